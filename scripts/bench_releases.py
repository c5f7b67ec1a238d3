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
        name: of the model.
        source: of its config.
        config: of its transformer, where it differs from the defaults of its class.
        depths: settings of that config with the number of blocks, one for each of the family's block lists.
        pixels: of what it makes.
        prompt: shapes of what its prompt encoder gives, by name, without a batch axis.
        num_inputs: pictures of the same size that an edit starts from.
        small: further settings of its config for a CPU.
        small_pixels: likewise.
    """

    name: str
    source: str
    config: Mapping[str, Any] = field(default_factory=dict)
    depths: tuple[str, ...] = ("num_layers",)
    pixels: Pixels = (1024, 1024, 1)
    prompt: Mapping[str, Shape]
    num_inputs: int = 0
    small: Mapping[str, Any]
    small_pixels: Pixels = (256, 256, 1)


_FLUX = {
    "config": {"guidance_embeds": True},
    "source": "defaults of `FluxTransformer2DModel`, with `guidance_embeds`: it is told a guidance scale",
    "depths": ("num_layers", "num_single_layers"),
    "prompt": {"prompt_embeds": (512, 4096), "pooled_prompt_embeds": (768,)},
    "small": {"num_attention_heads": 2},
}
_QWEN = {
    "source": "defaults of `QwenImageTransformer2DModel`",
    "small": {"num_attention_heads": 2},
}

RELEASES = {
    "chroma": Release(
        name="Chroma1-HD",
        source="defaults of `ChromaTransformer2DModel`",
        depths=("num_layers", "num_single_layers"),
        prompt={"prompt_embeds": (512, 4096)},
        small={"num_attention_heads": 2, "approximator_hidden_dim": 256},
    ),
    "flux": Release(name="FLUX.1 dev", **_FLUX),
    "flux_kontext": Release(name="FLUX.1 Kontext dev", num_inputs=1, **_FLUX),
    "ltx_video": Release(
        name="LTX-Video 2B",
        source="defaults of `LTXVideoTransformer3DModel`",
        pixels=(768, 512, 81),
        prompt={"prompt_embeds": (128, 4096), "frame_rate": ()},
        small={"num_attention_heads": 4, "cross_attention_dim": 256},
        small_pixels=(384, 256, 41),
    ),
    "qwen_image": Release(name="Qwen-Image", prompt={"prompt_embeds": (512, 3584)}, **_QWEN),
    "qwen_image_edit": Release(
        name="Qwen-Image-Edit", num_inputs=1, prompt={"prompt_embeds": (1024, 3584)}, **_QWEN
    ),
    "wan": Release(
        name="Wan 2.1 14B",
        source="defaults of `WanTransformer3DModel`",
        pixels=(832, 480, 81),
        prompt={"prompt_embeds": (512, 4096)},
        small={"num_attention_heads": 2, "ffn_dim": 691},
        small_pixels=(224, 128, 33),
    ),
}
"""By the name of the family."""
