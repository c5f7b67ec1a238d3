"""What files call the layers of each family: a LoRA on every layer of its model comes to that layer.

And does the same in ComfyUI as in diffusers. ComfyUI does not run: the names that it takes are frozen in
``comfyui_names.py``.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from comfyui_names import CONVERTED, TAKEN, updates_in_comfyui
from diffusers import UNet2DConditionModel
from family_sample import SIGMA, Sample, adapted_transformer
from original_layouts import original_layout
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import Tensor, nn

from diffsynth_lite.errors import UserError
from diffsynth_lite.lora import (
    adapter_settings,
    adapter_tensors,
    add_finished_lora,
    exported_tensors,
    find_target_layers,
)
from diffsynth_lite.lora.conversion import FamilyNames, convert, spelled
from diffsynth_lite.lora.kinds import Dora, Lokr
from diffsynth_lite.lora.reading import contents_of, known_pairs, read_contents
from diffsynth_lite.lora.updates import LoraPair, pairs_of
from diffsynth_lite.pipelines import ModelFamily
from diffsynth_lite.pipelines.base.composite import split_adapter
from diffsynth_lite.training.lora_file import export_lora

RANK = 4
TABLES = (
    "cond_type_embedding.weight",
    "embed_image_indicator.weight",
    "time_text_embed.addition_t_embedding.weight",
)
"""Of HunyuanVideo 1.5 and Ideogram 4: no layers, though their weights have two axes."""


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
            name: weight
            for name, weight in original.items()
            if name.endswith("weight") and weight.ndim > 1 and name not in TABLES
        }
        tensors = whole_weights(modules, "diffusion_model.")
    pairs = known_pairs(contents_of(Path("lora.safetensors"), tensors, {}), sample.family.lora_layers)
    assert pairs.keys() == {f"{component}.{name}" for name in layers}
    for name, weight in weights.items():
        pair = pairs[f"{component}.{name.removesuffix('.weight')}"]
        assert torch.equal(pair.up.flatten(1) @ pair.down.flatten(1), weight.flatten(1)), name


def test_kohyas_names_are_those_of_comfyuis_model_but_in_two_families(sample: Sample) -> None:
    family = sample.family
    spelling, component = family.lora_spelling, family.trainable[0]
    if sample.name not in TAKEN or spelling.is_converted_for_comfyui or spelling.is_flat:
        pytest.skip("a family elsewhere, or one whose names in ComfyUI other tests compare")
    if sample.name == "sana":
        pytest.skip("not in ComfyUI")
    model = family.parts_of(family.empty_transformer())[component]
    in_comfyui = {name.removesuffix(".weight").replace(".", "_") for name in original_layout(model) or {}}
    names = {
        family.lora_layers[component].in_kohya(layer)[0].replace(".", "_")
        for layer, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    assert (names <= in_comfyui) == spelling.comfyui_takes_kohya_names
    assert spelling.comfyui_takes_kohya_names == (sample.name not in ("qwen_image_21", "z_image"))


def test_diffusers_gives_each_layer_the_same_update_by_kohya_names(sample: Sample) -> None:
    if sample.name not in ("flux2", "qwen_image", "wan_i2v", "z_image"):
        pytest.skip("diffusers reads no such files of this family, or only with the released model's sizes")
    family, pipeline = sample.family, sample.fresh_pipeline()
    pairs = {}
    targets = family.default_target_modules
    for name in find_target_layers(pipeline.transformer, targets, unused_modules=[]):
        num_outputs, num_inputs = pipeline.transformer.get_parameter(f"{name}.weight").shape
        down, up = torch.randn(4, num_inputs), torch.randn(num_outputs, 4)
        pairs[f"transformer.{name}"] = LoraPair(down=down, up=up, alpha=2.0)
    names = FamilyNames(layers=family.lora_layers, comfyui=family.lora_spelling)
    tensors = spelled(pairs, names, "kohya", torch.float32)
    pipeline.load_lora_weights(dict(tensors), adapter_name="kohya")
    loaded = {
        f"transformer.{name}": module.get_delta_weight("kohya")
        for name, module in pipeline.transformer.named_modules()
        if isinstance(module, LoraLayer)
    }
    assert loaded.keys() == pairs.keys()
    for name, pair in pairs.items():
        # alpha over rank is a power of two: no matrix was rounded.
        assert torch.equal(loaded[name], pair.up @ pair.down * (pair.alpha / pair.rank)), name


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


@pytest.mark.parametrize("name", CONVERTED)
def test_a_lora_is_converted_to_the_layers_that_comfyui_has_and_back(
    sample_of: Callable[[str], Sample], name: str, tmp_path: Path
) -> None:
    sample = sample_of(name)
    family = sample.family
    transformer = adapted_transformer(sample, targets=family.target_sets["all"])
    settings = adapter_settings(transformer)
    trained = pairs_of(adapter_tensors(transformer), settings, "transformer.")
    (file,) = family.save_lora(tmp_path, adapter_tensors(transformer), settings)
    names = FamilyNames(layers=family.lora_layers, comfyui=family.lora_spelling)
    there = convert(read_contents(file), names, "comfyui", tmp_path / "for_comfyui.safetensors")
    layers = {re.sub(r"\.(lora_.*|alpha)$", "", key) for key in there.tensors}
    patterns = {one: re.compile(re.escape(one).replace(r"\*", r"\d+")) for one in CONVERTED[name]}
    assert {layer for layer in layers if not any(one.fullmatch(layer) for one in patterns.values())} == set()
    found = {one for one, pattern in patterns.items() if any(map(pattern.fullmatch, layers))}
    # Those of images belong to models that this one is not.
    assert found == {one for one in patterns if "*" in one and not one.endswith("_img")}
    back = convert(there.contents, names, "diffusers", tmp_path / "back.safetensors")
    # Folded alpha is a power of two from the rank: nothing was rounded.
    assert there.difference == back.difference == 0
    for pairs in (known_pairs(there.contents, family.lora_layers), back.contents.pairs):
        assert differing(trained, pairs) == []


KINDS = {
    "flux": Lokr(factor=2),
    "flux2": Lokr(),
    "ltx_video": Dora(),
    "sdxl": Lokr(factor=4),
    "wan": Dora(),
    "z_image": Dora(),
}
"""One of each kind of spelling, of pipelines that load the kind and of some that do not."""


def test_files_of_other_kinds_do_in_diffusers_and_in_comfyui_what_the_adapter_does(
    sample: Sample, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if (kind := KINDS.get(sample.name)) is None:
        pytest.skip("the kinds are tried on one family of each spelling")
    family = type(sample.family)(sample.family.folder)
    model = adapted_transformer(sample, kind=kind)
    layers = adapter_settings(model)["target_modules"]
    if sample.name == "flux":
        with pytest.raises(
            UserError, match=r"norm_out\.linear has scale and shift in another order in ComfyUI"
        ):
            family.settle_lora_spelling(
                family.empty_transformer(), ["norm_out.linear"], rank=RANK, kind=Dora()
            )
    family.settle_lora_spelling(family.empty_transformer(), layers, rank=RANK, kind=kind)
    assert family.pipeline_loads_adapter == (sample.name in ("flux2", "ltx_video", "z_image"))
    assert ("does not load a" in caplog.text) != family.pipeline_loads_adapter
    tensors = exported_tensors(model, adapter_tensors(model), torch.device("cpu"))
    (file,) = export_lora(
        family, tmp_path / "lora", tensors, adapter_settings(model), lambda _: {"a": "b"}
    ).files
    if family.pipeline_loads_adapter:
        pipeline = sample.fresh_pipeline()
        pipeline.load_lora_weights(file.parent)
        drawn = pipeline.transformer.eval()
    else:
        drawn = family.load_transformer(torch.float32)
        add_finished_lora(drawn, "read", *family.read_lora(file))
    outputs = [
        family.predict(one.eval(), sample.latents, SIGMA, sample.conditioning) for one in (model, drawn)
    ]
    torch.testing.assert_close(*outputs, rtol=1e-3, atol=1e-4)
    content = load_file(file)
    for layer in layers:
        key = family.lora_spelling.key(f"{family.lora_prefix(family.trained[0])}{layer}")
        weight = family_weight(model, layer)
        expected = changed_weight(model.get_submodule(layer), weight)
        torch.testing.assert_close(in_comfyui(content, key, weight), expected, rtol=1e-4, atol=1e-5)


def family_weight(model: nn.Module, layer: str) -> Tensor:
    weight: Tensor = model.get_submodule(layer).get_base_layer().weight  # type: ignore[operator]
    return weight.detach()


def changed_weight(layer: nn.Module, weight: Tensor) -> Tensor:
    """What a layer with an adapter multiplies its input with."""
    eye = torch.eye(weight.shape[1])
    with torch.no_grad():
        output = layer(eye) - layer(torch.zeros_like(eye))
    return output.T


def in_comfyui(content: dict[str, Tensor], key: str, weight: Tensor) -> Tensor:
    """What ComfyUI makes of a weight, by its ``comfy/weight_adapter``: it divides a DoRA by W's own norms."""
    assert f"{key}.alpha" not in content or f"{key}.lora_down.weight" in content
    if f"{key}.lokr_w1" in content:
        right = content.get(f"{key}.lokr_w2")
        if right is None:
            right = content[f"{key}.lokr_w2_a"] @ content[f"{key}.lokr_w2_b"]
        return weight + torch.kron(content[f"{key}.lokr_w1"], right)
    changed = weight + content[f"{key}.lora_B.weight"] @ content[f"{key}.lora_A.weight"]
    return changed * content[f"{key}.dora_scale"] / weight.norm(dim=1, keepdim=True)


def differing(expected: dict[str, LoraPair], found: dict[str, LoraPair]) -> list[str]:
    return [
        layer
        for layer in expected.keys() | found.keys()
        if layer not in expected or layer not in found or expected[layer].distance(found[layer]) != 0
    ]
