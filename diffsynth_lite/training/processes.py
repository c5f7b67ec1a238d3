"""This file makes what one process does, or each a part of, one decision of all processes."""

from collections.abc import Callable
from typing import TypeVar

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from diffsynth_lite.errors import RunStoppedError, UserError

_Result = TypeVar("_Result")
_Told = TypeVar("_Told")


def on_main_process(accelerator: Accelerator, work: Callable[[], _Result]) -> _Result | None:
    """Do something on the main process while the others wait; when it fails, every process raises.

    Returns:
        The result on the main process, None on the others.

    Raises:
        UserError: what the main process raised; on the others with the same text.
        RunStoppedError: likewise; also on the others when the main process failed in any other way.
    """
    if accelerator.num_processes == 1:
        return work()
    if not accelerator.is_main_process:
        kind, message = broadcast_object_list([None])[0]
        if kind is not None:
            raise UserError(message) if kind == "UserError" else RunStoppedError(message)
        return None
    try:
        result = work()
    except BaseException as error:
        kind = "UserError" if isinstance(error, UserError) else "other"
        broadcast_object_list([(kind, str(error) or type(error).__name__)])
        raise
    broadcast_object_list([(None, "")])
    return result


def on_all_processes(accelerator: Accelerator, work: Callable[[], _Result]) -> list[_Result]:
    """Do a part of something on each process; when one fails, every process raises.

    Returns:
        The results of all processes, the same list on each.

    Raises:
        UserError: what any process raised; on the others with the same text.
        RunStoppedError: likewise; also on the others when a process failed in any other way.
    """
    if accelerator.num_processes == 1:
        return [work()]
    try:
        result = work()
    except BaseException as error:
        kind = "UserError" if isinstance(error, UserError) else "other"
        gather_object([(kind, str(error) or type(error).__name__, None)])
        raise
    outcomes = gather_object([(None, "", result)])
    for kind, message, _ in outcomes:
        if kind is not None:
            raise UserError(message) if kind == "UserError" else RunStoppedError(message)
    return [result for _, _, result in outcomes]


def main_process_first(
    accelerator: Accelerator, work: Callable[[], _Result], tell: Callable[[_Result], _Told]
) -> tuple[_Result, list[_Told]]:
    """Do something on the main process and then on the others, which find done what it has left on the disk.

    Args:
        accelerator: tells processes.
        work: to do.
        tell: what all processes are to know of a process's result.

    Returns:
        The result of this process, and what is told of those of all, the same list on each.

    Raises:
        UserError: what any process raised; on the others with the same text.
        RunStoppedError: likewise; also on the others when a process failed in any other way.
    """
    results = on_main_process(accelerator, lambda: [work()]) or []

    def finish() -> _Told:
        if not results:
            results.append(work())
        return tell(results[0])

    told = on_all_processes(accelerator, finish)
    return results[0], told
