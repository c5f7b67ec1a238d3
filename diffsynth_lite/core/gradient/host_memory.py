"""This file says how much host memory is available to parked tensors."""

import os
from pathlib import Path

import torch
import torch.distributed as dist

_MEMINFO = Path("/proc/meminfo")
_CONTROL_GROUP = Path("/sys/fs/cgroup")


def default_host_bytes() -> int | None:
    """Half of the available host memory, divided by the processes that share it; None where it is unknown.

    Processes are counted as one for each device of this machine, or all of the run where it has none: a
    process does not know how many run beside it.
    """
    available = available_host_bytes()
    if available is None:
        return None
    num_processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    return available // 2 // min(num_processes, torch.cuda.device_count() or num_processes)


def available_host_bytes(meminfo: Path = _MEMINFO, control_group: Path = _CONTROL_GROUP) -> int | None:
    """Bytes of host memory that this process can still use; None where the system does not say.

    Args:
        meminfo: Linux' table of the machine's memory.
        control_group: folder with the limits of the container (control groups version 2).
    """
    limits = [_of_the_machine(meminfo), _of_the_container(control_group)]
    return min((limit for limit in limits if limit is not None), default=None)


def _of_the_machine(meminfo: Path) -> int | None:
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" not in names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _of_the_container(control_group: Path) -> int | None:
    limit, used = control_group / "memory.max", control_group / "memory.current"
    if not limit.exists() or not used.exists():
        return None
    value = limit.read_text().strip()
    return None if value == "max" else max(int(value) - int(used.read_text()), 0)
