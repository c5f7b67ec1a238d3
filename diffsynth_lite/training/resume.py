"""This file decides where a run starts: from nothing, or from a checkpoint."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from diffsynth_lite.errors import UserError
from diffsynth_lite.training.checkpoint_manifest import read_checkpoint
from diffsynth_lite.training.checkpoints import Checkpoint, CheckpointStore
from diffsynth_lite.training.contract import Change, Contract, require_same
from diffsynth_lite.training.processes import on_main_process
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


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What a run may continue from.

    Attributes:
        source: ``auto`` continues the newest checkpoint if there is one, ``must`` insists on one, ``none``
            insists on a new run, and anything else is the folder of a checkpoint.
        allow: settings that may differ from the run's; see ``require_same``.
        folder: of the run.
        store: the run's checkpoints.
    """

    source: str
    allow: Sequence[str]
    folder: RunFolder
    store: CheckpointStore

    def find(self) -> Checkpoint | None:
        """The checkpoint to continue from, or None to start a new run.

        Raises:
            UserError: there is no such checkpoint, or ``none`` would write over a run.
        """
        if self.source == "none":
            if self.folder.holds_run():
                raise UserError(
                    f"resume.source: none starts a new run, but {self.folder.path} holds one; "
                    "set another output.dir, or continue it with --resume auto"
                )
            return None
        if self.source not in ("auto", "must"):
            return read_checkpoint(_checkpoint_folder(self.source))
        checkpoint = self.store.latest()
        if checkpoint is None and self.source == "must":
            raise UserError(
                f"resume.source: must, but {self.store.folder} holds no checkpoint; "
                "check output.dir, or use --resume auto"
            )
        return checkpoint

    def changes(self, contract: Contract, checkpoint: Checkpoint | None) -> list[Change]:
        """What differs, as far as it is allowed to, from the checkpoint, or from a run without one.

        Raises:
            DifferentRunError: something else differs.
        """
        if checkpoint is not None:
            saved, where = checkpoint.documents["contract"], checkpoint.path
        elif self.folder.contract_file.is_file():
            saved, where = json.loads(self.folder.contract_file.read_bytes()), self.folder.path
        else:
            return []
        return require_same(contract, saved, where=str(where), allow=self.allow)


def agreed_start(accelerator: Accelerator, origin: Origin, contract: Contract) -> Checkpoint | None:
    """The checkpoint to continue from, the same on all processes; its settings are the run's.

    Raises:
        UserError: see ``Origin.find``.
        DifferentRunError: the run has other settings.
    """

    def find() -> Path | None:
        origin.store.clean()
        checkpoint = origin.find()
        if checkpoint is None:
            origin.changes(contract, None)
        return checkpoint.path if checkpoint else None

    found = [on_main_process(accelerator, find)]
    path = broadcast_object_list(found)[0]
    if path is None:
        return None
    checkpoint = origin.store.read(path)
    origin.changes(contract, checkpoint)
    logger.info("Continuing from %s.", path)
    return checkpoint
