"""This file decides where a run starts: from nothing, or from a checkpoint."""

import logging
from pathlib import Path

from diffsynth_lite.errors import UserError
from diffsynth_lite.training.checkpoint_manifest import read_checkpoint
from diffsynth_lite.training.checkpoints import Checkpoint, CheckpointStore
from diffsynth_lite.training.run_folder import RunFolder

logger = logging.getLogger(__name__)


def _checkpoint_folder(source: str) -> Path:
    path = Path(source).expanduser()
    if not path.is_dir():
        raise UserError(
            f"resume.source: {source!r} is neither auto, none nor must, nor the folder of a checkpoint "
            "such as runs/mine/checkpoints/step-00000200"
        )
    if (path / "checkpoints").is_dir():
        raise UserError(f"resume.source: {source} is a run; name one of {path / 'checkpoints'}/step-...")
    return path


def find_start(source: str, folder: RunFolder, store: CheckpointStore) -> Checkpoint | None:
    """The checkpoint to continue from, or None to start a new run.

    Args:
        source: ``auto`` continues the newest checkpoint if there is one, ``must`` insists on one, ``none``
            insists on a new run, and anything else is the folder of a checkpoint.
        folder: of the run.
        store: the run's checkpoints.

    Raises:
        UserError: there is no such checkpoint, or ``none`` would write over a run.
    """
    if source == "none":
        if folder.holds_run():
            raise UserError(
                f"resume.source: none starts a new run, but {folder.path} holds one; "
                "set another output.dir, or continue it with --resume auto"
            )
        return None
    if source not in ("auto", "must"):
        return read_checkpoint(_checkpoint_folder(source))
    checkpoint = store.latest()
    if checkpoint is None and source == "must":
        raise UserError(
            f"resume.source: must, but {store.folder} holds no checkpoint; "
            "check output.dir, or use --resume auto"
        )
    return checkpoint
