"""LTX-Video against diffusers' own transformer, autoencoder and pipelines."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKLLTXVideo,
    FlowMatchEulerDiscreteScheduler,
    LTXImageToVideoPipeline,
)
from diffusers.models.autoencoders import vae as posteriors
from diffusers.pipelines.ltx.pipeline_ltx import LTXPipeline, calculate_shift
from family_sample import (
    CPU,
    PROMPTS,
    Sample,
    assert_equal_under_all_flags,
    build_media,
    build_sample,
    picture,
    transformer_calls,
)
from ltx_layouts import decoding_timesteps, of_conditions
from PIL import Image

from diffsynth_lite.media import Media, Prompt
from diffsynth_lite.pipelines import PipelineFolder, PreviewRequest, require_family
from diffsynth_lite.pipelines.ltx_video import LTXVideo, model_fn_ltx_video, tiny

SIGMA = torch.tensor([0.1, 0.5, 0.9])


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return build_sample("ltx_video", tmp_path_factory.mktemp("ltx_video"))


@pytest.fixture(scope="module")
def pipeline() -> LTXPipeline:
    return tiny()


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_model_fn_equals_the_transformers_own_forward(per_token: bool, masked: bool) -> None:
    transformer = tiny().transformer
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(2, 128, 3, 2, 4, generator=generator)
    embeds = torch.randn(2, 7, 32, generator=generator)
    mask = (torch.arange(7) < torch.tensor([[7], [4]])).long() if masked else None
    timestep = torch.tensor([200.0, 700.0])
    if per_token:
        timestep = timestep[:, None] * torch.rand(2, 3 * 2 * 4, generator=generator)

    reference = transformer(
        hidden_states=latents.flatten(2).transpose(1, 2),
        encoder_hidden_states=embeds,
        timestep=timestep,
        encoder_attention_mask=mask,
        num_frames=3,
        height=2,
        width=4,
        rope_interpolation_scale=(8 / 25, 32, 32),
        return_dict=False,
    )[0]
    reference = reference.transpose(1, 2).unflatten(2, (3, 2, 4))
    assert_equal_under_all_flags(
        transformer,
        reference,
        model_fn_ltx_video,
        latents,
        timestep,
        embeds,
        mask,
        frame_rate=torch.tensor([25.0, 25.0]),
    )


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


def test_the_frame_rate_of_a_clip_is_kept_with_its_latents(sample: Sample) -> None:
    clip = dataclasses.replace(sample.media[0], fps=12.5)
    (tensors,) = sample.family.load_media_encoder(torch.float32, CPU)([clip])
    assert tensors["frame_rate"].item() == 12.5
    assert [given["frame_rate"].item() for given in sample.conditioning] == [25.0] * 3


def test_prompts_are_encoded_as_by_the_pipeline(pipeline: LTXPipeline, sample: Sample) -> None:
    texts = [*PROMPTS, "", "circle " * 60]
    family = sample.family
    encoded = family.load_prompt_encoder(torch.float32, CPU)([Prompt(text=text) for text in texts])
    with torch.no_grad():
        embeds, mask, _, _ = pipeline.encode_prompt(texts, do_classifier_free_guidance=False, device=CPU)
    lengths = mask.sum(1).tolist()
    assert [len(tensors["prompt_embeds"]) for tensors in encoded] == lengths
    assert lengths[-1] == family.max_prompt_tokens == 128 < family.prompt_lengths(texts)[-1]
    assert lengths[:-1] == family.prompt_lengths(texts)[:-1]
    for tensors, row, length in zip(encoded, embeds, lengths, strict=True):
        assert torch.equal(tensors["prompt_embeds"], row[:length])


def test_a_prompt_without_its_padding_counts_as_in_the_pipeline(
    pipeline: LTXPipeline, sample: Sample
) -> None:
    with torch.no_grad():
        embeds, mask, _, _ = pipeline.encode_prompt(
            list(PROMPTS), do_classifier_free_guidance=False, device=CPU
        )
        rate = torch.full((3,), 25.0)
        padded = model_fn_ltx_video(
            pipeline.transformer, sample.latents, 1000 * SIGMA, embeds, mask, frame_rate=rate
        )
        ours = sample.family.predict(pipeline.transformer, sample.latents, SIGMA, sample.conditioning)
        unmasked = model_fn_ltx_video(
            pipeline.transformer, sample.latents, 1000 * SIGMA, embeds, None, frame_rate=rate
        )
    # Sums over matrices of another shape; the masked part adds exact zeros.
    torch.testing.assert_close(ours, padded, rtol=1e-4, atol=1e-5)
    assert (ours - unmasked).abs().max() > 1e-3


def test_a_picture_is_a_clip_of_one_frame(sample: Sample) -> None:
    item = Media(frames=sample.media[0].frames[:1])
    (encoded,) = sample.family.load_media_encoder(torch.float32, CPU)([item])
    assert encoded["latents"].shape == sample.family.latents_shape(128, 64, 1) == (128, 1, 2, 4)


@pytest.mark.parametrize(("num_frames", "num_tokens"), [(1, 384), (73, 3840), (81, 4224), (161, 8064)])
def test_the_shift_is_the_one_of_the_pipelines_sampler_up_to_the_end_of_its_line(
    pipeline: LTXPipeline, sample: Sample, num_frames: int, num_tokens: int
) -> None:
    family, config = sample.family, pipeline.scheduler.config
    shape = family.latents_shape(768, 512, num_frames)
    assert family.num_tokens(shape) == num_tokens
    line = config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
    of_the_sampler = pytest.approx(np.exp(calculate_shift(num_tokens, *line)))
    assert family.resolution_shift(shape) == family.earlier_shift(shape) == of_the_sampler
    at_the_end = np.exp(calculate_shift(min(num_tokens, 4096), *line))
    assert family.family_shift(shape) == pytest.approx(at_the_end)


def test_a_line_that_the_folder_does_not_give_is_that_of_the_class(tmp_path: Path) -> None:
    LTXPipeline(**tiny().components).save_pretrained(tmp_path)
    file = tmp_path / "scheduler" / "scheduler_config.json"
    file.write_text(
        json.dumps({"_class_name": "FlowMatchEulerDiscreteScheduler", "use_dynamic_shifting": True})
    )
    family = LTXVideo(PipelineFolder(path=tmp_path))
    at_the_end = np.exp(FlowMatchEulerDiscreteScheduler().config.max_shift)
    assert family.family_shift(family.latents_shape(768, 512, 161)) == pytest.approx(at_the_end)


def test_a_distilled_release_has_a_fixed_shift(tmp_path: Path) -> None:
    parts = tiny().components | {"scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0)}
    LTXPipeline(**parts).save_pretrained(tmp_path)
    assert LTXVideo(PipelineFolder(path=tmp_path)).family_shift((128, 11, 16, 24)) == 3.0


def test_a_folder_that_names_the_pipeline_of_first_frames_is_one_of_the_family(tmp_path: Path) -> None:
    LTXImageToVideoPipeline(**tiny().components).save_pretrained(tmp_path)
    require_family(LTXVideo, PipelineFolder(path=tmp_path))


def drawn_start(family: LTXVideo, start: Image.Image, sigma: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The first frame that the model is told, as (tokens, channels), and the noise that it is drawn with."""
    clip = Media(frames=(start,) * 9, first_frame=start)
    (encoded,) = family.load_media_encoder(torch.float32, CPU)([clip])
    (prompt,) = family.load_prompt_encoder(torch.float32, CPU)([Prompt(text=PROMPTS[0])])
    latents, _ = encoded.pop("latents"), encoded.pop("loss_mask")
    noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(0))
    noisy = ((1 - sigma) * latents + sigma * noise)[None]
    transformer = family.load_transformer(torch.float32)
    (told,) = transformer_calls(
        transformer, lambda: family.predict(transformer, noisy, torch.tensor([sigma]), [prompt | encoded])
    )
    assert told["timestep"][0, :8].tolist() == [0.0] * 8
    return told["hidden_states"][0, :8], noise[:, 0].flatten(1).T


def test_a_first_frame_is_drawn_as_the_pipeline_draws_it(
    sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = picture(128, 64, 40)
    ours, noise = drawn_start(sample.family, start, 0.5)
    pipeline = LTXImageToVideoPipeline.from_pretrained(sample.family.folder.path)
    pipeline.set_progress_bar_config(disable=True)
    monkeypatch.setattr(posteriors, "randn_tensor", lambda shape, **_: noise.T.reshape(shape))
    settings: dict[str, Any] = {"width": 128, "height": 64, "num_frames": 9, "num_inference_steps": 2}
    theirs, _ = transformer_calls(
        pipeline.transformer, lambda: pipeline(prompt="", image=start, guidance_scale=1.0, **settings)
    )
    # The noise is taken out of the noisy latents.
    torch.testing.assert_close(ours, theirs["hidden_states"][0, :8], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sigma", [0.01, 0.5, 1.0])
@pytest.mark.parametrize(("build", "noise_scale"), [(tiny, 0.0), (of_conditions, 0.15)])
def test_a_first_frame_has_the_noise_of_its_autoencoder_and_of_the_pipeline(
    build: Callable[[], Any], noise_scale: float, sigma: float, tmp_path: Path
) -> None:
    pipeline = build()
    pipeline.save_pretrained(tmp_path)
    start, vae = picture(128, 64, 40), pipeline.vae
    ours, noise = drawn_start(LTXVideo(PipelineFolder(path=tmp_path)), start, sigma)
    with torch.no_grad():
        posterior = vae.encode(pipeline.video_processor.preprocess_video([start])).latent_dist
    mode, std = ((value[0].flatten(1).T) for value in (posterior.mode(), posterior.std))
    scale = ((std / vae.latents_std) ** 2 + (noise_scale * sigma**2) ** 2).sqrt()
    torch.testing.assert_close(
        ours, (mode - vae.latents_mean) / vae.latents_std + scale * noise, rtol=1e-3, atol=1e-4
    )


def test_an_autoencoder_that_denoises_while_it_decodes_is_told_how_much(
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
    told = decoding_timesteps(monkeypatch)
    request = sample.request(num_inference_steps=2, guidance_scale=1.0, seed=0)
    requests = [request, dataclasses.replace(request, inputs=(picture(64, 64, 5),))]
    family.sample(family.load_transformer(torch.float32), torch.float32, requests)
    assert told == pytest.approx([0.05, 0.05])


def test_a_preview_masks_the_shorter_one_of_its_prompts(sample: Sample) -> None:
    transformer = sample.family.load_transformer(torch.float32)
    calls: list[dict[str, Any]] = []
    transformer.register_forward_pre_hook(
        lambda _module, _args, kwargs: calls.append(kwargs), with_kwargs=True
    )
    request = sample.request(num_inference_steps=2, guidance_scale=2.0, seed=0)
    sample.family.sample(transformer, torch.float32, [request])
    lengths = [len(prompt["prompt_embeds"]) for prompt in (request.negative, request.conditioning)]
    assert lengths[0] != lengths[1]
    assert calls[0]["encoder_attention_mask"].sum(1).tolist() == lengths


@pytest.mark.parametrize("build", [tiny, of_conditions])
def test_a_preview_has_the_positions_of_clips_that_are_read_at_its_rate(
    build: Callable[[], Any], tmp_path: Path
) -> None:
    pipeline = build()
    pipeline.save_pretrained(tmp_path)
    family = LTXVideo(PipelineFolder(path=tmp_path))
    transformer, embeds = pipeline.transformer, torch.ones(3, pipeline.text_encoder.config.d_model)
    request = PreviewRequest(
        conditioning={"prompt_embeds": embeds},
        negative={},
        width=64,
        height=64,
        num_frames=17,
        fps=10.0,
        num_inference_steps=2,
        guidance_scale=1.0,
        seed=0,
    )
    drawn, *_ = transformer_calls(transformer, lambda: family.sample(transformer, torch.float32, [request]))
    told = {"prompt_embeds": embeds, "frame_rate": torch.tensor(10.0)}
    noisy, sigma = torch.zeros(1, 128, 3, 2, 2), torch.ones(1)
    (trained,) = transformer_calls(transformer, lambda: family.predict(transformer, noisy, sigma, [told]))
    rotary = [transformer.rope(call["hidden_states"], **_positions(call)) for call in (drawn, trained)]
    torch.testing.assert_close(*rotary)


def _positions(call: dict[str, Any]) -> dict[str, Any]:
    names = ("num_frames", "height", "width", "rope_interpolation_scale", "video_coords")
    return {name: call.get(name) for name in names}


def test_the_facts_of_the_family(sample: Sample) -> None:
    family = sample.family
    assert (family.size_divisor, family.frame_step, family.default_fps) == (32, 8, 25)
    assert family.default_num_frames % 8 == 1
    assert len(build_media(family)[0].frames) == 17


def test_in_tiles_clips_are_encoded_in_parts_but_decoded_whole(
    sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = LTXVideo(sample.family.folder)
    vaes: list[AutoencoderKLLTXVideo] = []
    load = family.load_component
    monkeypatch.setattr(family, "load_component", lambda *given: vaes.append(load(*given)) or vaes[-1])
    for expected in ([(False, False), (False, False)], [(True, True), (True, False)]):
        vaes.clear()
        family.load_media_encoder(torch.float32, CPU)
        family.load_preview_vae(torch.float32, CPU)
        assert [(vae.use_tiling, vae.use_framewise_decoding) for vae in vaes] == expected
        family.tile_vae()
