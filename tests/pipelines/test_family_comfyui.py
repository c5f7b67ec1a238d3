"""A LoRA file does the same in ComfyUI as in diffusers, on all layers; a new family is tested here too.

ComfyUI does not run: the names that it takes are frozen in ``comfyui_names.py``.
"""

from pathlib import Path

import pytest
import torch
from comfyui_names import TAKEN, updates_in_comfyui
from family_sample import Sample

from diffsynth_lite.lora.pairs import LoraPair, pairs_of
from diffsynth_lite.pipelines import ModelFamily
from diffsynth_lite.pipelines.base.composite import split_adapter

RANK = 4


@pytest.fixture
def family(sample: Sample) -> ModelFamily:
    """With all that it can train."""
    family = sample.family
    return type(family)(family.folder, trained=family.trainable)


def adapter_on(model: torch.nn.Module, *, alpha: float) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """An adapter on all linear layers of a model, as peft would name it."""
    generator = torch.Generator().manual_seed(0)
    tensors, layers = {}, []
    for layer, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            layers.append(layer)
            for matrix, shape in (("A", (RANK, module.in_features)), ("B", (module.out_features, RANK))):
                tensors[f"{layer}.lora_{matrix}.weight"] = torch.randn(shape, generator=generator)
    return tensors, {"r": RANK, "lora_alpha": alpha, "target_modules": layers}


def test_a_lora_on_all_layers_does_the_same_in_diffusers_and_in_comfyui(
    family: ModelFamily, sample: Sample, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = family.empty_transformer()
    tensors, settings = adapter_on(model, alpha=2 * RANK)
    trained = pairs_of(tensors, settings)
    family.settle_lora_spelling(model, settings["target_modules"], rank=RANK)
    spelling = family.lora_spelling
    (file,) = family.save_lora(tmp_path, tensors, settings)
    assert differing(trained, family.loaded_lora(tmp_path)) == []
    if sample.name not in TAKEN:
        assert spelling.unknown_to_comfyui is None
        return
    spelled: dict[str, LoraPair] = {}
    named: set[str] = set()
    for component, part in split_adapter(tensors, settings, family.trained).items():
        pairs = pairs_of(*part, family.lora_prefix(component))
        spelled |= {spelling.key(layer): pair for layer, pair in pairs.items()}
        named |= {spelling.key(layer) for layer in pairs if spelling.in_comfyui(layer)}
    in_comfyui = dict(updates_in_comfyui(sample.name, file))
    assert in_comfyui.keys() == named
    assert differing({key: spelled[key] for key in named}, in_comfyui) == []
    left_out = spelled.keys() - named
    warned = f"ComfyUI has no names for {len(left_out)} of the {len(trained)} layers" in caplog.text
    assert warned == (0 < len(left_out) < len(trained))


def differing(expected: dict[str, LoraPair], found: dict[str, LoraPair]) -> list[str]:
    return [
        layer
        for layer in expected.keys() | found.keys()
        if layer not in expected or layer not in found or expected[layer].distance(found[layer]) != 0
    ]
