"""This file turns a batch into a loss: the error of a model's estimates at random noise levels."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate

import torch
from accelerate import Accelerator
from torch.nn.functional import huber_loss

from diffsynth_lite.core.evaluation_mode import evaluation_mode
from diffsynth_lite.core.noise.densities import (
    LevelShares,
    TimestepDensity,
    draw_of_level,
    level_shares,
    sigma_from_uniform,
)
from diffsynth_lite.core.noise.losses import LossBreakdown, LossByTenth, SampleLosses
from diffsynth_lite.core.noise.paths import LossWeighting, loss_weight
from diffsynth_lite.data.batches import AudioBatch, Batch
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora import without_adapter
from diffsynth_lite.pipelines import Conditioning, ModelFamily, WithAudio
from diffsynth_lite.run_folder.progress import is_logged

_SMALLEST_SPAN = 1e-6

_Parts = tuple[torch.Tensor, ...]
"""Of B samples: (B, ...) of their images and, where it is learned, (B, ...) of their audio."""


@dataclass(kw_only=True)
class NoiseLevels:
    """The distribution of noise levels that the model is trained on.

    Attributes:
        density: see :func:`diffsynth_lite.core.noise.densities.sigma_from_uniform`, as for the next three.
        shift: of the shape of one sample's latents, or of those of its audio; see there.
        sigma_min: lower end of the range trained on, in [0, 1).
        sigma_max: upper end, in (0, 1].
        ranges: the parts [low, high) of the noise levels that are trained, each by a model of its own: all
            samples of an optimizer step are of one of them, unless the shift depends on their sizes. 1 itself
            belongs to the part that ends there.
    """

    density: TimestepDensity
    logit_mean: float
    logit_std: float
    mode_scale: float
    shift: Callable[[Sequence[int]], float]
    sigma_min: float
    sigma_max: float
    ranges: Sequence[tuple[float, float]] = ((0.0, 1.0),)
    _spans: dict[tuple[int, ...], list[tuple[float, float]]] = field(init=False, default_factory=dict)

    def sigma(
        self, uniform: torch.Tensor, latents_shape: Sequence[int], *, step_uniform: float = 0.0
    ) -> torch.Tensor:
        """Noise levels of uniform draws.

        Over many steps they have the density for any ``ranges``, cut to the levels that these cover.

        Args:
            uniform: (B,), in [0, 1).
            latents_shape: shape of one sample's latents.
            step_uniform: in [0, 1), chooses the range; the same for all samples of a step.

        Returns:
            (B,), in [sigma_min, sigma_max] and in one of ``ranges``, fp32.
        """
        if tuple(self.ranges) == ((0.0, 1.0),):
            return self._whole(uniform, latents_shape)
        spans = self._spans_of(tuple(latents_shape))
        ends = list(accumulate(last - first for first, last in spans))
        place = next(place for place, end in enumerate(ends) if step_uniform * ends[-1] < end)
        return self._of_range(uniform, place, latents_shape)

    def shares(self, latents_shape: Sequence[int]) -> list[tuple[float, LevelShares]]:
        """For each of ``ranges``, the part of the steps that it gets, and how their noise levels are spread.

        Args:
            latents_shape: shape of one sample's latents.
        """
        if tuple(self.ranges) == ((0.0, 1.0),):
            return [(1.0, level_shares(partial(self._whole, latents_shape=latents_shape)))]
        lengths = [last - first for first, last in self._spans_of(tuple(latents_shape))]
        return [
            (
                length / sum(lengths),
                level_shares(partial(self._of_range, place=place, latents_shape=latents_shape)),
            )
            for place, length in enumerate(lengths)
        ]

    def _of_range(self, uniform: torch.Tensor, place: int, latents_shape: Sequence[int]) -> torch.Tensor:
        """Noise levels of draws, all of one of ``ranges``."""
        first, last = self._spans_of(tuple(latents_shape))[place]
        low, high = self.ranges[place]
        sigma = self._whole(first + (last - first) * uniform.double(), latents_shape)
        # Rounding must not carry a level over to the neighbour, whose model is another one.
        below = torch.nextafter(torch.tensor(high), torch.tensor(-math.inf)).item()
        return sigma.clamp(low, 1.0 if high == 1.0 else below)

    def quantile(self, part: float) -> float:
        """The noise level that is ``part`` of the way, in [0, 1), through all that is trained."""
        left = part * sum(high - low for low, high in self.ranges)
        for low, high in sorted(self.ranges):
            if left < high - low:
                break
            left -= high - low
        return low + left

    def _spans_of(self, latents_shape: tuple[int, ...]) -> list[tuple[float, float]]:
        """For each range, the span of the uniform draws whose noise levels lie in it."""
        if latents_shape not in self._spans:
            spans = []
            levels = partial(self._whole, latents_shape=latents_shape)
            for bounds in self.ranges:
                first, last = sorted(draw_of_level(levels, bound) for bound in bounds)
                if last - first < _SMALLEST_SPAN:
                    raise UserError(
                        f"objective.sigma_min, objective.sigma_max: {self.sigma_min} to {self.sigma_max} "
                        f"leaves nothing of the noise levels {bounds[0]} to {bounds[1]}, which a model of "
                        "their own is trained on; widen them, or leave its component out of lora.components"
                    )
                spans.append((first, last))
            self._spans[latents_shape] = spans
        return self._spans[latents_shape]

    def _whole(self, uniform: torch.Tensor, latents_shape: Sequence[int]) -> torch.Tensor:
        sigma = sigma_from_uniform(
            uniform,
            self.density,
            logit_mean=self.logit_mean,
            logit_std=self.logit_std,
            mode_scale=self.mode_scale,
            shift=self.shift(latents_shape),
        )
        return self.sigma_min + (self.sigma_max - self.sigma_min) * sigma


@dataclass(frozen=True, kw_only=True)
class SampleErrors:
    """Errors of B samples, fp32, each (B,).

    Attributes:
        total: the error that is learned from.
        video: of the images or clips.
        audio: of their audio, 0 where that does not count; None where no audio is learned.
        has_audio: 1 where it counts, else 0.
    """

    total: torch.Tensor
    video: torch.Tensor
    audio: torch.Tensor | None = None
    has_audio: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """The model's inputs for B samples.

    Attributes:
        sigma: (B,), noise levels.
        audio_sigma: (B,), those of audio; None where they are the same, or there is none.
    """

    noisy: _Parts
    sigma: torch.Tensor
    audio_sigma: torch.Tensor | None
    conditioning: Sequence[Conditioning]

    def of(self, places: Sequence[int]) -> "_Seen":
        """That of some of the samples."""

        def chosen(part: torch.Tensor) -> torch.Tensor:
            # Not by an index, which would wait for the device.
            return torch.stack([part[place] for place in places])

        return _Seen(
            noisy=tuple(map(chosen, self.noisy)),
            sigma=chosen(self.sigma),
            audio_sigma=None if self.audio_sigma is None else chosen(self.audio_sigma),
            conditioning=[self.conditioning[place] for place in places],
        )


@dataclass(frozen=True, kw_only=True)
class DenoisingObjective:
    """The error of a model family's estimate, on the family's own path from data to noise.

    Attributes:
        weighting: loss weight by noise level; see :func:`diffsynth_lite.core.noise.paths.loss_weight`.
        huber_delta: the error beyond which the loss is linear; None where it is the squared error throughout.
        guidance_target: scale g of the guided target ``u + g (v - u)``; None is the plain target v.
        is_counted: whether this process is the one that counts its samples, where several have the same.
        loss_by_tenth: adds up the losses of the learned samples until they are logged.
        losses_by_kind: adds up the losses of learned and of preserved samples, of images and of audio; None
            where all are learned, count alike, and have no audio.
        audio_loss_weight: weight of the error of the audio relative to that of the images.
        own_audio_levels: whether the audio of clips is at noise levels of its own.
        train_silent_clips: whether clips without audio are learned as silent ones.
    """

    family: ModelFamily
    noise_levels: NoiseLevels
    weighting: LossWeighting
    min_snr_gamma: float
    device: torch.device
    huber_delta: float | None = None
    guidance_target: float | None = None
    is_counted: bool = True
    loss_by_tenth: LossByTenth = field(default_factory=LossByTenth)
    sample_losses: SampleLosses = field(default_factory=SampleLosses)
    losses_by_kind: LossBreakdown | None = None
    audio_loss_weight: float = 1.0
    own_audio_levels: bool = False
    train_silent_clips: bool = False

    def losses(self, transformer: torch.nn.Module, batch: Batch) -> Iterator[torch.Tensor]:
        """The parts of the loss of a micro-batch, here one; each has its backward pass before the next."""
        yield self.loss(transformer, batch)

    def loss(self, transformer: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Mean weighted loss of the estimate over a micro-batch, a scalar in fp32."""
        sigma, audio_sigma = self._levels(batch, batch), None
        if self.own_audio_levels and batch.audio is not None:
            audio_sigma = self._levels(batch, batch.audio)
        errors = self.errors(transformer, batch, sigma, audio_sigma=audio_sigma, huber_delta=self.huber_delta)
        weight = self._weight(sigma)
        audio_weight, of_level = weight, weight * errors.total
        losses = of_level
        if audio_sigma is not None and errors.audio is not None:
            audio_weight, of_level = self._weight(audio_sigma), weight * errors.video
            losses = of_level + self.audio_loss_weight * audio_weight * errors.audio
        if self.is_counted:
            self._count(batch, losses, sigma, of_level)
            self._count_parts(batch, weight * errors.video, audio_weight, errors)
        if batch.loss_weights is not None:
            losses = losses * batch.loss_weights.to(self.device)
        return losses.mean()

    def _levels(self, batch: Batch, part: Batch | AudioBatch) -> torch.Tensor:
        """(B,), the noise levels of a batch or of its audio, on the device."""
        shape, shared = part.latents.shape[1:], batch.step_uniform
        return self.noise_levels.sigma(part.uniform, shape, step_uniform=shared).to(self.device)

    def _count(self, batch: Batch, losses: torch.Tensor, sigma: torch.Tensor, of_level: torch.Tensor) -> None:
        """Count the losses, and the part of them that is at the noise levels ``sigma``; each is (B,)."""
        preserved = batch.preserved or ()
        if self.losses_by_kind is not None:
            self.losses_by_kind.add(losses, preserved)
        learned = [place for place in range(len(losses)) if place not in preserved]
        if not learned:
            return
        if preserved:
            chosen = (torch.stack([values[place] for place in learned]) for values in (sigma, of_level))
            sigma, of_level = chosen
        names, positions = zip(
            *((batch.names[place], batch.positions[place]) for place in learned), strict=True
        )
        self.loss_by_tenth.add(sigma, of_level)
        self.sample_losses.add(names, positions, sigma, of_level)

    def _count_parts(
        self, batch: Batch, video: torch.Tensor, audio_weight: torch.Tensor, errors: SampleErrors
    ) -> None:
        if self.losses_by_kind is None or batch.audio is None or errors.audio is None:
            return
        counts = self._counts_of_audio(batch.audio).tolist()
        self.losses_by_kind.add_parts(video, audio_weight * errors.audio, counts, batch.preserved or ())

    def _counts_of_audio(self, audio: AudioBatch) -> torch.Tensor:
        """(B,), 1 where the error of a sample's audio counts, else 0; on the batch's device."""
        return torch.ones_like(audio.has_audio) if self.train_silent_clips else audio.has_audio

    def totals_by_kind(self, accelerator: Accelerator) -> torch.Tensor:
        """The losses of the step that is ending, of all devices, as :meth:`LossBreakdown.take` has them.

        Args:
            accelerator: adds up those of its processes, which all call this.

        Returns:
            (12,) on the device; (0,) where all samples are learned, count alike, and have no audio.
        """
        if self.losses_by_kind is None:
            return torch.empty(0, device=self.device)
        totals: torch.Tensor = accelerator.reduce(self.losses_by_kind.take(self.device), reduction="sum")
        return totals

    def totals_by_noise(self, accelerator: Accelerator, every_steps: int, step: int) -> torch.Tensor:
        """The losses by tenth of the noise since the last step that was logged, of all devices.

        Returns:
            (20,), ten sums and ten numbers of samples, on the device; (0,) where the step is not logged.
        """
        if not is_logged(step, every_steps):
            return torch.empty(0, device=self.device)
        totals: torch.Tensor = accelerator.reduce(self.loss_by_tenth.take(self.device), reduction="sum")
        return totals.flatten()

    def _weight(self, sigma: torch.Tensor) -> torch.Tensor:
        if self.weighting == "min_snr":
            return self.family.noise_path.min_snr_weight(sigma, self.min_snr_gamma)
        return loss_weight(sigma, self.weighting)

    def errors(
        self,
        transformer: torch.nn.Module,
        batch: Batch,
        sigma: torch.Tensor,
        *,
        audio_sigma: torch.Tensor | None = None,
        huber_delta: float | None = None,
    ) -> SampleErrors:
        """Mean error of the estimate of each sample, squared by default.

        A loss mask is divided by its mean over the sample, so that a small mask does not make a small loss.

        Args:
            transformer: plain or wrapped by DDP.
            batch: gives no noise levels.
            sigma: (B,), in [0, 1], fp32, on the device.
            audio_sigma: (B,), of audio, as ``sigma``; None where it has no noise levels of its own.
            huber_delta: above this, above 0, errors count by their size, as Huber (1964) has it: twice
                ``torch.nn.functional.huber_loss``, which makes it the squared error of those below.
        """
        audio = batch.audio
        # Everything but the model's input stays in fp32: bf16 has 8 bits for a noise level.
        given = [(batch.latents, batch.noise)]
        if audio is not None:
            given.append((audio.latents, audio.noise))
        parts = [(clean.to(self.device), drawn.to(self.device)) for clean, drawn in given]
        levels = [sigma]
        if audio is not None:
            assert isinstance(self.family, WithAudio), "the audio of no other is learned"
            levels.append(self.family.audio_sigma(sigma) if audio_sigma is None else audio_sigma)
        path = self.family.noise_path
        noisy = tuple(path.add_noise(*part, level) for part, level in zip(parts, levels, strict=True))
        targets = tuple(path.target(*part, level) for part, level in zip(parts, levels, strict=True))
        seen = _Seen(noisy=noisy, sigma=sigma, audio_sigma=audio_sigma, conditioning=batch.conditioning)
        if self.guidance_target is not None:
            # Before the pass with gradients, so that only one is held at a time.
            own = self._own_estimate(transformer, replace(seen, conditioning=batch.unconditional))
            scale = self.guidance_target
            targets = tuple(one + scale * (target - one) for one, target in zip(own, targets, strict=True))
        if batch.preserved is not None:
            targets = self._preserving(targets, batch.preserved, transformer, seen)
        predicted = self._estimate(transformer, seen)
        errors = [
            pixel_errors(estimate.float(), target, huber_delta)
            for estimate, target in zip(predicted, targets, strict=True)
        ]
        video = _mean(errors[0], batch.loss_mask)
        if audio is None:
            return SampleErrors(total=video, video=video)
        counts = self._counts_of_audio(audio).to(self.device)
        of_audio = _mean(errors[1]) * counts
        total = video + self.audio_loss_weight * of_audio
        return SampleErrors(total=total, video=video, audio=of_audio, has_audio=counts)

    def _estimate(self, transformer: torch.nn.Module, seen: _Seen) -> _Parts:
        """The model's estimate of each part, in its shape."""
        if len(seen.noisy) == 1:
            return (self.family.predict(transformer, seen.noisy[0], seen.sigma, seen.conditioning),)
        # A shared level is not given twice: a family of somebody else may not know the argument.
        own = {} if seen.audio_sigma is None else {"audio_sigma": seen.audio_sigma}
        video, audio = seen.noisy
        assert isinstance(self.family, WithAudio)
        return self.family.predict_with_audio(transformer, video, audio, seen.sigma, seen.conditioning, **own)

    def _own_estimate(self, transformer: torch.nn.Module, seen: _Seen) -> _Parts:
        """The model's estimate as it is now, without gradients and dropout, in fp32."""
        with evaluation_mode(transformer):
            return tuple(part.float() for part in self._estimate(transformer, seen))

    def _preserving(
        self,
        targets: _Parts,
        preserved: Sequence[int],
        transformer: torch.nn.Module,
        seen: _Seen,
    ) -> _Parts:
        """The targets, of which some are the model's estimates without its adapter.

        Only these are computed, without gradients or dropout, and ahead of the pass that trains: its
        recomputes do not come here. Text encoders that are trained are without their adapters, too. Where
        none is preserved, one is computed for the sake of the processes that run the model together.
        """
        with without_adapter(transformer):
            estimates = self._own_estimate(transformer, seen.of(preserved or (0,)))
        return tuple(
            _with_places(target, preserved, estimate)
            for target, estimate in zip(targets, estimates, strict=True)
        )


def _with_places(target: torch.Tensor, places: Sequence[int], values: torch.Tensor) -> torch.Tensor:
    """``target``, (B, ...), with ``values`` in place of those at ``places``; there may be more of them."""
    changed = list(target)
    for place, value in zip(places, values, strict=False):
        changed[place] = value
    return torch.stack(changed)


def _mean(errors: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """(B,), the mean error of each sample, weighted by a mask of broadcastable shape."""
    if mask is None:
        return errors.flatten(1).mean(1)
    mask = mask.to(errors.device).float()
    return (errors * mask).flatten(1).mean(1) / mask.flatten(1).mean(1)


def pixel_errors(predicted: torch.Tensor, target: torch.Tensor, huber_delta: float | None) -> torch.Tensor:
    """The error of each element, in the shape of both."""
    if huber_delta is None:
        return (predicted - target).square()
    return 2 * huber_loss(predicted, target, reduction="none", delta=huber_delta)
