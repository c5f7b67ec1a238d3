"""This file finds the checkpoint to resume from, compares settings with it, and keeps the history of starts.

The settings and data that decide a run's numbers are its fingerprint. The run folder and each checkpoint hold
it as ``contract.json``: the format keeps its first name.
"""

import logging
import math
import platform
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, get_args

from accelerate import Accelerator

from diffsynth_lite.config import AllowedChange, Config, section_types
from diffsynth_lite.data.items import DataIdentity
from diffsynth_lite.errors import DifferentRunError, UserError
from diffsynth_lite.files import parse_json
from diffsynth_lite.redaction import redacted
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.reading import read_run_file
from diffsynth_lite.training.checkpoint.manifest import Checkpoint, read_checkpoint
from diffsynth_lite.training.checkpoint.store import CheckpointStore
from diffsynth_lite.training.distributed.agreement import (
    find_folder_group,
    from_main_process,
    on_all_processes,
)
from diffsynth_lite.training.distributed.devices import device_name
from diffsynth_lite.training.distributed.same_run import package_versions
from diffsynth_lite.training.layer_groups import OF_GROUP, group_fingerprint

logger = logging.getLogger(__name__)

_FIXED_SECTIONS = ("lora", "objective")
_FREE_FIELDS = ("lora.init_from",)
"""Settings of these sections that a resumed run does not use."""
_FIXED_FIELDS = {
    "model": (
        *("family", "dtype", "quantize", "quantize_skip"),
        *("text_encoder_dtype", "text_encoder_quantize", "vae_dtype", "vae_tiling"),
        "attention",
    ),
    "data": (
        *("width", "height", "resolutions", "sizes", "bucket_step", "max_aspect_ratio", "upscale"),
        *("frame_counts", "fps", "clip", "clips_per_video", "crop", "crops_per_item", "background"),
        *("caption_dropout", "tag_shuffles", "tag_separator", "keep_tags", "audio", "silent_clips"),
        "control_downscale",
    ),
    "train": (
        *("seed", "global_batch_size", "micro_batch_tokens", "mixed_precision", "compile", "max_grad_norm"),
        *("learning_rate", "lr_scheduler", "warmup_steps"),
        *("optimizer", "optimizer_options", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay"),
        "ema_decay",
    ),
}
_OF_SOURCES = ("data.repeats", "data.weight", "data.trigger", "data.loss_weight", "data.preserve")
"""Lists of a value for each source. The other settings of a source are paths of its items, whose content is
in :func:`data_fingerprint`."""
_CONDITIONAL = ("train.steps", "train.micro_batch_size")
"""Part of the fingerprint where other settings make them matter."""
_SHIFT_AT = "objective.shift at "
"""Begins the entries of the shift that the noise levels of a size have."""
_SHIFT_SETTINGS = ("objective.shift", "objective.shift_value")
"""May change where the shifts stay the same."""
_SAME_SHIFT = 1e-9
"""Relative; the last digits of an exponential differ between machines."""
_WEIGHTS = "model.weights"
_ADAPTER = "model.training_adapter.weights"
_WAYS = {
    _ADAPTER: "model.training_adapter.weights is the content of that file, wherever it is; None without one",
    _WEIGHTS: (
        "model.weights is the content of model.path's files, or of model.transformer_file, wherever they are"
    ),
    "train.warmup_steps": "train.warmup_steps counts as shortened to less than train.steps",
    _SHIFT_AT: (
        "objective.shift: resolution takes the sampler's where that grows with the size, and static any one "
        "value"
    ),
}
"""How to restore values that are not settings, by the beginning of their keys."""
_MAX_NAMED = 5
_Document = TypeVar("_Document", list[Any], dict[str, Any])

RunFingerprint = dict[str, Any]
"""Settings and facts that decide a run's numbers, by dotted key."""

Lineage = list[dict[str, Any]]
"""The starts of a run, the first one first."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A setting that differs from the one that the run was started with."""

    key: str
    old: Any
    new: Any

    @property
    def permission(self) -> str | None:
        """The entry of ``resume.allow`` that permits it; None where there is none."""
        if self.key.startswith("data."):
            return "data"
        setting = self.key.partition(OF_GROUP)[0]
        return setting if setting in get_args(AllowedChange) else None

    def __str__(self) -> str:
        return f"{self.key} was {self.old!r}, is {self.new!r}"


def settings_fingerprint(
    config: Config,
    *,
    model_fingerprint: str,
    training_adapter: str | None = None,
    shifts: Mapping[str, float] = MappingProxyType({}),
) -> RunFingerprint:
    """The settings that decide the numbers of a run, by dotted key, with secrets masked.

    Everything else may change between the parts of a run: the checkpointing and offload flags, workers,
    previews, trackers, intervals, paths. ``train.steps`` may change where the learning rate does not depend
    on it, and ``train.micro_batch_size`` where there is neither dropout nor a token budget, and one bucket;
    see :func:`data_fingerprint`.

    Args:
        shifts: by ``objective.shift``, for each size's name.
    """
    values = config.model_dump()
    fingerprint: RunFingerprint = {_WEIGHTS: model_fingerprint, _ADAPTER: training_adapter}
    for section in _FIXED_SECTIONS:
        fingerprint |= {f"{section}.{name}": value for name, value in values[section].items()}
    for section, names in _FIXED_FIELDS.items():
        fingerprint |= {f"{section}.{name}": values[section][name] for name in names}
    fingerprint = {key: value for key, value in fingerprint.items() if key not in _FREE_FIELDS}
    sources = config.data.sources_by_key.values()
    for key in _OF_SOURCES:
        fingerprint[key] = [getattr(source, key.removeprefix("data.")) for source in sources]
    fingerprint |= group_fingerprint(config)
    # What draws the items counts only where some are drawn.
    seed, ratio = config.validation.seed, config.data.hold_out
    fingerprint["data.hold_out"] = f"{ratio:g} by validation.seed {seed}" if ratio else ratio
    fingerprint["train.warmup_steps"] = config.train.warmup_in_run
    # Each micro-batch has dropout masks of its own; with a token budget their number in a step depends on it.
    if config.lora.dropout > 0 or config.train.micro_batch_tokens is not None:
        fingerprint["train.micro_batch_size"] = config.train.micro_batch_size
    if config.train.lr_scheduler != "constant":
        fingerprint["train.steps"] = config.train.steps
    return redacted(fingerprint) | _shift_fingerprint(shifts)


def _shift_fingerprint(shifts: Mapping[str, float]) -> RunFingerprint:
    return {f"{_SHIFT_AT}{size}": shift for size, shift in shifts.items()}


def data_fingerprint(identity: DataIdentity, *, micro_batch_size: int) -> RunFingerprint:
    """The facts that decide the samples of a run: its items in order, and their decoder and encoders.

    With several buckets also the micro-batch size: so many samples of one bucket follow each other.
    """
    fingerprint: RunFingerprint = {
        "data.items": identity.items,
        "data.decoder": identity.decoder,
        "data.media_encoder": identity.media_encoder,
        "data.prompt_encoder": identity.prompt_encoder,
    }
    if identity.num_buckets > 1:
        fingerprint["train.micro_batch_size"] = micro_batch_size
    return fingerprint


def require_same(
    fingerprint: RunFingerprint,
    saved: Mapping[str, Any],
    *,
    where: str,
    allow: Sequence[str] = (),
    earlier_shifts: Mapping[str, float] = MappingProxyType({}),
) -> list[Change]:
    """Check that a run is continued with the settings that it was started with; the allowed changes.

    Args:
        fingerprint: of this start; only its keys are compared.
        saved: of the earlier start. A setting that it lacks did not matter then, or did not exist: it counts
            as left at its default.
        allow: settings that may differ, or ``data`` for all of the data; see ``resume.allow``.
        earlier_shifts: of ``objective.shift: family`` before shifts were saved, for each size's name.

    Raises:
        DifferentRunError: with the other changes, old and new values, and remedies.
    """
    if saved.get("objective.shift") == "family" and not _shift_keys(saved):
        saved = {**_shift_fingerprint(earlier_shifts), **saved}  # of a version that did not keep them
    changes = _differences(fingerprint, saved)
    refused = [change for change in changes if change.permission not in allow]
    if not refused:
        return changes
    named = "; ".join(str(change) for change in refused[:_MAX_NAMED])
    more = f" and {len(refused) - _MAX_NAMED} more" if len(refused) > _MAX_NAMED else ""
    permissions = list(dict.fromkeys(change.permission for change in refused))
    ways = [way for key, way in _WAYS.items() if any(change.key.startswith(key) for change in refused)]
    how = f" ({'; '.join(ways)})" if ways else ""
    way = f"Restore these to continue that run{how}, or set another output.dir to start a new one"
    if None not in permissions:
        needed = ", ".join(map(str, dict.fromkeys([*allow, *permissions])))
        way += f"; to continue it with the new values all the same, set 'resume.allow=[{needed}]'"
    raise DifferentRunError(f"output.dir: {where} belongs to a different run: {named}{more}. {way}")


def _differences(fingerprint: RunFingerprint, saved: Mapping[str, Any]) -> list[Change]:
    changes = [
        Change(key=key, old=old, new=value)
        for key, value in fingerprint.items()
        if (old := saved.get(key, _value_if_missing(key, value))) != value
    ]
    compared = _shift_keys(fingerprint) & _shift_keys(saved)
    if compared and compared.isdisjoint(change.key for change in changes):
        return [change for change in changes if change.key not in _SHIFT_SETTINGS]
    return [change for change in changes if not _is_rounding(change)]


def _is_rounding(change: Change) -> bool:
    """Whether a shift is the same but for how it was computed."""
    if not change.key.startswith(_SHIFT_AT) or not isinstance(change.old, int | float):
        return False
    return math.isclose(change.old, change.new, rel_tol=_SAME_SHIFT)


def _shift_keys(fingerprint: Mapping[str, Any]) -> set[str]:
    return {key for key in fingerprint if key.startswith(_SHIFT_AT)}


def _value_if_missing(key: str, value: Any) -> Any:
    """The new value where the key is conditional, else its default or None; of sources a list like
    ``value``."""
    if key in _CONDITIONAL or key.startswith(_SHIFT_AT):
        return value
    section, _, name = key.partition(".")
    kind = section_types()[section]
    has_default = name in kind.model_fields and not kind.model_fields[name].is_required()
    default = kind.default(name) if has_default else None
    return [default] * len(value) if key in _OF_SOURCES else default


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


def _document(path: Path, kind: type[_Document]) -> _Document:
    """The content of a run's file that no checkpoint has a copy of."""
    try:
        document = parse_json(read_run_file(path))
    except ValueError:
        document = None
    starts = document if isinstance(document, list) else []
    if not isinstance(document, kind) or not all(isinstance(start, dict) for start in starts):
        raise UserError(
            f"{path} is damaged, and there is no checkpoint to take it from: remove {path.parent}, or set "
            "another output.dir"
        )
    return document


@dataclass(frozen=True, kw_only=True)
class ResumePolicy:
    """The checkpoint and settings that a run may continue from.

    Attributes:
        source: ``auto`` continues the newest checkpoint if there is one, ``must`` insists on one, ``none``
            insists on a new run, and anything else is the folder of a checkpoint.
    """

    source: str
    allow: Sequence[str]
    folder: RunFolder
    store: CheckpointStore
    earlier_shifts: Mapping[str, float]

    def find_checkpoint(self) -> Checkpoint | None:
        """The checkpoint to continue from, or None to start a new run."""
        if self.source == "none":
            if self.folder.holds_run():
                raise UserError(
                    f"resume.source: none starts a new run, but {self.folder.path} holds one; "
                    "set another output.dir, or continue it with --resume auto"
                )
            return None
        if self.source not in ("auto", "must"):
            checkpoint = read_checkpoint(_checkpoint_folder(self.source))
            if "state" not in checkpoint.documents:
                raise UserError(
                    f"resume.source: {self.source} has a LoRA without the optimizer's state; name a "
                    "checkpoint such as runs/mine/checkpoints/step-00000200"
                )
            return checkpoint
        newest = self.store.latest()
        if newest is None and self.source == "must":
            raise UserError(
                f"resume.source: must, but {self.store.folder} holds no checkpoint; "
                "check output.dir, or use --resume auto"
            )
        return newest

    def earlier_choices(self) -> dict[str, Any] | None:
        """Settings that ``memory.auto`` chose when a resumed run was started, by key; None for a new run."""
        checkpoint = self.find_checkpoint()
        if checkpoint is not None:
            lineage = checkpoint.lineage
        elif self.folder.fingerprint_file.is_file() and self.folder.lineage_file.is_file():
            lineage = _document(self.folder.lineage_file, list)
        else:
            return None
        return choices_in(lineage)

    def earlier_starts(self, checkpoint: Checkpoint | None) -> Lineage:
        """The history that a checkpoint holds, and the starts after it that ended without one."""
        saved: Lineage = checkpoint.lineage if checkpoint else []
        if not self.folder.lineage_file.is_file():
            return saved
        try:
            known = _document(self.folder.lineage_file, list)
        except UserError:
            logger.warning(
                "%s is damaged; it is written again, without starts that saved nothing.",
                self.folder.lineage_file,
            )
            return saved
        return known if known[: len(saved)] == redacted(saved) else saved

    def changed_settings(self, fingerprint: RunFingerprint, checkpoint: Checkpoint | None) -> list[Change]:
        """The allowed changes since the checkpoint, or since the start of a run that has none yet."""
        if checkpoint is not None:
            saved, where = checkpoint.documents["contract"], checkpoint.path
        elif self.folder.fingerprint_file.is_file():
            saved, where = _document(self.folder.fingerprint_file, dict), self.folder.path
        else:
            return []
        return require_same(
            fingerprint, saved, where=str(where), allow=self.allow, earlier_shifts=self.earlier_shifts
        )


def resolve_checkpoint(
    accelerator: Accelerator, policy: ResumePolicy, fingerprint: RunFingerprint
) -> Checkpoint | None:
    """The checkpoint to continue from, the same on all processes, or None to start a new run.

    The main process finds and reads it: the others may not have the run folder. Leftovers of killed writers
    are removed from the store.
    """
    require_newest_run(accelerator, policy)

    def find() -> Checkpoint | None:
        policy.store.clean()
        checkpoint = policy.find_checkpoint()
        policy.changed_settings(fingerprint, checkpoint)
        return checkpoint

    checkpoint = from_main_process(accelerator, find)
    if checkpoint is not None:
        logger.info("Continuing from %s.", checkpoint.path)
    return checkpoint


def require_newest_run(accelerator: Accelerator, policy: ResumePolicy) -> None:
    """Check that no machine with a run folder of its own is further than that of the main process.

    The launcher may have put the main process on another machine than before.
    """
    folder = policy.folder.path
    group = find_folder_group(accelerator, folder, on_each_machine=False)
    group.log("output.dir", folder, own="the run is on that of the main process")
    if group.num_folders == 1 or policy.source not in ("auto", "must", "none"):
        return
    found = on_all_processes(
        accelerator, lambda: (max(policy.store.steps(), default=0), socket.gethostname())
    )
    (here, main_host), (step, host) = found[0], max(found)
    if step > here:
        raise UserError(
            f"output.dir: {host} has a checkpoint of step {step} in its own {folder}, and {main_host}, where "
            f"the main process is, {f'one of step {here}' if here else 'none'}; start with {host} as the "
            f"first machine, copy the folder from there to {main_host}, or remove it there"
        )


def choices_in(lineage: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Settings that ``memory.auto`` chose in a history, by dotted key."""
    chosen = [entry.get("chosen") for entry in lineage]
    return {key: value for each in chosen if isinstance(each, dict) for key, value in each.items()}


def extended_lineage(
    earlier: Lineage,
    checkpoint: Checkpoint | None,
    changes: Sequence[Change],
    accelerator: Accelerator,
    *,
    began_at: datetime,
    chosen: Mapping[str, Any] = MappingProxyType({}),
) -> Lineage:
    """The history of a run, and this start; warns of each change."""
    entry: dict[str, Any] = {
        "step": checkpoint.step if checkpoint else 0,
        "continues": checkpoint.path.name if checkpoint else None,
        "at": began_at.isoformat(timespec="seconds"),
        "processes": accelerator.num_processes,
        "device": device_name(accelerator.device),
        "python": platform.python_version(),
        "versions": package_versions(),
        "changed": {change.key: {"from": change.old, "to": change.new} for change in changes},
    }
    if chosen:
        entry["chosen"] = dict(chosen)
    for change in changes:
        logger.warning("resume.allow: %s from step %d on.", change, entry["step"])
    return [*earlier, entry]
