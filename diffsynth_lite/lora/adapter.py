"""This file puts a LoRA on a model through peft, and takes its tensors out and in."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers.training_utils import cast_training_params
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from torch import nn

from diffsynth_lite.errors import UserError
from diffsynth_lite.lora.linear import use_lora_linear

_ADAPTER = "default"
_ALWAYS_SAVED = ("r", "lora_alpha")


def add_adapter(
    model: nn.Module, layers: Sequence[str], *, rank: int, alpha: float, dropout: float, seed: int
) -> None:
    """Freeze a model and put a LoRA in fp32 on the given layers.

    The second matrix of each pair starts at zero, so the model's output does not change.

    Args:
        model: a diffusers model. peft draws the first values on the CPU, whatever device it is on.
        layers: full names of linear layers.
        rank: inner width of each pair of matrices.
        alpha: the update is scaled by ``alpha / rank``.
        dropout: probability in [0, 1) that an input of the adapter is dropped in training.
        seed: of the first values; the global random state is left as it was.
    """
    model.requires_grad_(False)
    # Full names, not endings: the layers left out in the last block then need no exclude list in the file.
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=list(layers))
    use_lora_linear(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.add_adapter(config, adapter_name=_ADAPTER)  # type: ignore[operator]  # of every diffusers model
    cast_training_params(model, torch.float32)
    adapted = _adapted_layers(model)
    assert adapted == set(layers), f"peft adapted {len(adapted)} layers of {len(layers)}"


def adapter_size(model: nn.Module, layers: Sequence[str], *, rank: int) -> int:
    """Parameters that an adapter on these linear layers has; see :func:`adapter_shapes`."""
    shapes = adapter_shapes(model, layers, rank=rank)
    return sum(number * num_rows * num_columns for (num_rows, num_columns), number in shapes.items())


def adapter_shapes(model: nn.Module, layers: Sequence[str], *, rank: int) -> Counter[tuple[int, int]]:
    """Shapes of the matrices of an adapter on these linear layers, and how many there are of each.

    Args:
        model: may be on the meta device.
        layers: full names.
    """
    shapes: Counter[tuple[int, int]] = Counter()
    for layer in layers:
        num_outputs, num_inputs = model.get_parameter(f"{layer}.weight").shape
        shapes.update([(rank, num_inputs), (num_outputs, rank)])
    return shapes


def adapter_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The adapter's tensors by peft's names, on the CPU."""
    return {
        name: tensor.detach().cpu().contiguous() for name, tensor in get_peft_model_state_dict(model).items()
    }


def by_peft_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by parameter name, as the moving average has them, by those of :func:`adapter_tensors`."""
    return {name.replace(f".{_ADAPTER}.", "."): tensor for name, tensor in tensors.items()}


def load_adapter_tensors(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give an adapter already on the model the values of :func:`adapter_tensors`.

    Raises:
        UserError: the names or shapes differ from the adapter's.
    """
    present = {name: tensor.shape for name, tensor in get_peft_model_state_dict(model).items()}
    given = {name: tensor.shape for name, tensor in tensors.items()}
    if present != given:
        differing = sorted(
            name for name in present.keys() | given.keys() if present.get(name) != given.get(name)
        )
        raise UserError(
            f"the adapter in the checkpoint does not fit the model: {len(differing)} tensors differ "
            f"(first: {differing[0]}); resume with the lora settings that it was trained with"
        )
    set_peft_model_state_dict(model, dict(tensors))


def adapter_settings(model: nn.Module) -> dict[str, Any]:
    """peft's settings of the adapter as plain values, for the LoRA file's metadata.

    Only rank, alpha, full names of layers and what differs from peft's defaults: a file that lists every
    setting of one peft version is refused by versions that do not know them all.
    """
    settings: dict[str, Any] = model.peft_config[_ADAPTER].to_dict()  # type: ignore[index,union-attr]
    defaults = LoraConfig().to_dict()
    kept = {
        name: value
        for name, value in settings.items()
        if name in _ALWAYS_SAVED or (name in defaults and value != defaults[name])
    }
    # Of 20 layers and more, peft keeps endings only, which do not say whose of several components they are.
    kept["target_modules"] = _adapted_layers(model)
    return {name: sorted(value) if isinstance(value, set) else value for name, value in kept.items()}


def _adapted_layers(model: nn.Module) -> set[str]:
    return {name.rsplit(".lora_A", 1)[0] for name, _ in model.named_parameters() if ".lora_A." in name}
