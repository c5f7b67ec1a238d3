"""This file says what the machine has: versions, devices, free memory and disk."""

import os
import platform
import shutil
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from diffsynth_lite import __version__
from diffsynth_lite.core.gradient.host_pool import available_host_bytes

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
        facts["free memory"] = in_gib(free)
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        facts[f"GPU {index}"] = f"{torch.cuda.get_device_name(index)}, {in_gib(free)} of {in_gib(total)} free"
    if not torch.cuda.is_available():
        facts["GPU"] = "none that torch can use"
    facts["free disk"] = ", ".join(f"{in_gib(free_disk_bytes(folder))} at {folder}" for folder in folders)
    return facts


def free_disk_bytes(folder: Path) -> int:
    """Bytes that are free for a folder, which may not exist yet."""
    return shutil.disk_usage(_existing(folder)).free


def in_gib(num_bytes: float) -> str:
    """A number of bytes in the unit that suits it."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / 2**10:.1f} KiB"


def _existing(folder: Path) -> Path:
    """The folder, or its nearest parent that is there."""
    folder = folder.expanduser().absolute()
    return next(place for place in (folder, *folder.parents) if place.exists())
