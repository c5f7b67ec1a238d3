"""Kandinsky 5.0 Video: sizes, clips that start from an image, and folders with sparse attention."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_family_fidelity as fidelity
import test_family_gradients as gradients
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from family_sample import CPU, SIGMA, Sample, transformer_calls
from release_layouts import changed

from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Media
from diffsynth_lite.pipelines import PipelineFolder
from diffsynth_lite.pipelines.kandinsky5_video import Kandinsky5Video

FAMILY = "kandinsky5_video"


@pytest.fixture
def started(sample_of: Callable[[str], Sample]) -> Sample:
    return sample_of("kandinsky5_video of images")


def call_with(sample: Sample, latents: torch.Tensor) -> dict[str, Any]:
    """What the transformer is given with the latents of one clip."""
    batch = latents, SIGMA[:1], sample.conditioning[:1]
    (call,) = transformer_calls(sample.model, lambda: sample.family.predict(sample.model, *batch))
    return call


@pytest.mark.parametrize(("width", "height"), [(480, 480), (480, 848), (464, 480), (480, 864)])
def test_places_are_counted_closer_in_some_sizes_as_by_the_pipeline(
    sample: Sample, width: int, height: int
) -> None:
    call = call_with(sample, torch.zeros(1, *sample.family.latents_shape(width, height, 1)))
    assert call["scale_factor"] == sample.fresh_pipeline()._get_scale_factor(height, width)


def test_a_model_from_images_is_given_what_its_pipeline_gives_it(
    started: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    fidelity.test_a_preview_is_what_the_pipeline_generates_from_the_text(
        started, started.fresh_pipeline(), fidelity.GUIDANCE
    )
    gradients.test_the_model_is_run_as_by_its_own_forward_to_the_last_gradient(started)
    # The pipeline encodes the image in the dtype of the model, which is not that of its first weights.
    request = started.request(num_inference_steps=1, guidance_scale=1.0, seed=0)
    model = started.family.load_transformer(torch.bfloat16)
    assert started.family.sample(model, torch.float32, [request])
    # It draws from what the VAE gives of an image, which of a random one is far from its mode.
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda given, generator: given.mode())
    fidelity.test_all_that_the_model_gets_in_training_is_what_the_pipeline_gives_it(started)


def test_a_given_frame_is_clean_and_does_not_count(started: Sample, sample: Sample) -> None:
    family, clip = started.family, started.media[0]
    other = started.media[1].frames[0]
    encode = family.load_media_encoder(torch.float32, CPU)
    named, own = encode([replace(clip, first_frame=other), Media(frames=(other, *clip.frames[1:]))])
    assert torch.equal(named["first_frame_latents"], own["first_frame_latents"])
    kept = sum(value.numel() for name, value in own.items() if name != "latents")
    assert kept == family.num_condition_values(own["latents"].shape)
    example = family.example_conditioning(own["latents"].shape) or {}
    assert example["first_frame_latents"].shape == own["first_frame_latents"].shape
    seen_cfhw = call_with(started, started.latents[:1] + 1)["hidden_states"][0].movedim(-1, 0)
    assert torch.equal(seen_cfhw[:4, :1], started.conditioning[0]["first_frame_latents"])
    assert torch.equal(seen_cfhw[:4, 1:], started.latents[0, :, 1:] + 1)
    assert (own["loss_mask"][:, 0].any(), own["loss_mask"][:, 1:].all()) == (False, True)
    assert family.media_encoder_id(torch.float32) != sample.family.media_encoder_id(torch.float32)


@pytest.mark.parametrize("num_frames", [13, 513])
def test_clips_have_as_many_frames_as_the_pipeline_makes(started: Sample, num_frames: int) -> None:
    for made in (17, 509):
        started.family.check_frames(made, key="data.frame_counts")
    with pytest.raises(UserError, match=f"{num_frames} frames; Kandinsky5I2VPipeline makes 17 to 509"):
        started.family.check_frames(num_frames, key="data.frame_counts")


def test_a_model_with_sparse_attention_is_trained_and_used_with_full(sample: Sample, tmp_path: Path) -> None:
    pipeline = changed(sample.fresh_pipeline(), attention_type="nabla")
    pipeline.save_pretrained(tmp_path)
    family = Kandinsky5Video(PipelineFolder(path=tmp_path))
    request = sample.request(num_inference_steps=1, guidance_scale=1.0, seed=0)
    assert family.sample(family.load_transformer(torch.float32), torch.float32, [request])
    exec("\n".join(family.usage_setup(request)), {"pipeline": pipeline})
    assert pipeline.get_sparse_params(torch.zeros(1, 1, 16, 16, 4), CPU) is None
