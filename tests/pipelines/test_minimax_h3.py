"""MiniMax-H3: its one sequence of prompt, audio and clip, and the noise levels of the two."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import MiniMaxH3Scheduler
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.modular_pipelines.minimax_h3.before_denoise import patchify_video_latents
from diffusers.modular_pipelines.minimax_h3.encoders import (
    MiniMaxH3KeyframeVaeEncoderStep,
    MiniMaxH3Ref2VAReferenceEncoderStep,
)
from diffusers.modular_pipelines.minimax_h3.references import MiniMaxH3AudioReference
from diffusers.modular_pipelines.modular_pipeline import PipelineState
from diffusers_pipelines import read_pipeline
from family_sample import CPU, PROMPTS, Sample, encode_texts, mandelbrot, transformer_calls
from safetensors.torch import save_file
from torch.utils._pytree import tree_map_only

from diffsynth_lite.errors import UserError
from diffsynth_lite.lora.reading import contents_of
from diffsynth_lite.media import Audio, Media
from diffsynth_lite.pipelines.base.folder import ComponentFile, PipelineFolder
from diffsynth_lite.pipelines.base.single_file import read_single_file
from diffsynth_lite.pipelines.minimax_h3 import MiniMaxH3

FAMILY = "minimax_h3"
TONE = Audio(waveform=torch.sin(torch.arange(2 * 52000).view(2, -1) * 0.05) / 2, sample_rate=32000)


@pytest.fixture(scope="module")
def learning(sample: Sample) -> MiniMaxH3:
    """The family where the audio of clips is learned."""
    family = MiniMaxH3(sample.family.folder)
    family.with_audio = True
    return family


def unpacked(rows: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The latents of tokens: those that the pipeline's own function packs into them."""
    places = torch.arange(shape.numel(), dtype=torch.float64).view(1, *shape)
    order = patchify_video_latents(places, (1, 2, 2)).flatten().long()
    latents = torch.empty(shape.numel())
    latents[order] = rows.flatten()
    return latents.view(1, *shape)


def test_from_the_raw_prompt_on_the_model_gets_and_gives_at_each_step_what_it_does_in_the_pipeline(
    sample: Sample, learning: MiniMaxH3
) -> None:
    pipeline, shape, batches = read_pipeline(learning.folder.path), sample.latents.shape[1:], []
    pipeline.transformer.register_forward_pre_hook(  # it changes what it gives in place
        lambda _, args, given: (args, tree_map_only(torch.Tensor, torch.clone, given)), with_kwargs=True
    )
    for seed, prompt in enumerate(PROMPTS[:2]):
        given = sample.request(num_inference_steps=4, guidance_scale=1.0, seed=seed).call_arguments()
        outputs: list[torch.Tensor] = []
        run = partial(pipeline, prompt=prompt, num_frames=39, **given)
        calls = transformer_calls(pipeline.transformer, run, outputs)
        batches.append(list(zip(calls, outputs, strict=True)))
    assert len(batches[0]) == 3  # the last of four levels has no noise
    conditioning = encode_texts(learning, *PROMPTS[:2])
    for step in zip(*batches, strict=True):  # both prompts, of different lengths, in one batch
        clips = torch.cat([unpacked(call["hidden_states"], shape) for call, _ in step])
        audio = torch.cat([call["audio_hidden_states"].view(1, 2, -1, 32).mT for call, _ in step])
        sigma = torch.cat([1 - call["timestep"][:1] for call, _ in step])
        predict = partial(learning.predict_with_audio, sample.model, clips, audio, sigma, conditioning)
        with torch.no_grad():
            velocity, audio_velocity = predict()
        assert audio_velocity.shape == audio.shape
        for (theirs, output), ours, own in zip(
            step, transformer_calls(sample.model, predict), velocity.split(1), strict=True
        ):
            assert theirs.keys() - ours.keys() == {"attention_kwargs"}
            for call in (theirs, ours):  # of each token
                call["timestep"] = call["timestep"][call.pop("timestep_indices")]
            for name in ours.keys() - {"return_dict"}:
                torch.testing.assert_close(ours[name].double(), theirs[name].double(), rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(-own, unpacked(output, shape), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shift", [3.0, 5.0])
def test_audio_is_at_the_noise_level_of_the_same_step_of_the_sampler_that_its_folder_has_for_it(
    learning: MiniMaxH3, tmp_path: Path, shift: float
) -> None:
    shutil.copytree(learning.folder.path, tmp_path, dirs_exist_ok=True)
    audio = MiniMaxH3Scheduler(shift=shift)
    audio.save_pretrained(tmp_path / "audio_scheduler")
    family = MiniMaxH3(PipelineFolder(path=tmp_path))
    clips = family.load_scheduler()
    for scheduler in (clips, audio):
        scheduler.set_timesteps(20)
    torch.testing.assert_close(family.audio_sigma(clips.sigmas), audio.sigmas)
    family.with_audio = True
    assert (family.fingerprint() == learning.fingerprint()) == (shift == learning.family_shift((2, 32, 65)))
    assert family.family_shift((2, 32, 65)) == shift
    assert family.family_shift((4, 12, 4, 8)) == 12
    previews = family.preview_pipeline(learning.empty_transformer(), torch.float32)
    assert previews.audio_scheduler.shift == shift


def test_audio_is_learned_as_the_pipeline_encodes_that_of_references(
    sample: Sample, learning: MiniMaxH3
) -> None:
    frames = sample.media[0].frames
    given = [Media(frames=frames, audio=TONE), Media(frames=frames)]
    encoded = learning.load_media_encoder(torch.float32, CPU)(given)
    pipeline: Any = read_pipeline(learning.folder.path)
    rows = []
    for waveform in (TONE.waveform, torch.zeros_like(TONE.waveform)):
        state = PipelineState()
        state.set("normalized_references", [MiniMaxH3AudioReference(audio=waveform)])
        _, state = MiniMaxH3Ref2VAReferenceEncoderStep()(pipeline, state)
        rows += state.get("audio_condition_latents")
    for item, expected in zip(encoded, rows, strict=True):
        assert item["audio_latents"].shape == learning.audio_latents_shape(39, 24.0) == (2, 32, 65)
        torch.testing.assert_close(item["audio_latents"].mT.reshape(-1, 32), expected)
    still, *_ = learning.load_media_encoder(torch.float32, CPU)([Media(frames=frames[:1])])
    assert still.keys() == {"latents"}


def test_a_clip_has_as_many_latents_of_audio_as_the_pipeline_draws_at_the_rate_of_the_model(
    learning: MiniMaxH3,
) -> None:
    lengths = [learning.audio_latents_shape(count, 24.0) for count in (1, 22, 56, 124)]
    assert lengths == [None, (2, 32, 37), (2, 32, 93), (2, 32, 207)]
    assert learning.num_tokens((2, 32, 37)) == 74
    with pytest.raises(UserError, match=r"data\.fps: 12, .* at 24; set it to that, or data\.audio: false"):
        learning.audio_latents_shape(39, 12.0)


def test_without_audio_there_is_none_in_the_sequence_and_an_image_is_at_the_first_place_of_a_clip(
    sample: Sample,
) -> None:
    image = sample.family.load_media_encoder(torch.float32, CPU)([Media(frames=(mandelbrot(128, 64, 10),))])
    for latents in (sample.latents[:1], image[0]["latents"][None]):
        batch = latents, torch.tensor([0.5]), sample.prompts[:1]
        (call,) = transformer_calls(sample.model, lambda: sample.family.predict(sample.model, *batch))  # noqa: B023
        assert call["audio_hidden_states"].shape[1] == 0
        text, tokens = len(sample.prompts[0]["prompt_embeds"]), latents[0, 0].numel() // 4
        assert call["token_tags"].tolist() == [1] * text + [0] * tokens
        assert call["position_ids"][text : text + 8, 0].tolist() == [text] * 8


def test_an_empty_prompt_is_a_space_which_the_pipeline_takes(learning: MiniMaxH3) -> None:
    empty, space = encode_texts(learning, "", " ")
    assert torch.equal(empty["prompt_embeds"], space["prompt_embeds"])
    assert len(empty["prompt_embeds"]) == 1


def test_images_are_encoded_as_the_pipeline_encodes_keyframes_but_for_noise(
    sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = mandelbrot(128, 64, 10)
    (ours,) = sample.family.load_media_encoder(torch.float32, CPU)([Media(frames=(image,))])
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda self, generator: self.mode())
    state = PipelineState()
    state.set("keyframes", [image])
    _, state = MiniMaxH3KeyframeVaeEncoderStep()(read_pipeline(sample.family.folder.path), state)
    # They are rounded to float16.
    torch.testing.assert_close(ours["latents"][None], state.get("condition_latents")[0], rtol=1e-3, atol=1e-3)


def test_files_with_another_layout_are_named_as_such(sample: Sample, tmp_path: Path) -> None:
    file = ComponentFile(path=tmp_path / "x.safetensors", key="model.transformer_file")
    save_file({"adaln_t_table": torch.ones(2, 2), "blocks.0.mlp.fc2.weight": torch.ones(2, 2)}, file.path)
    with pytest.raises(UserError, match="seems to be a pruned MiniMax-H3, which diffusers does not read"):
        read_single_file(file, sample.family.empty_transformer())
    pair = {f"blocks.0.attn.qkv_proj.lora_{matrix}.default.weight": torch.ones(2, 2) for matrix in "AB"}
    with pytest.raises(UserError, match="is a LoRA of DiffSynth-Studio on MiniMax-H3"):
        contents_of(file.path, pair, {})
