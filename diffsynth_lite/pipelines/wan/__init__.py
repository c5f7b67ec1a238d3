"""Wan, which makes clips from text: the family, and what it shares with ``wan_i2v`` next to this folder."""

from diffsynth_lite.pipelines.wan.family import Wan, model_fn_wan, tiny, tiny_wan_transformer

__all__ = ["Wan", "model_fn_wan", "tiny", "tiny_wan_transformer"]
