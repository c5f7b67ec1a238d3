"""This file makes what the main process does first one decision of all processes."""

from collections.abc import Callable
from typing import TypeVar

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from diffsynth_lite.errors import RunStoppedError, UserError

_Result = TypeVar("_Result")


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
