"""Clips that start from an image, by a timestep for each token, as in diffusers' own pipelines."""

import dataclasses
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from family_sample import CPU, Sample, build_sample, picture
from release_layouts import ti2v

from diffsynth_lite.errors import UserError
from diffsynth_lite.training.objective import DenoisingObjective

SIGMA = torch.tensor([0.1, 0.5, 0.9])


@pytest.fixture(scope="module", params=["ltx_video", "wan"])
def clips(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sample:
    """Three clips of 3 latent frames, of 8 tokens each."""
    pipeline = ti2v if request.param == "wan" else None
    return build_sample(request.param, tmp_path_factory.mktemp(request.param), pipeline)


@pytest.fixture(scope="module")
def started(clips: Sample) -> Sample:
    """The same clips, of which the last two start from an image, whose latents the VAE is sure of."""
    media = [clips.media[0]] + [
        dataclasses.replace(item, first_frame=picture(128, 64, 40 + place))
        for place, item in enumerate(clips.media[1:])
    ]
    encoded = clips.family.load_media_encoder(torch.float32, CPU)(media)
    latents = torch.stack([tensors.pop("latents") for tensors in encoded])
    assert torch.equal(latents[:, :, 1:], clips.latents[:, :, 1:])
    masks = [tensors.pop("loss_mask", None) for tensors in encoded]
    assert masks[0] is None
    assert all(torch.equal(mask, masks[1]) for mask in masks[1:])
    for tensors in encoded:
        tensors |= {name: 0 * value for name, value in tensors.items() if name == "first_frame_std"}
    conditioning = [old | new for old, new in zip(clips.conditioning, encoded, strict=True)]
    return dataclasses.replace(clips, media=media, latents=latents, conditioning=conditioning)


def test_the_latents_of_a_first_frame_are_those_of_the_clips_own(clips: Sample) -> None:
    clip = dataclasses.replace(clips.media[0], first_frame=clips.media[0].frames[0])
    (encoded,) = clips.family.load_media_encoder(torch.float32, CPU)([clip])
    # The autoencoder is causal: a first frame knows nothing of those after it.
    torch.testing.assert_close(
        encoded["first_frame_latents"], encoded["latents"][:, :1], rtol=1e-4, atol=1e-5
    )
    assert encoded["loss_mask"].shape == (1, *clips.latents.shape[2:])
    assert encoded["loss_mask"].mean((0, 2, 3)).tolist() == [0, 1, 1]


def test_the_model_sees_a_first_frame_as_in_the_image_to_video_pipeline(
    started: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = started.family
    transformer, scheduler = family.load_transformer(torch.float32), family.load_scheduler()
    monkeypatch.setattr(family, "load_scheduler", lambda: scheduler)
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda self, _generator: self.mode())
    calls: list[dict[str, Any]] = []
    transformer.register_forward_pre_hook(
        lambda _module, _args, kwargs: calls.append(kwargs), with_kwargs=True
    )
    request = started.request(num_inference_steps=2, guidance_scale=1.0, seed=0)
    request = dataclasses.replace(request, inputs=(started.media[1].first_frame,))
    family.sample(transformer, torch.float32, [request])
    sigma = scheduler.sigmas[1].float()
    with torch.no_grad():
        family.predict(transformer, started.latents[1:2], sigma[None], started.conditioning[1:2])
    first, second, ours = calls
    assert ours["timestep"].tolist() == [[0.0] * 8 + [(sigma * 1000).item()] * 16]
    # Some schedulers round to whole timesteps.
    torch.testing.assert_close(second["timestep"].float(), ours["timestep"], rtol=0, atol=1)
    assert torch.equal(first_frame_of(first), first_frame_of(second))
    assert torch.equal(first_frame_of(ours)[0], started.conditioning[1]["first_frame_latents"].flatten(1).T)
    torch.testing.assert_close(first_frame_of(first), first_frame_of(ours), rtol=1e-4, atol=1e-5)
    scales = [[float(scale) for scale in call.get("rope_interpolation_scale", ())] for call in (second, ours)]
    assert scales[0] == pytest.approx(scales[1])


def first_frame_of(call: dict[str, Any]) -> torch.Tensor:
    """(B, height * width, C), from the tokens of LTX-Video or from the latents of Wan."""
    hidden_states = call["hidden_states"]
    return hidden_states[:, :8] if hidden_states.ndim == 3 else hidden_states[:, :, 0].flatten(2).mT


def test_noise_on_a_first_frame_reaches_neither_the_model_nor_the_loss(started: Sample) -> None:
    transformer = started.family.load_transformer(torch.float32)
    objective = DenoisingObjective(
        family=started.family,
        noise_levels=None,
        weighting="none",
        min_snr_gamma=5.0,
        device=CPU,
    )
    loss_mask = torch.ones_like(started.latents[:, :1])
    loss_mask[1:, :, 0] = 0
    noise = torch.randn(started.latents.shape, generator=torch.Generator().manual_seed(0))
    other = noise.clone()
    other[:, :, 0] += 1
    with torch.no_grad():
        errors, other_errors = (
            objective.errors(
                transformer, started.latents, noisy, SIGMA, started.conditioning, loss_mask
            ).total
            for noisy in (noise, other)
        )
    assert torch.equal(errors[1:], other_errors[1:])
    assert errors[0] != other_errors[0]


def test_clips_with_and_without_a_first_frame_share_a_batch(started: Sample) -> None:
    given = started.latents.clone()
    transformer = started.family.load_transformer(torch.float32)
    with torch.no_grad():
        together = started.family.predict(transformer, started.latents, SIGMA, started.conditioning)
        single = [
            started.family.predict(
                transformer, started.latents[place, None], SIGMA[place, None], [started.conditioning[place]]
            )
            for place in range(3)
        ]
    # One timestep for a single sample, and one for each token in a batch: the same products in other shapes.
    torch.testing.assert_close(together, torch.cat(single), rtol=1e-4, atol=1e-5)
    assert torch.equal(started.latents, given)


def test_a_clip_of_its_first_frame_only_is_refused(clips: Sample) -> None:
    encode = clips.family.load_media_encoder(torch.float32, CPU)
    first = picture(128, 64, 9)
    with pytest.raises(UserError, match="clip of 1 frame"):
        encode([dataclasses.replace(clips.media[0], first_frame=first, frames=(first,))])


def test_a_preview_from_an_image_has_its_size_and_follows_it(clips: Sample) -> None:
    transformer = clips.family.load_transformer(torch.float32)
    request = clips.request(num_inference_steps=2, guidance_scale=2.0, seed=5)
    requests = [dataclasses.replace(request, inputs=(picture(150, 150, quality),)) for quality in (5, 5, 60)]
    first, again, other = clips.family.sample(transformer, torch.float32, requests)
    assert [frame.size for frame in first] == [(128, 64)] * len(clips.media[0].frames)
    assert [frame.tobytes() for frame in first] == [frame.tobytes() for frame in again]
    assert first[0].tobytes() != other[0].tobytes()
