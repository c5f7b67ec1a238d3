"""Which releases the families' benchmark counts, their inputs, and the small variants that are timed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from diffsynth_lite.pipelines import releases_of
from diffsynth_lite.releases import Release
from diffsynth_lite.releases.release import Pixels


@dataclass(frozen=True, kw_only=True)
class CountedRelease:
    """A release that is counted.

    Attributes:
        family: its name.
        name: of one of the family's releases.
        depths: settings of what is trained of it with numbers of blocks.
        with_few: further settings that so few blocks ask for.
        counted: which of the family's block lists, or of the blocks outside of a list, stand for all; none:
            all of them are counted. Not the last block, which is offloaded in another way.
        pixels: of what it makes.
        num_inputs: images of the same size that an edit starts from.
        small: further settings of what is trained of it, for a CPU.
        small_pixels: also.
    """

    family: str
    name: str
    depths: tuple[str, ...] = ("num_layers",)
    with_few: Mapping[str, Any] = field(default_factory=dict)
    counted: tuple[str, ...] = ()
    pixels: Pixels = (1024, 1024, 1)
    num_inputs: int = 0
    small: Mapping[str, Any] = field(default_factory=dict)
    small_pixels: Pixels = (256, 256, 1)

    @property
    def release(self) -> Release:
        """Its numbers."""
        return next(release for release in releases_of(self.family) if release.name == self.name)


_TWO_LISTS = ("num_layers", "num_single_layers")
_TWO_HEADS = {"num_attention_heads": 2}
_CLIP, _SMALL_CLIP = (832, 480, 81), (224, 128, 33)

COUNTED = (
    CountedRelease(
        family="anima",
        name="Anima Base 1.0",
        small={"num_attention_heads": 2, "text_embed_dim": 256, "adaln_lora_dim": 32},
    ),
    CountedRelease(
        family="chroma",
        name="Chroma1 HD",
        depths=_TWO_LISTS,
        small={"num_attention_heads": 2, "approximator_hidden_dim": 256},
    ),
    CountedRelease(
        family="cogvideox",
        name="CogVideoX 5B",
        pixels=(720, 480, 49),
        small={"num_attention_heads": 4},
        small_pixels=(256, 128, 17),
    ),
    CountedRelease(
        family="ernie_image",
        name="ERNIE-Image",
        small={"hidden_size": 256, "num_attention_heads": 2, "ffn_hidden_size": 768},
    ),
    CountedRelease(family="flux", name="FLUX.1 dev", depths=_TWO_LISTS, small=_TWO_HEADS),
    CountedRelease(
        family="flux2",
        name="FLUX.2 dev",
        depths=_TWO_LISTS,
        small=_TWO_HEADS,
    ),
    CountedRelease(
        family="flux2",
        name="FLUX.2 klein base 4B",
        depths=_TWO_LISTS,
        small=_TWO_HEADS,
    ),
    CountedRelease(
        family="flux_fill",
        name="FLUX.1 Fill dev",
        depths=_TWO_LISTS,
        small=_TWO_HEADS,
    ),
    CountedRelease(
        family="flux_kontext",
        name="FLUX.1 Kontext dev",
        depths=_TWO_LISTS,
        num_inputs=1,
        small=_TWO_HEADS,
    ),
    CountedRelease(
        family="ideogram4",
        name="Ideogram 4 in bfloat16",
        small={"num_attention_heads": 1, "intermediate_size": 683, "llm_features_dim": 512},
    ),
    CountedRelease(
        family="krea2",
        name="Krea 2 Raw",
        depths=("num_layers", "num_layerwise_text_blocks", "num_refiner_text_blocks"),
        small={
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "intermediate_size": 683,
            "text_hidden_dim": 256,
            "text_num_attention_heads": 2,
            "text_num_key_value_heads": 2,
            "text_intermediate_size": 691,
        },
    ),
    CountedRelease(
        family="hunyuan_video",
        name="HunyuanVideo",
        depths=(*_TWO_LISTS, "num_refiner_layers"),
        pixels=(960, 544, 61),
        small=_TWO_HEADS,
        small_pixels=(224, 128, 17),
    ),
    CountedRelease(
        family="hunyuan_video_15",
        name="HunyuanVideo 1.5 480p T2V",
        pixels=(848, 480, 61),
        small=_TWO_HEADS,
        small_pixels=(224, 128, 17),
    ),
    CountedRelease(
        family="ltx2",
        name="LTX-2 19B",
        pixels=(768, 512, 81),
        small={
            "num_attention_heads": 2,
            "cross_attention_dim": 256,
            "audio_num_attention_heads": 2,
            "audio_cross_attention_dim": 128,
        },
        small_pixels=(384, 256, 41),
    ),
    CountedRelease(
        family="ltx_video",
        name="LTX-Video 0.9",
        pixels=(768, 512, 81),
        small={"num_attention_heads": 4, "cross_attention_dim": 256},
        small_pixels=(384, 256, 41),
    ),
    CountedRelease(family="qwen_image", name="Qwen-Image", small=_TWO_HEADS),
    CountedRelease(family="qwen_image_21", name="Qwen-Image 2.1", small=_TWO_HEADS),
    CountedRelease(
        family="qwen_image_edit",
        name="Qwen-Image-Edit",
        num_inputs=1,
        small=_TWO_HEADS,
    ),
    CountedRelease(
        family="qwen_image_layered",
        name="Qwen-Image-Layered",
        pixels=(640, 640, 5),
        small=_TWO_HEADS,
        small_pixels=(128, 128, 3),
    ),
    CountedRelease(
        family="sana",
        name="Sana 1.0 1.6B",
        small={
            "num_attention_heads": 8,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 128,
            "cross_attention_dim": 256,
        },
        small_pixels=(512, 512, 1),
    ),
    CountedRelease(
        family="sd3",
        name="Stable Diffusion 3.5 medium",
        small={"num_attention_heads": 4, "caption_projection_dim": 256},
    ),
    CountedRelease(
        family="sdxl",
        name="SDXL base 1.0",
        depths=("transformer_layers_per_block",),
        counted=(
            "down_blocks.1.attentions.1.transformer_blocks",
            "down_blocks.2.attentions.1.transformer_blocks",
            "down_blocks.1.resnets.1",
            "down_blocks.2.resnets.1",
            "up_blocks.0.resnets.1",
            "up_blocks.1.resnets.1",
            "up_blocks.2.resnets.1",
        ),
        small={"block_out_channels": (64, 128, 256), "attention_head_dim": (1, 2, 4)},
    ),
    CountedRelease(
        family="wan",
        name="Wan 2.1 T2V 14B",
        pixels=_CLIP,
        small={"num_attention_heads": 2, "ffn_dim": 691},
        small_pixels=_SMALL_CLIP,
    ),
    CountedRelease(
        family="wan_i2v",
        name="Wan 2.1 I2V 14B 480P",
        pixels=_CLIP,
        small={"num_attention_heads": 2, "ffn_dim": 691, "added_kv_proj_dim": 256},
        small_pixels=_SMALL_CLIP,
    ),
    CountedRelease(
        family="wan_vace",
        name="Wan 2.1 VACE 14B",
        # One further block leads to the first of the others, whichever number of these is counted.
        with_few={"vace_layers": (0,)},
        counted=("blocks",),
        pixels=_CLIP,
        small={"num_attention_heads": 2, "ffn_dim": 691},
        small_pixels=_SMALL_CLIP,
    ),
    CountedRelease(
        family="z_image",
        name="Z-Image",
        depths=("n_layers", "n_refiner_layers"),
        small={"dim": 256, "n_heads": 2, "n_kv_heads": 2},
    ),
)
