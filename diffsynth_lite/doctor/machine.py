"""This file lists what a run would find on this machine: versions of packages, devices, memory and disk.

A torch that cannot be imported is reported, too: that is what such a list is often asked for.
"""

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from diffsynth_lite import __version__
from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.files import free_disk_bytes

_PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate", "datasets", "av", "pillow")
_OPTIONAL = (
    *("bitsandbytes", "gguf", "onnxruntime", "prodigyopt", "pylance", "schedulefree"),
    *("tensorboard", "torchvision"),
)
_DRIVER_TIMEOUT_S = 20


def machine_table(folders: Sequence[Path] = ()) -> dict[str, str]:
    """Facts of this machine by name, in words.

    Args:
        folders: places that a run writes to; each may not exist yet.
    """
    facts = {
        "diffsynth_lite": __version__,
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        "packages": ", ".join(f"{name} {_version(name) or 'missing'}" for name in _PACKAGES),
        "optional packages": ", ".join(f"{name} {found}" for name in _OPTIONAL if (found := _version(name)))
        or "none",
        "CPU cores": str(os.cpu_count()),
        **_devices(),
    }
    if folders:
        free = (f"{format_bytes(free_disk_bytes(folder))} at {folder}" for folder in folders)
        facts["free disk"] = ", ".join(free)
    return facts


def ask_driver(fields: str) -> list[str]:
    """What NVIDIA's driver answers of each card, without torch, which takes seconds to import.

    Args:
        fields: as nvidia-smi names them, with commas between.

    Returns:
        A line for each card; none where there is no driver that answers.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=_DRIVER_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return answer.stdout.splitlines() if answer.returncode == 0 else []


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _devices() -> dict[str, str]:
    try:
        import torch

        from diffsynth_lite.core.transfer.host_pool import available_host_bytes
    except (ImportError, OSError) as error:  # OSError: a library of CUDA that is not found
        return {"torch": f"cannot be imported: {error}"}
    facts = {"torch": f"{torch.__version__}, CUDA {torch.version.cuda}, HIP {torch.version.hip}"}
    if (free := available_host_bytes()) is not None:
        facts["free memory"] = format_bytes(free)
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        facts[f"GPU {index}"] = (
            f"{torch.cuda.get_device_name(index)}, {format_bytes(free)} of {format_bytes(total)} free"
        )
    if not torch.cuda.is_available():
        facts["GPU"] = "none that torch can use"
    if versions := ask_driver("driver_version"):
        facts["driver"] = ", ".join(dict.fromkeys(versions))
    return facts
