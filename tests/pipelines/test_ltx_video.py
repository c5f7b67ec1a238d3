"""LTX-Video and its releases from 0.9.5 on against diffusers' own autoencoder and pipelines."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKLLTXVideo,
    LTXConditionPipeline,
    LTXImageToVideoPipeline,
)
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.pipelines.ltx import pipeline_ltx_condition
from diffusers.pipelines.ltx.pipeline_ltx import LTXPipeline, calculate_shift
from diffusers_pipelines import bytes_of
from family_sample import (
    CPU,
    PROMPTS,
    SIGMA,
    Sample,
    build_sample,
    encode_texts,
    mandelbrot,
    transformer_calls,
)
from PIL import Image
from release_layouts import decoding_timesteps, ltx_of_conditions

from diffsynth_lite.media import Media
from diffsynth_lite.pipelines import PipelineFolder, require_family
from diffsynth_lite.pipelines.ltx_video import LTXVideo, tiny

FAMILY = "ltx_video"


TOKENS = 8  # of a frame of the samples


DECODING = {"decode_timestep": 0.05, "decode_noise_scale": 0.025}


@pytest.fixture(scope="module")
def conditions(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    """Of 0.9.5, with the decoder that removes noise."""
    return build_sample("ltx_video", tmp_path_factory.mktemp("conditions"), ltx_of_conditions)


@pytest.fixture(scope="module")
def started(conditions: Sample) -> Sample:
    """The same clips, of which the first starts from an image that is not its own."""
    first = dataclasses.replace(conditions.media[0], first_frame=mandelbrot(128, 64, 40))
    (encoded,) = conditions.family.load_media_encoder(torch.float32, CPU)([first])
    latents = conditions.latents.clone()
    latents[0] = encoded.pop("latents")
    conditioning = [conditions.conditioning[0] | encoded, *conditions.conditioning[1:]]
    media = [first, *conditions.media[1:]]
    return dataclasses.replace(conditions, media=media, latents=latents, conditioning=conditioning)


@pytest.fixture(scope="module")
def of_conditions(conditions: Sample) -> LTXConditionPipeline:
    """Read from the folder, as the family reads it."""
    return LTXConditionPipeline.from_pretrained(conditions.family.folder.path)


def call(pipeline: LTXConditionPipeline, **settings: Any) -> Any:
    """The pipeline's own call, of the first prompt, in the size of the samples."""
    fixed = {"width": 128, "height": 64, "num_frames": 17, "num_inference_steps": 4, "guidance_scale": 1.0}
    generator = torch.Generator().manual_seed(5)
    return pipeline(prompt=PROMPTS[0], generator=generator, **fixed | DECODING | settings).frames[0]


def latents_of(tokens_bld: torch.Tensor) -> torch.Tensor:
    return tokens_bld.transpose(1, 2).unflatten(2, (3, 2, 4))


def test_each_clip_has_positions_by_its_own_frame_rate(sample: Sample) -> None:
    def velocity(*rates: float) -> torch.Tensor:
        conditioning = [
            given | {"frame_rate": torch.tensor(rate)}
            for given, rate in zip(sample.conditioning, rates, strict=True)
        ]
        with torch.no_grad():
            return sample.family.predict(transformer, sample.latents, SIGMA, conditioning)

    transformer = sample.family.load_transformer(torch.float32)
    slow, fast, mixed = velocity(12, 12, 12), velocity(50, 50, 50), velocity(12, 50, 12)
    assert torch.equal(mixed[1], fast[1])
    assert torch.equal(mixed[[0, 2]], slow[[0, 2]])
    assert not torch.equal(slow[1], fast[1])


@pytest.mark.parametrize(("name", "rate"), [("ltx_video", 25.0), ("ltx2", 24.0)])
def test_the_frame_rate_of_a_clip_is_kept_with_its_latents(
    sample_of: Callable[[str], Sample], name: str, rate: float
) -> None:
    sample = sample_of(name)
    clip = dataclasses.replace(sample.media[0], fps=12.5)
    (tensors,) = sample.family.load_media_encoder(torch.float32, CPU)([clip])
    assert tensors["frame_rate"].item() == 12.5
    assert [given["frame_rate"].item() for given in sample.conditioning] == [rate] * 3


@pytest.mark.parametrize("name", ["ltx_video", "ltx2"])
@pytest.mark.parametrize(
    ("num_frames", "num_tokens"), [(1, 384), (73, 3840), (81, 4224), (121, 6144), (161, 8064)]
)
def test_the_shift_is_the_one_of_the_pipelines_sampler_up_to_the_end_of_its_line(
    sample_of: Callable[[str], Sample], name: str, num_frames: int, num_tokens: int
) -> None:
    family = sample_of(name).family
    config = family.load_scheduler().config
    shape = family.latents_shape(768, 512, num_frames)
    assert family.num_tokens(shape) == num_tokens
    line = config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
    of_the_sampler = pytest.approx(np.exp(calculate_shift(num_tokens, *line)))
    assert family.resolution_shift(shape) == of_the_sampler
    assert name == "ltx2" or family.earlier_shift(shape) == of_the_sampler
    at_the_end = np.exp(calculate_shift(min(num_tokens, 4096), *line))
    assert family.family_shift(shape) == pytest.approx(at_the_end)


def test_a_folder_that_names_the_pipeline_of_first_frames_is_one_of_the_family(tmp_path: Path) -> None:
    LTXImageToVideoPipeline(**tiny().components).save_pretrained(tmp_path)
    require_family(LTXVideo, PipelineFolder(path=tmp_path))


def noisy_start(family: LTXVideo, start: Image.Image, sigma: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The first frame that the model gets, as (tokens, channels), and the noise in it."""
    clip = Media(frames=(start,) * 9, first_frame=start)
    (encoded,) = family.load_media_encoder(torch.float32, CPU)([clip])
    (prompt,) = encode_texts(family, PROMPTS[0])
    latents, _ = encoded.pop("latents"), encoded.pop("loss_mask")
    noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(0))
    noisy = ((1 - sigma) * latents + sigma * noise)[None]
    transformer = family.load_transformer(torch.float32)
    (call,) = transformer_calls(
        transformer, lambda: family.predict(transformer, noisy, torch.tensor([sigma]), [prompt | encoded])
    )
    assert call["timestep"][0, :8].tolist() == [0.0] * 8
    return call["hidden_states"][0, :8], noise[:, 0].flatten(1).T


@pytest.mark.parametrize("sigma", [0.01, 0.5, 1.0])
@pytest.mark.parametrize(("build", "noise_scale"), [(tiny, 0.0), (ltx_of_conditions, 0.15)])
def test_a_first_frame_has_the_noise_of_its_autoencoder_and_of_the_pipeline(
    build: Callable[[], Any], noise_scale: float, sigma: float, tmp_path: Path
) -> None:
    pipeline = build()
    pipeline.save_pretrained(tmp_path)
    start, vae = mandelbrot(128, 64, 40), pipeline.vae
    ours, noise = noisy_start(LTXVideo(PipelineFolder(path=tmp_path)), start, sigma)
    with torch.no_grad():
        posterior = vae.encode(pipeline.video_processor.preprocess_video([start])).latent_dist
    mode, std = ((value[0].flatten(1).T) for value in (posterior.mode(), posterior.std))
    scale = ((std / vae.latents_std) ** 2 + (noise_scale * sigma**2) ** 2).sqrt()
    torch.testing.assert_close(
        ours, (mode - vae.latents_mean) / vae.latents_std + scale * noise, rtol=1e-3, atol=1e-4
    )


def test_an_autoencoder_that_denoises_while_it_decodes_is_given_how_much(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vae = AutoencoderKLLTXVideo(
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_block_out_channels=(8, 16, 32),
        decoder_layers_per_block=(1, 1, 1, 1),
        decoder_spatio_temporal_scaling=(True, True, True),
        decoder_inject_noise=(False, False, False, False),
        upsample_residual=(True, True, True),
        upsample_factor=(2, 2, 2),
        timestep_conditioning=True,
    )
    LTXPipeline(**tiny().components | {"vae": vae}).save_pretrained(tmp_path)
    family = LTXVideo(PipelineFolder(path=tmp_path))
    given = decoding_timesteps(monkeypatch)
    request = sample.request(num_inference_steps=2, guidance_scale=1.0, seed=0)
    requests = [request, dataclasses.replace(request, inputs=(mandelbrot(64, 64, 5),))]
    family.sample(family.load_transformer(torch.float32), torch.float32, requests)
    assert given == pytest.approx([0.05, 0.05])


@pytest.mark.parametrize("name", ["ltx_video", "ltx_video of conditions"])
def test_a_preview_has_the_positions_of_clips_that_are_read_at_its_rate(
    sample_of: Callable[[str], Sample], name: str
) -> None:
    sample = sample_of(name)
    family, model = sample.family, sample.model
    request = sample.request(num_inference_steps=2, guidance_scale=1.0, seed=0)
    request = dataclasses.replace(request, fps=10.0)
    generated, *_ = transformer_calls(model, lambda: family.sample(model, torch.float32, [request]))
    given = sample.first | {"frame_rate": torch.tensor(10.0)}
    batch = sample.latents[:1], torch.ones(1), [given]
    (trained,) = transformer_calls(model, lambda: family.predict(model, *batch))
    rotary = [model.rope(call["hidden_states"], **_positions(call)) for call in (generated, trained)]
    torch.testing.assert_close(*rotary)


def _positions(call: dict[str, Any]) -> dict[str, Any]:
    names = ("num_frames", "height", "width", "rope_interpolation_scale", "video_coords")
    return {name: call.get(name) for name in names}


@pytest.mark.parametrize("name", ["ltx_video", "ltx2"])
def test_in_tiles_clips_are_encoded_in_parts_but_decoded_whole(
    sample_of: Callable[[str], Sample], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = sample_of(name).family
    family = type(shared)(shared.folder)
    vaes: list[Any] = []
    load = family.load_component
    monkeypatch.setattr(family, "load_component", lambda *given: vaes.append(load(*given)) or vaes[-1])
    for expected in ([(False, False), (False, False)], [(True, True), (True, False)]):
        vaes.clear()
        family.load_media_encoder(torch.float32, CPU)
        family.load_preview_vae(torch.float32, CPU)
        assert [(vae.use_tiling, vae.use_framewise_decoding) for vae in vaes] == expected
        family.tile_vae()


def assert_given_the_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Two forwards of the transformer were given the same; without masked tokens, which ours leave out."""
    assert theirs.keys() ^ ours.keys() == {"attention_kwargs"}
    assert theirs["attention_kwargs"] is None
    assert torch.equal(ours["video_coords"], theirs["video_coords"])
    mask = theirs["encoder_attention_mask"]
    assert ours["encoder_attention_mask"] is None
    assert torch.equal(ours["encoder_hidden_states"], theirs["encoder_hidden_states"][mask][None])
    # A timestep is divided by 1000 and multiplied again.
    torch.testing.assert_close(ours["timestep"].flatten(), theirs["timestep"].flatten(), rtol=1e-6, atol=0.0)


def test_from_a_first_frame_the_model_gets_what_the_pipeline_gives_it(
    of_conditions: LTXConditionPipeline, started: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given the noise of the pipeline: that of its latents, and of the first frame in each step."""
    noises: list[torch.Tensor] = []
    randn = pipeline_ltx_condition.randn_tensor
    monkeypatch.setattr(
        pipeline_ltx_condition,
        "randn_tensor",
        lambda *args, **kw: noises.append(randn(*args, **kw)) or noises[-1],
    )
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda self, _=None: self.mode())
    conditioning = [dict(started.conditioning[0])]
    conditioning[0]["first_frame_std"] = torch.zeros_like(conditioning[0]["first_frame_std"])
    theirs = transformer_calls(
        of_conditions.transformer, lambda: call(of_conditions, image=started.media[0].first_frame)
    )
    first = conditioning[0]["first_frame_latents"]
    for expected, noise in zip(theirs, noises[1:], strict=False):
        sigma = expected["timestep"].max() / 1000
        noisy = latents_of(expected["hidden_states"]).clone()
        noisy[0, :, :1] = (1 - sigma) * first + sigma * latents_of(noise)[0, :, :1]
        (ours,) = transformer_calls(
            of_conditions.transformer,
            lambda noisy=noisy, sigma=sigma: started.family.predict(
                of_conditions.transformer, noisy, sigma[None], conditioning
            ),
        )
        assert ours["timestep"][0, :TOKENS].tolist() == [0.0] * TOKENS
        assert torch.equal(ours["hidden_states"][:, TOKENS:], expected["hidden_states"][:, TOKENS:])
        # The noise is taken out of the noisy latents.
        torch.testing.assert_close(ours["hidden_states"], expected["hidden_states"], rtol=1e-5, atol=1e-5)
        assert_given_the_same(ours, expected)
    assert (expected["hidden_states"] - theirs[0]["hidden_states"])[:, :TOKENS].abs().max() > 0.1


def test_a_clip_begins_with_the_image_that_it_starts_from(conditions: Sample, started: Sample) -> None:
    tensors = started.conditioning[0]
    assert torch.equal(started.latents[0, :, :1], tensors["first_frame_latents"])
    # Encoded by itself and in a batch.
    torch.testing.assert_close(started.latents[0, :, 1:], conditions.latents[0, :, 1:], rtol=1e-4, atol=1e-5)
    assert not torch.equal(started.latents[0, :, :1], conditions.latents[0, :, :1])


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("starts", [False, True])
def test_a_preview_is_what_the_pipeline_of_conditions_generates(
    of_conditions: LTXConditionPipeline, conditions: Sample, scale: float, starts: bool
) -> None:
    request = conditions.request(num_inference_steps=4, guidance_scale=scale, seed=5)
    (negative,) = encode_texts(conditions.family, "blurred")
    images = (mandelbrot(128, 64, 40),) if starts else ()
    request = dataclasses.replace(request, negative=negative, inputs=images)
    given = {"image": images[0]} if starts else {}
    expected = call(of_conditions, guidance_scale=scale, negative_prompt="blurred", **given)
    (frames,) = conditions.family.sample(of_conditions.transformer, torch.float32, [request])
    assert bytes_of(frames) == bytes_of(expected)


def test_a_folder_of_0_9_5_that_names_the_pipeline_of_0_9_is_one_of_conditions(tmp_path: Path) -> None:
    LTXPipeline(**ltx_of_conditions().components).save_pretrained(tmp_path)
    family = LTXVideo(PipelineFolder(path=tmp_path))
    family.check_folder()
    assert family.pipeline is LTXConditionPipeline
    assert family.max_prompt_tokens == 256
