"""The released models that the families' benchmark counts, as data: what their configs say, and their inputs.

Most configs are the defaults of their diffusers class; ``source`` says where each one is from.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Shape = tuple[int, ...]
Pixels = tuple[int, int, int]
"""Width, height and frames."""


@dataclass(frozen=True, kw_only=True)
class Release:
    """A released model of a family.

    Attributes:
        family: its name.
        name: of the model.
        source: of its config.
        config: of what is trained of it, where it differs from the defaults of its class.
        depths: settings of that config with numbers of blocks.
        counted: which of the family's block lists, or of the blocks outside of a list, stand for all; none:
            all of them are counted. Not the last block, which is offloaded in another way.
        pixels: of what it makes.
        encoded: shapes of what its encoders give beside the latents, by name, without a batch axis.
        switches: names of what they say with yes or no; here it is no.
        num_inputs: pictures of the same size that an edit starts from.
        condition_channels: of latents of the same size that say what is given.
        small: further settings of its config for a CPU.
        small_pixels: likewise.
    """

    family: str
    name: str
    source: str
    config: Mapping[str, Any] = field(default_factory=dict)
    depths: tuple[str, ...] = ("num_layers",)
    counted: tuple[str, ...] = ()
    pixels: Pixels = (1024, 1024, 1)
    encoded: Mapping[str, Shape]
    switches: tuple[str, ...] = ()
    num_inputs: int = 0
    condition_channels: int = 0
    small: Mapping[str, Any]
    small_pixels: Pixels = (256, 256, 1)


_TWO_LISTS = ("num_layers", "num_single_layers")
_FLUX = {
    "config": {"guidance_embeds": True},
    "source": "defaults of `FluxTransformer2DModel`, with `guidance_embeds`: it is told a guidance scale",
    "depths": _TWO_LISTS,
    "encoded": {"prompt_embeds": (512, 4096), "pooled_prompt_embeds": (768,)},
    "small": {"num_attention_heads": 2},
}
_QWEN = {
    "source": "defaults of `QwenImageTransformer2DModel`",
    "small": {"num_attention_heads": 2},
}
_SDXL_UNET = {
    "sample_size": 128,
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}

RELEASES = (
    Release(
        family="chroma",
        name="Chroma1-HD",
        source="defaults of `ChromaTransformer2DModel`",
        depths=_TWO_LISTS,
        encoded={"prompt_embeds": (512, 4096)},
        small={"num_attention_heads": 2, "approximator_hidden_dim": 256},
    ),
    Release(family="flux", name="FLUX.1 dev", **_FLUX),
    Release(
        family="flux2",
        name="FLUX.2 dev",
        source="defaults of `Flux2Transformer2DModel`",
        depths=_TWO_LISTS,
        encoded={"prompt_embeds": (512, 15360)},
        small={"num_attention_heads": 2},
    ),
    Release(
        family="flux2",
        name="FLUX.2 klein 4B",
        source="`klein-4b` in diffusers' scripts/convert_flux2_to_diffusers.py",
        config={"num_attention_heads": 24, "joint_attention_dim": 7680, "guidance_embeds": False},
        depths=_TWO_LISTS,
        encoded={"prompt_embeds": (512, 7680)},
        small={"num_attention_heads": 2},
    ),
    Release(family="flux_kontext", name="FLUX.1 Kontext dev", num_inputs=1, **_FLUX),
    Release(
        family="ltx_video",
        name="LTX-Video 2B",
        source="defaults of `LTXVideoTransformer3DModel`",
        pixels=(768, 512, 81),
        encoded={"prompt_embeds": (128, 4096), "frame_rate": ()},
        small={"num_attention_heads": 4, "cross_attention_dim": 256},
        small_pixels=(384, 256, 41),
    ),
    Release(family="qwen_image", name="Qwen-Image", encoded={"prompt_embeds": (512, 3584)}, **_QWEN),
    Release(
        family="qwen_image_edit",
        name="Qwen-Image-Edit",
        num_inputs=1,
        encoded={"prompt_embeds": (1024, 3584)},
        **_QWEN,
    ),
    Release(
        family="sana",
        name="Sana 1.6B",
        source="defaults of `SanaTransformer2DModel`, as in diffusers' scripts/convert_sana_to_diffusers.py",
        encoded={"prompt_embeds": (300, 2304)},
        small={
            "num_attention_heads": 8,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 128,
            "cross_attention_dim": 256,
        },
        small_pixels=(512, 512, 1),
    ),
    Release(
        family="sdxl",
        name="SDXL base 1.0",
        source="its unet/config.json as public code quotes it; the 2.57 billion parameters are those of SDXL",
        config=_SDXL_UNET,
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
        encoded={"prompt_embeds": (77, 2048), "pooled_prompt_embeds": (1280,), "time_ids": (6,)},
        switches=("is_zero",),
        small={"block_out_channels": (64, 128, 256), "attention_head_dim": (1, 2, 4)},
    ),
    Release(
        family="wan",
        name="Wan 2.1 14B",
        source="defaults of `WanTransformer3DModel`; each expert of Wan 2.2 A14B has the same config",
        pixels=(832, 480, 81),
        encoded={"prompt_embeds": (512, 4096)},
        small={"num_attention_heads": 2, "ffn_dim": 691},
        small_pixels=(224, 128, 33),
    ),
    Release(
        family="wan_i2v",
        name="Wan 2.1 I2V-14B",
        source="`Wan-I2V-14B-480p` in diffusers' scripts/convert_wan_to_diffusers.py; an expert of Wan 2.2 "
        "I2V-A14B has the blocks of Wan 2.1 14B",
        config={"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120},
        pixels=(832, 480, 81),
        encoded={"prompt_embeds": (512, 4096), "image_embeds": (1, 257, 1280)},
        condition_channels=20,
        small={"num_attention_heads": 2, "ffn_dim": 691, "added_kv_proj_dim": 256},
        small_pixels=(224, 128, 33),
    ),
    Release(
        family="z_image",
        name="Z-Image",
        source="defaults of `ZImageTransformer2DModel`",
        depths=("n_layers", "n_refiner_layers"),
        encoded={"prompt_embeds": (512, 2560)},
        small={"dim": 256, "n_heads": 2, "n_kv_heads": 2},
    ),
)
