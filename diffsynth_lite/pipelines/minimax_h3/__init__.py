"""This folder trains MiniMax-H3: clips from text, and their audio."""

from diffsynth_lite.pipelines.minimax_h3.family import MiniMaxH3, tiny
from diffsynth_lite.pipelines.minimax_h3.forward import model_fn_minimax_h3

__all__ = ["MiniMaxH3", "model_fn_minimax_h3", "tiny"]
