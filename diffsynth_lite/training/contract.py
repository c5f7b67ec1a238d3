"""This file says which settings make a run the run that it is, and refuses to resume it as another one."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from diffsynth_lite.config import AllowedChange, Config, section_types
from diffsynth_lite.data import DataIdentity
from diffsynth_lite.errors import UserError
from diffsynth_lite.redaction import redacted

_FIXED_SECTIONS = ("lora", "objective")
_FREE_FIELDS = ("lora.init_from",)
"""Of these sections: a run that goes on does not look at it any more."""
_FIXED_FIELDS = {
    "model": ("family", "dtype", "text_encoder_dtype", "vae_dtype"),
    "data": (
        *("width", "height", "resolutions", "sizes", "bucket_step", "max_aspect_ratio", "upscale"),
        *("frame_counts", "fps", "clip", "clips_per_video", "crop", "crops_per_item", "background"),
        *("caption_dropout", "tag_shuffles", "tag_separator", "keep_tags"),
    ),
    "train": (
        *("seed", "global_batch_size", "micro_batch_tokens", "mixed_precision", "max_grad_norm"),
        *("learning_rate", "lr_scheduler", "warmup_steps"),
        *("adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "ema_decay"),
    ),
}
_FIXED_FIELDS_OF_SOURCES = ("repeats", "weight", "trigger")
"""Lists of a value for each source. What else a source says is where its items are; what they are is in
:func:`data_contract`."""
_CONDITIONAL = ("train.steps", "train.micro_batch_size")
"""Part of the contract where other settings make them matter."""
_MAX_NAMED = 5

Contract = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """A setting that is not what it was when the run was started."""

    key: str
    old: Any
    new: Any

    @property
    def permission(self) -> str | None:
        """What ``resume.allow`` must name for it; None where nothing can."""
        if self.key.startswith("data."):
            return "data"
        return self.key if self.key in get_args(AllowedChange) else None

    def __str__(self) -> str:
        return f"{self.key} was {self.old!r}, is {self.new!r}"


class DifferentRunError(UserError):
    """A checkpoint belongs to a run with other settings or other data."""


def settings_contract(config: Config, *, model_fingerprint: str) -> Contract:
    """The settings that decide the numbers of a run, by dotted key, with secrets masked.

    Everything else may change between the parts of a run: the checkpointing and offload flags, workers,
    previews, trackers, intervals, paths. ``train.steps`` may change where the learning rate does not depend
    on it, and ``train.micro_batch_size`` where there is neither dropout nor a token budget, and one bucket;
    see :func:`data_contract`.

    Args:
        config: of the run.
        model_fingerprint: of the base model's weights.
    """
    values = dataclasses.asdict(config)
    contract: Contract = {"model.weights": model_fingerprint}
    for section in _FIXED_SECTIONS:
        contract |= {f"{section}.{name}": value for name, value in values[section].items()}
    for section, names in _FIXED_FIELDS.items():
        contract |= {f"{section}.{name}": values[section][name] for name in names}
    contract = {key: value for key, value in contract.items() if key not in _FREE_FIELDS}
    sources = config.data.sources_by_key.values()
    contract |= {
        f"data.{name}": [getattr(source, name) for source in sources] for name in _FIXED_FIELDS_OF_SOURCES
    }
    # Each micro-batch has dropout masks of its own; with a token budget their number in a step depends on it.
    if config.lora.dropout > 0 or config.train.micro_batch_tokens is not None:
        contract["train.micro_batch_size"] = config.train.micro_batch_size
    if config.train.lr_scheduler != "constant":
        contract["train.steps"] = config.train.steps
    return redacted(contract)


def data_contract(identity: DataIdentity, *, micro_batch_size: int) -> Contract:
    """What decides the samples of a run: its items in order, and what makes tensors of them.

    Args:
        identity: of the items that are trained on.
        micro_batch_size: part of the contract where there are several buckets: the samples of one are drawn
            that many in a row.
    """
    contract: Contract = {
        "data.items": identity.items,
        "data.decoder": identity.decoder,
        "data.media_encoder": identity.media_encoder,
        "data.prompt_encoder": identity.prompt_encoder,
    }
    if identity.num_buckets > 1:
        contract["train.micro_batch_size"] = micro_batch_size
    return contract


def require_same(
    contract: Contract, saved: Mapping[str, Any], *, where: str, allow: Sequence[str] = ()
) -> list[Change]:
    """Check that a run is continued with the settings that it was started with.

    Args:
        contract: the settings of now; only its keys are compared.
        saved: the contract in the checkpoint. A setting that is not in it did not matter then, or did not
            exist: it counts as left at its default.
        where: the checkpoint, for the message.
        allow: settings that may differ, or ``data`` for all of the data; see ``resume.allow``.

    Returns:
        What differs and is allowed to.

    Raises:
        DifferentRunError: naming what differs and is not, with the old and the new value, and the ways out.
    """
    changes = [
        Change(key=key, old=old, new=value)
        for key, value in contract.items()
        if (old := saved.get(key, value if key in _CONDITIONAL else _default(key))) != value
    ]
    refused = [change for change in changes if change.permission not in allow]
    if not refused:
        return changes
    named = "; ".join(str(change) for change in refused[:_MAX_NAMED])
    more = f" and {len(refused) - _MAX_NAMED} more" if len(refused) > _MAX_NAMED else ""
    permissions = list(dict.fromkeys(change.permission for change in refused))
    way = "Restore these to continue that run, or set another output.dir to start a new one"
    if None not in permissions:
        needed = ", ".join(map(str, dict.fromkeys([*allow, *permissions])))
        way += f"; to continue it with the new values all the same, set resume.allow: [{needed}]"
    raise DifferentRunError(f"output.dir: {where} belongs to a different run: {named}{more}. {way}")


def _default(key: str) -> Any:
    """The default of a setting, by its dotted key; None for one without, and for what is no setting."""
    section, _, name = key.partition(".")
    settings = {field.name: field for field in dataclasses.fields(section_types()[section])}.get(name)
    if settings is None or settings.default is dataclasses.MISSING:
        return None
    return settings.default
