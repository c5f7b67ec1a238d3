"""This file does what all families of diffusers have in common with prompts, media, steps and previews."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from PIL.Image import Image

from diffsynth_lite.core.gradient import gradient_flags
from diffsynth_lite.core.noise.densities import resolution_mu
from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Generated, Media, Prompt
from diffsynth_lite.pipelines.base.diffusers_components import DiffusersComponents, assemble
from diffsynth_lite.pipelines.base.family import Conditioning, EncodedMedia, PreviewRequest
from diffsynth_lite.pipelines.base.latents import encode_latents, latents_shape
from diffsynth_lite.pipelines.base.model_function import pad_tokens, stacked, without_padding
from diffsynth_lite.pipelines.base.preview_request import in_turn


def device_and_dtype(model: torch.nn.Module) -> dict[str, Any]:
    """Those of a model's first parameter, as arguments of ``Tensor.to``."""
    parameter = next(model.parameters())
    return {"device": parameter.device, "dtype": parameter.dtype}


def exponential_shift(mu: float) -> float:
    """``exp(mu)``; refused where no float is as large."""
    try:
        return math.exp(mu)
    except OverflowError:
        raise UserError(
            f"objective.shift: that of the sampler is exp({mu:.0f}) for images or clips of this size, "
            "which no number holds; take smaller ones, or set objective.shift: static"
        ) from None


class DiffusersFamily(DiffusersComponents):
    """A family whose transformer and pipeline are classes of diffusers.

    Attributes:
        model_fn: its model function, which ``predict`` calls.
        num_timesteps: what the model is given as the noise level of pure noise.
        is_reversed: whether it counts noise levels from pure noise on, and predicts ``latents - noise``.
        prompt_id: name and version of how prompts are encoded: part of the keys of the cache.
        latents_id: the same of media.
        prompt_outputs: what ``encode_prompt`` of the pipeline returns, in order, by the names that are kept:
            ``mask`` hides the padding, which then is not kept, and the empty name is of no use.
        prompt_width: the setting of the transformer with the width of its prompts.
        pooled_width: the same of one vector for a whole prompt, ``pooled_prompt_embeds``.
        patch: latents on each side of what becomes one token.
        images_output: what the pipeline's output calls its images.
        frames_argument: what the pipeline's call calls the number of frames.
    """

    model_fn: ClassVar[Callable[..., Any]]
    num_timesteps: ClassVar[float] = 1
    is_reversed: ClassVar[bool] = False
    prompt_id: ClassVar[str]
    latents_id: ClassVar[str]
    prompt_outputs: ClassVar[tuple[str, ...]] = ("prompt_embeds", "mask")
    prompt_width: ClassVar[str | None] = None
    pooled_width: ClassVar[str | None] = None
    patch: ClassVar[int] = 1
    images_output: ClassVar[str] = "images"
    frames_argument: ClassVar[str] = "num_frames"

    def pipeline_for(self, request: PreviewRequest) -> Any:
        """The class of diffusers that generates a preview; another than ``pipeline`` in some families."""
        return self.pipeline

    def usage_arguments(self, request: PreviewRequest) -> Mapping[str, Any]:
        """What a call of ``pipeline_for`` is given to generate a preview, where its defaults would not.

        Prompts, scale of guidance, size, steps and seed are known of all pipelines; what is given here
        takes their place. Images are read from files, by `Code`.
        """
        return {}

    def usage_setup(self, request: PreviewRequest) -> Sequence[str]:
        """Lines of code before that call, where no argument has it generate a preview."""
        return ()

    @property
    def prompt_tokenizer(self) -> str:
        """The one of ``tokenizers`` that ``max_prompt_tokens`` counts by: the first, if no other is named."""
        return self.tokenizers[0]

    @cached_property
    def takes_guidance(self) -> bool:
        return bool(self.folder.component_config(self.trainable[0]).get("guidance_embeds"))

    @property
    def is_distilled(self) -> bool:
        """Whether the folder's index has a model without guidance, of pipelines that ask for it."""
        return bool(self.folder.pipeline_config().get("is_distilled"))

    @property
    def scale_argument(self) -> str:
        """Name of the scale of guidance in the pipeline's call; often a plain attribute, as are these two."""
        return "guidance_scale"

    @property
    def takes_size(self) -> bool:
        """Whether the pipeline's call is given the size of what it generates."""
        return True

    @property
    def encodes_as_model(self) -> bool:
        """Whether the pipeline hands images to the autoencoder in the dtype of the transformer."""
        return False

    def prompt_lengths(self, texts: Sequence[str]) -> list[int]:
        tokenizer = self.load_tokenizer(self.prompt_tokenizer)
        return [len(tokens) for tokens in tokenizer(list(texts))["input_ids"]]

    @property
    def prompt_template(self) -> Any:
        """What diffusers puts around prompts, or the like: another version of it may bring another one."""
        return None

    def prompt_encoder_id(self, dtype: torch.dtype) -> str:
        parts = self.folder.fingerprints(*self.text_encoders, *self.tokenizers)
        template = f" {self.prompt_template!r}" if self.prompt_template else ""
        return f"{self.prompt_id} {parts} {dtype} {self.max_prompt_tokens}{template}"

    def media_encoder_id(self, dtype: torch.dtype) -> str:
        return f"{self.latents_id} {self.folder.fingerprint('vae')} {dtype}"

    def num_tokens(self, latents_shape: Sequence[int]) -> int:
        return math.prod(latents_shape[1:]) // self.patch**2

    def example_conditioning(self, latents_shape: Sequence[int]) -> Conditioning | None:
        if self.prompt_width is None:
            return None
        config = self.folder.component_config("transformer")
        pooled = {"pooled_prompt_embeds": torch.ones(config[self.pooled_width])} if self.pooled_width else {}
        return {"prompt_embeds": torch.ones(self.max_prompt_tokens, config[self.prompt_width]), **pooled}

    @property
    def has_guidance(self) -> bool:
        return not self.is_distilled

    @property
    def min_inference_steps(self) -> int:
        # diffusers stretches the levels so that they end at this one, and divides by their span.
        return 2 if self.scheduler_config.get("shift_terminal") else 1

    def prompt_pipeline(self, dtype: torch.dtype, device: torch.device, **settings: Any) -> Any:
        """The folder's pipeline with its text encoders and tokenizers only, for ``encode_prompt``."""
        encoders = self.load_text_encoders(dtype, device)
        tokenizers = {name: self.load_tokenizer(name) for name in self.tokenizers}
        return assemble(self.pipeline, **encoders, **tokenizers, **self.pipeline_settings, **settings)

    def load_prompt_encoder(
        self, dtype: torch.dtype, device: torch.device
    ) -> Callable[[Sequence[Prompt]], list[Conditioning]]:
        """For families whose pipeline encodes prompts: they write ``encode_prompts``."""
        pipeline = self.prompt_pipeline(dtype, device)

        @torch.no_grad()
        def encode(prompts: Sequence[Prompt]) -> list[Conditioning]:
            return self.encode_prompts(pipeline, prompts, device)

        return encode

    def encode_prompts(
        self, pipeline: Any, prompts: Sequence[Prompt], device: torch.device
    ) -> list[Conditioning]:
        """The conditioning of prompts, on the CPU: by default ``prompt_outputs``.

        Where no mask hides the padding, the model sees it, and all rows are kept.
        """
        parameters = inspect.signature(pipeline.encode_prompt).parameters
        settings = {
            "do_classifier_free_guidance": False,
            "device": device,
            "max_sequence_length": self.max_prompt_tokens,
        }
        known = {name: value for name, value in settings.items() if name in parameters}
        required = (name for name, one in parameters.items() if one.default is one.empty)
        given = dict.fromkeys(required) | known | {"prompt": [prompt.text for prompt in prompts]}
        outputs = pipeline.encode_prompt(**given)
        named = dict(zip(self.prompt_outputs, outputs, strict=False))
        mask, _ = named.pop("mask", None), named.pop("", None)
        # The mask is that of the tokens, which come first.
        columns = [
            without_padding(rows, None if place else mask) for place, rows in enumerate(named.values())
        ]
        return [dict(zip(named, row, strict=True)) for row in zip(*columns, strict=True)]

    def load_media_encoder(
        self, dtype: torch.dtype, device: torch.device
    ) -> Callable[[Sequence[Media]], list[EncodedMedia]]:
        """For families that write ``encode_pixels`` and ``encode_given``, where the defaults do not do."""
        pipeline = self.media_pipeline(dtype, device)

        @torch.no_grad()
        def encode(media: Sequence[Media]) -> list[EncodedMedia]:
            if self.frame_step is None:
                pixels = pipeline.image_processor.preprocess([item.frames[0] for item in media])
            else:
                pixels = pipeline.video_processor.preprocess_video([list(item.frames) for item in media])
            return [
                self.with_given(latents, self.encode_given(pipeline, item))
                for latents, item in zip(self.encode_pixels(pipeline.vae, pixels), media, strict=True)
            ]

        return encode

    def media_pipeline(self, dtype: torch.dtype, device: torch.device) -> Any:
        """The folder's pipeline with its autoencoder, and whatever else encodes media."""
        vae = self.load_component("vae", dtype).to(device)
        return assemble(self.pipeline, vae=vae, **self.image_parts(dtype, device), **self.pipeline_settings)

    def image_parts(self, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """What sees the images that clips start from, as arguments of the pipeline; often nothing."""
        return {}

    def encode_pixels(self, vae: Any, pixels: torch.Tensor) -> torch.Tensor:
        """Normalised latents, (B, ...) in fp32, on the CPU.

        Args:
            pixels: (B, 3, H, W), of clips (B, 3, F, H, W), in [-1, 1], on the CPU.
        """
        return encode_latents(vae, pixels)

    def encode_given(self, pipeline: Any, item: Media) -> EncodedMedia:
        """What the transformer sees of an item next to its latents; nothing in many families.

        Args:
            pipeline: that of ``media_pipeline``.
        """
        return {}

    def with_given(self, latents: torch.Tensor, given: EncodedMedia) -> EncodedMedia:
        """All that is kept of an item, of its latents and what ``encode_given`` gave."""
        return {"latents": latents, **given}

    def latents_shape(self, width: int, height: int, num_frames: int) -> tuple[int, ...]:
        config = self.folder.component_config("vae")
        return latents_shape(self.component_class("vae"), config, (width, height, num_frames))

    def predict(
        self,
        transformer: torch.nn.Module,
        noisy_latents: torch.Tensor,
        sigma: torch.Tensor,
        conditioning: Sequence[Conditioning],
    ) -> torch.Tensor:
        if not self.splits_batches:
            return self._predicted(transformer, noisy_latents, sigma, conditioning)
        lengths = [len(sample["prompt_embeds"]) for sample in conditioning]
        predicted: dict[int, torch.Tensor] = {}
        for length in dict.fromkeys(lengths):
            places = [place for place, other in enumerate(lengths) if other == length]
            chosen = [conditioning[place] for place in places]
            of_length = self._predicted(transformer, noisy_latents[places], sigma[places], chosen)
            predicted |= zip(places, of_length, strict=True)
        return torch.stack([predicted[place] for place in range(len(lengths))])

    def _predicted(
        self,
        transformer: torch.nn.Module,
        noisy_latents: torch.Tensor,
        sigma: torch.Tensor,
        conditioning: Sequence[Conditioning],
    ) -> torch.Tensor:
        like = self.input_like(transformer)
        latents, timestep = self.noisy_inputs(noisy_latents, sigma, conditioning, like)
        predicted: torch.Tensor = type(self).model_fn(
            transformer,
            latents.to(**like),
            timestep,
            **self.model_inputs(conditioning, like),
            **gradient_flags(),
        )
        return -predicted if self.is_reversed else predicted

    def input_like(self, transformer: torch.nn.Module) -> dict[str, Any]:
        """Device and dtype of what the model is given."""
        return device_and_dtype(transformer)

    def noisy_inputs(
        self,
        noisy_latents: torch.Tensor,
        sigma: torch.Tensor,
        conditioning: Sequence[Conditioning],
        like: Mapping[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents and timesteps as the model is given them; ``like`` are its device and dtype."""
        return noisy_latents, self.timestep(sigma, like)

    def timestep(self, sigma: torch.Tensor, like: Mapping[str, Any]) -> torch.Tensor:
        """Noise levels as the model is given them, (B,)."""
        return (1 - sigma if self.is_reversed else sigma) * self.num_timesteps

    def model_inputs(self, conditioning: Sequence[Conditioning], like: Mapping[str, Any]) -> dict[str, Any]:
        """What ``model_fn`` is given of a batch's conditioning: by default its prompts, and their mask.

        With ``keeps_padding`` there is none: the rows of the padding hold something, which the model sees.
        """
        if self.keeps_padding:
            given: dict[str, Any] = {"prompt_embeds_bld": stacked(conditioning, "prompt_embeds", like)}
        else:
            embeds_bld, mask = self.padded(conditioning, like)
            given = {"prompt_embeds_bld": embeds_bld, "prompt_embeds_mask": mask}
        if self.pooled_width:
            given["pooled_prompt_embeds_bd"] = stacked(conditioning, "pooled_prompt_embeds", like)
        return given

    def padded(
        self, conditioning: Sequence[Conditioning], like: Mapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The prompts of a batch, and their mask; processes that split them have as many tokens each."""
        is_split = (
            self.context is not None and self.sequence_split and self.sequence_split.prompts == "padded"
        )
        multiple = self.context.num_processes if self.context and is_split else 1
        return pad_tokens([sample["prompt_embeds"] for sample in conditioning], multiple=multiple, **like)

    def guidance(self, conditioning: Sequence[Conditioning], like: Mapping[str, Any]) -> torch.Tensor | None:
        """The guidance scale of a batch in training, (B,) in fp32; None of a model that takes none."""
        if not self.takes_guidance:
            return None
        return torch.full((len(conditioning),), self.training_guidance, device=like["device"])

    def sample(
        self, transformer: torch.nn.Module, vae_dtype: torch.dtype, requests: Sequence[PreviewRequest]
    ) -> Sequence[Generated]:
        """By one ``preview_pipeline``, or by the others that ``pipeline_for`` names, of the same parts."""
        if self.encodes_as_model and any(request.inputs for request in requests):
            vae_dtype = self.input_like(transformer)["dtype"]
        pipeline = self.preview_pipeline(transformer, vae_dtype)
        return [self.generate(self.made_for(request, pipeline), request) for request in in_turn(requests)]

    def made_for(self, request: PreviewRequest, pipeline: Any) -> Any:
        """A preview pipeline of the class that generates a preview, of the same parts."""
        wanted = self.pipeline_for(request)
        if isinstance(pipeline, wanted):
            return pipeline
        # Of those that only the other class has, the folder holds none.
        parts = {name: part for name, part in pipeline.components.items() if part is not None}
        made = assemble(wanted, **parts, **self.pipeline_settings)
        made.set_progress_bar_config(disable=True)
        return made

    def generate(self, pipeline: Any, request: PreviewRequest) -> Generated:
        """The frames of one preview, by what ``preview_pipeline`` gave."""
        like = device_and_dtype(getattr(pipeline, self.trainable[0]))
        prompts = {"": request.conditioning}
        if request.is_guided and not self.takes_guidance:
            prompts["negative_"] = request.negative
        arguments = request.call_arguments()
        if not self.takes_size:
            del arguments["width"], arguments["height"]
        if self.frame_step is not None:
            arguments |= {self.frames_argument: request.num_frames, "output_type": "pil"}
        own = self.prompt_arguments(prompts, like) | self.call_arguments(pipeline, request)
        return self.generated(pipeline(**arguments | own), pipeline)

    def generated(self, output: Any, pipeline: Any) -> Generated:
        """What the pipeline returned as frames."""
        frames: list[Image] = (
            getattr(output, self.images_output) if self.frame_step is None else output.frames[0]
        )
        return frames

    def prompt_arguments(
        self, prompts: Mapping[str, Conditioning], like: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The prompts of a preview as arguments of the pipeline, whose names begin with the keys of each."""
        return {
            f"{prefix}{name}": value
            for prefix, prompt in prompts.items()
            for name, value in self.prompt_argument(prompt, like).items()
        }

    def prompt_argument(self, prompt: Conditioning, like: Mapping[str, Any]) -> dict[str, Any]:
        """One prompt of a preview as arguments of the pipeline."""
        return {name: tensor[None].to(**like) for name, tensor in prompt.items()}

    def call_arguments(self, pipeline: Any, request: PreviewRequest) -> dict[str, Any]:
        """What the pipeline is given of a preview next to prompts and ``request.call_arguments``."""
        return {self.scale_argument: request.guidance_scale}

    def preview_pipeline(self, model: torch.nn.Module, vae_dtype: torch.dtype, **settings: Any) -> Any:
        """The folder's pipeline around a transformer or UNet, for previews: with its own sampler, and silent.

        Args:
            model: in the place of the first of ``trainable``.
            vae_dtype: of the autoencoder, which is loaded to where ``model`` is.
        """
        device = device_and_dtype(model)["device"]
        vae = self.load_preview_vae(vae_dtype, device)
        _decode_in_own_dtype(vae)
        parts = {**self.preview_models(model), "vae": vae, "scheduler": self.load_scheduler()}
        parts |= self.image_parts(vae_dtype, device)
        pipeline = assemble(self.pipeline, **parts, **self.pipeline_settings, **settings)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def preview_models(self, model: torch.nn.Module) -> dict[str, torch.nn.Module]:
        """The models of a preview's pipeline that remove noise, by name."""
        return {self.trainable[0]: model}

    def resolution_shift(self, latents_shape: Sequence[int]) -> float:
        """``exp(mu)``, with mu linear in the number of tokens, by the settings in the folder's scheduler.

        Source: ``calculate_shift`` in diffusers ``pipeline_qwenimage.py``.
        """
        config = self.scheduler_config
        mu = resolution_mu(
            self.num_tokens(latents_shape),
            base_shift=config.get("base_shift", 0.5),
            max_shift=config.get("max_shift", 1.15),
            base_tokens=config.get("base_image_seq_len", 256),
            max_tokens=config.get("max_image_seq_len", 4096),
        )
        return exponential_shift(mu)

    def family_shift(self, latents_shape: Sequence[int]) -> float:
        """That of the folder's sampler, which is fixed or, in some releases, grows with the image.

        The noise levels that the model is used at are then trained about as often as they are used.
        """
        config = self.scheduler_config
        if config.get("use_dynamic_shifting"):
            return self.resolution_shift(latents_shape)
        return float(config.get("flow_shift", config.get("shift", 1.0)))


def _decode_in_own_dtype(vae: Any) -> None:
    """Let an autoencoder cast what it decodes: some pipelines hand it what the transformer returns."""
    first = getattr(vae, "post_quant_conv", None) or vae.decoder
    dtype = vae.dtype
    first.register_forward_pre_hook(lambda _module, inputs: (inputs[0].to(dtype), *inputs[1:]))
