"""SDXL: the family, and what it does with its two text encoders."""

from diffsynth_lite.pipelines.sdxl.family import SDXL, model_fn_sdxl, tiny

__all__ = ["SDXL", "model_fn_sdxl", "tiny"]
