"""Clips that are learned with their audio: noise, targets and losses of both."""

import dataclasses
from typing import Any

import pytest
import torch
from diffusers.loaders import PeftAdapterMixin
from test_objective import noise_levels

from diffsynth_lite.core.noise.losses import LossBreakdown, MeanLosses, mean_losses
from diffsynth_lite.core.noise.paths import FlowMatchingPath
from diffsynth_lite.core.randomness import normal
from diffsynth_lite.data.batches import AudioBatch, Batch
from diffsynth_lite.data.buckets import Bucket
from diffsynth_lite.lora import add_adapter
from diffsynth_lite.pipelines import WithAudio
from diffsynth_lite.training.evaluation import FixedNoiseErrors, FixedNoiseLoss, ValidationItem
from diffsynth_lite.training.objective import DenoisingObjective, NoiseLevels

VIDEO, AUDIO = (3, 2, 1, 4, 6), (3, 5, 6)
WEIGHT = 0.25


class TwoHeads(torch.nn.Module, PeftAdapterMixin):  # type: ignore[misc]
    """One layer along the last axis of both, and what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(6, 6)
        self.calls: list[tuple[str, int]] = []


def estimate(model: TwoHeads, noisy: torch.Tensor, sigma: torch.Tensor, conditioning: Any) -> torch.Tensor:
    """Depends on all that it is given."""
    captions = torch.tensor([sample.get("caption", 0.0) for sample in conditioning])
    scale = (sigma + captions).view(-1, *(1,) * (noisy.ndim - 1))
    return model.layer(noisy) * (1 + scale)


class Family(WithAudio):
    """Hears."""

    noise_path = FlowMatchingPath()
    audio_format = audio_latents_shape = None

    def predict(
        self, model: Any, noisy: torch.Tensor, sigma: torch.Tensor, conditioning: Any
    ) -> torch.Tensor:
        model.calls.append(("video", len(noisy)))
        return estimate(model, noisy, sigma, conditioning)

    def predict_with_audio(
        self,
        model: Any,
        noisy: torch.Tensor,
        audio: torch.Tensor,
        sigma: torch.Tensor,
        conditioning: Any,
        *,
        audio_sigma: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        model.calls.append(("both", len(noisy)))
        level = sigma if audio_sigma is None else audio_sigma
        return estimate(model, noisy, sigma, conditioning), 2 * estimate(model, audio, level, conditioning)


def objective(**changes: Any) -> DenoisingObjective:
    settings: dict[str, Any] = {
        "family": Family(),
        "noise_levels": noise_levels(),
        "weighting": "none",
        "min_snr_gamma": 5.0,
        "device": torch.device("cpu"),
        "audio_loss_weight": WEIGHT,
    }
    return DenoisingObjective(**(settings | changes))


def batch(**changes: Any) -> Batch:
    """Three clips, of which the second has no audio."""
    generator = torch.Generator().manual_seed(0)
    audio = AudioBatch(
        latents=torch.randn(AUDIO, generator=generator),
        noise=torch.randn(AUDIO, generator=generator),
        uniform=torch.tensor([0.5, 0.1, 0.8]),
        has_audio=torch.tensor([1.0, 0.0, 1.0]),
    )
    settings: dict[str, Any] = {
        "bucket": Bucket(width=48, height=32, num_frames=9),
        "positions": [0, 1, 2],
        "names": ["a", "b", "c"],
        "latents": torch.randn(VIDEO, generator=generator),
        "noise": torch.randn(VIDEO, generator=generator),
        "uniform": torch.tensor([0.25, 0.5, 0.75]),
        "conditioning": [{"caption": torch.tensor(place / 4)} for place in range(3)],
        "unconditional": [{}] * 3,
        "audio": audio,
        "step_samples": 3,
    }
    return Batch(**(settings | changes))


def noisy_and_target(
    given: Batch, audio_sigma: torch.Tensor | None = None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of both parts, written down once more; audio is at the levels of the clips where it has none."""
    assert given.audio is not None
    pairs = []
    levels = given.uniform, given.uniform if audio_sigma is None else audio_sigma
    for part, level in zip((given, given.audio), levels, strict=True):
        sigma = level.view(-1, *(1,) * (part.latents.ndim - 1))
        pairs.append(((1 - sigma) * part.latents + sigma * part.noise, part.noise - part.latents))
    return pairs


def expected_errors(
    given: Batch, model: TwoHeads, audio_sigma: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean squared error of each sample, of its images and of its audio."""
    levels = given.uniform, given.uniform if audio_sigma is None else audio_sigma
    video, audio = (
        (factor * estimate(model, noisy, level, given.conditioning) - target).square().flatten(1).mean(1)
        for factor, level, (noisy, target) in zip(
            (1, 2), levels, noisy_and_target(given, audio_sigma), strict=True
        )
    )
    return video, audio


HEARD = torch.tensor([1.0, 0.0, 1.0])
"""Which of the clips have audio."""


def of_both(video: torch.Tensor, audio: torch.Tensor) -> torch.Tensor:
    return video + WEIGHT * HEARD * audio


def by_kind_of(tried: DenoisingObjective, loss: torch.Tensor) -> MeanLosses:
    assert tried.losses_by_kind is not None
    return mean_losses(loss.item(), tried.losses_by_kind.take(torch.device("cpu")).tolist())


def test_the_loss_is_that_of_the_images_and_weighted_that_of_the_sound_where_there_is_some() -> None:
    given, model = batch(), TwoHeads()
    tried = objective(losses_by_kind=LossBreakdown())
    loss = tried.loss(model, given)
    assert model.calls == [("both", 3)]
    video, audio = expected_errors(given, model)
    torch.testing.assert_close(loss, of_both(video, audio).mean())

    # Each part of the step is reported by itself, that of the audio over the samples that have some.
    by_kind = by_kind_of(tried, loss)
    assert by_kind.preserved is None
    for value, of in ((by_kind.learned, loss), (by_kind.video, video), (by_kind.audio, audio[[0, 2]])):
        assert value == pytest.approx(of.mean().item(), rel=1e-5)
    assert mean_losses(1.0, []) == MeanLosses(learned=1.0)
    # By sample, and by noise level, the whole of it counts.
    assert [loss for _, _, loss in tried.sample_losses.take()] == pytest.approx(
        of_both(video, audio).tolist()
    )


def test_silence_is_learned_where_that_is_asked_for_and_a_weight_of_0_hears_without_learning_it() -> None:
    given, model = batch(), TwoHeads()
    video, audio = expected_errors(given, model)
    learns = objective(train_silent_clips=True).loss(model, given)
    torch.testing.assert_close(learns, (video + WEIGHT * audio).mean())
    deaf = objective(audio_loss_weight=0.0).loss(model, given)
    torch.testing.assert_close(deaf, video.mean())
    assert model.calls == [("both", 3)] * 2


def test_images_of_a_family_that_makes_sound_have_the_loss_of_images() -> None:
    given, model = batch(audio=None), TwoHeads()
    tried = objective(losses_by_kind=LossBreakdown())
    loss = tried.loss(model, given)
    assert model.calls == [("video", 3)]
    torch.testing.assert_close(loss, expected_errors(batch(), model)[0].mean())
    by_kind = by_kind_of(tried, loss)
    assert (by_kind.video, by_kind.audio) == (None, None)


def test_masks_are_of_the_images_and_weightings_and_huber_of_both() -> None:
    given, model = batch(), TwoHeads()
    mask = torch.zeros(3, 1, 1, 4, 6)
    mask[..., :2] = 1
    masked = dataclasses.replace(given, loss_mask=mask)
    (noisy, target), _ = noisy_and_target(given)
    of_mask = (estimate(model, noisy, given.uniform, given.conditioning) - target).square()[..., :2]
    expected = of_both(of_mask.flatten(1).mean(1), expected_errors(given, model)[1])
    found = objective(weighting="sigma_sqrt").loss(model, masked)
    torch.testing.assert_close(found, (expected / given.uniform.square()).mean())

    parts = []
    for factor, (noisy, target) in zip((1, 2), noisy_and_target(given), strict=True):
        error = (factor * estimate(model, noisy, given.uniform, given.conditioning) - target).abs()
        parts.append(torch.where(error < 0.5, error.square(), error - 0.25).flatten(1).mean(1))
    found = objective(huber_delta=0.5).loss(model, given)
    torch.testing.assert_close(found, of_both(*parts).mean())


def test_a_guided_target_guides_both() -> None:
    given, model = batch(), TwoHeads()
    loss = objective(guidance_target=3.0).loss(model, given)
    assert model.calls == [("both", 3)] * 2
    errors = []
    for factor, (noisy, target) in zip((1, 2), noisy_and_target(given), strict=True):
        own = factor * estimate(model, noisy, given.uniform, [{}] * 3)
        guided = own + 3 * (target - own)
        found = factor * estimate(model, noisy, given.uniform, given.conditioning)
        errors.append((found - guided).square().flatten(1).mean(1))
    torch.testing.assert_close(loss, of_both(*errors).mean())


def test_what_is_preserved_keeps_its_audio_too_and_is_counted_separately() -> None:
    given, model, plain = batch(preserved=(2,)), TwoHeads(), TwoHeads()
    add_adapter(model, ["layer"], rank=2, alpha=2, dropout=0, seed=0)
    torch.nn.init.normal_(model.layer.lora_B["default"].weight)
    model.train()
    tried = objective(losses_by_kind=LossBreakdown())
    loss = tried.loss(model, given)
    assert model.calls == [("both", 1), ("both", 3)]
    errors = []
    for factor, (noisy, target) in zip((1, 2), noisy_and_target(given), strict=True):
        target[2] = factor * estimate(plain, noisy, given.uniform, given.conditioning)[2]
        found = factor * estimate(model, noisy, given.uniform, given.conditioning)
        errors.append((found - target).square().flatten(1).mean(1))
    video, audio = errors
    totals = of_both(video, audio)
    torch.testing.assert_close(loss, totals.mean())
    by_kind = by_kind_of(tried, loss)
    expected = (totals[:2].mean(), totals[2], video[:2].mean(), audio[0])
    found_by_kind = (by_kind.learned, by_kind.preserved, by_kind.video, by_kind.audio)
    for value, of in zip(found_by_kind, expected, strict=True):
        assert value == pytest.approx(of.item(), rel=1e-5)


def by_shape() -> NoiseLevels:
    """Noise levels with a shift of 4 for clips, and of 2 for audio."""
    shifts = {VIDEO[1:]: 4.0, AUDIO[1:]: 2.0}
    return dataclasses.replace(objective().noise_levels, shift=lambda shape: shifts[tuple(shape)])


def moved(level: torch.Tensor, shift: float) -> torch.Tensor:
    return shift * level / (1 + (shift - 1) * level)


def test_audio_with_levels_of_its_own_has_them_from_its_own_draws_tokens_and_weights() -> None:
    given, model = batch(), TwoHeads()
    assert given.audio is not None
    tried = objective(
        own_audio_levels=True, losses_by_kind=LossBreakdown(), noise_levels=by_shape(), weighting="sigma_sqrt"
    )
    loss = tried.loss(model, given)
    sigma, audio_sigma = moved(given.uniform, 4), moved(given.audio.uniform, 2)
    video, audio = expected_errors(dataclasses.replace(given, uniform=sigma), model, audio_sigma)
    video, audio = video / sigma.square(), audio / audio_sigma.square()
    torch.testing.assert_close(loss, of_both(video, audio).mean())
    by_kind = by_kind_of(tried, loss)
    assert by_kind.learned == pytest.approx(loss.item(), rel=1e-5)
    assert by_kind.video == pytest.approx(video.mean().item(), rel=1e-5)
    assert by_kind.audio == pytest.approx(audio[[0, 2]].mean().item(), rel=1e-5)
    # A noise level has the loss of what is at it: the clips only.
    for (_, level, found), at, of in zip(tried.sample_losses.take(), sigma, video, strict=True):
        assert (level, found) == pytest.approx((at.item(), of.item()), rel=1e-5)
    sums, numbers = tried.loss_by_tenth.take(given.latents.device)
    assert (sums.sum().item(), numbers.sum().item()) == (pytest.approx(video.sum().item(), rel=1e-5), 3)


def test_with_levels_of_its_own_what_guides_and_what_is_preserved_are_at_them_too() -> None:
    given, model, plain = batch(preserved=(2,)), TwoHeads(), TwoHeads()
    assert given.audio is not None
    add_adapter(model, ["layer"], rank=2, alpha=2, dropout=0, seed=0)
    torch.nn.init.normal_(model.layer.lora_B["default"].weight)
    loss = objective(own_audio_levels=True, guidance_target=3.0).loss(model, given)
    levels, errors = (given.uniform, given.audio.uniform), []
    for factor, level, (noisy, target) in zip(
        (1, 2), levels, noisy_and_target(given, given.audio.uniform), strict=True
    ):
        own = factor * estimate(model, noisy, level, [{}] * 3)
        guided = own + 3 * (target - own)
        guided[2] = factor * estimate(plain, noisy, level, given.conditioning)[2]
        found = factor * estimate(model, noisy, level, given.conditioning)
        errors.append((found - guided).square().flatten(1).mean(1))
    torch.testing.assert_close(loss, of_both(*errors).mean())


def test_images_have_no_audio_to_have_a_level_of_its_own() -> None:
    given, model = batch(audio=None), TwoHeads()
    losses = [objective(own_audio_levels=own).loss(model, given) for own in (False, True)]
    assert torch.equal(*losses)
    assert model.calls == [("video", 3)] * 2


@pytest.mark.parametrize("own", [False, True])
def test_the_loss_on_fixed_noise_reports_its_parts_and_has_noise_of_its_own_for_the_audio(own: bool) -> None:
    given, model = batch(), TwoHeads()
    assert given.audio is not None
    items = [
        ValidationItem(
            bucket=given.bucket,
            latents=given.latents[place],
            conditioning=given.conditioning[place],
            audio={"audio_latents": given.audio.latents[place], "has_audio": given.audio.has_audio[place]},
        )
        for place in range(3)
    ]
    tried = objective(own_audio_levels=own, noise_levels=by_shape())
    errors = FixedNoiseErrors(objective=tried, seed=3, purpose="validation-noise", batch_size=2)
    values = FixedNoiseLoss(name="validation_loss", items=items, errors=errors).measure(model).values
    assert model.calls == [("both", 2), ("both", 1)]
    drawn = dataclasses.replace(
        given,
        uniform=torch.tensor([1 / 6, 1 / 2, 5 / 6]),
        noise=torch.stack([normal(3, "validation-noise", place, VIDEO[1:]) for place in range(3)]),
        audio=dataclasses.replace(
            given.audio,
            noise=torch.stack([normal(3, "audio-validation-noise", place, AUDIO[1:]) for place in range(3)]),
        ),
    )
    # Of its own a third further on the way from data to noise, whatever the tokens and draws.
    video, audio = expected_errors(drawn, model, torch.tensor([1 / 2, 5 / 6, 1 / 6]) if own else None)
    expected = {
        "validation_loss": of_both(video, audio).mean().item(),
        "validation_loss/video": video.mean().item(),
        "validation_loss/audio": audio[[0, 2]].mean().item(),
    }
    assert values == pytest.approx(expected, rel=1e-5)

    silent = [
        dataclasses.replace(item, audio=item.audio | {"has_audio": torch.tensor(0.0)}) for item in items
    ]
    values = FixedNoiseLoss(name="validation_loss", items=silent, errors=errors).measure(model).values
    assert values.keys() == {"validation_loss", "validation_loss/video"}
    assert values["validation_loss"] == pytest.approx(values["validation_loss/video"], rel=1e-6)
