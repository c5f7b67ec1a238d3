"""The main jobs on the embedded mini models really teach what they say.

What the models generate before is in test_mini_pipelines.py, and what the scores make of both in
test_quickstart_score.py.
"""

from collections.abc import Callable
from pathlib import Path

import comparison
import make_clips
import make_data
import motions
import pytest
import score
import score_clips
import shapes
from accelerate.state import AcceleratorState
from measure import read_images, summarise
from measure_motion import read_clips, summarise_motion

from diffsynth_lite.cli.train import main

REPOSITORY = Path(__file__).parents[2]
# The other tests cover previews, losses on fixed noise, checkpointing and offload, which change no weight.
FASTER = (
    "validation.prompts=[]",
    "validation.loss_items=0",
    "validation.item_losses=0",
    "train.use_gradient_checkpointing=false",
    "train.use_gradient_checkpointing_offload=false",
)


@pytest.fixture
def teach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., set[str]]:
    """Trains a config on what a maker makes, into ``tmp_path / "run"``; gives the captions of that."""
    monkeypatch.chdir(REPOSITORY)
    # Of 20 steps of the scores; as many show the same.
    monkeypatch.setattr(comparison, "NUM_STEPS", 8)

    def train(config: str, make: Callable[[], None]) -> set[str]:
        data = tmp_path / "data"
        monkeypatch.setattr("sys.argv", ["make", "--output", str(data)])
        make()
        paths = {"data.path": data, "data.cache_dir": tmp_path / "cache", "output.dir": tmp_path / "run"}
        settings = (f"{key}={path}" for key, path in paths.items())
        assert main(["--config", config, *settings, *FASTER]) == 0
        AcceleratorState._reset_state(reset_partial_state=True)
        return comparison.training_captions(data)

    return train


@pytest.mark.nightly
def test_the_quickstart_teaches_the_new_colours_and_keeps_the_known_ones(
    teach: Callable[..., set[str]], tmp_path: Path, quickstart: Path
) -> None:
    captions = teach("quickstart.yaml", make_data.main)
    pipeline = score.load_pipeline(quickstart / "mini_qwen_image")
    pipeline.load_lora_weights(tmp_path / "run" / "lora")
    new, known = shapes.held_out_scenes(), shapes.known_scenes(8)
    assert len([scene for scene in new if scene.caption not in captions]) == 16
    generated = score.generate_prompts(pipeline, [*new, *known])
    taught, kept = (
        summarise(read_images(part, scenes))
        for part, scenes in ((generated[:16], new), (generated[16:], known))
    )
    assert taught.accuracy >= 15 / 16
    assert taught.distance <= 45
    assert kept.accuracy == 1


@pytest.mark.nightly
def test_the_video_quickstart_teaches_the_new_motion_and_keeps_the_known_ones(
    teach: Callable[..., set[str]], tmp_path: Path, quickstart: Path
) -> None:
    captions = teach("video_quickstart.yaml", make_clips.main)
    pipeline = score_clips.load_pipeline(quickstart / "mini_wan")
    pipeline.load_lora_weights(tmp_path / "run" / "lora")
    new, known = motions.held_out_scenes(), motions.known_scenes()
    assert len([scene for scene in new if scene.caption not in captions]) == 8
    generated = score_clips.generate_prompts(pipeline, [*new, *known])
    taught, kept = (
        summarise_motion(read_clips(part, scenes))
        for part, scenes in ((generated[:8], new), (generated[8:], known))
    )
    assert taught.accuracy >= 7 / 8
    assert taught.cosine >= 0.95
    assert kept.accuracy >= 7 / 8
