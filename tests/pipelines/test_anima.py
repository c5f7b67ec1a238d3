"""Anima: what its modular pipeline, its conditioner and its checkpoints have of their own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.transformers import transformer_cosmos
from family_sample import (
    Sample,
)
from original_layouts import original_layout
from safetensors.torch import save_file

from diffsynth_lite.pipelines import PipelineFolder
from diffsynth_lite.pipelines.anima import Anima, without_torchvision
from diffsynth_lite.pipelines.base.release_folder import num_parameters
from diffsynth_lite.pipelines.base.single_file import component_files

FAMILY = "anima"


KEY = "model.transformer_file"


# Of circlestone-labs/Anima on the hub: anima-base-v1.0.safetensors and qwen_3_06b_base.safetensors.
BYTES_OF_TRANSFORMER_AND_CONDITIONER, BYTES_OF_TEXT_ENCODER = 4_182_218_328, 1_192_135_096


LARGEST_HEADER = 200_000


def test_the_padding_mask_is_resized_as_by_torchvision_and_nothing_is_left() -> None:
    mask = (torch.rand(1, 1, 48, 80, generator=torch.Generator().manual_seed(0)) > 0.5).to(torch.bfloat16)
    had = hasattr(transformer_cosmos, "transforms")
    with without_torchvision():
        transforms = transformer_cosmos.transforms
        with without_torchvision():  # a preview in a step
            assert transformer_cosmos.transforms is transforms
        resized = transforms.functional.resize(
            mask, [6, 10], interpolation=transforms.InterpolationMode.NEAREST
        )
    assert torch.equal(resized, mask[..., ::8, ::8])
    assert hasattr(transformer_cosmos, "transforms") == had


@pytest.mark.parametrize("prefix", ["net.", "model.diffusion_model.", ""])
def test_a_checkpoint_of_comfyuis_gives_transformer_and_conditioner(
    sample: Sample, tmp_path: Path, prefix: str
) -> None:
    folder = PipelineFolder(path=sample.family.folder.path)
    family = Anima(folder)
    transformer = family.load_transformer(torch.float32)
    conditioner: Any = family.load_component("text_conditioner", torch.float32)
    file = tmp_path / "anima.safetensors"
    tensors = {f"{prefix}{name}": value for name, value in (original_layout(transformer) or {}).items()}
    adapter = {f"{prefix}llm_adapter.{name}": value + 1 for name, value in conditioner.state_dict().items()}
    save_file(tensors | adapter, file)
    before = family.prompt_encoder_id(torch.float32)
    family.take_files(component_files({KEY: str(file)}, family.denoisers))
    family.check_folder()
    read = family.load_transformer(torch.float32)
    assert all(
        torch.equal(value, read.state_dict()[name]) for name, value in transformer.state_dict().items()
    )
    changed = family.load_component("text_conditioner", torch.float32).state_dict()
    assert all(torch.equal(changed[name], value + 1) for name, value in conditioner.state_dict().items())
    assert family.prompt_encoder_id(torch.float32) != before
    save_file(tensors, file)
    of_the_folder = Anima(folder)
    of_the_folder.take_files(component_files({KEY: str(file)}, family.denoisers))
    assert of_the_folder.folder.files.keys() == {"transformer"}


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("is_original", [True, False])
def test_a_file_of_a_deeper_or_shallower_model_gives_as_many_blocks_as_it_has(
    sample: Sample, tmp_path: Path, num_layers: int, is_original: bool
) -> None:
    family = Anima(PipelineFolder(path=sample.family.folder.path))
    released = family.empty_transformer()
    assert len(released.transformer_blocks) == 2
    other = type(released).from_config({**released.config, "num_layers": num_layers})
    file = tmp_path / "anima.safetensors"
    save_file((original_layout(other) or {}) if is_original else other.state_dict(), file)
    family.take_files(component_files({KEY: str(file)}, family.denoisers))
    family.check_folder()
    assert len(family.empty_transformer().transformer_blocks) == num_layers
    read = family.load_transformer(torch.float32).state_dict()
    assert read.keys() == other.state_dict().keys()
    assert all(torch.equal(value, read[name]) for name, value in other.state_dict().items())


def test_the_released_model_has_as_many_weights_as_its_files() -> None:
    (release,) = Anima.releases
    sizes = {name: num_parameters(component) for name, component in release.components.items()}
    for names, num_bytes in (
        (("transformer", "text_conditioner"), BYTES_OF_TRANSFORMER_AND_CONDITIONER),
        (("text_encoder",), BYTES_OF_TEXT_ENCODER),
    ):
        header = num_bytes - 2 * sum(sizes[name] for name in names)
        assert 0 < header < LARGEST_HEADER, names
