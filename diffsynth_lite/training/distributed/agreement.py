"""This file lets several processes act as one, and finds out which of them have the same folder under a path.

An error on one process is raised on all: a UserError or RunInterrupted with the same text, any other as a
RunStoppedError. An error of another machine names that machine: its paths may exist on this one.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from socket import gethostname
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, broadcast_object_list, gather_object
from torch import Tensor

from diffsynth_lite.errors import Problems, RunInterrupted, RunStoppedError, UserError
from diffsynth_lite.files import temporary_path

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_Gathered = TypeVar("_Gathered")
_Given = ParamSpec("_Given")

_WAIT_S = 1.0
"""Wait for a file that another machine has just written: a network file system may show it late."""
_POLL_S = 0.05


def on_main_process(
    accelerator: Accelerator,
    work: Callable[_Given, _Result],
    *args: _Given.args,
    **kwargs: _Given.kwargs,
) -> _Result | None:
    """Call a function on the main process while the others wait; when it fails, every process raises.

    Returns:
        The result on the main process, None on the others.
    """
    if accelerator.num_processes == 1:
        return work(*args, **kwargs)
    if not accelerator.is_main_process:
        _raise_here(broadcast_object_list([None])[0])
        return None
    try:
        result = work(*args, **kwargs)
    except BaseException as error:
        broadcast_object_list([_Failure.of(error)])
        raise
    broadcast_object_list([None])
    return result


def from_main_process(
    accelerator: Accelerator,
    work: Callable[_Given, _Result],
    *args: _Given.args,
    **kwargs: _Given.kwargs,
) -> _Result:
    """The main process's result, given to all; when it fails, every process raises."""
    if accelerator.num_processes == 1:
        return work(*args, **kwargs)
    found: list[_Result] = broadcast_object_list([on_main_process(accelerator, work, *args, **kwargs)])
    return found[0]


def tensors_from_main_process(
    accelerator: Accelerator,
    read: Callable[_Given, Mapping[str, Tensor]],
    *args: _Given.args,
    **kwargs: _Given.kwargs,
) -> dict[str, Tensor]:
    """Tensors that the main process has read, on the CPU of all processes, bit for bit."""
    read_here = on_main_process(accelerator, read, *args, **kwargs) or {}
    if accelerator.num_processes == 1:
        return dict(read_here)
    described = [(name, tensor.shape, tensor.dtype) for name, tensor in read_here.items()]
    tensors = {}
    for name, shape, dtype in broadcast_object_list([described])[0]:
        sent = read_here[name] if accelerator.is_main_process else torch.empty(shape, dtype=dtype)
        # As bytes, which every backend takes, and one by one: the device need not hold all of them.
        raw = sent.contiguous().reshape(-1).view(torch.uint8).to(accelerator.device)
        tensors[name] = broadcast(raw).cpu().view(dtype).reshape(shape)
    return tensors


def on_all_processes(
    accelerator: Accelerator,
    work: Callable[_Given, _Result],
    *args: _Given.args,
    **kwargs: _Given.kwargs,
) -> list[_Result]:
    """Call a function on each process; when one fails, every process raises.

    Returns:
        The results of all processes, the same list on each.
    """
    if accelerator.num_processes == 1:
        return [work(*args, **kwargs)]
    try:
        result = work(*args, **kwargs)
    except BaseException as error:
        gather_object([(_Failure.of(error), None)])
        raise
    outcomes = gather_object([(None, result)])
    for failure, _ in outcomes:
        _raise_here(failure)
    return [result for _, result in outcomes]


def ranks_by_machine(accelerator: Accelerator, *, key: str) -> list[range]:
    """The processes of each machine; call it on all.

    Args:
        key: setting that needs them, for the error.
    """
    local = on_all_processes(accelerator, lambda: accelerator.local_process_index)
    starts = [*(rank for rank, place in enumerate(local) if place == 0), len(local)]
    machines = [range(first, last) for first, last in pairwise(starts)]
    if [place for ranks in machines for place in range(len(ranks))] != local:
        raise UserError(
            f"{key} needs processes that are numbered machine by machine, as torchrun and accelerate launch "
            f"do it; their places in their machines are {local}"
        )
    return machines


def problems_of_all(accelerator: Accelerator, problems: Problems) -> Problems:
    """The problems of all processes, each once and the same on each."""
    if accelerator.num_processes == 1:
        return problems
    found = gather_object([(gethostname(), list(problems))])
    main_host, common = found[0]
    lines = (
        line if line in common or host == main_host else f"{host}: {line}"
        for host, lines in found
        for line in lines
    )
    return Problems(dict.fromkeys(lines))


def some_processes_first(
    accelerator: Accelerator,
    work: Callable[[], _Result],
    gather: Callable[[_Result], _Gathered],
    *,
    is_first: bool,
) -> tuple[_Result, list[_Gathered]]:
    """Call a function on some processes and then on the others, which find its files on the disk.

    Args:
        gather: returns the part of a process's result that all of them get.
        is_first: whether this process is one of those that begin: one of each group that shares a folder.

    Returns:
        The result of this process, and the gathered parts of all, the same list on each.
    """
    results: list[_Result] = []

    def begin() -> None:
        if is_first:
            results.append(work())

    def finish() -> _Gathered:
        if not results:
            results.append(work())
        return gather(results[0])

    on_all_processes(accelerator, begin)
    gathered = on_all_processes(accelerator, finish)
    return results[0], gathered


@dataclass(frozen=True, kw_only=True)
class FolderGroup:
    """The processes that have the same folder under a path as this one.

    Attributes:
        ranks: of these processes, with this one's.
        num_folders: how many different folders all processes have under that path.
    """

    ranks: Sequence[int] = (0,)
    place: int = 0
    num_folders: int = 1
    num_machines: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process is the first one of the group."""
        return self.place == 0

    def log(self, key: str, folder: Path, *, own: str) -> None:
        """Log whether machines share a folder; nothing where there is one machine.

        Args:
            key: setting that names the folder.
            own: consequence where they do not.
        """
        if self.num_folders > 1:
            logger.info("%s: %s is not shared by the %d machines: %s.", key, folder, self.num_machines, own)
        elif self.num_machines > 1:
            logger.info("%s: %s is shared by the %d machines.", key, folder, self.num_machines)


def find_folder_group(accelerator: Accelerator, folder: Path, *, on_each_machine: bool) -> FolderGroup:
    """Find out which processes have the same folder; call it on all.

    Some processes leave a file with a random name, and all look which of these they see. A file that is seen
    too late only makes a folder count as not shared.

    Args:
        folder: of this process; made where a file is left.
        on_each_machine: whether the first process of each leaves one; else only the main process does.
    """
    if accelerator.num_processes == 1:
        return FolderGroup()
    leaves_one = accelerator.is_local_main_process if on_each_machine else accelerator.is_main_process
    marker = _left_in(folder) if leaves_one else None
    try:
        # The others look when all exist: file systems cache that a name was missing.
        name = None if marker is None else marker.name
        left = gather_object([(name, bool(accelerator.is_local_main_process))])
        names = frozenset(name for name, _ in left if name is not None)
        seen_by = gather_object([_seen(folder, names)])
    finally:
        if marker is not None:
            marker.unlink(missing_ok=True)
    own = accelerator.process_index
    ranks = [rank for rank, seen in enumerate(seen_by) if seen == seen_by[own]]
    return FolderGroup(
        ranks=ranks,
        place=ranks.index(own),
        num_folders=len(set(seen_by)),
        num_machines=sum(is_local_main for _, is_local_main in left),
    )


def _left_in(folder: Path) -> Path | None:
    """An empty file in a folder; None where it cannot be written to."""
    marker = temporary_path(folder / "shared")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        marker.touch()
    except OSError:
        return None
    return marker


def _seen(folder: Path, names: frozenset[str]) -> frozenset[str]:
    """The names that are there, or will be in a moment."""
    end = time.monotonic() + _WAIT_S
    while True:
        seen = frozenset(name for name in names if os.path.lexists(folder / name))
        if seen == names or time.monotonic() > end:
            return seen
        time.sleep(_POLL_S)


class SharedFlag:
    """A flag that any process sets, and all see without waiting for one another.

    Args:
        name: of the flag, which is one for all processes.
    """

    def __init__(self, accelerator: Accelerator, name: str) -> None:
        self._name, self._is_set = name, False
        # torch has no public way to the store that its processes found each other by.
        find: Any = torch.distributed.distributed_c10d._get_default_store
        self._store = find() if accelerator.num_processes > 1 else None

    def set(self) -> None:
        """Set it."""
        if self._store is not None and not self._is_set:
            self._store.set(self._name, "set")
        self._is_set = True

    def is_set(self) -> bool:
        """Whether a process has set it; where there are several, it asks over the network."""
        if self._store is not None and not self._is_set:
            self._is_set = bool(self._store.check([self._name]))
        return self._is_set


class _Failure(NamedTuple):
    """How a process ended, for the others, which end alike: any error that is none of these stops the run."""

    kind: type[UserError | RunInterrupted | RunStoppedError]
    message: str
    host: str

    @classmethod
    def of(cls, error: BaseException) -> "_Failure":
        known: tuple[type[UserError | RunInterrupted], ...] = UserError, RunInterrupted
        kind = next((one for one in known if isinstance(error, one)), RunStoppedError)
        return cls(kind, str(error) or type(error).__name__, gethostname())


def _raise_here(failure: _Failure | None) -> None:
    """Raise the error of another process, if it had one."""
    if failure is None:
        return
    prefix = "" if failure.host == gethostname() else f"{failure.host}: "
    raise failure.kind(f"{prefix}{failure.message}")
