"""This folder trains HunyuanVideo 1.5."""

from diffsynth_lite.pipelines.hunyuan_video_15.family import (
    HunyuanVideo15,
    model_fn_hunyuan_video_15,
    tiny,
    tiny_transformer,
)

__all__ = ["HunyuanVideo15", "model_fn_hunyuan_video_15", "tiny", "tiny_transformer"]
