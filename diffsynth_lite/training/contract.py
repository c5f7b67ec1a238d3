"""This file says which settings make a run the run that it is, and refuses to resume it as another one."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from diffsynth_lite.config import Config
from diffsynth_lite.data import EncodedItem
from diffsynth_lite.errors import UserError

_FIXED_SECTIONS = ("lora", "objective")
_FIXED_FIELDS = {
    "model": ("family", "dtype", "text_encoder_dtype", "vae_dtype"),
    "data": ("width", "height", "repeats"),
    "train": (
        *("seed", "global_batch_size", "mixed_precision", "max_grad_norm"),
        *("learning_rate", "lr_scheduler", "warmup_steps"),
        *("adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay"),
    ),
}
_MAX_NAMED = 5

Contract = dict[str, Any]


class DifferentRunError(UserError):
    """A checkpoint belongs to a run with other settings or other data."""


def settings_contract(config: Config, *, model_fingerprint: str) -> Contract:
    """The settings that decide the numbers of a run, by dotted key.

    Everything else may change between the parts of a run: the checkpointing and offload flags, workers,
    previews, trackers, intervals, paths. ``train.steps`` may change where the learning rate does not depend
    on it, and ``train.micro_batch_size`` where there is no dropout.

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
    if config.lora.dropout > 0:
        contract["train.micro_batch_size"] = config.train.micro_batch_size  # each has masks of its own
    if config.train.lr_scheduler != "constant":
        contract["train.steps"] = config.train.steps
    return contract


def data_contract(items: Sequence[EncodedItem]) -> Contract:
    """What decides the samples of a run: the items' names, pictures and captions, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for item in items:
        digest.update(f"{item.name}\0{item.latents_key}\0{item.caption_key}\n".encode())
    return {"data.items": f"{len(items)} items, {digest.hexdigest()}"}


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
