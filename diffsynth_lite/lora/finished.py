"""This file puts finished LoRAs on a model, to generate with or to stay frozen while another one trains."""

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.training_utils import cast_training_params
from peft import set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from diffsynth_lite.errors import UserError
from diffsynth_lite.lora.adapter import OWN_ADAPTER, leaving_out, peft_pattern
from diffsynth_lite.lora.kinds import LORA, AdapterKind, Dora, Lokr
from diffsynth_lite.lora.layers import MAGNITUDE
from diffsynth_lite.lora.updates import LOKR_NAME, lokr_updates, pairs_of

_FIRST, _SECOND = ".lora_A.weight", ".lora_B.weight"


def require_fit(model: nn.Module, tensors: Mapping[str, torch.Tensor], *, place: str) -> None:
    """Check that a LoRA fits the layers of a model and has finite numbers.

    Args:
        model: may be on the meta device.
    """
    known = (_FIRST, _SECOND, MAGNITUDE)
    others = sorted(name for name in tensors if not name.endswith(known) and not LOKR_NAME.fullmatch(name))
    if others or not tensors:
        found = (
            f"{others[0]}, which is not a part of a plain LoRA (lora_A, lora_B)" if others else "no tensors"
        )
        raise UserError(f"{place} holds {found}")
    products = lokr_updates(tensors)
    pairs = {name.partition(".lora_")[0] for name in tensors if name.endswith(known)}
    misfits = sorted(
        [layer for layer in pairs if not _fits(model, layer, tensors)]
        + [
            layer
            for layer, update in products.items()
            if (weight := _weight(model, layer)) is None or weight.shape != update.sizes[::-1]
        ]
    )
    if misfits:
        raise UserError(
            f"{place}: the LoRA does not fit the model: {len(misfits)} of its {len(pairs) + len(products)} "
            f"layers are not there or of other sizes, such as {misfits[0]}; name the base model that it was "
            "trained on, and in lora.components the components that it is on"
        )
    if broken := sorted(name for name, tensor in tensors.items() if not tensor.isfinite().all()):
        raise UserError(f"{place}: {broken[0]} holds numbers that are not finite; get the LoRA again")


def _fits(model: nn.Module, layer: str, tensors: Mapping[str, torch.Tensor]) -> bool:
    first, second = tensors.get(f"{layer}{_FIRST}"), tensors.get(f"{layer}{_SECOND}")
    weight = _weight(model, layer)
    if first is None or second is None or weight is None:
        return False
    rank, norms = len(first), tensors.get(f"{layer}{MAGNITUDE}")
    if norms is not None and norms.shape != weight.shape[:1]:
        return False
    return first.shape == (rank, *weight.shape[1:]) and second.shape[:2] == (len(weight), rank)


def _weight(model: nn.Module, layer: str) -> torch.Tensor | None:
    try:
        weight = model.get_submodule(layer).weight
    except AttributeError:
        return None
    return weight if isinstance(weight, torch.Tensor) else None


def excludes_other_loras(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether a LoRA is of a kind that cannot be combined with others on a model: a DoRA, or a LoKr.

    A DoRA's norms are those of the base's weights, and peft puts no LoKr on layers with a LoRA.
    """
    return any(not name.endswith((_FIRST, _SECOND)) for name in tensors)


def add_finished_lora(
    model: nn.Module,
    name: str,
    tensors: Mapping[str, torch.Tensor],
    settings: Mapping[str, Any],
    *,
    device: torch.device | None = None,
) -> None:
    """Put another LoRA in fp32 on a model; see :func:`set_lora_weights`.

    Args:
        tensors: by peft's names, which fit the model.
        settings: peft's. Where they give no alpha, each layer's is its rank.
        device: to read frozen weights on, where a DoRA asks for them; None is where they are.
    """
    if products := lokr_updates(tensors):
        _put_on(model, name, list(products), Lokr(), rank=1, alpha=1, device=device)
        load_finished_lora(model, name, tensors)
        return
    ranks = {key.removesuffix(_FIRST): len(first) for key, first in tensors.items() if key.endswith(_FIRST)}
    rank = next(iter(ranks.values()))
    alpha = settings.get("lora_alpha")
    others = peft_pattern({layer: own for layer, own in ranks.items() if own != rank})
    _put_on(
        model,
        name,
        list(ranks),
        Dora() if any(key.endswith(MAGNITUDE) for key in tensors) else LORA,
        rank=rank,
        alpha=rank if alpha is None else alpha,
        rank_pattern=others,
        alpha_pattern=others if alpha is None else {},
        device=device,
    )
    load_finished_lora(model, name, tensors)


def load_finished_lora(model: nn.Module, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load other values into a LoRA that :func:`add_finished_lora` put on a model.

    Args:
        tensors: by peft's names, on the same layers and of the same sizes and alpha.
    """
    if products := lokr_updates(tensors):
        for layer, update in products.items():
            model.get_submodule(layer).hold(name, update.left, update.right)  # type: ignore[operator]
        return
    set_peft_model_state_dict(model, dict(tensors), adapter_name=name)


def _put_on(
    model: nn.Module,
    name: str,
    layers: list[str],
    kind: AdapterKind,
    *,
    device: torch.device | None,
    **settings: Any,
) -> None:
    config = kind.config(layers, dropout=0.0, **settings)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # Several adapters on one model are intended.
        warnings.filterwarnings("ignore", "Already found a `peft_config`", UserWarning)
        model.add_adapter(config, adapter_name=name)  # type: ignore[operator]  # of every diffusers model
        cast_training_params(model, torch.float32)
        kind.start(model, layers, name, device)


def set_lora_weights(model: nn.Module, weights: Mapping[str, float]) -> None:
    """Activate the named LoRAs, each with its update multiplied by a weight, and no others.

    As ``set_adapters`` of diffusers' models, which cannot handle a model that is made of several.
    """
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.set_adapter(list(weights))
            for name, weight in weights.items():
                module.set_scale(name, weight)


_NAME = "training_adapter"


def add_training_adapter(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], settings: Mapping[str, Any]
) -> None:
    """Put a finished LoRA on a model that has one to train: both are active, and this one is frozen, in fp32.

    Args:
        tensors: by peft's names, which fit the model; they may be on layers that the other one is not on.
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
    """Scope in which a model computes without what :func:`add_training_adapter` put on it."""
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
