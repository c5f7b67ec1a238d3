"""This file trains Kandinsky 5.0 Video: clips from text, or from an image.

Layouts: b batch, c latent channels, f latent frames, h and w latent height and width; l tokens, d channels.
Sources: diffusers ``transformer_kandinsky.py``, ``pipeline_kandinsky.py`` and ``pipeline_kandinsky_i2v.py``;
``configs/`` and ``kandinsky/generation_utils.py`` of kandinskylab/kandinsky-5.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Unpack

import torch
from diffusers import AutoencoderKLHunyuanVideo, Kandinsky5I2VPipeline, Kandinsky5T2VPipeline

from diffsynth_lite.core.gradient import gradient_checkpoint_forward
from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Media, RecordKind
from diffsynth_lite.pipelines.base.family import Conditioning, EncodedMedia, PreviewRequest
from diffsynth_lite.pipelines.base.first_frame import encode_start, preview_start, start_code
from diffsynth_lite.pipelines.base.model_function import Checkpointing, checkpointed, model_function, stacked
from diffsynth_lite.pipelines.hunyuan_video import HunyuanVideo
from diffsynth_lite.pipelines.kandinsky5 import (
    KANDINSKY5_IMAGE,
    NUM_POSITIONS,
    Kandinsky5,
    tiny_pipeline,
    with_positions,
)
from diffsynth_lite.testing import autoencoders


@model_function
def model_fn_kandinsky5_video(
    transformer: torch.nn.Module,
    latents_bcfhw: torch.Tensor,
    timestep: torch.Tensor,
    prompt_embeds_bld: torch.Tensor,
    pooled_prompt_embeds_bd: torch.Tensor,
    first_frame_bcfhw: torch.Tensor | None = None,
    **checkpointing: Unpack[Checkpointing],
) -> torch.Tensor:
    """One forward of Kandinsky 5.0 Video, each transformer block run by the gradient engine.

    Args:
        transformer: a ``Kandinsky5Transformer3DModel`` with ``visual_cond``, plain or wrapped by DDP.
        latents_bcfhw: (B, 16, F, H, W), noisy normalised latents; F <= 128, H and W even and <= 256.
        first_frame_bcfhw: (B, 16, 1, H, W), clean normalised latents of the image that clips start from.
            Other arguments are those of ``model_fn_kandinsky5``.

    Returns:
        (B, 16, F, H, W), the predicted velocity ``noise - latents``, of no meaning in a frame that is given.
    """
    is_given = torch.zeros_like(latents_bcfhw[:, :1])
    if first_frame_bcfhw is not None:
        latents_bcfhw = torch.cat([first_frame_bcfhw, latents_bcfhw[:, :, 1:]], dim=2)
        is_given[:, :, :1] = 1
    # Between the two is place for clean latents, which the pipelines leave at zero.
    seen_bcfhw = torch.cat([latents_bcfhw, torch.zeros_like(latents_bcfhw), is_given], dim=1)
    is_small = all(480 <= side * 8 <= 854 for side in latents_bcfhw.shape[-2:])  # in pixels
    scale = 2 if is_small else 3.16
    with checkpointed(Kandinsky5Video, transformer, gradient_checkpoint_forward, **checkpointing):
        velocity_bfhwc: torch.Tensor = transformer(
            **with_positions(seen_bcfhw.movedim(1, -1), prompt_embeds_bld),
            timestep=timestep,
            pooled_projections=pooled_prompt_embeds_bd,
            scale_factor=(1, scale, scale),
            return_dict=True,
        ).sample
    return velocity_bfhwc.movedim(-1, 1)


_CONFIGS = "kandinskylab/kandinsky-5, configs/"
_SEEN = {"in_visual_dim": 16, "out_visual_dim": 16, "visual_cond": True}
_LITE = {"axes_dims": (16, 24, 24), "ff_dim": 7168, "model_dim": 1792, "num_visual_blocks": 32}
_PRO = {"axes_dims": (32, 48, 48), "ff_dim": 16384, "model_dim": 4096, "num_visual_blocks": 60}
_PRO |= {"num_text_blocks": 4, "time_dim": 1024}
_MODEL = KANDINSKY5_IMAGE.components["transformer"]
_LITE_T2V = KANDINSKY5_IMAGE.but(
    "Kandinsky 5.0 T2V Lite 5s",
    "kandinskylab/Kandinsky-5.0-T2V-Lite-sft-5s-Diffusers",
    pipeline_class="Kandinsky5T2VPipeline",
    transformer=replace(_MODEL, config=_SEEN | _LITE, source=f"{_CONFIGS}k5_lite_t2v_5s_sft_sd.yaml"),
    vae=HunyuanVideo.releases[0].components["vae"],
    size=(768, 512, 121),
    parameters=2e9,
    sources={"parameters": "kandinskylab/kandinsky-5, README.md"},
    unconfirmed=(*KANDINSKY5_IMAGE.unconfirmed, "attention_type of its folder"),
)
_PRO_T2V = _LITE_T2V.but(
    "Kandinsky 5.0 T2V Pro 5s",
    "kandinskylab/Kandinsky-5.0-T2V-Pro-sft-5s-Diffusers",
    transformer=replace(_MODEL, config=_SEEN | _PRO, source=f"{_CONFIGS}k5_pro_t2v_5s_sft_sd.yaml"),
    parameters=19e9,
)
_OF_IMAGES = {"pipeline_class": "Kandinsky5I2VPipeline"}
_I2V = "kandinskylab/Kandinsky-5.0-I2V"


class Kandinsky5Video(Kandinsky5):
    """Kandinsky 5.0 Video, text to video and image to video: Lite of 2 and Pro of 19 billion parameters.

    32 blocks (Pro: 60) of self- and cross-attention, after two (four) that read the prompt, as in
    `kandinsky5`; the causal video VAE of HunyuanVideo: 1/4 of the frames, 1/8 of the size.

    The folder decides whether clips are made from text only or from an image. A clip whose first frame the
    data does not name starts from the first one of its own. The model sees it clean, and it does not count in
    the loss. The pipeline evens out the first four latent frames by those after them, and needs 17 frames.

    All tokens see each other, in training, previews and the code of model cards. Releases of 10 seconds, and
    Pro at a megapixel, are made for sparse attention (NABLA, `attention_type: nabla`), for which diffusers
    needs flex attention and sides that are multiples of 128. At 512 pixels the authors use Pro with full
    attention, too (`k5_pro_t2v_5s_sft_sd.yaml`), and SimpleTuner trains all so.

    Prompts of different lengths, and their template, are treated as in `kandinsky5`. The authors cut them at
    256 tokens, diffusers at 512. Captions of images have the template of clips, as in diffusers.

    The sampler's shift is 5. musubi-tuner trains with the same, and a density around the middle; its authors'
    own program generates most clips with 10. ComfyUI takes its LoRA files as they are.
    """

    pipelines: ClassVar[tuple[Any, ...]] = (Kandinsky5T2VPipeline, Kandinsky5I2VPipeline)
    releases = (
        _LITE_T2V,
        _PRO_T2V,
        _LITE_T2V.but("Kandinsky 5.0 I2V Lite 5s", f"{_I2V}-Lite-5s-Diffusers", **_OF_IMAGES),
        _PRO_T2V.but("Kandinsky 5.0 I2V Pro 5s", f"{_I2V}-Pro-sft-5s-Diffusers", **_OF_IMAGES),
    )
    starting_recipes: ClassVar[Mapping[RecordKind, str]] = {"video": "kandinsky5_video_lora.yaml"}
    encoder_classes: ClassVar[Mapping[str, Any]] = {
        **Kandinsky5.encoder_classes,
        "vae": AutoencoderKLHunyuanVideo,
    }
    visual_cond = True
    frame_step = 4
    default_num_frames = 121
    default_fps = 24.0
    model_fn = model_fn_kandinsky5_video
    latents_id = "kandinsky5_video/latents/1"
    encodes_as_model = True

    @property
    def record_kinds(self) -> tuple[RecordKind, ...]:
        """From text clips and images; from an image clips, and clips with a first frame."""
        return ("video", "image_to_video") if self.needs_inputs else ("video", "image")

    @property
    def needs_inputs(self) -> bool:
        return self.pipeline is Kandinsky5I2VPipeline

    def check_frames(self, num_frames: int, *, key: str) -> None:
        super().check_frames(num_frames, key=key)
        fewest = 17 if self.needs_inputs else 1
        most = (NUM_POSITIONS - 1) * self.frame_step + 1
        if not fewest <= num_frames <= most:
            raise UserError(f"{key}: {num_frames} frames; {self.pipeline.__name__} makes {fewest} to {most}")

    def load_transformer(self, dtype: torch.dtype) -> Any:
        model: Any = super().load_transformer(dtype)
        model.register_to_config(attention_type="regular")  # the pipelines ask for it
        return model

    def media_encoder_id(self, dtype: torch.dtype) -> str:
        return super().media_encoder_id(dtype) + (" start" if self.needs_inputs else "")

    def encode_given(self, pipeline: Any, item: Media) -> EncodedMedia:
        if not self.needs_inputs:
            return {}
        return encode_start(self, pipeline, replace(item, first_frame=item.first_frame or item.frames[0]))

    def num_condition_values(self, latents_shape: Sequence[int]) -> int:
        channels, num_frames, height, width = latents_shape
        return (channels + num_frames) * height * width if self.needs_inputs else 0

    def example_conditioning(self, latents_shape: Sequence[int]) -> Conditioning | None:
        given = super().example_conditioning(latents_shape) or {}
        channels, _, *sides = latents_shape
        first = {"first_frame_latents": torch.ones(channels, 1, *sides)} if self.needs_inputs else {}
        return given | first

    def model_inputs(self, conditioning: Sequence[Conditioning], like: Mapping[str, Any]) -> dict[str, Any]:
        given = super().model_inputs(conditioning, like)
        if self.needs_inputs:
            given["first_frame_bcfhw"] = stacked(conditioning, "first_frame_latents", like)
        return given

    def call_arguments(self, pipeline: Any, request: PreviewRequest) -> dict[str, Any]:
        return super().call_arguments(pipeline, request) | preview_start(request)

    def usage_arguments(self, request: PreviewRequest) -> Mapping[str, Any]:
        return start_code(request)

    def usage_setup(self, request: PreviewRequest) -> list[str]:
        if self.folder.component_config("transformer").get("attention_type") != "nabla":
            return []
        return [
            "# All tokens see each other, as in training.",
            'pipeline.transformer.register_to_config(attention_type="regular")',
        ]


def tiny() -> Kandinsky5T2VPipeline:
    """A random, complete and small pipeline of the real classes, built offline in a second.

    The real compression and scale of the latents, of 4 channels.
    """
    return tiny_pipeline(Kandinsky5T2VPipeline, autoencoders.tiny_hunyuan_video_vae(), visual_cond=True)
