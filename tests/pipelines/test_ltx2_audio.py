"""LTX-2 with its audio, against diffusers' own transformer and pipelines, and closed formulas."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import LTX2ImageToVideoPipeline, LTX2Pipeline
from diffusers_pipelines import bytes_of
from family_sample import (
    CPU,
    NEGATIVE,
    PROMPTS,
    Sample,
    adapted_transformer,
    assert_equal_under_all_flags,
    build_sample,
    clip,
    engine_with,
    mandelbrot,
    transformer_calls,
)
from held_step import assert_same_cost, step_on_cpu
from release_layouts import ltx_2_3, other_guidance
from test_family_fidelity import numbers
from test_ltx2 import BUILDS, forward, some_audio
from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

from diffsynth_lite.core.gradient import gradient_engine
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora import find_target_layers
from diffsynth_lite.media import Audio, AudioFormat, ClipWithAudio, Media
from diffsynth_lite.pipelines.base.release_folder import write_release
from diffsynth_lite.pipelines.ltx2 import LTX2, model_fn_ltx2, tiny
from diffsynth_lite.pipelines.ltx2.audio import N_FFT, log_mel
from diffsynth_lite.pipelines.ltx2.releases import LTX_2
from diffsynth_lite.training.planning.memory_count import MemoryCounter
from diffsynth_lite.training.planning.step import StepSettings

RATE = 16000
SIGMA = torch.tensor([0.1, 0.5, 0.9])
SETTINGS = {"sample_rate": RATE, "hop_length": 160, "num_bands": 64}


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    sample = build_sample("ltx2", tmp_path_factory.mktemp("ltx2"))
    sample.family.with_audio = True
    return sample


@pytest.fixture(scope="module")
def audio_latents(sample: Sample) -> torch.Tensor:
    """Of the audio of three clips, the last of which has none."""
    media = [
        dataclasses.replace(item, audio=audio)
        for item, audio in zip(sample.media, (tone(440, 17), tone(1000, 17), None), strict=True)
    ]
    encoded = sample.family.load_media_encoder(torch.float32, CPU)(media)
    assert all(torch.equal(one["latents"], row) for one, row in zip(encoded, sample.latents, strict=True))
    return torch.stack([one["audio_latents"] for one in encoded])


def tone(frequency: float, num_frames: int, *, amplitude: float = 0.5) -> Audio:
    """Of a clip at 24 frames a second, twice as loud on the left."""
    times = torch.arange(round(num_frames / 24 * RATE), dtype=torch.float64) / RATE
    left = (amplitude * torch.cos(2 * math.pi * frequency * times)).float()
    return Audio(waveform=torch.stack([left, left / 2]), sample_rate=RATE)


def test_noise_has_the_spectrum_of_another_implementation_and_silence_the_smallest() -> None:
    waveform = torch.randn(1, 2, 12345, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
    filters = mel_filter_bank(513, 64, 0.0, RATE / 2, RATE, norm="slaney", mel_scale="slaney")
    window = window_function(N_FFT, "hann", periodic=True)
    for ours, channel in zip(log_mel(waveform, **SETTINGS)[0], waveform[0], strict=True):
        theirs = spectrogram(
            channel.double().numpy(), window, N_FFT, 160, power=1.0, mel_filters=filters, mel_floor=1e-5
        )
        np.testing.assert_allclose(ours.numpy(), np.log(theirs.T), atol=1e-4)
    silent = log_mel(torch.zeros(1, 2, 8000), **SETTINGS)
    assert torch.equal(silent, torch.full_like(silent, math.log(1e-5)))


@pytest.mark.parametrize(("num_frames", "fps"), [(9, 24.0), (17, 24.0), (25, 25.0), (33, 30.0), (17, 12.5)])
def test_a_clip_has_as_many_latents_of_audio_as_the_pipeline_generates(
    sample: Sample, num_frames: int, fps: float
) -> None:
    family, samples = sample.family, round(num_frames / fps * RATE)
    assert family.audio_format == AudioFormat(sample_rate=RATE, num_channels=2)
    waveform = torch.randn(2, samples, generator=torch.Generator().manual_seed(0)) / 4
    frames = (mandelbrot(64, 64, 10),) * num_frames
    item = Media(frames=frames, fps=fps, audio=Audio(waveform=waveform, sample_rate=RATE))
    (encoded,) = family.load_media_encoder(torch.float32, CPU)([item])
    shape = family.audio_latents_shape(num_frames, fps)
    # By the formula of the pipeline's call.
    assert encoded["audio_latents"].shape == shape == (4, round(num_frames / fps * (RATE / 160 / 4.0)), 4)
    (picture_alone,) = family.load_media_encoder(torch.float32, CPU)([Media(frames=frames[:1], fps=None)])
    assert "audio_latents" not in picture_alone
    assert family.audio_latents_shape(1, fps) is None


def test_clips_that_are_too_short_for_a_spectrogram_are_refused(sample: Sample) -> None:
    rate = 9 * RATE / 513
    assert sample.family.audio_latents_shape(9, rate)[1] == 1
    log_mel(torch.zeros(1, 2, 513), **SETTINGS)
    with pytest.raises(UserError, match=r"data\.fps: 281\.25: clips of 9 frames last 0\.032 s, too short"):
        sample.family.audio_latents_shape(9, 9 * RATE / 512)


def test_latents_are_those_that_the_pipeline_takes_and_silence_replaces_none(
    sample: Sample, audio_latents: torch.Tensor
) -> None:
    pipeline = LTX2Pipeline.from_pretrained(sample.family.folder.path)
    silence = Audio.silent(AudioFormat(sample_rate=RATE, num_channels=2), 17 / 24)
    waveforms = torch.stack([audio.waveform for audio in (tone(440, 17), tone(1000, 17), silence)])
    settings = SETTINGS | {"num_bands": 16}
    with torch.no_grad():
        latents = pipeline.audio_vae.encode(log_mel(waveforms, **settings)).latent_dist.mode()
    packed = pipeline.prepare_audio_latents(latents=latents)
    torch.testing.assert_close(pipeline._pack_audio_latents(audio_latents), packed)
    assert audio_latents.shape == (3, 4, 18, 4)
    assert not torch.allclose(audio_latents[0], audio_latents[2], atol=1e-2)


def test_of_the_latents_that_the_encoder_makes_the_last_is_left_out_where_it_is_one_too_many(
    sample: Sample,
) -> None:
    audio_vae = LTX2Pipeline.from_pretrained(sample.family.folder.path).audio_vae
    # A tone that begins late, so that no latent is like another.
    audio = tone(440, 9)
    late = dataclasses.replace(audio, waveform=audio.waveform * torch.linspace(0, 1, 6000))
    with torch.no_grad():
        made = audio_vae.encode(
            log_mel(late.waveform[None], **SETTINGS | {"num_bands": 16})
        ).latent_dist.mode()
    assert made.shape == (1, 4, 10, 4)
    packed = (LTX2Pipeline._pack_audio_latents(made) - audio_vae.latents_mean) / audio_vae.latents_std
    expected = packed[:, :9].unflatten(2, (4, 4)).transpose(1, 2)[0]
    item = Media(frames=(mandelbrot(128, 64, 10),) * 9, fps=24.0, audio=late)
    (encoded,) = sample.family.load_media_encoder(torch.float32, CPU)([item])
    torch.testing.assert_close(encoded["audio_latents"], expected)
    assert not torch.allclose(expected[:, 1:], expected[:, :-1], atol=1e-2)


def test_what_is_kept_of_clips_is_named_by_what_makes_their_audio(sample: Sample) -> None:
    silent = LTX2(sample.family.folder)
    ours, without = (one.media_encoder_id(torch.float32) for one in (sample.family, silent))
    assert ours.startswith(without)
    assert sample.family.folder.fingerprint("audio_vae") in ours
    assert sample.family.folder.fingerprint("audio_vae") not in without
    (encoded,) = silent.load_media_encoder(torch.float32, CPU)(sample.media[:1])
    assert "audio_latents" not in encoded


GATES = ("temb_ca_gate", "temb_ca_audio_gate")
"""What a block is given of the levels by which the streams gate what they take from each other."""


def as_ltx_core_modulates(
    transformer: Any, timestep: torch.Tensor, streams: dict[str, Any]
) -> tuple[Any, Any, torch.Tensor]:
    """The transformer's own forward: by levels of its own, but for gates, which are by those of the other."""
    kept: list[dict[str, torch.Tensor]] = []

    def keep(_block: torch.nn.Module, _given: Any, named: dict[str, Any]) -> None:
        kept.append({name: named[name] for name in GATES})

    def put(_block: torch.nn.Module, given: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return given, named | kept[0]

    hook = transformer.transformer_blocks[0].register_forward_pre_hook(keep, with_kwargs=True)
    forward(transformer, timestep, streams | {"use_cross_timestep": True}, isolate_modalities=False)
    hook.remove()
    blocks = transformer.transformer_blocks
    hooks = [block.register_forward_pre_hook(put, with_kwargs=True) for block in blocks]
    found = forward(transformer, timestep, streams | {"use_cross_timestep": False}, isolate_modalities=False)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("audio_level", [None, torch.tensor([900.0, 100.0])], ids=["shared", "own"])
def test_model_fn_equals_the_transformers_own_forward_of_both(
    build: Callable[[], Any], per_token: bool, audio_level: torch.Tensor | None
) -> None:
    transformer = build().transformer
    timestep = torch.tensor([200.0, 700.0])
    streams = some_audio(transformer, 1) | {"use_cross_timestep": True}
    streams["audio_encoder_hidden_states"] = streams["audio_encoder_hidden_states"][:, :1].repeat(1, 7, 1)
    sigma = torch.tensor([200.0, 700.0]) if audio_level is None else audio_level
    streams |= {"audio_timestep": sigma, "audio_sigma": sigma}
    streams["audio_encoder_attention_mask"] = (torch.arange(7) < torch.tensor([[7], [4]])).long()
    if per_token:
        timestep = timestep[:, None] * torch.rand(2, 24, generator=torch.Generator().manual_seed(1))
    if audio_level is None:
        reference, inputs, sigma = forward(transformer, timestep, streams, isolate_modalities=False)
    else:
        reference, inputs, sigma = as_ltx_core_modulates(transformer, timestep, streams)
    audio = streams["audio_hidden_states"].unflatten(2, (4, 4)).transpose(1, 2)

    def both(*given: Any, **settings: Any) -> torch.Tensor:
        clips, audios = model_fn_ltx2(*given, **settings)
        return torch.cat([clips.flatten(2).transpose(1, 2).flatten(1), audios.transpose(1, 2).flatten(1)], 1)

    learned = assert_equal_under_all_flags(
        transformer,
        torch.cat([one.flatten(1) for one in reference], 1),
        both,
        *inputs,
        sigma=sigma,
        frame_rate=torch.tensor([24.0, 24.0]),
        audio_latents_bclm=audio,
        audio_prompt_embeds_bld=streams["audio_encoder_hidden_states"],
        audio_sigma=audio_level,
    )
    assert all(gradient is not None and gradient.any() for gradient in learned.values())


def test_audio_with_a_level_of_its_own_gets_it_and_a_first_frame_has_none(
    sample: Sample, audio_latents: torch.Tensor
) -> None:
    family, model = sample.family, sample.family.load_transformer(torch.float32)
    (encoded,) = family.load_media_encoder(torch.float32, CPU)(
        [Media(frames=clip(128, 64, 17, 10), first_frame=mandelbrot(128, 64, 40), fps=24.0)]
    )
    kept = {name: encoded[name] for name in ("first_frame_latents", "frame_rate")}
    batch = encoded["latents"][None], audio_latents[:1], torch.tensor([0.8]), [sample.first | kept]
    modulators = {
        "av_cross_attn_video_scale_shift": torch.cat([torch.zeros(8), torch.full((16,), 800.0)]),
        "av_cross_attn_audio_scale_shift": torch.tensor([300.0]),
        "av_cross_attn_video_a2v_gate": torch.tensor([300.0]),
        "av_cross_attn_audio_v2a_gate": torch.tensor([800.0]),
    }
    # Of the releases it is 1.
    model.register_to_config(cross_attn_timestep_scale_multiplier=500)
    factor, given = 500 / model.config.timestep_scale_multiplier, {}

    def keep(name: str) -> Callable[..., None]:
        return lambda _module, levels, _output: given.update({name: levels[0]})

    for name in modulators:
        getattr(model, name).register_forward_hook(keep(name))
    (call,) = transformer_calls(
        model, lambda: family.predict_with_audio(model, *batch, audio_sigma=torch.tensor([0.3]))
    )
    assert torch.equal(call["timestep"][0], modulators["av_cross_attn_video_scale_shift"])
    assert (call["sigma"].item(), call["audio_sigma"].item(), call["audio_timestep"].item()) == (
        *(pytest.approx(800), pytest.approx(300), pytest.approx(300)),
    )
    for name, levels in modulators.items():
        torch.testing.assert_close(given[name], levels * (factor if "gate" in name else 1), msg=name)
    # Nothing is left on the model.
    given.clear()
    family.predict_with_audio(model, *batch)
    torch.testing.assert_close(given["av_cross_attn_video_a2v_gate"], torch.tensor([800.0 * factor]))


def predicted(
    sample: Sample, transformer: Any, audio_latents: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    batch = sample.latents, audio_latents, SIGMA, sample.conditioning
    return sample.family.predict_with_audio(transformer, *batch)


def test_all_that_the_model_gets_with_audio_is_what_the_pipeline_gives_it(
    sample: Sample, audio_latents: torch.Tensor
) -> None:
    family = sample.family
    model = family.load_transformer(torch.float32)
    conditioning = [sample.first | {"frame_rate": torch.tensor(24.0)}]
    batch = sample.latents[:1], audio_latents[:1], torch.ones(1), conditioning
    (ours,) = transformer_calls(model, lambda: family.predict_with_audio(model, *batch))
    request = sample.request(num_inference_steps=2, guidance_scale=1.0, seed=5)
    theirs, _ = transformer_calls(model, lambda: family.sample(model, torch.float32, [request]))
    # The pipeline gives positions next to what they come of, and a mask that hides nothing.
    derived = {"video_coords", "audio_coords", "encoder_attention_mask", "audio_encoder_attention_mask"}
    given = {name for name, value in ours.items() if len(numbers(value))}
    assert (
        given - {"audio_timestep"}
        == {name for name, value in theirs.items() if len(numbers(value))} - derived
    )
    assert torch.equal(ours["audio_timestep"], theirs["timestep"])
    coords = model.audio_rope.prepare_audio_coords(1, ours["audio_num_frames"], CPU)
    assert torch.equal(coords, theirs["audio_coords"])
    for name in given - {"audio_timestep", "hidden_states", "audio_hidden_states"}:
        torch.testing.assert_close(numbers(ours[name]), numbers(theirs[name]), msg=name)
    for name in ("hidden_states", "audio_hidden_states"):
        assert ours[name].shape == theirs[name].shape


def test_every_layer_of_either_stream_and_between_them_learns_under_all_flags(
    sample: Sample, audio_latents: torch.Tensor
) -> None:
    family = sample.family
    assert family.unused_modules(family.empty_transformer()) == []
    transformer = adapted_transformer(sample.family, targets=family.target_sets["all"])
    found = []
    for flags in ((False, False), (True, True)):
        transformer.zero_grad()
        with gradient_engine(engine_with(flags)):
            sum(one.square().mean() for one in predicted(sample, transformer, audio_latents)).backward()
        found.append(
            {name: value.grad for name, value in transformer.named_parameters() if value.requires_grad}
        )
    plain, recomputed = found
    assert {name.split(".")[2] for name in plain} == {
        *("attn1", "attn2", "audio_attn1", "audio_attn2", "ff", "audio_ff"),
        *("audio_to_video_attn", "video_to_audio_attn"),
    }
    for name, gradient in plain.items():
        assert gradient.any(), name
        assert torch.equal(gradient, recomputed[name]), name


@pytest.mark.parametrize("own", [False, True])
def test_a_step_holds_what_is_counted_of_it_also_where_audio_has_a_level_of_its_own(
    sample: Sample, audio_latents: torch.Tensor, own: bool
) -> None:
    family = sample.family
    settings = StepSettings(mixed_precision="no", dtype=torch.float32, device_type="cpu")
    (encoded,) = family.load_media_encoder(torch.float32, CPU)(
        [Media(frames=clip(128, 64, 17, 10), first_frame=mandelbrot(128, 64, 40), fps=24.0)]
    )
    kept = {name: encoded[name] for name in ("first_frame_latents", "frame_rate")}
    inputs: dict[str, Any] = {
        "latents_shape": encoded["latents"].shape,
        "conditioning": sample.first | kept,
        "audio_latents_shape": audio_latents.shape[1:],
        "own_audio_level": own,
    }
    layers = find_target_layers(family.empty_transformer(), family.default_target_modules, unused_modules=[])
    counted = MemoryCounter(family, layers, rank=4, **inputs).count(settings)
    assert_same_cost(counted.step, step_on_cpu(family, adapted_transformer(family), settings, **inputs))


def test_a_released_model_gets_a_lora_on_either_stream_and_between_them(tmp_path: Path) -> None:
    family = LTX2(write_release(LTX_2[0], tmp_path))
    model = family.empty_transformer()
    # Each of 48 blocks has 6 attentions: to itself and to the prompt in either stream, and two between.
    for family.with_audio, num_attentions in ((False, 2), (True, 6)):
        layers = find_target_layers(
            model, family.default_target_modules, unused_modules=family.unused_modules(model)
        )
        assert len(layers) == 48 * num_attentions * 4
    # A clip of the pipeline's default size: 25 latents of audio a second.
    assert family.audio_latents_shape(121, 24.0) == (8, 126, 16)


def test_a_clip_that_starts_from_an_image_has_its_audio_at_the_noise_level_of_the_rest(
    sample: Sample, audio_latents: torch.Tensor
) -> None:
    family, start = sample.family, mandelbrot(128, 64, 40)
    (encoded,) = family.load_media_encoder(torch.float32, CPU)(
        [Media(frames=clip(128, 64, 17, 10), first_frame=start, fps=24.0)]
    )
    kept = {name: encoded[name] for name in ("first_frame_latents", "frame_rate")}
    model = family.load_transformer(torch.float32)
    batch = encoded["latents"][None], audio_latents[:1], torch.ones(1), [sample.first | kept]
    (ours,) = transformer_calls(model, lambda: family.predict_with_audio(model, *batch))
    pipeline = LTX2ImageToVideoPipeline.from_pretrained(family.folder.path)
    settings: dict[str, Any] = {"width": 128, "height": 64, "num_frames": 17, "num_inference_steps": 2}
    theirs, _ = transformer_calls(
        pipeline.transformer,
        lambda: pipeline(
            image=start, prompt=PROMPTS[0], **settings, **other_guidance(family.folder, is_guided=False)
        ),
    )
    for name in ("timestep", "audio_timestep", "sigma", "use_cross_timestep", "isolate_modalities"):
        assert torch.equal(numbers(ours[name]), numbers(theirs[name])), name


@pytest.mark.parametrize(
    ("build", "rate", "gates"), [(tiny, 24000, ()), (ltx_2_3, 48000, ("to_gate_logits",))], ids=BUILDS
)
def test_a_preview_has_audio_as_the_pipeline_has_it(
    build: Callable[[], Any], rate: int, gates: tuple[str, ...], tmp_path: Path
) -> None:
    sample = build_sample("ltx2", tmp_path, build)
    family = sample.family
    assert isinstance(family, LTX2)
    family.with_audio = True
    request = sample.request(num_inference_steps=2, guidance_scale=3.0, seed=5)
    request = dataclasses.replace(request, num_frames=9, fps=12.0)
    transformer, both = family.load_transformer(torch.float32), []
    requests = [request, dataclasses.replace(request, num_frames=1)]
    calls = transformer_calls(
        transformer, lambda: both.extend(family.sample(transformer, torch.float32, requests))
    )
    # A step has two prompts at once, and the streams kept separate; in 2.3 also a block without attention.
    assert len(calls) == 2 * 2 * (2 + len(gates))
    assert family.target_sets["attention"] == ("to_q", "to_k", "to_v", "to_out.0", *gates)
    generated, still = both
    assert isinstance(generated, ClipWithAudio)
    assert isinstance(still, list)
    pipeline = LTX2Pipeline.from_pretrained(tmp_path)
    expected = pipeline(
        prompt=PROMPTS[0],
        negative_prompt=NEGATIVE,
        guidance_scale=3.0,
        num_frames=9,
        frame_rate=12.0,
        **other_guidance(family.folder, is_guided=True),
        **request.call_arguments(),
    )
    assert bytes_of(generated.frames) == bytes_of(expected.frames[0])
    torch.testing.assert_close(generated.audio.waveform, expected.audio[0], rtol=1e-4, atol=1e-6)
    assert generated.audio.sample_rate == pipeline.vocoder.config.output_sampling_rate == rate
    # 25 latents a second, of which the first is one frame of the spectrogram, the others for four.
    assert generated.audio.waveform.shape == (2, (4 * round(9 / 12 * 25) - 3) * rate // 100)
    assert generated.audio.waveform.abs().max() > 1e-3
