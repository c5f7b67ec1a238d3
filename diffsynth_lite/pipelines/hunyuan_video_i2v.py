"""This file trains HunyuanVideo from images, the first version: 16 channels, or 33.

Layouts: b batch, c latent channels, f latent frames, h and w latent height and width; l tokens, d channels.
Sources: diffusers ``transformer_hunyuan_video.py`` and ``pipeline_hunyuan_video_image2video.py``;
``hyvideo/diffusion/flow/transport.py`` of Tencent's HunyuanVideo-I2V.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from diffusers import HunyuanVideoImageToVideoPipeline
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video_image2video import DEFAULT_PROMPT_TEMPLATE
from PIL import Image
from transformers import CLIPImageProcessorPil, LlavaForConditionalGeneration

from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Media, Prompt, RecordKind
from diffsynth_lite.pipelines import hunyuan_video
from diffsynth_lite.pipelines.base.family import Conditioning, EncodedMedia, PreviewRequest
from diffsynth_lite.pipelines.base.first_frame import (
    encode_start,
    next_to_first_frame,
    preview_start,
    require_later_frames,
    start_code,
)
from diffsynth_lite.pipelines.base.mixins import EditInputs
from diffsynth_lite.pipelines.base.model_function import stacked, without_padding
from diffsynth_lite.releases.components import DIFFUSERS, SWARM, encoder_sizes
from diffsynth_lite.releases.release import ReleaseComponent, ReleaseTokenizer
from diffsynth_lite.testing import text_encoders, tokenizers

TEMPLATE: str = DEFAULT_PROMPT_TEMPLATE["template"]
"""The text around a prompt, with the place of the image."""
_NUM_IMAGE_TOKENS: int = DEFAULT_PROMPT_TEMPLATE["image_emb_len"]
_EVERY = {"token_replace": 4, "latent_concat": 2}
"""By ``image_condition_type``: one of how many tokens of the image the transformer gets."""
_NUM_ENDING = 4
"""Tokens of the template after a prompt that are cut out; one is left."""
_BLACK = Image.new("RGB", (16, 16))
"""What a negative prompt is read with, in any size."""
_TINY_SIDE = 48  # of the images that the tiny LLaVA sees

model_fn_hunyuan_video_i2v = hunyuan_video.model_fn_hunyuan_video
"""One forward. ``latents_bcfhw`` begin with the clean first frame, or have it after them in the channels."""

_SCRIPT = f"{DIFFUSERS}scripts/convert_hunyuan_video_to_diffusers.py"
_SIDE = 336
_LLAVA = ReleaseComponent(
    "LlavaForConditionalGeneration",
    {
        "image_token_index": 128257,
        "pad_token_id": 128258,
        "text_config": {"model_type": "llama", **encoder_sizes(4096, 14336, 32, 32, 8, 128320)},
    },
    dtype="float16",
    source=f"xtuner/llava-llama-3-8b-v1_1-transformers, as {_SCRIPT} takes it, by config.json of "
    "asadfgglie/banban-vision-8b-v1-pretrain-zh, which was made from it; else the defaults of LLaVA's class",
)
_16_CHANNELS = hunyuan_video.T2V.but(
    "HunyuanVideo I2V",
    "hunyuanvideo-community/HunyuanVideo-I2V",
    pipeline_class="HunyuanVideoImageToVideoPipeline",
    transformer=ReleaseComponent(
        "HunyuanVideoTransformer3DModel",
        {"image_condition_type": "token_replace"},
        dtype="bfloat16",
        source=_SCRIPT,
    ),
    text_encoder=_LLAVA,
    tokenizers={
        "image_processor": ReleaseTokenizer(
            "CLIPImageProcessor",
            images={"size": {"shortest_edge": _SIDE}, "crop_size": {"height": _SIDE, "width": _SIDE}},
        )
    },
    architecture="hunyuan-video-i2v-v2",
    sources={
        "pipeline": f"{_SCRIPT}; hub ids as in the docstring of the pipeline",
        "licence": "Tencent-Hunyuan/HunyuanVideo-I2V, LICENSE.txt",
        "architecture": SWARM,
    },
    unconfirmed=("dtype of the autoencoder", "shift"),
)
_33_CHANNELS = _16_CHANNELS.but(
    "HunyuanVideo I2V 33ch",
    "hunyuanvideo-community/HunyuanVideo-I2V-33ch",
    transformer=replace(
        _16_CHANNELS.components["transformer"],
        config={"guidance_embeds": False, "image_condition_type": "latent_concat", "in_channels": 33},
    ),
    architecture="hunyuan-video-i2v",
)


class HunyuanVideoI2V(EditInputs, hunyuan_video.HunyuanVideo):
    """HunyuanVideo I2V, the first version, from images: of 16 channels (the later one) and of 33.

    HunyuanVideo whose prompts are read by LLaVA together with the image that a clip starts from. Where the
    data names none, that is the first frame of the clip. Negative prompts and dropped captions are read with
    a black image, as by the pipeline.

    The folder decides what the transformer is given of the image (``image_condition_type``). Of 16 channels
    (``token_replace``) its latents take the place of the first ones, at noise level 0, and do not count in
    the loss. Of 33 (``latent_concat``) they are in the channels next to the noisy ones, and all latents count
    in the loss, as in Tencent's trainer. That pipeline cuts off the first 4 frames of what it generates, also
    of previews: 129 frames become 125.

    The model of 16 channels takes a guidance scale, as HunyuanVideo does: training gives it 1, where
    Tencent's trainer gives it 6. The one of 33 is guided by the negative prompt. Tencent trains with a shift
    of 7 (``run_train_image2video_lora.sh``), and samples with 7, or with 17 for more motion.
    """

    pipelines = (HunyuanVideoImageToVideoPipeline,)
    releases = (_16_CHANNELS, _33_CHANNELS)
    starting_recipes: ClassVar[Mapping[RecordKind, str]] = {"image_to_video": "hunyuan_video_i2v_lora.yaml"}
    encoder_classes: ClassVar[Mapping[str, Any]] = {
        **hunyuan_video.HunyuanVideo.encoder_classes,
        "text_encoder": LlavaForConditionalGeneration,
    }
    record_kinds: ClassVar[tuple[RecordKind, ...]] = ("video", "image_to_video")
    needs_inputs = True
    prompt_sees_images = True
    negative_sees_images = False
    prompt_id = "hunyuan_video_i2v/prompt/1"
    prompt_template = TEMPLATE
    num_cut = DEFAULT_PROMPT_TEMPLATE["crop_start"]
    latents_id = "hunyuan_video_i2v/latents/1"

    @property
    def components_without_weights(self) -> tuple[str, ...]:
        return (*super().components_without_weights, "image_processor")

    @cached_property
    def _condition_type(self) -> str:
        return str(self.folder.component_config("transformer").get("image_condition_type"))

    @property
    def prompt_tokens_of_an_input(self) -> int:
        return _NUM_IMAGE_TOKENS // _EVERY[self._condition_type]

    def check_folder(self, *, with_weights: bool = True) -> None:
        super().check_folder(with_weights=with_weights)
        if self._condition_type not in _EVERY:
            raise UserError(
                f"model.path: {self.folder.path / 'transformer'} has image_condition_type "
                f"{self._condition_type}, and this family trains {' and '.join(_EVERY)}; get the folder again"
            )

    def check_frames(self, num_frames: int, *, key: str) -> None:
        require_later_frames(num_frames, self.frame_step, key=key)
        super().check_frames(num_frames, key=key)

    def prompt_encoder_id(self, dtype: torch.dtype) -> str:
        seen = f"{self.folder.fingerprints('image_processor')} {self._condition_type}"
        return f"{super().prompt_encoder_id(dtype)} {seen}"

    def prompt_pipeline(self, dtype: torch.dtype, device: torch.device, **settings: Any) -> Any:
        folder = self.folder.place("image_processor").path
        processor = CLIPImageProcessorPil.from_pretrained(folder)
        return super().prompt_pipeline(dtype, device, image_processor=processor, **settings)

    def encode_prompts(
        self, pipeline: Any, prompts: Sequence[Prompt], device: torch.device
    ) -> list[Conditioning]:
        """One by one, as the pipeline cuts off long prompts only so."""
        rows = []
        for prompt in prompts:
            is_shown = prompt.images and not prompt.is_negative
            embeds_bld, pooled_bd, mask = pipeline.encode_prompt(
                image=prompt.images[0] if is_shown else _BLACK,
                prompt=[prompt.text],
                device=device,
                max_sequence_length=self.max_prompt_tokens,
                image_embed_interleave=_EVERY[self._condition_type],
            )
            (row,) = without_padding(embeds_bld, mask)
            rows.append({"prompt_embeds": row, "pooled_prompt_embeds": pooled_bd[0].cpu()})
        return rows

    def media_encoder_id(self, dtype: torch.dtype) -> str:
        return f"{super().media_encoder_id(dtype)} {self._condition_type}"

    def encode_given(self, pipeline: Any, item: Media) -> EncodedMedia:
        """(C, 1, H, W) of the image that a clip starts from, and where it takes a place, the loss mask."""
        started = replace(item, first_frame=item.first_frame or item.frames[0])
        encoded = encode_start(self, pipeline, started)
        if self._condition_type == "latent_concat":
            del encoded["loss_mask"]
        return encoded

    def num_condition_values(self, latents_shape: Sequence[int]) -> int:
        channels, num_frames, height, width = latents_shape
        has_mask = self._condition_type != "latent_concat"
        return (channels + has_mask * num_frames) * height * width

    def example_conditioning(self, latents_shape: Sequence[int]) -> Conditioning:
        config, (channels, _, *sides) = self.folder.component_config("transformer"), latents_shape
        num_tokens = self.max_prompt_tokens - _NUM_ENDING + self.prompt_tokens_of_an_input
        return {
            "prompt_embeds": torch.ones(num_tokens, config[self.prompt_width]),
            "pooled_prompt_embeds": torch.ones(config[self.pooled_width]),
            "first_frame_latents": torch.ones(channels, 1, *sides),
        }

    def noisy_inputs(
        self,
        noisy_latents: torch.Tensor,
        sigma: torch.Tensor,
        conditioning: Sequence[Conditioning],
        like: Mapping[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first_bcfhw = stacked(conditioning, "first_frame_latents", {"device": noisy_latents.device})
        if self._condition_type == "latent_concat":
            latents_bcfhw = next_to_first_frame(noisy_latents, first_bcfhw)
        else:
            latents_bcfhw = torch.cat([first_bcfhw, noisy_latents[:, :, 1:]], dim=2)
        return latents_bcfhw, self.timestep(sigma, like)

    def call_arguments(self, pipeline: Any, request: PreviewRequest) -> dict[str, Any]:
        return super().call_arguments(pipeline, request) | preview_start(request)

    def usage_arguments(self, request: PreviewRequest) -> dict[str, Any]:
        return {**start_code(request)}


def tiny() -> HunyuanVideoImageToVideoPipeline:
    """A random, complete and small pipeline of the real classes, built offline in a second: of 16 channels.

    As in ``hunyuan_video``, but for LLaVA.
    """
    parts = hunyuan_video.tiny(image_condition_type="token_replace").components
    tokenizer = tokenizers.llama3_tokenizer([TEMPLATE])
    side = {"height": _TINY_SIDE, "width": _TINY_SIDE}
    return HunyuanVideoImageToVideoPipeline(
        **parts | {"tokenizer": tokenizer, "text_encoder": text_encoders.tiny_llava(tokenizer)},
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": _TINY_SIDE}, crop_size=side),
    )
