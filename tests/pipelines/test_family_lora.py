"""The layers that each family offers for a LoRA, and what files call them: the same to diffusers and ComfyUI.

ComfyUI does not run: the names that it takes are frozen in ``comfyui_names.py``.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from comfyui_names import CONVERTED, TAKEN, updates_in_comfyui
from family_sample import (
    SIGMA,
    Sample,
    adapted_transformer,
    assert_does_as,
    load_lora,
    pairs_on,
    velocity_and_gradients,
)
from my_families.stable_diffusion import StableDiffusion
from my_families.stable_diffusion import tiny as tiny_stable_diffusion
from original_layouts import original_layout
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from diffsynth_lite.core.gradient import blocks_of
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
from diffsynth_lite.pipelines import ModelFamily, PipelineFolder
from diffsynth_lite.pipelines.base.composite import split_adapter
from diffsynth_lite.training.lora_file import export_lora

RANK = 4
NO_LAYERS = (
    r"(cond_type_embedding|embed_image_indicator|time_text_embed\.addition_t_embedding|\.ff_i\.gate)\.weight$"
    r"|^motion_encoder|^face_encoder\.conv"
)
"""Of HunyuanVideo 1.5, Ideogram 4, HiDream-I1 and Wan Animate: no layers, though they have several axes."""


def whole_weights(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """A LoRA whose updates are these weights: of their full rank, the first matrix the identity."""
    tensors = {}
    for name, weight in weights.items():
        layer, inputs = name.removesuffix(".weight"), weight[0].numel()
        tensors[f"{prefix}{layer}.lora_A.weight"] = torch.eye(inputs).reshape(-1, *weight.shape[1:])
        up = weight.reshape(len(weight), inputs, *(1 for _ in weight.shape[2:]))
        tensors[f"{prefix}{layer}.lora_B.weight"] = up
    return tensors


def weights_of_layers(sample: Sample) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model of a family, and the weights of its layers by their names."""
    family = sample.family
    model = family.parts_of(sample.model)[family.trainable[0]]
    kinds = nn.Linear | nn.Conv2d | nn.Conv3d
    layers = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    return model, {f"{name}.weight": model.get_submodule(name).weight.detach() for name in layers}


@pytest.mark.of_the_model
@pytest.mark.families(lambda _, family: family.lora_layers)
def test_a_lora_on_all_layers_comes_to_them_by_diffusers_names(sample: Sample) -> None:
    _, weights = weights_of_layers(sample)
    tensors = whole_weights(weights, f"{sample.family.trainable[0]}.")
    assert_comes_to_layers(sample, tensors, weights)


# No file has a LoRA in Sana's original names, and those of a small UNet are not those of the released one.
@pytest.mark.of_the_model
@pytest.mark.families(lambda name, family: family.lora_layers and name not in ("sana", "sdxl"))
def test_a_lora_on_all_layers_comes_to_them_by_the_original_names(sample: Sample) -> None:
    model, weights = weights_of_layers(sample)
    original = {
        name: weight
        for name, weight in (original_layout(model) or {}).items()
        if name.endswith("weight") and weight.ndim > 1 and not re.search(NO_LAYERS, name)
    }
    assert_comes_to_layers(sample, whole_weights(original, "diffusion_model."), weights)


def assert_comes_to_layers(sample: Sample, tensors: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
    component = sample.family.trainable[0]
    pairs = known_pairs(contents_of(Path("lora.safetensors"), tensors, {}), sample.family.lora_layers)
    assert pairs.keys() == {f"{component}.{name.removesuffix('.weight')}" for name in weights}
    for name, weight in weights.items():
        pair = pairs[f"{component}.{name.removesuffix('.weight')}"]
        assert torch.equal(pair.up.flatten(1) @ pair.down.flatten(1), weight.flatten(1)), name


# Other tests compare the names of the others in ComfyUI, which has no Sana.
@pytest.mark.of_the_model
@pytest.mark.families(lambda name, _: name in TAKEN and name not in (*CONVERTED, "sana", "sdxl"))
def test_kohyas_names_are_those_of_comfyuis_model_but_in_two_families(sample: Sample) -> None:
    family = sample.family
    spelling, component = family.lora_spelling, family.trainable[0]
    model = family.parts_of(family.empty_transformer())[component]
    in_comfyui = {name.removesuffix(".weight").replace(".", "_") for name in original_layout(model) or {}}
    names = {
        family.lora_layers[component].in_kohya(layer)[0].replace(".", "_")
        for layer, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    assert (names <= in_comfyui) == spelling.comfyui_takes_kohya_names
    assert spelling.comfyui_takes_kohya_names == (sample.name not in ("qwen_image_21", "z_image"))


# Of the others diffusers reads no such files, or only with the released model's sizes.
@pytest.mark.of_the_model
@pytest.mark.families(lambda name, _: name in ("flux2", "qwen_image", "wan_i2v", "z_image"))
def test_diffusers_gives_each_layer_the_same_update_by_kohya_names(sample: Sample) -> None:
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


@pytest.mark.of_the_model
def test_a_lora_on_all_layers_does_the_same_in_diffusers_and_in_comfyui(
    family: ModelFamily, sample: Sample, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = family.empty_transformer()
    tensors, settings = adapter_on(model, alpha=2 * RANK)
    trained = pairs_of(tensors, settings)
    family.lora_files.settle(model, settings["target_modules"], rank=RANK)
    spelling = family.lora_files.spelling
    (file,) = family.lora_files.save(tmp_path, tensors, settings)
    assert differing(trained, family.lora_files.loaded(tmp_path)) == []
    if sample.name not in TAKEN:
        assert spelling.unknown_to_comfyui is None
        return
    spelled: dict[str, LoraPair] = {}
    named: set[str] = set()
    for component, part in split_adapter(tensors, settings, family.trained).items():
        pairs = pairs_of(*part, family.lora_files.prefix(component))
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
    transformer = sample.adapted(family.target_sets["all"])
    settings = adapter_settings(transformer)
    trained = pairs_of(adapter_tensors(transformer), settings, "transformer.")
    (file,) = family.lora_files.save(tmp_path, adapter_tensors(transformer), settings)
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


@pytest.mark.of_the_model
@pytest.mark.families(lambda name, _: name in KINDS)
def test_files_of_other_kinds_do_in_diffusers_and_in_comfyui_what_the_adapter_does(
    sample: Sample, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind = KINDS[sample.name]
    family = type(sample.family)(sample.family.folder)
    model = adapted_transformer(sample.family, kind=kind)
    layers = adapter_settings(model)["target_modules"]
    if sample.name == "flux":
        with pytest.raises(
            UserError, match=r"norm_out\.linear has the halves of its outputs in another order in ComfyUI"
        ):
            family.lora_files.settle(family.empty_transformer(), ["norm_out.linear"], rank=RANK, kind=Dora())
    family.lora_files.settle(family.empty_transformer(), layers, rank=RANK, kind=kind)
    assert family.lora_files.pipeline_loads_adapter == (sample.name in ("flux2", "ltx_video", "z_image"))
    assert ("does not load a" in caplog.text) != family.lora_files.pipeline_loads_adapter
    tensors = exported_tensors(model, adapter_tensors(model), torch.device("cpu"))
    (file,), _ = export_lora(
        family, tmp_path / "lora", tensors, adapter_settings(model), lambda _: {"a": "b"}
    )
    if family.lora_files.pipeline_loads_adapter:
        pipeline = sample.fresh_pipeline()
        pipeline.load_lora_weights(file.parent)
        loaded = pipeline.transformer.eval()
    else:
        loaded = family.load_transformer(torch.float32)
        add_finished_lora(loaded, "read", *family.lora_files.read(file))
    outputs = [predict(sample, one.eval()) for one in (model, loaded)]
    torch.testing.assert_close(*outputs, rtol=1e-3, atol=1e-4)
    content = load_file(file)
    for layer in layers:
        key = family.lora_files.spelling.key(f"{family.lora_files.prefix(family.trained[0])}{layer}")
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


BEYOND_BLOCKS = {"sdxl": ("proj_in", "proj_out")}
"""Endings of what ``all`` holds next to the layers of the blocks."""
NOT_TRAINED = {
    "sdxl": "time_emb_proj",
    "flux3": "mode_blocks.image_cond.",
    "hidream": "ff_i.experts.",
    "minimax_h3": "adaln_proj.",
}
"""In the names of linear layers of the blocks that ``all`` leaves out."""


def target_layers_of(sample: Sample, model: torch.nn.Module, targets: tuple[str, ...]) -> set[str]:
    return {*find_target_layers(model, targets, unused_modules=sample.family.unused_modules(model))}


def linear_layers_in(model: torch.nn.Module, modules: list[str]) -> set[str]:
    inside = tuple(f"{module}." for module in modules)
    return {
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.startswith(inside)
    }


@pytest.mark.of_the_model
@pytest.mark.families(lambda _, family: family.target_sets is not ModelFamily.target_sets)
def test_the_sets_hold_all_linear_layers_of_the_blocks_and_those_of_their_attention(sample: Sample) -> None:
    family = sample.family
    model = family.empty_transformer()
    names = {module: name for name, module in model.named_modules()}
    of_blocks = linear_layers_in(model, [names[block] for block in blocks_of(model, family.block_lists)])
    unused = tuple(family.unused_modules(model))
    used = {name for name in of_blocks if not name.startswith(unused)}
    beyond = {name for name in names.values() if name.endswith(BEYOND_BLOCKS.get(sample.name, ()))}
    left_out = {name for name in used if NOT_TRAINED.get(sample.name, "none") in name}
    every = target_layers_of(sample, model, sample.family.target_sets["all"])
    assert every == (used | beyond) - left_out
    projections = linear_layers_in(
        model, [name for module, name in names.items() if type(module).__name__.endswith("Attention")]
    )
    assert (
        target_layers_of(sample, model, sample.family.target_sets["attention"])
        == (projections & used) - left_out
    )
    assert target_layers_of(sample, model, family.default_target_modules) <= every


@pytest.mark.of_the_model
@pytest.mark.families(lambda _, family: family.target_sets is not ModelFamily.target_sets)
def test_every_adapter_of_the_largest_set_learns(sample: Sample) -> None:
    _, gradients = velocity_and_gradients(sample, sample.adapted(sample.family.target_sets["all"]))
    assert [layer for layer, gradient in gradients.items() if gradient is None or not gradient.any()] == []


def test_a_saved_lora_does_the_same_in_the_diffusers_pipeline(sample: Sample, tmp_path: Path) -> None:
    """On as many layers as there is a set of; runs export those of the default (tests/runs)."""
    family, pipeline = sample.family, sample.fresh_pipeline()
    (component,) = family.trained
    loaded = getattr(pipeline, component)
    with torch.no_grad():
        base = predict(sample, loaded)
    transformer = sample.adapted(family.target_sets.get("all", family.default_target_modules)).eval()
    files = family.lora_files.save(tmp_path, adapter_tensors(transformer), adapter_settings(transformer))
    assert [file.name for file in files] == ["pytorch_lora_weights.safetensors"]
    assert_does_as(pairs_of(*family.lora_files.read(tmp_path)), transformer)
    assert_does_as(family.lora_files.loaded(tmp_path), transformer)
    load_lora(pipeline, tmp_path)
    assert_does_as(pairs_on(loaded), transformer)
    with torch.no_grad():
        reloaded, trained = predict(sample, loaded), predict(sample, transformer)
    assert torch.equal(reloaded, trained)
    assert not torch.allclose(base, trained, atol=1e-3)


def predict(sample: Sample, transformer: torch.nn.Module) -> torch.Tensor:
    return sample.family.predict(transformer, sample.latents, SIGMA, sample.conditioning)


def test_a_lora_that_its_pipeline_reads_is_taken_for_what_its_settings_make_it(tmp_path: Path) -> None:
    tiny_stable_diffusion().save_pretrained(tmp_path)
    family, lora = StableDiffusion(PipelineFolder(path=tmp_path)), tmp_path / "lora"
    layers = [f"mid_block.attentions.0.transformer_blocks.0.attn1.{name}" for name in ("to_q", "to_k")]
    tensors = {f"{layer}.lora_{part}.weight": torch.ones(4, 4) for layer in layers for part in "AB"}
    (file,) = family.lora_files.save(lora, tensors, {"r": 4, "lora_alpha": 4, "target_modules": layers})
    stored = load_file(file)

    def read(**settings: object) -> dict[str, LoraPair]:
        stated = {f"unet.{name}": value for name, value in settings.items()}
        save_file(stored, file, {"format": "pt", "lora_adapter_metadata": json.dumps(stated)})
        return pairs_of(*family.lora_files.read(lora))

    pairs = read(r=4, lora_alpha=8, alpha_pattern={"to_k": 2}, target_modules=layers)
    updates = [pairs[layer].up @ pairs[layer].down * (pairs[layer].alpha / 4) for layer in layers]
    assert [float(update[0, 0]) for update in updates] == [8, 2]
    with pytest.raises(UserError, match="is a DoRA by its settings"):
        read(r=4, lora_alpha=8, use_dora=True)
    save_file(stored, file, {"format": "pt", "lora_adapter_metadata": "[" * 100_000})
    with pytest.raises(UserError, match="holds no LoRA that StableDiffusionPipeline can read"):
        family.lora_files.read(lora)
