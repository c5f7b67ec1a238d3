"""A run whose steps are scored with tiny DINOv2 and SigLIP: what is generated and kept, and what is refused."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from tiny_run import UNWATCHED, TinyRun, checkpoint_tensors, copy_run, differing, make_run, tiny_image

from diffsynth_lite.scores.record import ScoreRecord, read_scores
from diffsynth_lite.testing.feature_models import save_tiny_dinov2, save_tiny_siglip

COLOURS = ("red", "blue", "green")


@pytest.fixture(scope="module")
def scored_run(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> TinyRun:
    """A finished run with two scored steps, 2 and 4."""
    root = tmp_path_factory.mktemp("scored")
    run = make_run(root, tiny_model)
    (root / "held out").mkdir()
    for place, colour in enumerate(COLOURS):
        tiny_image(64, 32, 30 + place).save(root / "held out" / f"{place}.png")
        (root / "held out" / f"{place}.txt").write_text(f"a {colour} square")
    models = save_tiny_dinov2(root / "dinov2"), save_tiny_siglip(root / "siglip")
    settings = (
        *UNWATCHED[1:],
        *("train.steps=4", "validation.every_steps=1", "validation.scores=true", "data.trigger=ohwx"),
        *("validation.prompts=[a red circle]", f"validation.data={root}/held out"),
        f"validation.score_models=[{models[0]}, {models[1]}]",
    )
    run = replace(run, settings=settings)
    assert run.train() == 0
    AcceleratorState._reset_state(reset_partial_state=True)
    return run


def test_a(scored_run: TinyRun, caplog):
    print(read_scores(scored_run.folder / "scores.json"))
    print(sorted(p.name for p in (scored_run.folder / "previews").rglob("*")))
    assert 0
