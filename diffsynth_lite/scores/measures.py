"""This file makes the scores of a LoRA out of features of images: by prompt, as the record keeps them.

Letters of shapes: P prompts, N images of a caption, D size of the features.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from diffsynth_lite.scores.record import ScoredColumn

_SMALLEST = 1e-6
"""Distance of images that are the same to features in float32."""


@dataclass(frozen=True, kw_only=True)
class GeneratedFeatures:
    """What is known of the images of one LoRA, or of the base, which have the same prompts and seeds.

    Attributes:
        new: of images of captions of held-out images, (P, D), unit vectors, as all features.
        plain: of images of prompts that do not name what was taught, (P, D).
        taught: of images of training captions, (P, D); P may be 0.
        prompt: similarity of the images of new prompts to their prompts, (P,).
    """

    new: np.ndarray
    plain: np.ndarray
    taught: np.ndarray
    prompt: np.ndarray


class References:
    """What the images of a LoRA are compared with.

    Args:
        held_out: features of the held-out images of each new prompt, (N, D), N of each prompt its own.
        training: features of the training images of each taught prompt, (N, D).
        base_plain: features of the base's images of plain prompts, (P, D).
        base_again: those of other seeds; None for none.

    Attributes:
        held_out_contrast: likeness of held-out images to others of the same caption, less that to images of
            others: an image that is the only one of its caption is compared with itself.
        other_seed: as in the record.
    """

    def __init__(
        self,
        *,
        held_out: Sequence[np.ndarray],
        training: Sequence[np.ndarray],
        base_plain: np.ndarray,
        base_again: np.ndarray | None = None,
    ) -> None:
        self._held_out, self._training, self._base_plain = held_out, training, base_plain
        self._between_plain = 1.0
        if (count := len(base_plain)) > 1:
            alike = base_plain @ base_plain.T
            mean = float(alike.sum() - alike.trace()) / (count * (count - 1))
            self._between_plain = max(1 - mean, _SMALLEST)
        self.other_seed = () if base_again is None else self._kept(base_again)
        own, others = self._own_and_others(held_out)
        among = [_without_itself(*pair) for pair in zip(own, held_out, strict=True)]
        self.held_out_contrast = float(np.mean(among) - np.mean(others))

    def scores(self, column: str, step: int | None, images: GeneratedFeatures) -> ScoredColumn:
        """The scores of the images of a LoRA, or of the base."""
        own, others = self._own_and_others(images.new[:, None])
        memory = [np.mean(to @ image) for image, to in zip(images.taught, self._training, strict=True)]
        return ScoredColumn(
            column=column,
            step=step,
            likeness=_floats(own),
            contrast=_floats(own - others),
            prompt=_floats(images.prompt),
            kept=self._kept(images.plain),
            memory=_floats(memory),
        )

    def _kept(self, plain: np.ndarray) -> tuple[float, ...]:
        """What images of plain prompts, (P, D), kept of the base's."""
        return _floats(1 - (1 - np.sum(plain * self._base_plain, axis=-1)) / self._between_plain)

    def _own_and_others(self, by_prompt: Sequence[np.ndarray] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean likeness of the images of each new prompt, (N, D), to the held-out images of that caption, and
        to images of others, both (P,): half those of other captions, half the base's of plain prompts."""
        to_plain = np.array([np.mean(images @ self._base_plain.T) for images in by_prompt])
        to_all = np.array([[np.mean(images @ held.T) for held in self._held_out] for images in by_prompt])
        own = to_all.diagonal().copy()
        if len(own) == 1:
            return own, to_plain
        return own, ((to_all.sum(axis=1) - own) / (len(own) - 1) + to_plain) / 2


def _without_itself(likeness: float, images: np.ndarray) -> float:
    """Mean likeness of images (N, D) to each other, of that to all of them, themselves included."""
    count = len(images)
    return (count * likeness - 1) / (count - 1) if count > 1 else likeness


def _floats(values: np.ndarray | Sequence[float]) -> tuple[float, ...]:
    return tuple(map(float, values))
