"""What files call the layers of each family: a LoRA on every layer of its model comes to that layer."""

from pathlib import Path

import pytest
import torch
from diffusers import UNet2DConditionModel
from family_sample import Sample
from original_layouts import original_layout
from torch import Tensor, nn

from diffsynth_lite.lora.reading import contents_of, known_pairs


def whole_weights(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """A LoRA whose updates are these weights: of their full rank, the first matrix the identity."""
    tensors = {}
    for name, weight in weights.items():
        layer, inputs = name.removesuffix(".weight"), weight[0].numel()
        tensors[f"{prefix}{layer}.lora_A.weight"] = torch.eye(inputs).reshape(-1, *weight.shape[1:])
        up = weight.reshape(len(weight), inputs, *(1 for _ in weight.shape[2:]))
        tensors[f"{prefix}{layer}.lora_B.weight"] = up
    return tensors


@pytest.mark.parametrize("layout", ["diffusers", "original"])
def test_a_lora_on_all_layers_comes_to_them(sample: Sample, layout: str) -> None:
    if not sample.family.lora_layers:
        pytest.skip("a family elsewhere, which says nothing of other programs' files")
    (component,) = sample.family.trainable[:1]
    model = sample.family.parts_of(sample.family.load_transformer(torch.float32))[component]
    layers = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d | nn.Conv3d)
    ]
    weights = {f"{name}.weight": model.get_submodule(name).weight.detach() for name in layers}
    if layout == "diffusers":
        tensors = whole_weights(weights, f"{component}.")
    elif sample.name == "sana" or isinstance(model, UNet2DConditionModel):
        pytest.skip(
            "no file has a LoRA in these names; those of a small UNet are not those of the released one"
        )
    else:
        original = original_layout(model) or {}
        modules = {
            name: weight for name, weight in original.items() if name.endswith("weight") and weight.ndim > 1
        }
        tensors = whole_weights(modules, "diffusion_model.")
    pairs = known_pairs(contents_of(Path("lora.safetensors"), tensors, {}), sample.family.lora_layers)
    assert pairs.keys() == {f"{component}.{name}" for name in layers}
    for name, weight in weights.items():
        pair = pairs[f"{component}.{name.removesuffix('.weight')}"]
        assert torch.equal(pair.up.flatten(1) @ pair.down.flatten(1), weight.flatten(1)), name
