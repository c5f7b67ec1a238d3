"""This file trains Wan image to video: Wan 2.1 I2V-14B and FLF2V-14B, and Wan 2.2 I2V-A14B.

Layouts: b batch, c latent channels, f latent frames, h and w latent height and width; l tokens, d channels.
Source: diffusers ``pipeline_wan_i2v.py``.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from diffusers import WanImageToVideoPipeline
from PIL import ImageOps
from PIL.Image import Image
from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModel

from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Media, RecordKind
from diffsynth_lite.pipelines import wan
from diffsynth_lite.pipelines.base.family import Conditioning, EncodedMedia, PreviewRequest, TargetSets
from diffsynth_lite.pipelines.base.first_frame import require_later_frames
from diffsynth_lite.pipelines.base.model_function import stacked
from diffsynth_lite.pipelines.wan.releases import WAN_I2V
from diffsynth_lite.testing import seeded

_LARGEST_FLF2V_SHIFT = 5.0
_CLIP_SIZE = 32  # of the images that the tiny CLIP sees

model_fn_wan_i2v = wan.model_fn_wan
"""One forward.

``latents_bcfhw`` are the noisy latents and, after them in the channels, a mask of the frames that are given
(4 channels) and the latents of these frames with grey between them; what is predicted has the channels of the
noisy latents only. ``image_embeds_bld`` has the rows of a sample's images one after the other.
"""


class WanI2V(wan.Wan):
    """Wan 2.1 I2V-14B and FLF2V-14B, and Wan 2.2 I2V-A14B: clips from an image, or from one to another.

    A clip whose first frame the data does not name starts from the first one of its own. The folder decides
    about the last: FLF2V-14B always has one, named by the data or the clip's own; I2V-A14B has one where the
    data names it; I2V-14B refuses one. All latents count in the loss, those of the given frames too.

    Wan 2.1 also sees the images through CLIP, whose encoder is loaded together with the autoencoder: when
    media are encoded, and while previews are generated. A preview starts from an image, cut to its size, and
    leads to that of ``validation.last_frames`` where it is given; without it, FLF2V leads back to the first.
    """

    pipelines = (WanImageToVideoPipeline,)
    releases = WAN_I2V
    starting_recipes: ClassVar[Mapping[RecordKind, str]] = {"image_to_video": "wan_i2v_14b_lora.yaml"}
    size_divisor = 16
    default_num_frames = 81
    default_fps = 16.0

    @property
    def record_kinds(self) -> tuple[RecordKind, ...]:
        """Clips, and clips with a first frame; with a last frame, see above."""
        return ("video", "image_to_video")

    @property
    def encoder_classes(self) -> Mapping[str, Any]:
        of_images = {"image_encoder": CLIPVisionModel} if self._embeds_images else {}
        return {**super().encoder_classes, **of_images}

    @property
    def target_sets(self) -> TargetSets:
        """As in family ``wan``; in Wan 2.1 both add ``add_k_proj, add_v_proj``, of its image embeddings."""
        # diffusers fills a LoRA up with zeros for these two where it has none, and warns.
        of_images = ("add_k_proj", "add_v_proj") if self._embeds_images else ()
        return {name: (*targets, *of_images) for name, targets in super().target_sets.items()}

    @property
    def needs_inputs(self) -> bool:
        return True

    @property
    def takes_last_frames(self) -> bool:
        """All but Wan 2.1 I2V, whose transformer has no place for a second image."""
        return self._leads_to_last_frame or not self._embeds_images

    @cached_property
    def _transformer_config(self) -> dict[str, Any]:
        return self.folder.component_config("transformer")

    @property
    def _embeds_images(self) -> bool:
        """Wan 2.1, whose transformer also sees the images through CLIP."""
        return self._transformer_config.get("image_dim") is not None

    @property
    def _leads_to_last_frame(self) -> bool:
        """FLF2V, whose transformer distinguishes the first image from the last by their place."""
        return self._transformer_config.get("pos_embed_seq_len") is not None

    def check_folder(self, *, with_weights: bool = True) -> None:
        if self.folder.pipeline_config().get("expand_timesteps"):
            raise UserError(
                f"model.path: {self.folder.path} holds a Wan 2.2 TI2V-5B (expand_timesteps), which "
                "model.family: wan trains, with first frames too; set it, and _class_name: WanPipeline in "
                "model_index.json"
            )
        super().check_folder(with_weights=with_weights)
        if self._embeds_images:
            self.folder.require_files("image_processor")

    def check_frames(self, num_frames: int, *, key: str) -> None:
        require_later_frames(num_frames, self.frame_step, key=key)
        super().check_frames(num_frames, key=key)

    def media_encoder_id(self, dtype: torch.dtype) -> str:
        of_images = ("image_encoder", "image_processor") if self._embeds_images else ()
        parts = self.folder.fingerprints("vae", *of_images)
        frames = "first and last" if self._leads_to_last_frame else "first"
        return f"wan_i2v/latents/1 {parts} {dtype} {frames}"

    def image_parts(self, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        if not self._embeds_images:
            return {}
        folder = self.folder.place("image_processor").path
        return {
            "image_encoder": self.load_component("image_encoder", dtype).to(device),
            "image_processor": CLIPImageProcessorPil.from_pretrained(folder),
        }

    def encode_given(self, pipeline: Any, item: Media) -> EncodedMedia:
        """(4 + C, F, H, W) and, where CLIP sees the images, (1 or 2, L, D)."""
        images = self._given_images(item)
        pixels_bchw = [pipeline.video_processor.preprocess(image) for image in images]
        width, height = item.frames[0].size
        _, condition_bcfhw = pipeline.prepare_latents(
            pixels_bchw[0],
            batch_size=1,
            height=height,
            width=width,
            num_frames=len(item.frames),
            dtype=torch.float32,
            device=pipeline.vae.device,
            latents=torch.empty(0),  # without any it would draw noise
            last_image=pixels_bchw[1] if len(images) > 1 else None,
        )
        encoded = {"condition_latents": condition_bcfhw[0].cpu()}
        if self._embeds_images:
            encoded["image_embeds"] = pipeline.encode_image(images, pipeline.vae.device).cpu()
        return encoded

    def _given_images(self, item: Media) -> list[Image]:
        """The first frame, and the last one where there is one."""
        assert item.last_frame is None or self.takes_last_frames, "refused with the records"
        last = item.last_frame or (item.frames[-1] if self._leads_to_last_frame else None)
        return [item.first_frame or item.frames[0], *([last] if last else [])]

    def family_shift(self, latents_shape: Sequence[int]) -> float:
        """That of the folder's sampler, as in family ``wan``; of FLF2V-14B, whose folder has 16, at most 5.

        16 (``objective.shift: static`` with ``shift_value: 16``) leaves 6 % of the steps for noise levels
        below 0.5, where detail is learned. DiffSynth-Studio trains all of Wan with 5 (``set_timesteps_wan``
        in ``flow_match.py``), which is also what other Wan models of 720p are sampled with (``generate.py``
        in Wan's repository); the example in musubi-tuner's ``docs/wan.md`` has 3.
        """
        shift = super().family_shift(latents_shape)
        return min(shift, _LARGEST_FLF2V_SHIFT) if self._leads_to_last_frame else shift

    def earlier_shift(self, latents_shape: Sequence[int]) -> float:
        return super().family_shift(latents_shape)

    def num_condition_values(self, latents_shape: Sequence[int]) -> int:
        return sum(map(math.prod, self._condition_shapes(latents_shape).values()))

    def _condition_shapes(self, latents_shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        channels, *sides = latents_shape
        shapes = {"condition_latents": (self._vae_config["scale_factor_temporal"] + channels, *sides)}
        if self._embeds_images:
            config = self.folder.component_config("image_encoder")
            num_tokens = (config["image_size"] // config["patch_size"]) ** 2 + 1
            shapes["image_embeds"] = (1 + self._leads_to_last_frame, num_tokens, config["hidden_size"])
        return shapes

    def example_conditioning(self, latents_shape: Sequence[int]) -> Conditioning:
        shapes = self._condition_shapes(latents_shape)
        given = {name: torch.ones(shape) for name, shape in shapes.items()}
        return super().example_conditioning(latents_shape) | given

    def noisy_inputs(
        self,
        noisy_latents: torch.Tensor,
        sigma: torch.Tensor,
        conditioning: Sequence[Conditioning],
        like: Mapping[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        condition_bcfhw = stacked(conditioning, "condition_latents", {"device": noisy_latents.device})
        return torch.cat([noisy_latents, condition_bcfhw], dim=1), self.timestep(sigma, like)

    def model_inputs(self, conditioning: Sequence[Conditioning], like: Mapping[str, Any]) -> dict[str, Any]:
        given = super().model_inputs(conditioning, like)
        if self._embeds_images:
            embeds_bld = torch.cat([sample["image_embeds"] for sample in conditioning])
            given["image_embeds_bld"] = embeds_bld.to(**like)
        return given

    def call_arguments(self, pipeline: Any, request: PreviewRequest) -> dict[str, Any]:
        arguments = super().call_arguments(pipeline, request)
        if self._leads_to_last_frame or len(request.inputs) > 1:
            arguments["last_image"] = ImageOps.fit(request.inputs[-1], (request.width, request.height))
        return arguments

    def usage_arguments(self, request: PreviewRequest) -> dict[str, Any]:
        arguments = super().usage_arguments(request)
        if self._leads_to_last_frame or len(request.inputs) > 1:
            arguments["last_image"] = request.fitted('load_image("last.png")')
        return arguments


def tiny() -> WanImageToVideoPipeline:
    """A random, complete and small pipeline of the real classes, built offline in a second: Wan 2.1 I2V.

    Next to what is small in ``wan``, a CLIP encoder that makes 5 tokens of an image.
    """
    parts = wan.tiny().components
    layout, image_encoder = parts["transformer"].config, tiny_clip_vision()
    parts["transformer"] = wan.tiny_wan_transformer(
        layout.text_dim,
        in_channels=2 * layout.in_channels + parts["vae"].config.scale_factor_temporal,
        image_dim=image_encoder.config.hidden_size,
        added_kv_proj_dim=layout.num_attention_heads * layout.attention_head_dim,
    )
    return WanImageToVideoPipeline(
        **parts, image_encoder=image_encoder, image_processor=tiny_clip_processor()
    )


def tiny_clip_vision() -> CLIPVisionModel:
    """A random CLIP image encoder with two layers, in eval mode.

    It makes 5 tokens of an image of 32 x 32 pixels; the released one makes 257 of 224 x 224.
    """
    config = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        projection_dim=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=_CLIP_SIZE,
        patch_size=_CLIP_SIZE // 2,
    )
    with seeded(0):
        return CLIPVisionModel(config).eval()


def tiny_clip_processor() -> CLIPImageProcessorPil:
    """What brings an image to the size of :func:`tiny_clip_vision`: shorter side to 32, then cut."""
    size = {"height": _CLIP_SIZE, "width": _CLIP_SIZE}
    return CLIPImageProcessorPil(size={"shortest_edge": _CLIP_SIZE}, crop_size=size)
