"""This file keeps the history of a run: each start, what it continued, where it ran, what was changed."""

import logging
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from accelerate import Accelerator

from diffsynth_lite import __version__
from diffsynth_lite.training.checkpoints import Checkpoint
from diffsynth_lite.training.contract import Change

logger = logging.getLogger(__name__)

Lineage = list[dict[str, Any]]
"""One entry for each start, the first one first."""

_PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate")


def extended_lineage(
    checkpoint: Checkpoint | None, changes: Sequence[Change], accelerator: Accelerator
) -> Lineage:
    """The history in a checkpoint, and this start; warns of what was changed.

    Args:
        checkpoint: that the run continues from; None starts one.
        changes: settings that differ from the checkpoint's.
        accelerator: tells the processes and the device.
    """
    entry = {
        "step": checkpoint.step if checkpoint else 0,
        "continues": checkpoint.path.name if checkpoint else None,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "processes": accelerator.num_processes,
        "device": str(accelerator.device.type),
        "python": platform.python_version(),
        "versions": {"diffsynth_lite": __version__} | {name: version(name) for name in _PACKAGES},
        "changed": {change.key: {"from": change.old, "to": change.new} for change in changes},
    }
    for change in changes:
        logger.warning("resume.allow: %s from step %d on.", change, entry["step"])
    earlier = checkpoint.documents["state"].get("lineage", []) if checkpoint else []
    return [*earlier, entry]
