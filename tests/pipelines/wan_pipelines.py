"""Tiny pipelines in the layouts of the two releases of Wan 2.2."""

from diffusers import WanPipeline

from diffsynth_lite.pipelines.wan import tiny
from diffsynth_lite.testing.autoencoders import tiny_wan_vae
from diffsynth_lite.testing.transformers import tiny_wan_transformer

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
