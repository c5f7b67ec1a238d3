"""The main jobs on the embedded mini models really teach what they say."""

import json
from pathlib import Path

import pytest
from processes import Program

from diffsynth_lite.cli.train import main

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples" / "quickstart"
# The other tests cover previews, losses on fixed noise, checkpointing and offload, which change no weight.
FASTER = (
    "validation.prompts=[]",
    "validation.loss_items=0",
    "validation.item_losses=0",
    "train.use_gradient_checkpointing=false",
    "train.use_gradient_checkpointing_offload=false",
)


def run_script(name: str, *arguments: str, log: Path) -> None:
    program = Program((EXAMPLE / name).resolve(), arguments, log)
    assert program.wait() == 0, program.printed()


@pytest.mark.slow
def test_the_quickstart_teaches_the_new_colours_and_keeps_the_known_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    data, run, score = (str(tmp_path / name) for name in ("data", "run", "score"))
    run_script("make_data.py", "--output", data, log=tmp_path / "made")
    settings = [f"data.path={data}", f"output.dir={run}", f"data.cache_dir={tmp_path / 'cache'}"]
    assert main(["--config", "quickstart.yaml", *settings, *FASTER]) == 0
    model = str(EXAMPLE / "mini_qwen_image")
    arguments = ("--model", model, "--lora", f"{run}/lora", "--data", data, "--output", score)
    run_script("../../tests/runs/score_quickly.py", "score.py", *arguments, log=tmp_path / "scored")
    record = json.loads((tmp_path / "score" / "score.json").read_text())
    assert record["num_unseen_new_prompts"] == 16
    assert record["new"]["before"]["accuracy"] <= 0.25
    assert record["new"]["after"]["accuracy"] >= 15 / 16
    assert record["new"]["after"]["distance"] <= 45
    assert record["known"]["after"]["accuracy"] == 1


@pytest.mark.slow
def test_the_video_quickstart_teaches_the_new_motion_and_keeps_the_known_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    data, run, score = (str(tmp_path / name) for name in ("data", "run", "score"))
    run_script("make_clips.py", "--output", data, log=tmp_path / "made")
    settings = [f"data.path={data}", f"output.dir={run}", f"data.cache_dir={tmp_path / 'cache'}"]
    assert main(["--config", "video_quickstart.yaml", *settings, *FASTER]) == 0
    model = str(EXAMPLE / "mini_wan")
    arguments = ("--model", model, "--lora", f"{run}/lora", "--data", data, "--output", score)
    run_script("../../tests/runs/score_quickly.py", "score_clips.py", *arguments, log=tmp_path / "scored")
    record = json.loads((tmp_path / "score" / "score.json").read_text())
    assert record["num_unseen_new_prompts"] == 8
    assert record["new"]["before"]["accuracy"] <= 0.25
    assert record["new"]["after"]["accuracy"] >= 7 / 8
    assert record["new"]["after"]["cosine"] >= 0.95
    assert record["known"]["after"]["accuracy"] >= 7 / 8
