"""How SDXL is sampled and how it is trained fit together: noise, what the UNet is told, previews."""

from pathlib import Path

import pytest
import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler, StableDiffusionXLPipeline
from family_sample import PROMPTS
from sdxl_folders import request_of, saved

from diffsynth_lite.pipelines.sdxl import SDXL, tiny

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


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> SDXL:
    return saved(tiny(), tmp_path_factory.mktemp("sdxl"))


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_sampler_comes_back_to_the_clean_latents_along_the_target(name: str, tmp_path: Path) -> None:
    family = saved(tiny(), tmp_path, scheduler=SCHEDULERS[name]())
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
    family = saved(tiny(), tmp_path, scheduler=SCHEDULERS[name]())
    signal = family.noise_path.add_noise(torch.ones(1, 1), torch.zeros(1, 1), torch.ones(1)).square()
    assert signal.item() == pytest.approx(last, rel=0.01)


@pytest.mark.parametrize(("zeros", "theirs"), [(True, None), (False, " ")])
def test_a_preview_with_an_empty_negative_prompt_is_what_the_pipeline_draws(
    zeros: bool, theirs: str | None, tmp_path: Path
) -> None:
    family = saved(tiny(), tmp_path, force_zeros_for_empty_prompt=zeros)
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
    ((drawn,),) = family.sample(
        family.load_transformer(torch.float32),
        torch.float32,
        [request_of(family, " ", guidance_scale=5.0)],
    )
    assert drawn.tobytes() == expected.tobytes()
