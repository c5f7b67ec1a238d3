"""This file keeps a run folder's status true, however the run ends."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from diffsynth_lite.errors import EXIT_FINISHED, RunInterrupted, RunStoppedError, exit_code
from diffsynth_lite.files import write_json
from diffsynth_lite.training.checkpoint.manifest import DifferentRunError
from diffsynth_lite.training.checkpoint.store import CheckpointStore
from diffsynth_lite.training.run_folder.folder import RunFolder, RunState

logger = logging.getLogger(__name__)


@contextmanager
def outcome_recorded(
    folder: RunFolder, store: CheckpointStore, *, start_step: int, total_steps: int
) -> Iterator[None]:
    """Scope of a run: ``status.json`` says that it is running, and afterwards how it ended.

    Of a run that ends early it names the step of the newest checkpoint in ``store``. A run that turns out
    to be a different one leaves the status as it was.
    """
    before = folder.read_status()
    folder.write_status("running", exit_code=None, step=start_step, message="started")
    try:
        yield
    except DifferentRunError:
        if before is not None:
            write_json(folder.status_file, before)
        raise
    except BaseException as error:
        with _best_effort(folder):
            folder.write_status(
                _state(error),
                exit_code=exit_code(error),
                step=max(store.steps(), default=0),
                message=str(error) or type(error).__name__,
            )
        raise
    folder.write_status("finished", exit_code=EXIT_FINISHED, step=total_steps, message="finished")


@contextmanager
def _best_effort(folder: RunFolder) -> Iterator[None]:
    """On a full disk the status cannot be written either; the error that ended the run matters more."""
    try:
        yield
    except OSError as error:
        logger.warning("%s could not be written: %s", folder.status_file, error)


def _state(error: BaseException) -> RunState:
    if isinstance(error, RunInterrupted):
        return "interrupted"
    return "stopped" if isinstance(error, RunStoppedError) else "failed"
