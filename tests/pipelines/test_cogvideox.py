"""What the tests of all families cannot know of the one for CogVideoX that is kept elsewhere."""

from pathlib import Path

import pytest
from my_families.cogvideox import CogVideoX, tiny

from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines import PipelineFolder


def test_a_larger_model_whose_positions_are_rotary_is_refused(tmp_path: Path) -> None:
    pipeline = tiny()
    pipeline.transformer.register_to_config(use_rotary_positional_embeddings=True)
    pipeline.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"use_rotary_positional_embeddings.*; use CogVideoX 2B"):
        CogVideoX(PipelineFolder(path=tmp_path)).check_folder()
