"""SDXL's UNet, prompts, latents and sampling against diffusers' own, and what its folders need."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    LCMScheduler,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from family_sample import CPU, PROMPTS, assert_equal_under_all_flags, build_media
from release_layouts import request_of_sdxl, saved_sdxl

from diffsynth_lite.core.gradient import blocks_of, intercept_blocks
from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Crop
from diffsynth_lite.pipelines import PipelineFolder
from diffsynth_lite.pipelines.sdxl import SDXL, model_fn_sdxl, tiny
from diffsynth_lite.pipelines.sdxl.family import unet_block_lists

FAMILY = "sdxl"


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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_model_function_equals_the_unets_own_forward(layout: str) -> None:
    unet, generator = small_unet(layout), torch.Generator().manual_seed(0)
    noisy, embeds, pooled = (
        torch.randn(2, *shape, generator=generator) for shape in ((4, 8, 12), (77, 64), (32,))
    )
    timestep = torch.tensor([3, 998])
    time_ids = torch.tensor([[96, 64, 8, 0, 64, 96], [64, 96, 0, 16, 64, 96]])
    reference = unet(
        noisy, timestep, embeds, added_cond_kwargs={"text_embeds": pooled, "time_ids": time_ids}
    ).sample
    inputs = noisy, timestep, embeds, pooled, time_ids
    assert None not in assert_equal_under_all_flags(unet, reference, model_fn_sdxl, *inputs).values()


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


def test_the_unet_gets_the_size_of_the_file_and_where_the_crop_begins(family: SDXL) -> None:
    plain = build_media(family)[0]
    cropped = replace(plain, crop=Crop(original_width=900, original_height=500, left=5, top=3))
    encode = family.load_media_encoder(torch.float32, CPU)
    given = [tensors["time_ids"].tolist() for tensors in encode([plain, cropped])]
    assert plain.frames[0].size == (64, 32)
    assert given == [[32, 64, 0, 0, 32, 64], [500, 900, 3, 5, 32, 64]]
    assert family.media_encoder_id(torch.float32).startswith("sdxl/latents/2 ")


def test_an_autoencoder_that_fp16_is_too_narrow_for_is_refused(family: SDXL, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.vae_dtype: float16 .* use float32"):
        family.check_vae_dtype(torch.float16)
    family.check_vae_dtype(torch.bfloat16)
    vae = tiny().vae
    vae.register_to_config(force_upcast=False)  # as in the VAE that was mended for it
    saved_sdxl(tiny(), tmp_path, vae=vae).check_vae_dtype(torch.float16)


@pytest.mark.parametrize(
    "trained", [["text_encoder"], ["unet", "text_encoder"], ["text_encoder", "text_encoder_2"]]
)
def test_the_unet_is_trained_by_itself_or_with_both_text_encoders(family: SDXL, trained: list[str]) -> None:
    choices = r"use \[unet\], or \[unet, text_encoder, text_encoder_2\]"
    with pytest.raises(UserError, match=rf"lora\.components: .*{', '.join(trained)}.*{choices}"):
        SDXL(family.folder, trained=trained)


@pytest.mark.parametrize(
    ("scheduler", "reason"),
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
    scheduler: Any, reason: str | None, tmp_path: Path
) -> None:
    scheduler.save_pretrained(tmp_path / "scheduler")
    (tmp_path / "model_index.json").write_text("{}")
    distilled = SDXL(PipelineFolder(path=tmp_path)).distilled
    assert distilled is None if reason is None else reason in str(distilled)


BETAS = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}


ZERO_SNR = {**BETAS, "prediction_type": "v_prediction", "rescale_betas_zero_snr": True}


SCHEDULERS = {
    "epsilon": lambda: EulerDiscreteScheduler(**BETAS, timestep_spacing="leading", steps_offset=1),
    "v": lambda: EulerDiscreteScheduler(**BETAS, prediction_type="v_prediction"),
    "v without a signal at the end": lambda: EulerDiscreteScheduler(**ZERO_SNR, timestep_spacing="trailing"),
    "epsilon, another sampler": lambda: DDIMScheduler(**BETAS, clip_sample=False, set_alpha_to_one=True),
    "v without any signal at the end": lambda: DDIMScheduler(
        **ZERO_SNR, clip_sample=False, set_alpha_to_one=True, timestep_spacing="trailing"
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_sampler_comes_back_to_the_clean_latents_along_the_target(name: str, tmp_path: Path) -> None:
    family = saved_sdxl(tiny(), tmp_path, scheduler=SCHEDULERS[name]())
    family.check_folder()
    path, scheduler = family.noise_path, family.load_scheduler()
    clean, noise = torch.randn(2, 3, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    scheduler.set_timesteps(10)
    for timestep in scheduler.timesteps:
        sigma = ((timestep + 0.5) / 1000).float().expand(3)
        assert path.timestep(sigma).tolist() == [int(timestep)] * 3
        noisy = scheduler.add_noise(clean, noise, timestep.expand(3))
        shown = scheduler.scale_model_input(noisy, timestep)
        torch.testing.assert_close(shown, path.add_noise(clean, noise, sigma), rtol=0, atol=1e-5)
        stepped = scheduler.step(path.target(clean, noise, sigma), timestep, noisy)
        # Euler's first noise is 4096 times as large as the latents where no signal is left.
        torch.testing.assert_close(stepped.pred_original_sample, clean, rtol=0, atol=2e-3)
    torch.testing.assert_close(stepped.prev_sample, clean, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("name", "last"), [("epsilon", 0.0047), ("v without a signal at the end", 2**-24)])
def test_the_signal_that_is_left_is_that_of_the_folders_sampler(
    name: str, last: float, tmp_path: Path
) -> None:
    family = saved_sdxl(tiny(), tmp_path, scheduler=SCHEDULERS[name]())
    signal = family.noise_path.add_noise(torch.ones(1, 1), torch.zeros(1, 1), torch.ones(1)).square()
    assert signal.item() == pytest.approx(last, rel=0.01)


@pytest.mark.parametrize(("zeros", "theirs"), [(True, None), (False, " ")])
def test_a_preview_with_an_empty_negative_prompt_is_what_the_pipeline_generates(
    zeros: bool, theirs: str | None, tmp_path: Path
) -> None:
    family = saved_sdxl(tiny(), tmp_path, force_zeros_for_empty_prompt=zeros)
    pipeline = StableDiffusionXLPipeline.from_pretrained(tmp_path, add_watermarker=False)
    pipeline.set_progress_bar_config(disable=True)
    expected = pipeline(
        PROMPTS[0],
        negative_prompt=theirs,
        guidance_scale=5.0,
        width=64,
        height=32,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(3),
    ).images[0]
    ((generated,),) = family.sample(
        family.load_transformer(torch.float32),
        torch.float32,
        [request_of_sdxl(family, " ", guidance_scale=5.0)],
    )
    assert generated.tobytes() == expected.tobytes()
