"""Anima: what its modular pipeline, its conditioner and its checkpoints have of their own."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.transformers import transformer_cosmos
from diffusers.modular_pipelines.anima.encoders import encode_vae_image
from diffusers_pipelines import read_pipeline
from family_sample import (
    CPU,
    SIGMA,
    Sample,
    assert_equal_under_all_flags,
)
from original_layouts import original_layout
from safetensors.torch import save_file

from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines import PipelineFolder, require_family
from diffsynth_lite.pipelines.anima import ANIMA, Anima, model_fn_anima, without_torchvision
from diffsynth_lite.pipelines.base.release_folder import num_parameters
from diffsynth_lite.pipelines.base.single_file import component_files

FAMILY = "anima"


KEY = "model.transformer_file"


# Of circlestone-labs/Anima on the hub: anima-base-v1.0.safetensors and qwen_3_06b_base.safetensors.
BYTES_OF_TRANSFORMER_AND_CONDITIONER, BYTES_OF_TEXT_ENCODER = 4_182_218_328, 1_192_135_096


LARGEST_HEADER = 200_000


def test_the_folder_is_a_modular_one_and_its_index_is_what_diffusers_writes(sample: Sample) -> None:
    folder = sample.family.folder
    assert not (folder.path / "model_index.json").exists()
    index = folder.pipeline_config()
    assert (index["_class_name"], index["_blocks_class_name"]) == ("AnimaModularPipeline", "AnimaAutoBlocks")
    assert folder.parts()["text_conditioner"] == ("diffusers", "AnimaTextConditioner")
    require_family(Anima, folder)


def test_another_modular_pipeline_is_refused_by_its_name(sample: Sample, tmp_path: Path) -> None:
    settings = sample.family.folder.pipeline_config() | {"_class_name": "QwenImageModularPipeline"}
    (tmp_path / "modular_model_index.json").write_text(json.dumps({**settings}))
    with pytest.raises(UserError, match=r"holds a QwenImageModularPipeline, .* the nearest is qwen_image"):
        require_family(Anima, PipelineFolder(path=tmp_path))


def test_the_model_function_takes_the_masks_that_the_transformer_takes(sample: Sample) -> None:
    transformer = sample.family.load_transformer(torch.float32).requires_grad_(True)
    prompts = torch.randn(3, 9, 16, generator=torch.Generator().manual_seed(0))
    batch = sample.latents, SIGMA, prompts
    # In pixels, as the pipeline has it; and not all of the prompts' tokens.
    padding = torch.zeros(1, 1, 8 * sample.latents.shape[-2], 8 * sample.latents.shape[-1])
    padding[..., :8] = 1
    kept = torch.arange(9)[None] < torch.tensor([[9], [5], [1]])
    masks = {"padding_mask": padding, "attention_mask": kept}
    with without_torchvision():
        reference = transformer(*batch, **masks, return_dict=False)[0]
    assert_equal_under_all_flags(transformer, reference, model_fn_anima, *batch, **masks)
    with torch.no_grad():
        assert not torch.equal(model_fn_anima(transformer, *batch), reference)


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


def test_the_model_sees_512_rows_whatever_the_other_prompts_are(sample: Sample) -> None:
    family, model = sample.family, sample.family.load_transformer(torch.float32)
    with torch.no_grad():
        together = family.predict(model, sample.latents, torch.tensor([0.5] * 3), sample.prompts)
        single = family.predict(model, sample.latents[1:2], torch.tensor([0.5]), sample.prompts[1:2])
        short = model_fn_anima(
            model, sample.latents[1:2], torch.tensor([0.5]), sample.prompts[1]["prompt_embeds"][None]
        )
    torch.testing.assert_close(together[1:2], single)
    # The zeros after a prompt count: attention to it has no mask.
    assert not torch.allclose(short, single)


def test_latents_are_those_of_the_pipelines_own_encoding(sample: Sample) -> None:
    components = read_pipeline(sample.family.folder.path)
    pixels = torch.rand(2, 3, 32, 48, generator=torch.Generator().manual_seed(0)) * 2 - 1
    ours = sample.family.encode_pixels(components.vae, pixels)
    with torch.no_grad():
        theirs = encode_vae_image(pixels, components.vae, torch.Generator(), CPU, torch.float32)
    torch.testing.assert_close(ours, theirs)
    assert ours.shape[1:] == sample.family.latents_shape(48, 32, 1)


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


def test_guidance_is_that_of_the_request_and_off_at_one(sample: Sample) -> None:
    family = sample.family
    pipeline = family.preview_pipeline(family.load_transformer(torch.float32), torch.float32)
    request = sample.request(num_inference_steps=2, guidance_scale=7.0, seed=0)
    scales = []
    for scale in (7.0, 1.0):
        family.generate(pipeline, replace(request, guidance_scale=scale))
        scales.append((pipeline.guider.guidance_scale, pipeline.guider.num_conditions))
    assert scales == [(7.0, 2), (1.0, 1)]


def test_the_released_model_has_as_many_weights_as_its_files() -> None:
    (release,) = ANIMA
    sizes = {name: num_parameters(component) for name, component in release.components.items()}
    for names, num_bytes in (
        (("transformer", "text_conditioner"), BYTES_OF_TRANSFORMER_AND_CONDITIONER),
        (("text_encoder",), BYTES_OF_TEXT_ENCODER),
    ):
        header = num_bytes - 2 * sum(sizes[name] for name in names)
        assert 0 < header < LARGEST_HEADER, names
