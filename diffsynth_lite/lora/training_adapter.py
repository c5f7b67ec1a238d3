"""This file has the frozen adapter that is on a model while a LoRA trains, and not when it draws."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from diffsynth_lite.lora.adapter import OWN_ADAPTER, leaving_out
from diffsynth_lite.lora.pairs import pairs_of
from diffsynth_lite.lora.weighted import add_finished_lora

_NAME = "training_adapter"


def add_training_adapter(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], settings: Mapping[str, Any]
) -> None:
    """Put a finished LoRA on a model that has one to train: both are active, and this one is frozen, in fp32.

    Args:
        model: a diffusers model with an adapter of ``add_adapter``.
        tensors: by peft's names, which fit the model; they may be on layers that the other one is not on.
        settings: peft's.
    """
    add_finished_lora(model, _NAME, tensors, settings)
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            layer.set_adapter([OWN_ADAPTER, _NAME])
    for name, parameter in model.named_parameters():
        if f".{_NAME}." in name:
            parameter.requires_grad_(False)


@contextmanager
def without_training_adapter(model: nn.Module) -> Iterator[None]:
    """Scope in which a model computes without what :func:`add_training_adapter` put on it.

    Args:
        model: with or without one; plain, or wrapped.
    """
    with leaving_out(model, _NAME):
        yield


def adapter_digest(tensors: Mapping[str, torch.Tensor], settings: Mapping[str, Any]) -> str:
    """Equal for LoRAs with the same numbers on the same layers, however their files spell them."""
    digest = hashlib.blake2b(digest_size=16)
    for layer, pair in sorted(pairs_of(tensors, settings).items()):
        for matrix in (pair.down, pair.up):
            facts = layer, pair.alpha, str(matrix.dtype), list(matrix.shape)
            digest.update(json.dumps(facts).encode())
            digest.update(matrix.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
