"""This file says what the machine has: versions, devices, free memory and disk."""

import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from diffsynth_lite import __version__
from diffsynth_lite.core.gradient.host_pool import available_host_bytes
from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.files import free_disk_bytes

_PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate", "datasets", "av", "pillow")


def describe_machine(folders: Sequence[Path]) -> dict[str, str]:
    """Facts of this machine by name, in words.

    Args:
        folders: places that a run writes to; each may not exist yet.
    """
    facts = {
        "diffsynth_lite": __version__,
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        "packages": ", ".join(f"{name} {version(name)}" for name in _PACKAGES),
        "CPU cores": str(os.cpu_count()),
    }
    if (free := available_host_bytes()) is not None:
        facts["free memory"] = format_bytes(free)
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        facts[f"GPU {index}"] = (
            f"{torch.cuda.get_device_name(index)}, {format_bytes(free)} of {format_bytes(total)} free"
        )
    if not torch.cuda.is_available():
        facts["GPU"] = "none that torch can use"
    facts["free disk"] = ", ".join(
        f"{format_bytes(free_disk_bytes(folder))} at {folder}" for folder in folders
    )
    return facts
