"""SDXL's UNet, prompts and latents against diffusers' own, and folders that are refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    EDMEulerScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    LCMScheduler,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from family_sample import CPU, PROMPTS, build_media
from sdxl_folders import encoded_prompts, gradients, saved

from diffsynth_lite.core.gradient import blocks_of, intercept_blocks
from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Crop
from diffsynth_lite.pipelines import PipelineFolder, require_family
from diffsynth_lite.pipelines.sdxl import SDXL, model_fn_sdxl, tiny
from diffsynth_lite.pipelines.sdxl.family import unet_block_lists

FLAGS = [(False, False), (True, False), (False, True), (True, True)]
# The layouts of SDXL and of models cut down from it, at a width for tests.
LAYOUTS: dict[str, dict[str, Any]] = {
    "two levels": {},
    "as released": {
        "block_out_channels": (8, 8, 16),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2, 3),
        "attention_head_dim": (1, 1, 2),
        "layers_per_block": 2,
    },
    "no middle": {"mid_block_type": None},
    "levels of unequal depth": {"layers_per_block": (2, 1), "transformer_layers_per_block": (1, 1)},
}


def small_unet(layout: str = "two levels") -> UNet2DConditionModel:
    # Without the names that ``from_config`` would take for those of settings left at their defaults.
    settings = {name: value for name, value in tiny().unet.config.items() if not name.startswith("_")}
    torch.manual_seed(0)
    unet = UNet2DConditionModel(**settings | LAYOUTS[layout])
    assert (unet.mid_block is None) == (layout == "no middle")
    return unet


@pytest.fixture(scope="module")
def pipeline() -> StableDiffusionXLPipeline:
    return tiny()


@pytest.fixture(scope="module")
def family(pipeline: StableDiffusionXLPipeline, tmp_path_factory: pytest.TempPathFactory) -> SDXL:
    return saved(pipeline, tmp_path_factory.mktemp("sdxl"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_model_fn_equals_the_unets_own_forward(layout: str) -> None:
    unet = small_unet(layout)
    generator = torch.Generator().manual_seed(0)
    noisy, embeds, pooled = (
        torch.randn(2, *shape, generator=generator) for shape in ((4, 8, 12), (77, 64), (32,))
    )
    timestep, time_ids = (
        torch.tensor([3, 998]),
        torch.tensor([[96, 64, 8, 0, 64, 96], [64, 96, 0, 16, 64, 96]]),
    )
    reference = unet(
        noisy, timestep, embeds, added_cond_kwargs={"text_embeds": pooled, "time_ids": time_ids}
    ).sample
    expected = gradients(unet, reference)
    for checkpointing, offload in FLAGS:
        predicted = model_fn_sdxl(
            unet,
            noisy,
            timestep,
            embeds,
            pooled,
            time_ids,
            use_gradient_checkpointing=checkpointing,
            use_gradient_checkpointing_offload=offload,
        )
        assert torch.equal(predicted, reference)
        for name, gradient in gradients(unet, predicted).items():
            assert gradient is not None, name
            assert torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_declared_blocks_are_those_that_the_hook_runs_in_their_order(layout: str) -> None:
    unet = small_unet(layout)
    run: list[torch.nn.Module] = []

    def record(_index: int, block: torch.nn.Module, *args: Any) -> Any:
        run.append(block)
        return block(*args)

    with intercept_blocks(unet, record):
        unet(
            *(torch.zeros(1, 4, 8, 8), 0, torch.zeros(1, 77, 64)),
            added_cond_kwargs={"text_embeds": torch.zeros(1, 32), "time_ids": torch.zeros(1, 6)},
        )
    declared = blocks_of(unet, tuple(unet_block_lists(unet.config)))
    assert len(run) == len(declared)
    assert all(block is other for block, other in zip(run, declared, strict=True))
    kinds = {"ResnetBlock2D", "BasicTransformerBlock"}
    blocks = [block for block in unet.modules() if type(block).__name__ in kinds]
    assert len(blocks) - len(run) == (unet.mid_block is not None)


def test_sdxl_as_released_has_86_such_blocks() -> None:
    released = {
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        "mid_block_type": "UNetMidBlock2DCrossAttn",
        "layers_per_block": 2,
    }
    depth = {"down_blocks.1": 2, "down_blocks.2": 10, "mid_block": 10, "up_blocks.0": 10, "up_blocks.1": 2}
    numbers = [
        depth[name.split(".attentions")[0]] if name.endswith("transformer_blocks") else 1
        for name in unet_block_lists(released)
    ]
    assert sum(numbers) == 86


def test_prompts_are_encoded_as_by_the_pipeline(pipeline: StableDiffusionXLPipeline, family: SDXL) -> None:
    texts = [*PROMPTS, "", " ", "circle " * 40]
    encoded = encoded_prompts(family, *texts)
    with torch.no_grad():
        embeds, _, pooled, _ = pipeline.encode_prompt(texts, device=CPU, do_classifier_free_guidance=False)
    assert torch.equal(torch.stack([row["prompt_embeds"] for row in encoded]), embeds)
    assert torch.equal(torch.stack([row["pooled_prompt_embeds"] for row in encoded]), pooled)
    assert embeds.shape == (6, 77, 64)
    assert not any(row["is_zero"] for row in encoded)
    lengths = family.prompt_lengths(texts)
    assert lengths[3] == 2  # the start and the end
    assert lengths[5] > family.max_prompt_tokens


def test_the_unet_is_told_the_size_of_the_file_and_where_the_crop_begins(family: SDXL) -> None:
    plain = build_media(family)[0]
    cropped = replace(plain, crop=Crop(original_width=900, original_height=500, left=5, top=3))
    encode = family.load_media_encoder(torch.float32, CPU)
    told = [tensors["time_ids"].tolist() for tensors in encode([plain, cropped])]
    assert plain.frames[0].size == (64, 32)
    assert told == [[32, 64, 0, 0, 32, 64], [500, 900, 3, 5, 32, 64]]
    assert family.media_encoder_id(torch.float32).startswith("sdxl/latents/2 ")


def test_an_autoencoder_that_fp16_is_too_narrow_for_is_refused(family: SDXL, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.vae_dtype: float16 .* use float32"):
        family.check_vae_dtype(torch.float16)
    family.check_vae_dtype(torch.bfloat16)
    vae = tiny().vae
    vae.register_to_config(force_upcast=False)  # as in the VAE that was mended for it
    saved(tiny(), tmp_path, vae=vae).check_vae_dtype(torch.float16)


@pytest.mark.parametrize("scheduler", [FlowMatchEulerDiscreteScheduler, EDMEulerScheduler])
def test_a_folder_with_another_kind_of_noise_is_refused(scheduler: Callable[[], Any], tmp_path: Path) -> None:
    family = saved(tiny(), tmp_path, scheduler=scheduler())
    with pytest.raises(UserError, match=rf"{scheduler.__name__}.* is no sampler of denoising diffusion"):
        family.check_folder()


@pytest.mark.parametrize(
    "trained", [["text_encoder"], ["unet", "text_encoder"], ["text_encoder", "text_encoder_2"]]
)
def test_the_unet_is_trained_alone_or_with_both_text_encoders(family: SDXL, trained: list[str]) -> None:
    choices = r"use \[unet\], or \[unet, text_encoder, text_encoder_2\]"
    with pytest.raises(UserError, match=rf"lora\.components: .*{', '.join(trained)}.*{choices}"):
        SDXL(family.folder, trained=trained)


@pytest.mark.parametrize(
    ("scheduler", "told"),
    [
        (
            EulerAncestralDiscreteScheduler(timestep_spacing="trailing"),
            "timestep_spacing trailing, is one",
        ),
        (LCMScheduler(), "its sampler, LCMScheduler with timestep_spacing leading, is one for few steps"),
        (EulerDiscreteScheduler(timestep_spacing="trailing", rescale_betas_zero_snr=True), None),
        (EulerDiscreteScheduler(timestep_spacing="leading"), None),
    ],
)
def test_a_distilled_model_is_known_by_a_sampler_for_few_steps(
    scheduler: Any, told: str | None, tmp_path: Path
) -> None:
    scheduler.save_pretrained(tmp_path / "scheduler")
    (tmp_path / "model_index.json").write_text("{}")
    distilled = SDXL(PipelineFolder(path=tmp_path)).distilled
    assert distilled is None if told is None else told in str(distilled)


def test_a_folder_of_the_refiner_is_refused_with_what_it_holds(tmp_path: Path) -> None:
    StableDiffusionXLImg2ImgPipeline(**tiny().components).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="holds a StableDiffusionXLImg2ImgPipeline, but"):
        require_family(SDXL, PipelineFolder(path=tmp_path))


@pytest.mark.parametrize("component", ["text_encoder_2", "tokenizer_2"])
def test_a_missing_second_encoder_is_named(component: str, tmp_path: Path) -> None:
    family = saved(tiny(), tmp_path)
    for path in (tmp_path / component).iterdir():
        path.unlink()
    with pytest.raises(UserError, match=component):
        family.check_folder()
