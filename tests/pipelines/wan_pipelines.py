"""Tiny pipelines in the layouts of the releases of Wan."""

from pathlib import Path

import torch
from diffusers import WanImageToVideoPipeline, WanPipeline

from diffsynth_lite.pipelines import PipelineFolder, wan_i2v
from diffsynth_lite.pipelines.wan import tiny, tiny_wan_transformer
from diffsynth_lite.testing.autoencoders import tiny_wan_vae

BOUNDARY = 0.875


def two_experts() -> WanPipeline:
    """A14B: one transformer from the boundary on, another one below it."""
    second = tiny_wan_transformer(32, seed=1)
    return WanPipeline(**tiny().components | {"transformer_2": second}, boundary_ratio=BOUNDARY)


def ti2v() -> WanPipeline:
    """TI2V-5B: 48 channels at 1/16, a noise level for each token."""
    parts = tiny().components | {
        "vae": tiny_wan_vae(residual=True),
        "transformer": tiny_wan_transformer(32, in_channels=48, out_channels=48),
    }
    return WanPipeline(**parts, expand_timesteps=True)


_EMBEDS_PICTURES = {"image_dim": 16, "added_kv_proj_dim": 24}
FROM_PICTURES = {
    "i2v": _EMBEDS_PICTURES,
    "flf2v": {**_EMBEDS_PICTURES, "pos_embed_seq_len": 10},
    "a14b": {},
}
"""What the transformers of the image-to-video releases differ in."""


def transformer_from_pictures(release: str, seed: int = 0) -> torch.nn.Module:
    model = tiny_wan_transformer(32, seed=seed, in_channels=36, **FROM_PICTURES[release])
    if release == "flf2v":
        # Zeros as built: which of two pictures comes first would not show.
        places = model.condition_embedder.image_embedder.pos_embed
        places.data.normal_(generator=torch.Generator().manual_seed(0))
    return model


def from_pictures(release: str) -> WanImageToVideoPipeline:
    """One of the image-to-video releases."""
    parts = wan_i2v.tiny().components | {"transformer": transformer_from_pictures(release)}
    if release != "a14b":
        return WanImageToVideoPipeline(**parts)
    parts |= {"image_encoder": None, "image_processor": None}
    parts["transformer_2"] = transformer_from_pictures(release, seed=1)
    return WanImageToVideoPipeline(**parts, boundary_ratio=0.9)


def families_from_pictures(root: Path) -> dict[str, wan_i2v.WanI2V]:
    """The family, bound to a folder of each image-to-video release."""
    for release in FROM_PICTURES:
        from_pictures(release).save_pretrained(root / release)
    return {release: wan_i2v.WanI2V(PipelineFolder(path=root / release)) for release in FROM_PICTURES}
