"""CogVideoX against diffusers' own transformer, autoencoder and sampler, in all layouts of its releases."""

import re
from collections.abc import Callable

import pytest
import torch
from comfyui_names import COGVIDEOX as TAKEN
from diffusers import CogVideoXTransformer3DModel
from family_sample import CPU, Sample

from diffsynth_lite.core.noise import DiffusionPath
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora.spelling import COGVIDEOX_IN_COMFYUI
from diffsynth_lite.pipelines.cogvideox import CogVideoX, model_fn_cogvideox
from diffsynth_lite.releases import Release
from diffsynth_lite.releases.cogvideox import COGVIDEOX as RELEASES


@pytest.fixture(scope="module", params=["cogvideox", "cogvideox 2b", "cogvideox 1.5"])
def sample(request: pytest.FixtureRequest, sample_of: Callable[[str], Sample]) -> Sample:
    return sample_of(request.param)


def test_by_twos_the_first_latent_frame_is_there_twice(sample: Sample) -> None:
    family, frames = sample.family, sample.latents[0].unbind(1)
    assert isinstance(family, CogVideoX)
    # 17 frames are 5 latent ones. By twos they are 6, of which the first two are the same.
    assert len(frames) == (6 if family._is_1_5 else 5)
    assert torch.equal(frames[0], frames[1]) == family._is_1_5
    assert (family.default_num_frames, family.default_fps) == ((81, 16.0) if family._is_1_5 else (49, 8.0))
    assert family.num_tokens(family.latents_shape(64, 32, 1)) == 2 * 4


def test_latents_are_the_inverse_of_what_the_pipeline_decodes(sample: Sample) -> None:
    pipeline, family = sample.fresh_pipeline(), sample.family
    media = sample.media[:1]
    pixels = pipeline.video_processor.preprocess_video(list(media[0].frames))
    with torch.no_grad():
        expected = pipeline.vae.encode(pixels).latent_dist.mode()
    (encoded,) = family.load_media_encoder(torch.float32, CPU)(media)
    latents = encoded["latents"][None, :, -expected.shape[2] :]
    torch.testing.assert_close(latents / pipeline.vae_scaling_factor_image, expected)
    with torch.no_grad():
        assert pipeline.decode_latents(latents.transpose(1, 2)).shape == pixels.shape
        # Of an even number of latent frames it makes more than there were: why clips have 8 k + 1 frames.
        assert pipeline.vae.encode(pixels[:, :, :5]).latent_dist.mode().shape[2] == 2
        assert pipeline.decode_latents(latents[:, :, :2].transpose(1, 2)).shape[2] == 8


def test_the_last_timestep_is_pure_noise_and_the_target_is_v(sample: Sample) -> None:
    path = sample.family.noise_path
    assert isinstance(path, DiffusionPath)
    clean, noise = torch.randn(2, 1, 16, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(path.add_noise(clean, noise, torch.ones(1)), noise)
    assert torch.equal(path.target(clean, noise, torch.ones(1)), -clean)
    assert path.timestep(torch.tensor([0.0, 1.0])).tolist() == [0, 999]
    # As diffusers' training script has it: what it calls velocity of the target gives the clean latents back.
    scheduler, timestep = sample.family.load_scheduler(), torch.tensor([400])
    level = (timestep + 0.5) / 1000
    noisy, v = path.add_noise(clean, noise, level), path.target(clean, noise, level)
    torch.testing.assert_close(noisy, scheduler.add_noise(clean, noise, timestep))
    torch.testing.assert_close(scheduler.get_velocity(v, noisy, timestep), clean, rtol=0, atol=1e-5)


def test_clips_beyond_the_table_of_places_are_refused(sample: Sample) -> None:
    sample.family.check_size(160, 128, keys="data")
    if not isinstance(sample.family, CogVideoX) or not sample.family._is_1_5:
        sample.family.check_size(1600, 1280, keys="data")
        return
    for width, height in ((176, 128), (160, 144)):
        with pytest.raises(UserError, match=rf"data: {width}x{height}; .* of at most 160 x 128 pixels"):
            sample.family.check_size(width, height, keys="data")
    transformer = sample.fresh_pipeline().transformer
    inputs = torch.randn(1, 16, 2, 18, 4), torch.tensor([3]), torch.randn(1, 226, 32)
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"), torch.no_grad():
        model_fn_cogvideox(transformer, *inputs)


@pytest.mark.parametrize(
    ("release", "num_layers"),
    list(zip(RELEASES, (245, 341, 342), strict=True)),
    ids=[release.hub_id for release in RELEASES],
)
def test_comfyui_has_each_linear_layer_of_a_release(release: Release, num_layers: int) -> None:
    with torch.device("meta"):
        model = CogVideoXTransformer3DModel(**release.components["transformer"].config)
    layers = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    keys = {COGVIDEOX_IN_COMFYUI.key(f"transformer.{layer}") for layer in layers}
    assert len(keys) == len(layers) == num_layers
    # Of 1.0 it is a convolution.
    convolutions = set() if model.config.patch_size_t else {"diffusion_model.patch_embed.proj"}
    assert {re.sub(r"\.\d+\.", ".*.", key) for key in keys} == set(TAKEN) - convolutions
