"""This file makes what several processes do one decision.

What goes wrong on another machine is told with that machine's name: its paths may be there on this one.
"""

from collections.abc import Callable, Mapping
from itertools import pairwise
from socket import gethostname
from typing import NamedTuple, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, broadcast_object_list, gather_object
from torch import Tensor

from diffsynth_lite.errors import Problems, RunStoppedError, UserError

_Result = TypeVar("_Result")
_Gathered = TypeVar("_Gathered")


def on_main_process(accelerator: Accelerator, work: Callable[[], _Result]) -> _Result | None:
    """Do something on the main process while the others wait; when it fails, every process raises.

    Returns:
        The result on the main process, None on the others.

    Raises:
        UserError: the main process raised it; on the others with the same text.
        RunStoppedError: the same; on the others also when the main process failed in any other way.
    """
    if accelerator.num_processes == 1:
        return work()
    if not accelerator.is_main_process:
        _raise_here(broadcast_object_list([None])[0])
        return None
    try:
        result = work()
    except BaseException as error:
        broadcast_object_list([_Failure.of(error)])
        raise
    broadcast_object_list([None])
    return result


def from_main_process(accelerator: Accelerator, work: Callable[[], _Result]) -> _Result:
    """What something comes to on the main process, given to all; when it fails, every process raises.

    Raises:
        UserError: as :func:`on_main_process`.
        RunStoppedError: likewise.
    """
    if accelerator.num_processes == 1:
        return work()
    found: list[_Result] = broadcast_object_list([on_main_process(accelerator, work)])
    return found[0]


def tensors_from_main_process(
    accelerator: Accelerator, read: Callable[[], Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Tensors that the main process has read, on the CPU of all processes, bit for bit.

    Raises:
        UserError: as :func:`on_main_process`.
        RunStoppedError: likewise.
    """
    read_here = on_main_process(accelerator, read) or {}
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


def on_all_processes(accelerator: Accelerator, work: Callable[[], _Result]) -> list[_Result]:
    """Do a part of something on each process; when one fails, every process raises.

    Returns:
        The results of all processes, the same list on each.

    Raises:
        UserError: some process raised it; on the others with the same text.
        RunStoppedError: the same; on the others also when a process failed in any other way.
    """
    if accelerator.num_processes == 1:
        return [work()]
    try:
        result = work()
    except BaseException as error:
        gather_object([(_Failure.of(error), None)])
        raise
    outcomes = gather_object([(None, result)])
    for failure, _ in outcomes:
        _raise_here(failure)
    return [result for _, result in outcomes]


def ranks_by_machine(accelerator: Accelerator, *, key: str) -> list[range]:
    """The processes of each machine, which all of them call this together to find out.

    Args:
        key: of the setting that asks.

    Raises:
        UserError: the launcher has not numbered them machine by machine.
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
    """Do something on some processes and then on the others, which find its files on the disk.

    Args:
        accelerator: knows the processes.
        work: to do.
        gather: gives the part of a process's result that all of them get.
        is_first: whether this process is one of those that begin: of those that share a folder, one.

    Returns:
        The result of this process, and the gathered parts of all, the same list on each.

    Raises:
        UserError: some process raised it; on the others with the same text.
        RunStoppedError: the same; on the others also when a process failed in any other way.
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


class _Failure(NamedTuple):
    """An error of a process, for the others."""

    is_of_user: bool
    message: str
    host: str

    @classmethod
    def of(cls, error: BaseException) -> "_Failure":
        return cls(isinstance(error, UserError), str(error) or type(error).__name__, gethostname())


def _raise_here(failure: _Failure | None) -> None:
    """Raise the error of another process, if it had one."""
    if failure is None:
        return
    prefix = "" if failure.host == gethostname() else f"{failure.host}: "
    message = f"{prefix}{failure.message}"
    raise UserError(message) if failure.is_of_user else RunStoppedError(message)
