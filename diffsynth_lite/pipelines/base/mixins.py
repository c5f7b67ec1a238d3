"""This file has what only some families answer: those that edit images, and those whose clips have audio."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from diffsynth_lite.media import AudioFormat
from diffsynth_lite.pipelines.base.preview_request import Conditioning


class EditInputs:
    """A further base class of families that edit images; by itself one that does nothing special with them.

    Attributes:
        prompt_sees_images: whether the text encoder also sees the images that an edit starts from; or, in a
            family of clips, the one that a clip starts from.
        keeps_input_size: whether previews have the size that their image is encoded at, and no other.
        negative_sees_images: whether it then sees them with negative prompts and dropped captions, too.
    """

    prompt_sees_images: ClassVar[bool] = False
    negative_sees_images: ClassVar[bool] = True
    keeps_input_size: ClassVar[bool] = False

    @property
    def max_inputs(self) -> int | None:
        """Images that an edit may start from; None where any number will do."""
        return None

    @property
    def prompt_tokens_of_an_input(self) -> int:
        """Tokens that one of them takes in the prompt, about."""
        return 0

    def input_size(self, width: int, height: int, num_inputs: int = 1) -> tuple[int, int]:
        """Width and height in pixels that one of this width and height is encoded at.

        Args:
            num_inputs: images that the edit starts from.

        Raises:
            UserError: it has a shape that cannot be encoded.
        """
        return width, height


class WithAudio(ABC):
    """A further base class of families that make clips with audio; their ``default_fps`` is given.

    Their media encoder gives ``audio_latents`` of clips where ``with_audio`` is set, and no others.
    """

    @property
    @abstractmethod
    def audio_format(self) -> AudioFormat:
        """Form of the audio that the model makes."""

    @abstractmethod
    def audio_latents_shape(self, num_frames: int, fps: float) -> tuple[int, ...] | None:
        """Shape of the latents of a clip's audio, without a batch axis; None of images.

        Raises:
            UserError: the clip is too short for its audio.
        """

    def audio_sigma(self, sigma: torch.Tensor) -> torch.Tensor:
        """Noise levels of audio, (B,), where it has none of its own: those of its clips, ``sigma``.

        Another where the model's sampler has other levels of the two at a step.
        """
        return sigma

    @abstractmethod
    def predict_with_audio(
        self,
        transformer: torch.nn.Module,
        noisy_latents: torch.Tensor,
        noisy_audio_latents: torch.Tensor,
        sigma: torch.Tensor,
        conditioning: Sequence[Conditioning],
        *,
        audio_sigma: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``predict``, of clips with their audio: the estimate of each of the two, in its shape.

        Args:
            audio_sigma: (B,), noise level of the audio, in fp32; None where it is ``audio_sigma(sigma)``.
        """
