"""LTX-Video from 0.9.5 on against ``LTXConditionPipeline``: what its transformer is told, what it draws."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import LTXConditionPipeline, LTXPipeline
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.pipelines.ltx import pipeline_ltx_condition
from family_sample import (
    CPU,
    PROMPTS,
    Sample,
    assert_equal_under_all_flags,
    build_sample,
    picture,
    transformer_calls,
)
from ltx_layouts import decoding_timesteps, of_conditions, vae_of_0_9_5

from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Media, Prompt
from diffsynth_lite.pipelines import PipelineFolder
from diffsynth_lite.pipelines.ltx_video import LTXVideo, model_fn_ltx_video, tiny

TOKENS = 8  # of a frame of the samples
DECODING = {"decode_timestep": 0.05, "decode_noise_scale": 0.025}


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return build_sample("ltx_video", tmp_path_factory.mktemp("conditions"), of_conditions)


@pytest.fixture(scope="module")
def started(sample: Sample) -> Sample:
    """The same clips, of which the first starts from a picture that is none of its own."""
    first = dataclasses.replace(sample.media[0], first_frame=picture(128, 64, 40))
    (encoded,) = sample.family.load_media_encoder(torch.float32, CPU)([first])
    latents = sample.latents.clone()
    latents[0] = encoded.pop("latents")
    conditioning = [sample.conditioning[0] | encoded, *sample.conditioning[1:]]
    media = [first, *sample.media[1:]]
    return dataclasses.replace(sample, media=media, latents=latents, conditioning=conditioning)


@pytest.fixture(scope="module")
def pipeline(sample: Sample) -> LTXConditionPipeline:
    """Read from the folder, as the family reads it."""
    pipeline = LTXConditionPipeline.from_pretrained(sample.family.folder.path)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def call(pipeline: LTXConditionPipeline, **settings: Any) -> Any:
    """The pipeline's own call, of the first prompt, in the size of the samples."""
    fixed = {"width": 128, "height": 64, "num_frames": 17, "num_inference_steps": 4, "guidance_scale": 1.0}
    generator = torch.Generator().manual_seed(5)
    return pipeline(prompt=PROMPTS[0], generator=generator, **fixed | DECODING | settings).frames[0]


def latents_of(tokens_bld: torch.Tensor) -> torch.Tensor:
    return tokens_bld.transpose(1, 2).unflatten(2, (3, 2, 4))


@pytest.mark.parametrize("per_token", [False, True])
def test_model_fn_equals_the_transformers_own_forward_at_the_positions_of_the_pipeline(
    per_token: bool,
) -> None:
    pipeline = of_conditions()
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(2, 128, 3, 2, 4, generator=generator)
    embeds = torch.randn(2, 7, 32, generator=generator)
    mask = (torch.arange(7) < torch.tensor([[7], [4]])).long()
    timestep = torch.tensor([200.0, 700.0])
    if per_token:
        timestep = timestep[:, None] * torch.rand(2, 3 * TOKENS, generator=generator)
    rates = torch.tensor([25.0, 12.0])
    *_, coords, _ = pipeline.prepare_latents(
        [], batch_size=2, height=64, width=128, num_frames=17, dtype=torch.float32
    )
    coords = coords.float()
    coords[:, 0] *= torch.tensor([[1.0 / 25], [1.0 / 12]])

    reference = pipeline.transformer(
        hidden_states=latents.flatten(2).transpose(1, 2),
        encoder_hidden_states=embeds,
        timestep=timestep,
        encoder_attention_mask=mask,
        video_coords=coords,
        return_dict=False,
    )[0]
    assert_equal_under_all_flags(
        pipeline.transformer,
        latents_of(reference),
        model_fn_ltx_video,
        latents,
        timestep,
        embeds,
        mask,
        frame_rate=rates,
        causal_positions=True,
    )


def test_prompts_are_encoded_as_by_the_pipeline(pipeline: LTXConditionPipeline, sample: Sample) -> None:
    texts = [*PROMPTS, "", "circle " * 150]
    encoded = sample.family.load_prompt_encoder(torch.float32, CPU)([Prompt(text=text) for text in texts])
    with torch.no_grad():
        embeds, mask, _, _ = pipeline.encode_prompt(texts, do_classifier_free_guidance=False, device=CPU)
    lengths = mask.sum(1).tolist()
    assert lengths[-1] == sample.family.max_prompt_tokens == 256 < sample.family.prompt_lengths(texts)[-1]
    for tensors, row, length in zip(encoded, embeds, lengths, strict=True):
        assert torch.equal(tensors["prompt_embeds"], row[:length])


def test_a_prompt_of_128_tokens_is_another_one_in_the_cache(sample: Sample, tmp_path: Path) -> None:
    """The text encoder is the same, but 0.9 lets it see the padding."""
    LTXPipeline(**tiny().components).save_pretrained(tmp_path)
    before = LTXVideo(PipelineFolder(path=tmp_path)).prompt_encoder_id(torch.float32)
    assert before != sample.family.prompt_encoder_id(torch.float32)


def assert_told_the_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Two forwards of the transformer were given the same; masked tokens aside, which ours leave out."""
    assert theirs.keys() ^ ours.keys() == {"attention_kwargs"}
    assert theirs["attention_kwargs"] is None
    assert torch.equal(ours["video_coords"], theirs["video_coords"])
    mask = theirs["encoder_attention_mask"]
    assert ours["encoder_attention_mask"] is None
    assert torch.equal(ours["encoder_hidden_states"], theirs["encoder_hidden_states"][mask][None])
    # A timestep is divided by 1000 and multiplied again.
    torch.testing.assert_close(ours["timestep"].flatten(), theirs["timestep"].flatten(), rtol=1e-6, atol=0.0)


def test_from_text_the_model_is_told_what_the_pipeline_tells_it(
    pipeline: LTXConditionPipeline, sample: Sample
) -> None:
    theirs = transformer_calls(pipeline.transformer, lambda: call(pipeline))
    assert len(theirs) == 4
    for told in theirs:
        noisy, sigma = latents_of(told["hidden_states"]), told["timestep"][0] / 1000
        (ours,) = transformer_calls(
            pipeline.transformer,
            lambda noisy=noisy, sigma=sigma: sample.family.predict(
                pipeline.transformer, noisy, sigma, sample.conditioning[:1]
            ),
        )
        assert torch.equal(ours["hidden_states"], told["hidden_states"])
        assert_told_the_same(ours, told)


def test_from_a_first_frame_the_model_is_told_what_the_pipeline_tells_it(
    pipeline: LTXConditionPipeline, started: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given the noise that the pipeline draws: that of its latents, and of the first frame in each step."""
    drawn: list[torch.Tensor] = []
    randn = pipeline_ltx_condition.randn_tensor
    monkeypatch.setattr(
        pipeline_ltx_condition,
        "randn_tensor",
        lambda *args, **kw: drawn.append(randn(*args, **kw)) or drawn[-1],
    )
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda self, _=None: self.mode())
    conditioning = [dict(started.conditioning[0])]
    conditioning[0]["first_frame_std"] = torch.zeros_like(conditioning[0]["first_frame_std"])
    theirs = transformer_calls(
        pipeline.transformer, lambda: call(pipeline, image=started.media[0].first_frame)
    )
    first = conditioning[0]["first_frame_latents"]
    for told, noise in zip(theirs, drawn[1:], strict=False):
        sigma = told["timestep"].max() / 1000
        noisy = latents_of(told["hidden_states"]).clone()
        noisy[0, :, :1] = (1 - sigma) * first + sigma * latents_of(noise)[0, :, :1]
        (ours,) = transformer_calls(
            pipeline.transformer,
            lambda noisy=noisy, sigma=sigma: started.family.predict(
                pipeline.transformer, noisy, sigma[None], conditioning
            ),
        )
        assert ours["timestep"][0, :TOKENS].tolist() == [0.0] * TOKENS
        assert torch.equal(ours["hidden_states"][:, TOKENS:], told["hidden_states"][:, TOKENS:])
        # The noise is taken out of the noisy latents.
        torch.testing.assert_close(ours["hidden_states"], told["hidden_states"], rtol=1e-5, atol=1e-5)
        assert_told_the_same(ours, told)
    assert (told["hidden_states"] - theirs[0]["hidden_states"])[:, :TOKENS].abs().max() > 0.1


def test_a_clip_begins_with_the_picture_that_it_starts_from(sample: Sample, started: Sample) -> None:
    tensors = started.conditioning[0]
    assert torch.equal(started.latents[0, :, :1], tensors["first_frame_latents"])
    # Encoded alone and in a batch.
    torch.testing.assert_close(started.latents[0, :, 1:], sample.latents[0, :, 1:], rtol=1e-4, atol=1e-5)
    assert not torch.equal(started.latents[0, :, :1], sample.latents[0, :, :1])


def test_clips_with_and_without_a_first_frame_share_a_batch(started: Sample) -> None:
    family, sigma = started.family, torch.tensor([0.1, 0.5, 0.9])
    transformer = family.load_transformer(torch.float32)
    with torch.no_grad():
        together = family.predict(transformer, started.latents, sigma, started.conditioning)
        alone = [
            family.predict(
                transformer, started.latents[place, None], sigma[place, None], [started.conditioning[place]]
            )
            for place in range(3)
        ]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("starts", [False, True])
def test_a_preview_is_what_the_pipeline_draws(
    pipeline: LTXConditionPipeline, sample: Sample, scale: float, starts: bool
) -> None:
    request = sample.request(num_inference_steps=4, guidance_scale=scale, seed=5)
    (negative,) = sample.family.load_prompt_encoder(torch.float32, CPU)([Prompt(text="blurred")])
    images = (picture(128, 64, 40),) if starts else ()
    request = dataclasses.replace(request, negative=negative, inputs=images)
    given = {"image": images[0]} if starts else {}
    expected = call(pipeline, guidance_scale=scale, negative_prompt="blurred", **given)
    (frames,) = sample.family.sample(pipeline.transformer, torch.float32, [request])
    assert [frame.tobytes() for frame in frames] == [frame.tobytes() for frame in expected]


def test_previews_of_a_bf16_model_are_drawn_by_an_fp32_autoencoder(
    sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = decoding_timesteps(monkeypatch)
    request = sample.request(num_inference_steps=2, guidance_scale=3.0, seed=5)
    requests = [request, dataclasses.replace(request, inputs=(picture(150, 150, 5),))]
    drawn = sample.family.sample(sample.family.load_transformer(torch.bfloat16), torch.float32, requests)
    assert [[frame.size for frame in frames] for frames in drawn] == [[(128, 64)] * 17] * 2
    assert told == pytest.approx([DECODING["decode_timestep"]] * 2, rel=1e-2)  # told in bf16


def test_a_picture_is_a_clip_of_one_frame(sample: Sample) -> None:
    item = Media(frames=sample.media[0].frames[:1])
    (encoded,) = sample.family.load_media_encoder(torch.float32, CPU)([item])
    assert encoded["latents"].shape == sample.family.latents_shape(128, 64, 1) == (128, 1, 2, 4)


def test_a_folder_of_0_9_5_that_names_the_pipeline_of_0_9_is_one_of_conditions(tmp_path: Path) -> None:
    LTXPipeline(**of_conditions().components).save_pretrained(tmp_path)
    family = LTXVideo(PipelineFolder(path=tmp_path))
    family.check_folder()
    assert family.pipeline is LTXConditionPipeline
    assert family.max_prompt_tokens == 256


def test_a_sampler_that_the_pipeline_cannot_draw_with_is_refused(tmp_path: Path) -> None:
    LTXConditionPipeline(**tiny().components | {"vae": vae_of_0_9_5()}).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"scheduler has use_dynamic_shifting, .* set it to false there"):
        LTXVideo(PipelineFolder(path=tmp_path)).check_folder()
    file = tmp_path / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_dynamic_shifting": False}))
    LTXVideo(PipelineFolder(path=tmp_path)).check_folder()


def test_the_shift_is_that_of_the_folders_sampler(sample: Sample) -> None:
    assert sample.family.family_shift((128, 11, 16, 24)) == 1.0
