"""Files that are dropped into the run folder while a run goes on, and the checkpoints that stay."""

import json
import shutil

import pytest
from safetensors.torch import load_file
from tiny_run import TinyRun, checkpoint_tensors, differing, dropping

from diffsynth_lite.training.optimizer_step import OptimizerStep, StepResult

LORA = "pytorch_lora_weights.safetensors"


def steps_kept(run: TinyRun) -> list[int]:
    return sorted(int(path.name[-8:]) for path in (run.folder / "checkpoints").glob("step-*"))


def test_a_run_saves_samples_and_stops_when_asked_and_goes_on_as_if_it_had_not(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tiny_run.root / "whole"
    settings = ("output.checkpoint_every_steps=6", "output.keep_checkpoints=9")
    assert tiny_run.train(f"output.dir={whole}", *settings) == 0
    dropping(tiny_run, monkeypatch, SAVE=1, SAMPLE=2, STOP=4)
    assert tiny_run.train(*settings) == 75
    assert steps_kept(tiny_run) == [1, 4]
    assert len(list((tiny_run.folder / "previews").glob("step-00000002-*.png"))) == 2
    assert not any((tiny_run.folder / name).exists() for name in ("SAVE", "SAMPLE", "STOP"))
    assert tiny_run.status()["state"] == "interrupted"
    monkeypatch.undo()
    assert tiny_run.train(*settings) == 0
    assert differing(checkpoint_tensors(whole, 6), checkpoint_tensors(tiny_run.folder, 6)) == []


def test_who_watches_a_run_sees_its_step(tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffsynth_lite.training.outcome._RENEWED_EVERY_S", 0.0)
    take, seen = OptimizerStep.take, []

    def take_and_look(self: OptimizerStep, step: int) -> StepResult:
        seen.append(tiny_run.status())
        return take(self, step)

    monkeypatch.setattr(OptimizerStep, "take", take_and_look)
    assert tiny_run.train("validation.prompts=[]", "validation.loss_items=0") == 0
    assert [(status["state"], status["step"]) for status in seen] == [("running", step) for step in range(6)]
    assert all(status["samples_per_s"] > 0 for status in seen[1:])


def test_the_best_on_held_out_data_and_every_so_many_stay_beside_the_newest(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out = shutil.copytree(tiny_run.root / "data", tiny_run.root / "held_out")
    losses = iter([9.0, 5.0, 3.0, 4.0, float("nan"), 3.5, 3.0, 7.0])
    monkeypatch.setattr(
        "diffsynth_lite.training.evaluation.FixedNoiseLoss.measure",
        lambda *_: {"validation_loss": next(losses)},
    )
    settings = (
        *(f"validation.data={held_out}", "validation.every_steps=1", "validation.prompts=[]"),
        *("output.checkpoint_every_steps=1", "output.keep_checkpoints=1", "output.keep_every_steps=4"),
    )
    assert tiny_run.train(*settings, "train.steps=5") == 0
    assert steps_kept(tiny_run) == [2, 4, 5]
    # The best is remembered by the checkpoint that the run goes on from; an equal loss is not better.
    assert tiny_run.train(*settings, "train.steps=7") == 0
    assert steps_kept(tiny_run) == [2, 4, 7]
    state = json.loads((tiny_run.folder / "checkpoints" / "step-00000007" / "state.json").read_text())
    assert state["best"] == {"step": 2, "loss": 3.0}
    best = {
        f"transformer.{name.removeprefix('adapter/')}": tensor
        for name, tensor in checkpoint_tensors(tiny_run.folder, 2).items()
        if name.startswith("adapter/")
    }
    assert differing(load_file(tiny_run.folder / "lora_best" / LORA), best) == []


def test_without_held_out_data_no_checkpoint_is_the_best(tiny_run: TinyRun) -> None:
    assert tiny_run.train("validation.every_steps=1") == 0
    assert steps_kept(tiny_run) == [4, 6]
    assert not (tiny_run.folder / "lora_best").exists()
