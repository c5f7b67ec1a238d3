"""Model folders that are damaged or hostile: their settings are held against the classes built from them."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    Flux2Transformer2DModel,
    FluxTransformer2DModel,
    UNet2DConditionModel,
    WanTransformer3DModel,
)
from torch import nn

from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines import PipelineFolder, family_names, load_family, qwen_image
from diffsynth_lite.pipelines.base.model_settings import (
    ModelSettings,
    building,
    read_settings,
    require_kinds,
    require_possible,
    require_sizes,
)
from diffsynth_lite.pipelines.base.quantized import require_finite_weights
from diffsynth_lite.pipelines.base.release_folder import class_of, empty_model, full_config
from diffsynth_lite.pipelines.qwen_image import QwenImage

HERE = Path("vae/config.json")
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_bytes(b'{"a": "\xff"}'), "cannot be read: .*utf-8"),
        (lambda path: path.write_text('{"a": '), "cannot be read"),
        (lambda path: path.write_text("[1]"), "does not hold a JSON object"),
        (lambda path: path.write_text('{"a": NaN}'), "it holds NaN, which is not a number"),
        (lambda path: path.write_text("[" * 100_000), "cannot be read: maximum recursion depth"),
        (lambda path: path.mkdir(), "is not a file that can be read"),
        (os.mkfifo, "is not a file that can be read"),
        (lambda path: path.symlink_to("nowhere"), "is not a file that can be read"),
        (lambda path: path.symlink_to("/dev/zero"), "is not a file that can be read"),
    ],
)
def test_what_is_no_file_of_settings_is_refused(
    tmp_path: Path, make: Callable[[Path], object], message: str
) -> None:
    make(tmp_path / "config.json")
    with pytest.raises(UserError, match=rf"^model.path: .*config.json .*{message}") as caught:
        read_settings(tmp_path / "config.json")
    assert len(str(caught.value)) < 500


def test_a_setting_that_is_lacking_is_named() -> None:
    with pytest.raises(UserError, match=r"vae/config.json lacks z_dim"):
        ModelSettings({}, HERE)["z_dim"]


def test_all_released_models_pass() -> None:
    releases = [release for name in family_names() for release in load_family(name).releases]
    components = [one for release in releases for one in (*release.components.values(), release.scheduler)]
    assert len(components) > 100
    for component in components:
        # As json has them, which knows no tuples.
        settings = ModelSettings(json.loads(json.dumps(full_config(component))), HERE)
        require_sizes(settings)
        require_kinds(class_of(component), settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_layers": 10**12}, r"num_layers is 1000000000000, and in no model below 0 or above 10000"),
        ({"num_layers": -1}, "num_layers is -1"),
        ({"text_config": {"hidden_size": 10**12}}, r"text_config\.hidden_size is 1000000000000"),
        ({"transformer_layers_per_block": [1, [10**6]]}, "transformer_layers_per_block is 1000000"),
        ({"num_train_timesteps": 10**12}, "num_train_timesteps is 1000000000000"),
    ],
)
def test_sizes_that_no_model_has_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        require_sizes(ModelSettings(settings, HERE))


@pytest.mark.parametrize(
    ("built", "settings", "message"),
    [
        (
            AutoencoderKLWan,
            {"z_dim": "x" * 10_000},
            r'z_dim is "xxx.*\.\.\., and AutoencoderKLWan takes a number',
        ),
        (AutoencoderKLWan, {"z_dim": None}, "z_dim is null"),
        (AutoencoderKLWan, {"dim_mult": 4}, "dim_mult is 4, and AutoencoderKLWan takes a list"),
        (AutoencoderKLWan, {"latents_mean": {}}, "latents_mean is {}"),
        (
            FluxTransformer2DModel,
            {"axes_dims_rope": [16, "a"]},
            'an entry of axes_dims_rope is "a", and FluxTransformer2DModel takes a number',
        ),
        (Flux2Transformer2DModel, {"axes_dims_rope": [[]]}, r"an entry of axes_dims_rope is \[\]"),
        (AutoencoderKLWan, {"latents_std": ["a"]}, "an entry of latents_std is"),
        (
            UNet2DConditionModel,
            {"down_block_types": [1]},
            "an entry of down_block_types is 1, .* takes a text",
        ),
        (FlowMatchEulerDiscreteScheduler, {"base_shift": []}, "base_shift is .*takes a number or null"),
        (
            FlowMatchEulerDiscreteScheduler,
            {"time_shift_type": 1},
            "time_shift_type is 1, and .* takes a text",
        ),
    ],
)
def test_settings_of_another_kind_are_refused(built: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        require_kinds(built, ModelSettings(settings, HERE))
    assert len(str(caught.value)) < 500


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_layers": 1, "ffn_dim": -1}, "config.json makes no WanTransformer3DModel .*Error"),
        (
            {"num_layers": 1, "ffn_dim": 0},
            r"its blocks\.0\.ffn\.net\.0\.proj\.weight would have the shape \[0, ",
        ),
        ({"num_layers": 1, "rope_max_seq_len": 10**9}, "what it computes when it is made would take 9.* GiB"),
    ],
)
def test_what_makes_no_model_is_refused_with_its_file(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message), building(WanTransformer3DModel, HERE):
        require_possible(empty_model(WanTransformer3DModel, settings))


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    qwen_image.tiny().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tiny_folder: Path) -> PipelineFolder:
    return PipelineFolder(path=tiny_folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([], "does not hold a JSON object"),
        ({}, "lacks weight_map"),
        ({"weight_map": ["a"]}, "is not an index of weights: its weight_map is not an object"),
        ({"weight_map": {"a": 1}}, "lists 1, which is not a .safetensors file next to it"),
        ({"weight_map": {"a": "../../b.safetensors"}}, "lists ../../b.safetensors, which is no"),
        ({"weight_map": {"a": "/b.safetensors"}}, "lists /b.safetensors, which is no"),
        ({"weight_map": {"a": "config.json"}}, "lists config.json, which is no"),
    ],
)
def test_an_index_lists_only_files_next_to_it(folder: PipelineFolder, index: object, message: str) -> None:
    file = folder.path / "vae" / "diffusion_pytorch_model.safetensors.index.json"
    file.write_text(json.dumps(index))
    with pytest.raises(UserError, match=message):
        folder.require_weights(["vae"])
    file.unlink()


def changed(
    file: Path, change: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[str, dict[str, torch.Tensor]]:
    """Changes the first weight in a file; its name, and what the file held before."""
    before = safetensors.torch.load_file(file)
    name = next(name for name, tensor in sorted(before.items()) if name.endswith("weight"))
    safetensors.torch.save_file({**before, name: change(before[name].clone())}, file, {"format": "pt"})
    return name, before


LOAD: dict[str, Callable[[QwenImage], object]] = {
    "transformer": lambda family: family.load_transformer(torch.float32),
    "text_encoder": lambda family: family.load_text_encoders(torch.float32, CPU),
    "vae": lambda family: family.load_media_encoder(torch.float32, CPU),
}


@pytest.mark.parametrize("component", ["text_encoder", "vae"])
def test_weights_of_encoders_that_are_not_finite_are_refused_by_file_and_name(
    folder: PipelineFolder, component: str
) -> None:
    (file,) = folder.files_to_load(component)
    _, before = changed(file, lambda weight: weight.index_fill_(0, torch.tensor([0]), torch.inf))
    with pytest.raises(
        UserError, match=rf"^model.path: {file}: .*weight holds numbers that are not finite; get"
    ):
        LOAD[component](QwenImage(folder))
    safetensors.torch.save_file(before, file, {"format": "pt"})


def test_weights_in_a_format_of_their_library_are_not_taken_for_numbers(folder: PipelineFolder) -> None:
    # torch does not know what is finite in 8 bits; in other formats the bits of a NaN are weights.
    layer = nn.Linear(2, 2, dtype=torch.bfloat16).requires_grad_(False)
    layer.weight.data = torch.full((2, 2), torch.nan).to(torch.float8_e4m3fn)
    file = folder.path / "text_encoder" / "config.json"
    before = file.read_text()
    file.write_text(json.dumps(json.loads(before) | {"quantization_config": {"quant_method": "fp8"}}))
    require_finite_weights(folder, "text_encoder", layer)
    file.write_text(before)


@pytest.mark.parametrize("component", LOAD)
def test_weights_of_whole_numbers_are_refused(folder: PipelineFolder, component: str) -> None:
    (file,) = folder.files_to_load(component)
    name, before = changed(file, lambda weight: weight.to(torch.int64))
    with pytest.raises(
        UserError, match=rf"{component} hold {name} in I64, and not as floating-point numbers"
    ):
        folder.require_whole_weights([component])
    safetensors.torch.save_file(before, file, {"format": "pt"})


def test_a_config_of_a_far_larger_model_makes_no_memory(folder: PipelineFolder) -> None:
    with pytest.raises(
        UserError, match=r"that of a Linear with 1000001000000 weights, and the files next to it"
    ):
        folder.require_as_many_numbers("vae", nn.Linear, 10**12 + 10**6)
