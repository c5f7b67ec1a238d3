"""This folder trains LTX-2: clips, and their audio."""

from diffsynth_lite.pipelines.ltx2.family import LTX2
from diffsynth_lite.pipelines.ltx2.forward import model_fn_ltx2
from diffsynth_lite.pipelines.ltx2.tiny import tiny, tiny_connectors, tiny_gemma4, tiny_transformer

__all__ = ["LTX2", "model_fn_ltx2", "tiny", "tiny_connectors", "tiny_gemma4", "tiny_transformer"]
