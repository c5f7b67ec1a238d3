"""This file says which settings make a run the run that it is, and refuses to resume it as another one."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from diffsynth_lite.config import Config
from diffsynth_lite.data import ItemTable
from diffsynth_lite.errors import UserError

_FIXED_SECTIONS = ("lora", "objective")
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
        *("adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay"),
    ),
}
_FIXED_FIELDS_OF_SOURCES = ("repeats", "weight", "trigger")
"""Lists of a value for each source. What else a source says is where its items are; what they are is in
:func:`data_contract`."""
_MAX_NAMED = 5

Contract = dict[str, Any]


class DifferentRunError(UserError):
    """A checkpoint belongs to a run with other settings or other data."""


def settings_contract(config: Config, *, model_fingerprint: str) -> Contract:
    """The settings that decide the numbers of a run, by dotted key.

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
    sources = config.data.sources_by_key.values()
    contract |= {
        f"data.{name}": [getattr(source, name) for source in sources] for name in _FIXED_FIELDS_OF_SOURCES
    }
    # Each micro-batch has dropout masks of its own; with a token budget their number in a step depends on it.
    if config.lora.dropout > 0 or config.train.micro_batch_tokens is not None:
        contract["train.micro_batch_size"] = config.train.micro_batch_size
    if config.train.lr_scheduler != "constant":
        contract["train.steps"] = config.train.steps
    return contract


def data_contract(items: ItemTable, *, micro_batch_size: int) -> Contract:
    """What decides the samples of a run: the items' names, buckets, sources, media and captions, in order.

    Args:
        items: trained on.
        micro_batch_size: part of the contract where there are several buckets: the samples of one are drawn
            that many in a row.
    """
    contract: Contract = {"data.items": f"{len(items)} items, {items.fingerprint()}"}
    if len(items.buckets) > 1:
        contract["train.micro_batch_size"] = micro_batch_size
    return contract


def require_same(contract: Contract, saved: Mapping[str, Any], *, where: str) -> None:
    """Check that a run is continued with the settings that it was started with.

    Args:
        contract: the settings of now; only its keys are compared.
        saved: the contract in the checkpoint.
        where: the checkpoint, for the message.

    Raises:
        DifferentRunError: naming what differs, with the old and the new value, and both ways out.
    """
    differing = [key for key, value in contract.items() if saved.get(key) != value]
    if not differing:
        return
    changes = [f"{key} was {saved.get(key)!r}, is {contract[key]!r}" for key in differing[:_MAX_NAMED]]
    more = f" and {len(differing) - _MAX_NAMED} more" if len(differing) > _MAX_NAMED else ""
    raise DifferentRunError(
        f"output.dir: {where} belongs to a different run: {'; '.join(changes)}{more}. "
        "Restore these to continue that run, or set another output.dir to start a new one"
    )
