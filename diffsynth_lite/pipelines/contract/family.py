"""What a model family offers to the trainer. Latents carry no layout here: a family's file says its axes."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL.Image import Image

from diffsynth_lite.core.noise import resolution_mu
from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Media, Prompt, RecordKind
from diffsynth_lite.pipelines.contract.folder import PipelineFolder

Conditioning = dict[str, torch.Tensor]
"""What one sample is conditioned on (prompt embeddings and the like), without a batch axis, on the CPU."""

EncodedMedia = dict[str, torch.Tensor]
"""What training needs of one item's media, on the CPU, without a batch axis: ``latents``, normalised, fp32,
``loss_mask`` where not all of them are learned, (1, ...) at their size, and whatever else the transformer is
conditioned on, which joins the conditioning of its prompt."""

LoraFile = tuple[dict[str, torch.Tensor], dict[str, Any]]
"""An adapter as its file holds it: tensors by peft's names, without the component's prefix, and settings."""


@dataclass(frozen=True, kw_only=True)
class PreviewRequest:
    """One preview: a picture or a clip.

    Attributes:
        conditioning: of the prompt.
        negative: of the negative prompt, for classifier-free guidance.
        inputs: RGB pictures to edit, or to start a clip from; most families have none.
        width: pixels, a multiple of the family's ``size_divisor``.
        height: pixels, likewise.
        num_frames: of a clip, as ``check_frames`` wants it; 1 is a picture.
        num_inference_steps: denoising steps.
        guidance_scale: told to a model that knows one; classifier-free guidance for others, off at 1 or less.
        seed: of the starting noise.
    """

    conditioning: Conditioning
    negative: Conditioning
    inputs: tuple[Image, ...] = ()
    width: int
    height: int
    num_frames: int = 1
    num_inference_steps: int
    guidance_scale: float
    seed: int


class ModelFamily(ABC):
    """A model family, bound to one pipeline folder.

    Class attributes are the training facts of the family; methods load one component at a time, so that an
    encoder is never in memory together with the transformer.

    Attributes:
        pipeline_classes: class names of which ``model_index.json`` must give one.
        components: folders whose weights training and previews need.
        components_without_weights: other folders that they need.
        block_lists: attributes of the transformer that hold its blocks, in call order.
        record_kinds: what its data sets are made of.
        frame_step: frame counts must be k * ``frame_step`` + 1; None where there are only pictures.
        max_prompt_tokens: longer prompts are cut, as by the pipeline's own default.
        prompt_sees_images: whether the text encoder also sees the input pictures of an edit.
        default_target_modules: endings of the names of the linear layers that get a LoRA.
        dead_in_last_block: endings of names in the last block whose output nobody uses: a LoRA there never
            gets a gradient, which plain DDP refuses.
    """

    pipeline_classes: ClassVar[tuple[str, ...]]
    components: ClassVar[tuple[str, ...]]
    components_without_weights: ClassVar[tuple[str, ...]] = ("scheduler", "tokenizer")
    block_lists: ClassVar[tuple[str, ...]]
    record_kinds: ClassVar[tuple[RecordKind, ...]] = ("image",)
    frame_step: ClassVar[int | None] = None
    max_prompt_tokens: ClassVar[int]
    prompt_sees_images: ClassVar[bool] = False
    default_target_modules: ClassVar[tuple[str, ...]]
    dead_in_last_block: ClassVar[tuple[str, ...]] = ()

    def __init__(self, folder: PipelineFolder) -> None:
        self.folder = folder

    @property
    @abstractmethod
    def size_divisor(self) -> int:
        """Width and height must be multiples of it, in pixels; most families give it as a plain attribute."""

    @property
    def default_num_frames(self) -> int:
        """Frames of a clip, unless the user says otherwise."""
        return 1

    @property
    def default_fps(self) -> float | None:
        """Frames per second that the model was trained on; None where there are only pictures."""
        return None

    @property
    def max_inputs(self) -> int | None:
        """Input pictures that an edit may start from; None where any number will do."""
        return None

    @property
    def prompt_tokens_of_an_input(self) -> int:
        """Tokens that an input picture of an edit takes in the prompt, about."""
        return 0

    def input_size(self, width: int, height: int) -> tuple[int, int]:
        """Width and height in pixels that an input picture of this width and height is encoded at.

        Raises:
            UserError: it has a shape that cannot be encoded.
        """
        return width, height

    @cached_property
    def scheduler_config(self) -> dict[str, Any]:
        """Settings of the folder's scheduler, read once: the shift is asked for with every batch."""
        return self.folder.component_config("scheduler")

    @property
    def needs_inputs(self) -> bool:
        """Whether it makes nothing from a prompt alone."""
        return not {"image", "video"} & set(self.record_kinds)

    def check_folder(self, *, with_weights: bool = True) -> None:
        """Check, without loading weights, that the folder holds this family's pipeline.

        Args:
            with_weights: also that the weights are there.

        Raises:
            UserError: another pipeline class, a missing component, or missing weights.
        """
        found = self.folder.pipeline_class_name()
        if found not in self.pipeline_classes:
            raise UserError(
                f"model.path: {self.folder.path} holds a {found}, but this family trains a "
                f"{' or '.join(self.pipeline_classes)}; check model.family and model.path"
            )
        if with_weights:
            self.folder.require_weights(self.components)
        for component in self.components_without_weights:
            self.folder.require_files(component)

    def fingerprint(self) -> str:
        """Identity of the base model: changes with the weights and settings of any of its components."""
        return " ".join(self.folder.fingerprint(component) for component in (*self.components, "scheduler"))

    def check_size(self, width: int, height: int, *, keys: str) -> None:
        """Check that a picture size suits the family.

        Raises:
            UserError: naming ``keys`` and the nearest size that would do.
        """
        divisor = self.size_divisor
        if width % divisor or height % divisor:
            fit = [max(divisor, round(side / divisor) * divisor) for side in (width, height)]
            raise UserError(
                f"{keys}: {width}x{height} is not divisible by {divisor}; "
                f"the nearest size is {fit[0]}x{fit[1]}"
            )

    def check_frames(self, num_frames: int, *, key: str) -> None:
        """Check that a number of frames suits the family.

        Raises:
            UserError: naming ``key`` and the nearest numbers that would do.
        """
        if self.frame_step is None:
            if num_frames != 1:
                raise UserError(f"{key}: {num_frames} frames; this family makes pictures, of 1 frame")
            return
        steps, rest = divmod(num_frames - 1, self.frame_step)
        if num_frames < 1 or rest:
            fit = [max(0, steps + extra) * self.frame_step + 1 for extra in (0, 1)]
            raise UserError(
                f"{key}: {num_frames} frames; this family needs {self.frame_step} k + 1, such as "
                f"{' or '.join(map(str, fit))}"
            )

    @abstractmethod
    def empty_transformer(self) -> torch.nn.Module:
        """The transformer on the meta device: its structure without its weights."""

    @abstractmethod
    def load_transformer(self, dtype: torch.dtype) -> torch.nn.Module:
        """The transformer on the CPU in ``dtype``, frozen."""

    @abstractmethod
    def prompt_encoder_id(self, dtype: torch.dtype) -> str:
        """Identity of everything that decides a prompt's conditioning; part of the cache's key."""

    @abstractmethod
    def load_prompt_encoder(
        self, dtype: torch.dtype, device: torch.device
    ) -> Callable[[Sequence[Prompt]], list[Conditioning]]:
        """A function from prompts to their conditioning; the encoders live as long as it does."""

    @abstractmethod
    def prompt_lengths(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text, uncut, as ``max_prompt_tokens`` counts them; loads the tokenizer alone."""

    @abstractmethod
    def media_encoder_id(self, dtype: torch.dtype) -> str:
        """Identity of everything that decides what is encoded of media; part of the cache's key."""

    @abstractmethod
    def load_media_encoder(
        self, dtype: torch.dtype, device: torch.device
    ) -> Callable[[Sequence[Media]], list[EncodedMedia]]:
        """A function from media, all of one size and frame count, to what training needs of them."""

    @abstractmethod
    def latents_shape(self, width: int, height: int, num_frames: int) -> tuple[int, ...]:
        """Shape of the latents of media of this size, without a batch axis; loads no weights."""

    @abstractmethod
    def num_tokens(self, latents_shape: Sequence[int]) -> int:
        """Tokens that the transformer makes of one sample's latents."""

    def resolution_shift(self, latents_shape: Sequence[int]) -> float:
        """Shift of the noise levels that grows with the picture, as the pipeline's own sampler applies it.

        ``exp(mu)`` with mu linear in the number of tokens, by the settings in the folder's scheduler.
        Source: ``calculate_shift`` in diffusers ``pipeline_qwenimage.py``.

        Returns:
            s in ``sigma -> s * sigma / (1 + (s - 1) * sigma)``.
        """
        config = self.scheduler_config
        mu = resolution_mu(
            self.num_tokens(latents_shape),
            base_shift=config.get("base_shift", 0.5),
            max_shift=config.get("max_shift", 1.15),
            base_tokens=config.get("base_image_seq_len", 256),
            max_tokens=config.get("max_image_seq_len", 4096),
        )
        return math.exp(mu)

    @abstractmethod
    def family_shift(self, latents_shape: Sequence[int]) -> float:
        """The shift that the family is trained with unless the user says otherwise; 1 is none."""

    @abstractmethod
    def predict_velocity(
        self,
        transformer: torch.nn.Module,
        noisy_latents: torch.Tensor,
        sigma: torch.Tensor,
        conditioning: Sequence[Conditioning],
        *,
        use_gradient_checkpointing: bool = False,
        use_gradient_checkpointing_offload: bool = False,
    ) -> torch.Tensor:
        """The model's estimate of ``noise - latents``, whatever the model's own convention is.

        Args:
            transformer: the transformer, plain or wrapped by DDP.
            noisy_latents: (B, ...) as the media encoder gives them, in fp32.
            sigma: (B,), noise level in [0, 1], in fp32.
            conditioning: of the B samples.
            use_gradient_checkpointing: recompute each block in backward instead of keeping its activations.
            use_gradient_checkpointing_offload: also park each block's inputs in host memory.

        Returns:
            Tensor of the shape of ``noisy_latents``.
        """

    @abstractmethod
    def sample(
        self, transformer: torch.nn.Module, vae_dtype: torch.dtype, requests: Sequence[PreviewRequest]
    ) -> list[list[Image]]:
        """The frames of each preview, drawn by diffusers' own pipeline around the given transformer."""

    @abstractmethod
    def save_lora(
        self, folder: Path, tensors: Mapping[str, torch.Tensor], settings: Mapping[str, Any]
    ) -> Path:
        """Write an adapter in the format that the family's diffusers pipeline loads, alpha included.

        Returns:
            The file written.
        """

    @abstractmethod
    def read_lora(self, folder: Path) -> LoraFile:
        """Read an adapter back through the loader of the family's diffusers pipeline."""
