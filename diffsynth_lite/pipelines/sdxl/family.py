"""This file trains SDXL (text to image): its UNet, and on request both of its text encoders with it.

Layouts: b batch, c latent channels, h and w latent height and width; l tokens, d channels.
Sources: diffusers ``unet_2d_condition.py`` and ``pipeline_stable_diffusion_xl.py``.
"""

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Unpack

import torch
from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
from PIL.Image import Image
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from diffsynth_lite.core.gradient import (
    checkpoint_blocks,
    count_blocks,
    gradient_checkpoint_forward,
    gradient_flags,
    unwrapped,
)
from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Crop, Media, Prompt, RecordKind
from diffsynth_lite.pipelines.base.diffusers_family import device_and_dtype
from diffsynth_lite.pipelines.base.diffusion_family import DiffusionFamily
from diffsynth_lite.pipelines.base.family import Conditioning, EncodedMedia, PreviewRequest, TargetSets
from diffsynth_lite.pipelines.base.folder import ComponentFile, PipelineFolder
from diffsynth_lite.pipelines.base.model_function import Checkpointing, model_function
from diffsynth_lite.pipelines.base.model_settings import ModelSettings
from diffsynth_lite.pipelines.base.preview_request import in_turn
from diffsynth_lite.pipelines.base.single_file import holds, names_in
from diffsynth_lite.pipelines.sdxl.names import SDXL_LAYERS, SDXL_NAMES
from diffsynth_lite.pipelines.sdxl.releases import SDXL as RELEASES
from diffsynth_lite.pipelines.sdxl.text_encoders import clip_prompt_embeds, clip_prompt_encoder
from diffsynth_lite.testing import autoencoders, seeded, text_encoders, tokenizers

logger = logging.getLogger(__name__)

_OF_EDM = frozenset({"edm_mean", "edm_std", "edm_vpred.sigma_max"})
"""Names of tensors that only such checkpoints have. Source: as of ``_settings_of_file``."""
_TEXT_ENCODERS = {"text_encoder": CLIPTextModel, "text_encoder_2": CLIPTextModelWithProjection}


@model_function
def model_fn_sdxl(
    unet: torch.nn.Module,
    latents_bchw: torch.Tensor,
    timestep: torch.Tensor,
    prompt_embeds_bld: torch.Tensor,
    pooled_prompt_embeds_bd: torch.Tensor,
    time_ids: torch.Tensor,
    **checkpointing: Unpack[Checkpointing],
) -> torch.Tensor:
    """One forward of SDXL's UNet, each ResNet and transformer block run by the gradient engine.

    Args:
        unet: a ``UNet2DConditionModel``, plain or wrapped by DDP.
        latents_bchw: (B, 4, H, W), noisy normalised latents.
        timestep: (B,), whole, in [0, 1000).
        prompt_embeds_bld: (B, 77, D) prompt embeddings of both text encoders, side by side.
        pooled_prompt_embeds_bd: (B, D_pooled) prompt embeddings of the second one.
        time_ids: (B, 6), in pixels: the original's height and width, the crop's top and left, and the
            image's height and width.

    Returns:
        (B, 4, H, W), the noise or the v that the UNet predicts.
    """
    block_lists = tuple(unet_block_lists(unwrapped(unet).config))
    with checkpoint_blocks(
        unet,
        block_lists,
        gradient_checkpoint_forward,
        unused_matmuls=SDXL.unused_matmuls,
        **checkpointing,
    ):
        predicted_bchw: torch.Tensor = unet(
            latents_bchw,
            timestep,
            encoder_hidden_states=prompt_embeds_bld,
            added_cond_kwargs={"text_embeds": pooled_prompt_embeds_bd, "time_ids": time_ids},
            return_dict=False,
        )[0]
    return predicted_bchw


def unet_block_lists(config: Any) -> Iterator[str]:
    """Names of the modules and module lists that diffusers' checkpointing hook runs, in call order.

    These are the ResNet blocks and the transformer blocks. The hook leaves out the ResNet block that opens
    the middle, and the samplers between the levels.

    Args:
        config: the settings of a ``UNet2DConditionModel``, a mapping.
    """
    down_types, up_types = config["down_block_types"], config["up_block_types"]
    layers = config.get("layers_per_block", 2)
    num_layers = [layers] * len(down_types) if isinstance(layers, int) else list(layers)
    for place, (block_type, number) in enumerate(zip(down_types, num_layers, strict=True)):
        yield from _lists_of_level(f"down_blocks.{place}", block_type, number)
    if config.get("mid_block_type", "UNetMidBlock2DCrossAttn") == "UNetMidBlock2DCrossAttn":
        yield "mid_block.attentions.0.transformer_blocks"
        yield "mid_block.resnets.1"
    for place, (block_type, number) in enumerate(zip(up_types, reversed(num_layers), strict=True)):
        yield from _lists_of_level(f"up_blocks.{place}", block_type, number + 1)


def _lists_of_level(name: str, block_type: str, num_layers: int) -> Iterator[str]:
    for place in range(num_layers):
        yield f"{name}.resnets.{place}"
        if block_type.startswith("CrossAttn"):
            yield f"{name}.attentions.{place}.transformer_blocks"


class SDXL(DiffusionFamily):
    """SDXL and models made from it: the UNet, and on request both text encoders with it.

    Denoising diffusion in 1000 timesteps; the folder's scheduler gives whether the UNet predicts ``epsilon``
    or ``v_prediction``, and whether the last timestep is all noise (``rescale_betas_zero_snr``).

    ``lora.components`` is ``[unet]`` or ``[unet, text_encoder, text_encoder_2]``. With the second, the cache
    holds tokens, and both encoders stay in memory in ``model.dtype`` and run in every step. The last layer
    of the first encoder gets no LoRA: the UNet sees what goes into it.

    Checkpointing covers the ResNet and transformer blocks that diffusers' hook runs: not the ResNet block
    that opens the middle, the samplers between the levels, nor the text encoders.

    The UNet takes sizes as in diffusers' training script: that of an image's file, where in the resized image
    its crop begins, and that of the training image. Previews give it the same as the pipeline: their own
    size, uncropped.

    An empty negative prompt is zeros where the folder sets ``force_zeros_for_empty_prompt``, and so is a
    caption that ``data.caption_dropout`` emptied. An item's own empty caption is encoded as any other.
    """

    pipelines = (StableDiffusionXLPipeline,)
    releases = RELEASES
    starting_recipes: ClassVar[Mapping[RecordKind, str]] = {"image": "sdxl_lora.yaml"}
    transformer_class = UNet2DConditionModel
    patch = 2  # of the largest attention, on the second level
    lora_spelling = SDXL_NAMES
    lora_layers = SDXL_LAYERS
    # transformers 5 has no such level in its CLIPTextModel; earlier versions and ComfyUI look for it.
    lora_prefixes: ClassVar[Mapping[str, str]] = {"text_encoder": "text_encoder.text_model."}
    encoder_classes: ClassVar[Mapping[str, Any]] = {**_TEXT_ENCODERS, "vae": AutoencoderKL}
    tokenizers = ("tokenizer", "tokenizer_2")
    max_prompt_tokens = 77
    keeps_padding = True
    latents_id = "sdxl/latents/2"
    float16_vae = False
    unused_matmuls = ("conv2",)
    trainable = ("unet", *_TEXT_ENCODERS)

    def __init__(self, folder: PipelineFolder, *, trained: Sequence[str] | None = None) -> None:
        super().__init__(folder, trained=trained)
        if self.trained not in (self.trained_by_default, self.trainable):
            raise UserError(
                f"lora.components: [{', '.join(self.trained)}] is not a choice here; use [unet], or "
                f"[{', '.join(self.trainable)}]"
            )

    def take_files(self, files: Mapping[str, ComponentFile]) -> None:
        """Also the text encoders and the autoencoder are read from the UNet's file, where it holds them."""
        super().take_files(files)
        file = self.folder.files.get("unet")
        if file is None:
            return
        names = names_in(file)
        if other := sorted(_OF_EDM.intersection(names)):
            raise UserError(
                f"{file.key}: {file.path} is a model on the noise levels of EDM ({other[0]}), which this "
                "family does not train; take one that predicts noise or v"
            )
        found = {name: file for name, one in self.encoder_classes.items() if holds(names, one)}
        self.folder = replace(self.folder, files={**self.folder.files, **found})
        if lacking := [name for name in self.encoder_classes if name not in found]:
            logger.info("%s has no %s: those of model.path are used.", file.path, ", ".join(lacking))

    @cached_property
    def _settings_of_file(self) -> dict[str, Any]:
        """A checkpoint's statements about its noise, by tensors of these names.

        Sources: ``SDXL.model_type`` in ComfyUI's ``supported_models.py`` for the names; for zero SNR Lin et
        al. 2023 (arXiv:2305.08891), and the documentation of diffusers' schedulers.
        """
        file = self.folder.files.get("unet")
        names = names_in(file) if file else frozenset()
        if "v_pred" not in names:
            return {}
        zero_snr = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
        return {"prediction_type": "v_prediction"} | (zero_snr if "ztsnr" in names else {})

    @cached_property
    def scheduler_config(self) -> ModelSettings:
        """Settings of the folder's scheduler, overridden by those in the file of the UNet."""
        settings = self.folder.component_config("scheduler")
        return ModelSettings(settings | self._settings_of_file, settings.file)

    def check_scheduler(self, scheduler: Any) -> None:
        super().check_scheduler(scheduler)
        known = inspect.signature(type(scheduler)).parameters  # its config also keeps what it does not know
        for name in self._settings_of_file:
            if name not in known:
                file = self.folder.files["unet"]
                raise UserError(
                    f"{file.key}: {file.path} needs a sampler that knows {name}, which "
                    f"{type(scheduler).__name__} of model.path does not; EulerDiscreteScheduler does"
                )

    @property
    def _trains_text(self) -> bool:
        return self.trained == self.trainable

    @property
    def _zeros_for_empty(self) -> bool:
        return bool(self.folder.pipeline_config().get("force_zeros_for_empty_prompt", True))

    @cached_property
    def block_lists(self) -> tuple[str, ...]:
        """The ResNet and transformer blocks of each level."""
        return tuple(unet_block_lists(self.folder.component_config("unet")))

    @property
    def default_target_modules(self) -> tuple[str, ...]:
        """All attention of the UNet, and of the text encoders where they are trained: set ``attention``."""
        return self.target_sets["attention"]

    @property
    def target_sets(self) -> TargetSets:
        """``attention``: ``to_q, to_k, to_v, to_out.0``; ``all`` adds ``proj_in, proj_out, ff.net.0.proj,
        ff.net.2``, but not the layers that give the ResNet blocks their timestep. Where text encoders are
        trained, both have their attention, ``q_proj, k_proj, v_proj, out_proj``, and ``all`` also ``fc1,
        fc2``.
        """
        attention: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")
        others: tuple[str, ...] = ("proj_in", "proj_out", "ff.net.0.proj", "ff.net.2")
        if self._trains_text:
            attention += ("q_proj", "k_proj", "v_proj", "out_proj")
            others += ("fc1", "fc2")
        return {"attention": attention, "all": attention + others}

    @property
    def size_divisor(self) -> int:
        """32; each level of VAE and UNet but the last halves the image."""
        levels = [self.folder.component_config(name)["block_out_channels"] for name in ("unet", "vae")]
        return int(2 ** sum(len(channels) - 1 for channels in levels))

    def unused_modules(self, model: torch.nn.Module) -> list[str]:
        if not self._trains_text:
            return []
        layers = "text_encoder.encoder.layers"
        return [f"{layers}.{count_blocks(model, [layers]) - 1}"]

    def prompt_encoder_id(self, dtype: torch.dtype) -> str:
        tokenizers = f"{self.folder.fingerprints(*self.tokenizers)} {self._zeros_for_empty}"
        if self._trains_text:
            return f"sdxl/tokens/1 {tokenizers}"
        return f"sdxl/prompt/1 {self.folder.fingerprints(*self.text_encoders)} {tokenizers} {dtype}"

    def load_prompt_encoder(
        self, dtype: torch.dtype, device: torch.device
    ) -> Callable[[Sequence[Prompt]], list[Conditioning]]:
        encoders = [] if self._trains_text else list(self.load_text_encoders(dtype, device).values())
        tokenizers = [self.load_tokenizer(name) for name in self.tokenizers]
        return clip_prompt_encoder(tokenizers, encoders, device, zeros_for_empty=self._zeros_for_empty)

    def encode_given(self, pipeline: Any, item: Media) -> EncodedMedia:
        """Sizes and crop of the image, (6,), as ``model_fn_sdxl`` takes them.

        Source: ``train_text_to_image_lora_sdxl.py`` of diffusers.
        """
        width, height = item.frames[0].size
        crop = item.crop or Crop(original_width=width, original_height=height)
        sizes = [crop.original_height, crop.original_width, crop.top, crop.left, height, width]
        return {"time_ids": torch.tensor(sizes)}

    def example_conditioning(self, latents_shape: Sequence[int]) -> Conditioning:
        width = self.folder.component_config("unet")["cross_attention_dim"]
        pooled_width = self.folder.component_config("text_encoder_2")["projection_dim"]
        embeds = {
            "prompt_embeds": torch.ones(self.max_prompt_tokens, width),
            "pooled_prompt_embeds": torch.ones(pooled_width),
        }
        tokens = torch.ones(self.max_prompt_tokens, dtype=torch.int64)
        return {
            **({"input_ids": tokens, "input_ids_2": tokens} if self._trains_text else embeds),
            "time_ids": torch.ones(6, dtype=torch.int64),
            "is_zero": torch.tensor(False),
        }

    def predict(
        self,
        transformer: torch.nn.Module,
        noisy_latents: torch.Tensor,
        sigma: torch.Tensor,
        conditioning: Sequence[Conditioning],
    ) -> torch.Tensor:
        like = device_and_dtype(transformer)

        def run(model: torch.nn.Module) -> torch.Tensor:
            return model_fn_sdxl(
                self.parts_of(model)["unet"],
                noisy_latents.to(**like),
                self.noise_path.timestep(sigma),
                *self._prompt_embeds(model, conditioning),
                torch.stack([sample["time_ids"] for sample in conditioning]).to(like["device"]),
                **gradient_flags(),
            )

        predicted: torch.Tensor = transformer(run) if self._trains_text else run(transformer)
        return predicted

    def _prompt_embeds(
        self, model: torch.nn.Module, conditioning: Sequence[Conditioning]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        encoders = [model.get_submodule(name) for name in self.text_encoders if self._trains_text]
        return clip_prompt_embeds(encoders, conditioning, device_and_dtype(model))

    @torch.no_grad()
    def sample(
        self, transformer: torch.nn.Module, vae_dtype: torch.dtype, requests: Sequence[PreviewRequest]
    ) -> list[list[Image]]:
        unet = self.parts_of(transformer)["unet"]
        pipeline = self.preview_pipeline(unet, vae_dtype, add_watermarker=False)
        return [self._generate(pipeline, transformer, request) for request in in_turn(requests)]

    def _generate(self, pipeline: Any, transformer: torch.nn.Module, request: PreviewRequest) -> list[Image]:
        embeds, pooled = self._prompt_embeds(transformer, [request.conditioning])
        negative_embeds, negative_pooled = self._prompt_embeds(transformer, [request.negative])
        generated: list[Image] = pipeline(
            prompt_embeds=embeds,
            pooled_prompt_embeds=pooled,
            negative_prompt_embeds=negative_embeds,
            negative_pooled_prompt_embeds=negative_pooled,
            guidance_scale=request.guidance_scale,
            **request.call_arguments(),
        ).images
        return generated


def tiny() -> StableDiffusionXLPipeline:
    """A random, complete and small pipeline of the real classes, built offline in a second.

    A UNet of two levels, of which the second has transformer blocks, as has the middle; the real sampler.
    """
    tokenizer, tokenizer_2 = tokenizers.clip_tokenizer(), tokenizers.clip_tokenizer(pad_token="!")
    text_encoder = text_encoders.tiny_clip_text(tokenizer)
    text_encoder_2 = text_encoders.tiny_clip_text_with_projection(tokenizer_2, seed=1)
    time_dim = 8
    with seeded(0):
        unet = UNet2DConditionModel(
            block_out_channels=(8, 16),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            layers_per_block=1,
            transformer_layers_per_block=(1, 2),
            attention_head_dim=(1, 2),
            cross_attention_dim=text_encoder.config.hidden_size + text_encoder_2.config.hidden_size,
            use_linear_projection=True,
            norm_num_groups=4,
            addition_embed_type="text_time",
            addition_time_embed_dim=time_dim,
            projection_class_embeddings_input_dim=6 * time_dim + text_encoder_2.config.projection_dim,
        ).eval()
    betas: dict[str, Any] = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
    return StableDiffusionXLPipeline(
        vae=autoencoders.tiny_sdxl_vae(),
        text_encoder=text_encoder,
        text_encoder_2=text_encoder_2,
        tokenizer=tokenizer,
        tokenizer_2=tokenizer_2,
        unet=unet,
        scheduler=EulerDiscreteScheduler(**betas, timestep_spacing="leading", steps_offset=1),
        add_watermarker=False,
    )
