"""This file keeps a run folder's status true, however the run ends."""

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from diffsynth_lite.core.gradient import HostBytesError
from diffsynth_lite.data import is_lost_worker
from diffsynth_lite.errors import EXIT_FINISHED, RunInterrupted, RunStoppedError, UserError, exit_code
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


@contextmanager
def shortages_explained() -> Iterator[None]:
    """Scope in which a lack of memory, disk space or data workers ends the run with what would help.

    Raises:
        RunStoppedError: instead of torch's and the system's own errors.
        UserError: for a file or folder that may not be written, and for too little host memory.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        first_line = str(error).partition("\n")[0]
        raise RunStoppedError(
            f"out of memory before training: {first_line} What helps: smaller pictures or "
            "shorter clips (data.resolutions, data.sizes, data.frame_counts), model.vae_dtype: bfloat16, "
            "model.text_encoder_dtype: bfloat16"
        ) from error
    except HostBytesError as error:
        raise UserError(
            f"memory.host_gib: {error.host_bytes / 1024**3:.3g} GiB do not hold the "
            f"{error.block_bytes / 1024**3:.3g} GiB that one block parks; raise it, or lower "
            "train.micro_batch_size, or park nothing"
        ) from error
    except RuntimeError as error:
        # Raised at any place: a signal tells torch that a worker has died.
        if not is_lost_worker(error):
            raise
        first_line = str(error).partition("\n")[0]
        raise RunStoppedError(
            f"a data worker died or hangs ({first_line}): look at the host's memory and at "
            "the disk of data.cache_dir, or set data.num_workers: 0; the same command continues the run"
        ) from error
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            raise UserError(
                f"{error.filename}: {error.strerror}; output.dir and data.cache_dir must be writable folders"
            ) from error
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise RunStoppedError(
            f"no space left on the disk ({error}); checkpoints already written are intact, "
            "and the same command continues the run"
        ) from error


def _state(error: BaseException) -> RunState:
    if isinstance(error, RunInterrupted):
        return "interrupted"
    return "stopped" if isinstance(error, RunStoppedError) else "failed"
