"""This file trains Wan 2.2 Animate: a character who moves as the poses and the face of another clip.

Layouts: b batch, c latent channels, f latent frames, h and w latent height and width; l tokens, d channels.
Sources: diffusers ``transformer_wan_animate.py`` and ``pipeline_wan_animate.py``.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Unpack

import torch
from diffusers import WanAnimatePipeline, WanAnimateTransformer3DModel

from diffsynth_lite.core.gradient import gradient_checkpoint_forward
from diffsynth_lite.lora.layer_names import LoraLayers, Original, renamed, under
from diffsynth_lite.media import Media, RecordKind
from diffsynth_lite.pipelines import wan_i2v
from diffsynth_lite.pipelines.base.diffusers_components import assemble
from diffsynth_lite.pipelines.base.family import Conditioning, EncodedMedia, PreviewRequest
from diffsynth_lite.pipelines.base.model_function import Checkpointing, checkpointed, model_function, stacked
from diffsynth_lite.pipelines.base.preview_request import LANCZOS, Code
from diffsynth_lite.pipelines.wan.names import WAN_LAYERS
from diffsynth_lite.pipelines.wan.releases import WAN_ANIMATE
from diffsynth_lite.testing import seeded

_MASKS = 4
"""Channels of a mask of the frames that are given, before their latents."""

_GUIDED_BY = ("pose_patch_embedding", "motion_encoder", "face_encoder", "face_adapter")
"""Parts of the transformer that see poses and faces."""
_ADAPTER, _ORIGINAL = "face_adapter.*", "face_adapter.fuser_blocks.*"
_OF_WAN = WAN_LAYERS["transformer"]
_LORA_LAYERS = replace(
    _OF_WAN,
    layers=(
        *_OF_WAN.layers,
        *("pose_patch_embedding", "face_encoder.out_proj"),
        *under(_ADAPTER, ("to_q", "to_k", "to_v", "to_out")),
    ),
    kohya={
        **_OF_WAN.kohya,
        f"{_ORIGINAL}.linear1_q": renamed(f"{_ADAPTER}.to_q"),
        f"{_ORIGINAL}.linear1_kv": Original(under(_ADAPTER, ("to_k", "to_v")), rows=(1, 1)),
        f"{_ORIGINAL}.linear2": renamed(f"{_ADAPTER}.to_out"),
    },
)


@model_function
def model_fn_wan_animate(
    transformer: torch.nn.Module,
    latents_bcfhw: torch.Tensor,
    timestep: torch.Tensor,
    prompt_embeds_bld: torch.Tensor,
    image_embeds_bld: torch.Tensor,
    pose_bcfhw: torch.Tensor,
    face_bcfhw: torch.Tensor,
    **checkpointing: Unpack[Checkpointing],
) -> torch.Tensor:
    """One forward of Wan Animate, each transformer block run by the gradient engine.

    The adapters of the face, after every fifth block, and its encoder are not.

    Args:
        transformer: a ``WanAnimateTransformer3DModel``, plain or wrapped by DDP.
        latents_bcfhw: (B, 36, 1 + F, H, W): noisy normalised latents (16), a mask of what is given (4), and
            its latents (16); the character's image is before the frames.
        timestep: (B,), in [0, 1000].
        prompt_embeds_bld: (B, 512, D) prompt embeddings, filled up with zeros; there is no mask.
        image_embeds_bld: (B, L, D_image), of the character's image.
        pose_bcfhw: (B, 16, F, H, W), normalised latents of the poses.
        face_bcfhw: (B, 3, 4 F - 3, 512, 512), pixels of the face, in [-1, 1].

    Returns:
        (B, 16, 1 + F, H, W), the predicted velocity ``noise - latents``.
    """
    with checkpointed(WanAnimate, transformer, gradient_checkpoint_forward, **checkpointing):
        velocity_bcfhw: torch.Tensor = transformer(
            hidden_states=latents_bcfhw,
            timestep=timestep,
            encoder_hidden_states=prompt_embeds_bld,
            encoder_hidden_states_image=image_embeds_bld,
            pose_hidden_states=pose_bcfhw,
            face_pixel_values=face_bcfhw,
            return_dict=False,
        )[0]
    return velocity_bcfhw


class WanAnimate(wan_i2v.WanI2V):
    """Wan 2.2 Animate: a character who moves as the poses and the face of another clip.

    Each clip has a clip of its poses (``data.control_dir``) and one of its face, cut out (``data.face_dir``),
    both as long as it. The character's image is the clip's own first frame, or that of
    ``data.first_frame_dir``. It is also a frame before those of the clip, which the model predicts too, and
    which counts in the loss, as the given frames of family ``wan_i2v`` do. Poses and faces are made by the
    preprocessing of the authors.

    A preview is given ``validation.inputs``, ``validation.control`` and ``validation.faces``. Above a
    guidance scale of 1 its pipeline also steers away from a face that is black; the authors use no guidance.

    Only the mode that animates an image is trained, and not the one that replaces a character in a clip; nor
    are clips that continue others, of which a preview is the first 77 frames. The LoRA is on the blocks. The
    adapters of the face and its encoder stay as they are.
    """

    pipelines = (WanAnimatePipeline,)
    releases = WAN_ANIMATE
    starting_recipes: ClassVar[Mapping[RecordKind, str]] = {"image_to_video": "wan22_animate_14b_lora.yaml"}
    lora_layers: ClassVar[LoraLayers] = {"transformer": _LORA_LAYERS}
    takes_faces = True
    frames_argument = "segment_frame_length"
    # The adapters of the face are after every fifth block.
    is_counted_by_few_blocks = False
    transformer_class = WanAnimateTransformer3DModel
    model_fn = model_fn_wan_animate
    sequence_split = None
    latents_id = "wan_animate/latents/1"
    default_num_frames = 77
    default_fps = 30.0

    @property
    def record_kinds(self) -> tuple[RecordKind, ...]:
        """Clips with their poses and faces, and with a character's image or their own first frame."""
        return ("control", "image_to_video")

    def unused_modules(self, model: torch.nn.Module) -> list[str]:
        """What sees poses and faces, which stays as it is."""
        return list(_GUIDED_BY)

    def media_encoder_id(self, dtype: torch.dtype) -> str:
        parts = self.folder.fingerprints("vae", "image_encoder", "image_processor")
        return f"{self.latents_id} {parts} {dtype} {self._transformer_config.get('motion_encoder_size')}"

    def media_pipeline(self, dtype: torch.dtype, device: torch.device) -> Any:
        vae = self.load_component("vae", dtype).to(device)
        transformer = self.empty_component("transformer")
        return assemble(self.pipeline, vae=vae, transformer=transformer, **self.image_parts(dtype, device))

    def with_given(self, latents: torch.Tensor, given: EncodedMedia) -> EncodedMedia:
        # The character's image is a frame before those of the clip.
        latents = torch.cat([given["condition_latents"][_MASKS:, :1], latents], dim=1)
        return super().with_given(latents, given)

    def encode_given(self, pipeline: Any, item: Media) -> EncodedMedia:
        """(4 + C, 1 + F, H, W), (C, F, H, W) of the poses, (L, D), and (3, 4 F - 3, 512, 512) in bytes."""
        device, (width, height) = pipeline.vae.device, item.frames[0].size
        character = item.first_frame or item.frames[0]
        size = {"height": height, "width": width}
        given_bcfhw = pipeline.prepare_prev_segment_cond_latents(
            segment_frame_length=len(item.frames), device=device, **size
        )
        pixels_bchw = pipeline.vae_image_processor.preprocess(character, resize_mode="fill", **size)
        reference_bcfhw = pipeline.prepare_reference_image_latents(pixels_bchw, device=device)
        poses = pipeline.video_processor.preprocess_video(list(item.control), **size)
        face_bcfhw = pipeline.video_processor.preprocess_video(
            list(item.face), *[self._transformer_config["motion_encoder_size"]] * 2
        )
        return {
            "condition_latents": torch.cat([reference_bcfhw, given_bcfhw], dim=2)[0].float().cpu(),
            "pose_latents": pipeline.prepare_pose_latents(poses, device=device)[0].float().cpu(),
            "image_embeds": pipeline.encode_image([character], device).cpu(),
            "face_pixels": ((face_bcfhw[0] + 1) * 127.5).round().to(torch.uint8).cpu(),
        }

    def latents_shape(self, width: int, height: int, num_frames: int) -> tuple[int, ...]:
        channels, frames, *sides = super().latents_shape(width, height, num_frames)
        return (channels, 1 + frames, *sides)

    def num_condition_values(self, latents_shape: Sequence[int]) -> int:
        """With the pixels of the face, which are bytes."""
        face = math.prod(self._condition_shapes(latents_shape)["face_pixels"])
        return super().num_condition_values(latents_shape) - face + face // 4

    def _condition_shapes(self, latents_shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        channels, frames, *sides = latents_shape
        num_pixels = (frames - 2) * self._vae_config["scale_factor_temporal"] + 1
        face = (3, num_pixels, *[self._transformer_config["motion_encoder_size"]] * 2)
        given = {"pose_latents": (channels, frames - 1, *sides), "face_pixels": face}
        return super()._condition_shapes(latents_shape) | given

    def example_conditioning(self, latents_shape: Sequence[int]) -> Conditioning:
        example = super().example_conditioning(latents_shape)
        return example | {"face_pixels": example["face_pixels"].to(torch.uint8)}

    def model_inputs(self, conditioning: Sequence[Conditioning], like: Mapping[str, Any]) -> dict[str, Any]:
        # In fp32, as the pipeline has pixels before it casts them.
        faces = stacked(conditioning, "face_pixels", {"device": like["device"]}).float()
        given = {
            "pose_bcfhw": stacked(conditioning, "pose_latents", like),
            "face_bcfhw": (faces / 255 * 2 - 1).to(**like),
        }
        return super().model_inputs(conditioning, like) | given

    @property
    def pipeline_settings(self) -> dict[str, Any]:
        return {}

    def pipeline_for(self, request: PreviewRequest) -> Any:
        return self.pipeline

    def call_arguments(self, pipeline: Any, request: PreviewRequest) -> dict[str, Any]:
        guides = {"pose_video": list(request.control), "face_video": list(request.face)}
        return super().call_arguments(pipeline, request) | guides

    def usage_arguments(self, request: PreviewRequest) -> dict[str, Any]:
        count = request.num_frames
        poses = f'[{request.fitted("frame", LANCZOS)} for frame in load_video("control.mp4")[:{count}]]'
        return super().usage_arguments(request) | {
            "pose_video": Code(poses),
            "face_video": Code(f'load_video("face.mp4")[:{count}]'),
        }


def tiny() -> WanAnimatePipeline:
    """A random, complete and small pipeline of the real classes, built offline in a second."""
    parts = wan_i2v.tiny().components
    layout = parts["transformer"].config
    with seeded(0):
        parts["transformer"] = WanAnimateTransformer3DModel(
            num_layers=4,
            inject_face_latents_blocks=2,
            num_attention_heads=2,
            attention_head_dim=12,
            ffn_dim=32,
            text_dim=layout.text_dim,
            rope_max_seq_len=32,
            image_dim=layout.image_dim,
            added_kv_proj_dim=layout.added_kv_proj_dim,
            motion_encoder_channel_sizes={"4": 8, "8": 8, "16": 8},
            motion_encoder_size=16,
            motion_style_dim=8,
            motion_dim=4,
            motion_encoder_dim=16,
            face_encoder_hidden_dim=16,
            face_encoder_num_heads=2,
        ).eval()
    del parts["transformer_2"]
    return WanAnimatePipeline(**parts)
