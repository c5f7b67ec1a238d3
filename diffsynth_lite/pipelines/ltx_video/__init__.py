"""LTX-Video: the family, and its releases."""

from diffsynth_lite.pipelines.ltx_video.family import LTXVideo, model_fn_ltx_video, tiny

__all__ = ["LTXVideo", "model_fn_ltx_video", "tiny"]
