"""Files that are dropped into the run folder while a run continues, and the checkpoints that stay."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from tiny_run import (
    UNWATCHED,
    TinyRun,
    checkpoint_part,
    checkpoint_tensors,
    copy_run,
    differing,
    dropping,
    make_run,
)

from diffsynth_lite.cli.continuation import continuation
from diffsynth_lite.cli.main import main
from diffsynth_lite.pipelines import ModelFamily
from diffsynth_lite.run_folder.progress import RunningStatus
from diffsynth_lite.training import saver, stopping
from diffsynth_lite.training.checkpoint.store import CheckpointStore
from diffsynth_lite.training.evaluation import MeasuredLoss

LORA = "pytorch_lora_weights.safetensors"


def steps_kept(run: TinyRun) -> list[int]:
    return sorted(int(path.name[-8:]) for path in (run.folder / "checkpoints").glob("step-*"))


def held_out(run: TinyRun) -> tuple[str, ...]:
    folder = shutil.copytree(run.root / "data", run.root / "held_out")
    return f"validation.data={folder}", "validation.loss_items=3"


class Killed(BaseException):
    """Ends a run where a kill would: nothing handles it."""


def measure(monkeypatch: pytest.MonkeyPatch, *losses: float) -> None:
    """Give the evaluations these losses, one after the other."""
    left = iter(losses)
    monkeypatch.setattr(
        "diffsynth_lite.training.evaluation.FixedNoiseLoss.measure",
        lambda *_: MeasuredLoss(values={"validation_loss": (loss := next(left))}, by_item=(loss, loss)),
    )


def best_lora(run: TinyRun) -> dict[str, torch.Tensor]:
    return load_file(run.folder / "lora_best" / LORA)


def lora_of_step(run: TinyRun, step: int, source: str = "adapter") -> dict[str, torch.Tensor]:
    """Adapter or average of a checkpoint as the LoRA file has it: alpha, twice the rank, is in lora_B."""
    return {
        f"transformer.{name}".replace(".default.", "."): 2 * tensor if ".lora_B." in name else tensor
        for name, tensor in checkpoint_part(run.folder, step, source).items()
    }


def test_a_run_saves_samples_and_stops_when_asked_and_goes_on_as_if_it_had_not(
    watched_run: TinyRun, whole_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("output.checkpoint_every_steps=6", "output.keep_checkpoints=9")
    dropping(watched_run, monkeypatch, SAVE=1, SAMPLE=2, STOP=4)
    assert watched_run.train(*settings) == 75
    assert steps_kept(watched_run) == [1, 4]
    assert len(list((watched_run.folder / "previews").glob("step-00000002-*.png"))) == 2
    assert not any((watched_run.folder / name).exists() for name in ("SAVE", "SAMPLE", "STOP"))
    assert watched_run.status()["state"] == "interrupted"
    monkeypatch.undo()
    (watched_run.folder / "command.json").unlink()
    found = continuation(watched_run.folder)  # by the settings that it was started with
    assert found.arguments == ("--config", f"{watched_run.folder}/resolved.yaml")
    assert main(["train", *found.arguments, *UNWATCHED]) == 0
    assert (watched_run.folder / "config.yaml").read_text() == watched_run.config.read_text()
    assert json.loads((watched_run.folder / "lineage.json").read_text())[-1]["changed"] == {}
    tensors = checkpoint_tensors(whole_run.folder, 6)
    assert differing(tensors, checkpoint_tensors(watched_run.folder, 6)) == []


def test_a_run_without_progress_or_time_stops_by_itself_and_goes_on_as_if_it_had_not(
    watched_run: TinyRun, caplog: pytest.LogCaptureFixture
) -> None:
    held_out = ("data.hold_out=0.4", "validation.prompts=[]", "validation.item_losses=0")
    settings = (*held_out, "validation.every_steps=2", "validation.loss_items=3")
    assert watched_run.train(*settings, f"output.dir={watched_run.root}/whole") == 0
    # Two items, of which only a difference that hardly varies is shown.
    for _ in range(2):  # again: nothing has changed, so no step is taken
        assert watched_run.train(*settings, "train.stop_after=1") == 75
        status = watched_run.status()
        assert (status["state"], status["exit_code"], status["step"]) == ("interrupted", 75, 2)
        assert status["message"] == (
            "stopped after step 2 of 6, saved; train.stop_after: 1 evaluation since step 0 did not show a "
            "lower loss on held-out items; a larger number continues it"
        )
        assert status["message"] in (watched_run.folder / "report.html").read_text()
    assert caplog.text.count("a lower loss on held-out items than at step 0") == 1
    names = [
        json.loads(row)["item"] for row in (watched_run.folder / "held_out.jsonl").read_text().splitlines()
    ]
    assert len(names) == 2
    assert watched_run.train(*settings, "train.stop_after=9", "train.max_hours=1e-6") == 75
    assert watched_run.status()["message"].startswith(
        "stopped after step 3 of 6, saved; train.max_hours: 1e-06 hours have passed; the same command"
    )
    assert watched_run.train(*settings, "train.stop_after=9") == 0
    waited = state_of(watched_run, 6)["stop_after"]
    assert (waited["step"], waited["num_since"]) == (0, 3)
    tensors = checkpoint_tensors(watched_run.root / "whole", 6)
    assert differing(tensors, checkpoint_tensors(watched_run.folder, 6)) == []
    assert (watched_run.folder / "lora_best" / LORA).exists()


@pytest.mark.parametrize(
    ("phase", "done", "step", "settings"),
    [("encoding", 2, 0, UNWATCHED), ("generating", 1, 2, ("validation.every_steps=2",))],
)
def test_a_stop_is_answered_while_a_run_encodes_and_generates_and_it_goes_on_as_if_it_had_not(
    watched_run: TinyRun,
    whole_run: TinyRun,
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
    done: int,
    step: int,
    settings: tuple[str, ...],
) -> None:
    monkeypatch.setattr(stopping, "_LOOK_EVERY_S", 0.0)
    show_phase = RunningStatus.show_phase

    def show_and_stop(shown: RunningStatus, *progress: Any) -> None:
        show_phase(shown, *progress)
        if (*progress[:2], shown.step) == (phase, done, step):
            status = watched_run.status()
            assert (status["state"], status["step"], status["phase"]) == ("running", step, phase)
            (watched_run.folder / "STOP").touch()

    with monkeypatch.context() as patch:
        patch.setattr(RunningStatus, "show_phase", show_and_stop)
        assert watched_run.train(*settings) == 75
    status = watched_run.status()
    assert (status["state"], status["exit_code"], status["step"]) == ("interrupted", 75, step)
    assert not (watched_run.folder / "STOP").exists()
    encoded = {file: file.stat().st_mtime_ns for file in (watched_run.root / "cache").rglob("*.safetensors")}
    assert len(encoded) == done or step
    assert watched_run.train(*settings) == 0
    assert all(file.stat().st_mtime_ns == time for file, time in encoded.items())
    tensors = checkpoint_tensors(whole_run.folder, 6)
    assert differing(tensors, checkpoint_tensors(watched_run.folder, 6)) == []
    # Those that were left out are made up for.
    assert len(list((watched_run.folder / "previews").glob("step-00000002-*.png"))) == step


def test_the_best_on_held_out_data_and_every_so_many_stay_with_the_newest(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure(monkeypatch, 9.0, 5.0, 3.0, 4.0, float("nan"), 3.5, 3.0, 7.0)
    settings = (
        *(*held_out(tiny_run), "validation.every_steps=1"),
        *("output.checkpoint_every_steps=1", "output.keep_checkpoints=1", "output.keep_every_steps=4"),
    )
    assert tiny_run.train(*settings, "train.steps=5") == 0
    assert steps_kept(tiny_run) == [2, 4, 5]
    # The best is remembered by the checkpoint that the run continues from; an equal loss is not better.
    assert tiny_run.train(*settings, "train.steps=7") == 0
    assert steps_kept(tiny_run) == [2, 4, 7]
    assert (best_of(tiny_run, 7)["step"], best_of(tiny_run, 7)["loss"]) == (2, 3.0)
    assert differing(best_lora(tiny_run), lora_of_step(tiny_run, 2)) == []


@pytest.mark.parametrize("averaged", [False, True])
def test_a_run_killed_before_its_best_lora_was_written_writes_it_when_it_goes_on(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch, averaged: bool
) -> None:
    settings = (*held_out(tiny_run), "validation.every_steps=1", *(["train.ema_decay=0.6"] * averaged))
    measure(monkeypatch, 9.0, 5.0, 3.0)
    export = saver.export_lora

    def killed(family: ModelFamily, folder: Path, *rest: Any, **more: Any) -> Any:
        if folder.name == "lora_best" and folder.exists():
            raise SystemExit
        return export(family, folder, *rest, **more)

    monkeypatch.setattr(saver, "export_lora", killed)
    with pytest.raises(SystemExit):
        tiny_run.train(*settings)
    source = "ema" if averaged else "adapter"
    assert differing(best_lora(tiny_run), lora_of_step(tiny_run, 2, source))
    monkeypatch.undo()
    measure(monkeypatch, 4.0)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert tiny_run.train(*settings, "train.steps=3") == 0
    assert steps_kept(tiny_run) == [2, 3]
    assert differing(best_lora(tiny_run), lora_of_step(tiny_run, 2, source)) == []


def test_what_is_the_best_by_an_evaluation_on_request_at_a_planned_save_stays_the_best(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (*held_out(tiny_run), "validation.every_steps=5", "output.checkpoint_every_steps=1")
    measure(monkeypatch, 9.0, 3.0)
    dropping(tiny_run, monkeypatch, SAMPLE=2, STOP=3)
    assert tiny_run.train(*settings) == 75
    for step in (2, 3):
        state = tiny_run.folder / "checkpoints" / f"step-{step:08d}" / "state.json"
        assert json.loads(state.read_text())["best"]["step"] == 2


def test_a_stop_at_a_planned_save_and_a_best_step_are_saved_and_exported_once(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[str, int]] = []
    export, save = saver.export_lora, CheckpointStore.save

    def counted_export(
        family: ModelFamily, folder: Path, *rest: Any, **more: Any
    ) -> tuple[list[Path], float]:
        written.append((folder.name, max(steps_kept(tiny_run))))
        return export(family, folder, *rest, **more)

    def counted_save(store: CheckpointStore, step: int, *rest: Any, **more: Any) -> Path:
        written.append(("checkpoint", step))
        return save(store, step, *rest, **more)

    monkeypatch.setattr(saver, "export_lora", counted_export)
    monkeypatch.setattr(CheckpointStore, "save", counted_save)
    measure(monkeypatch, 9.0, 3.0, 5.0)
    dropping(tiny_run, monkeypatch, STOP=4)
    assert tiny_run.train(*held_out(tiny_run), "validation.every_steps=2") == 75
    assert written == [
        *[("checkpoint", 2), ("lora", 2), ("lora_best", 2)],
        *[("checkpoint", 4), ("lora", 4)],
    ]


def test_a_run_that_goes_on_elsewhere_without_its_best_checkpoint_seeks_the_best_again(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = (*held_out(tiny_run), "validation.every_steps=1", "output.checkpoint_every_steps=1")
    measure(monkeypatch, 9.0, 3.0, 4.0)
    assert tiny_run.train(*settings, "train.steps=2") == 0
    source = str(tiny_run.folder / "checkpoints" / "step-00000002")
    elsewhere = tiny_run.root / "elsewhere"
    measure(monkeypatch, 7.0, 8.0)
    resumed = ("--resume", source, f"output.dir={elsewhere}", "train.steps=4")
    assert tiny_run.train(*settings, *resumed) == 0
    assert "Tracking of the best checkpoint starts over" in caplog.text
    state = json.loads((elsewhere / "checkpoints" / "step-00000004" / "state.json").read_text())
    assert (state["best"]["step"], state["best"]["loss"]) == (3, 7.0)
    assert (elsewhere / "lora_best" / LORA).is_file()


def state_of(run: TinyRun, step: int) -> dict[str, Any]:
    return json.loads((run.folder / "checkpoints" / f"step-{step:08d}" / "state.json").read_text())


def best_of(run: TinyRun, step: int) -> dict[str, Any] | None:
    return state_of(run, step)["best"]


def test_a_run_that_goes_back_to_before_its_best_leaves_that_and_seeks_the_best_again(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = (*held_out(tiny_run), "validation.every_steps=2", "output.keep_checkpoints=2")
    measure(monkeypatch, 9.0, 2.0, 2.5, 1.0)
    assert tiny_run.train(*settings) == 0
    assert (steps_kept(tiny_run), best_of(tiny_run, 4)["step"]) == ([4, 6], 2)
    abandoned = lora_of_step(tiny_run, 6)
    measure(monkeypatch, 3.0, 4.0)
    source = str(tiny_run.folder / "checkpoints" / "step-00000004")
    changes = ("train.learning_rate=0.002", "resume.allow=[train.learning_rate]", "train.steps=8")
    assert tiny_run.train(*settings, "--resume", source, *changes) == 0
    assert "The best checkpoint (step 2, loss 2.0000) cannot be used" in caplog.text
    assert (best_of(tiny_run, 8)["step"], best_of(tiny_run, 8)["loss"]) == (6, 3.0)
    assert steps_kept(tiny_run) == [6, 8]
    assert differing(best_lora(tiny_run), lora_of_step(tiny_run, 6)) == []
    assert differing(load_file(tiny_run.folder / ".left-lora_best-1" / LORA), abandoned) == []


def test_a_best_lora_of_a_run_that_goes_on_from_before_any_best_is_set_aside(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (*held_out(tiny_run), "validation.every_steps=4", "output.keep_checkpoints=3")
    measure(monkeypatch, 9.0, 2.0, 2.5)
    assert tiny_run.train(*settings) == 0
    assert best_of(tiny_run, 2) is None
    measure(monkeypatch, float("nan"))
    source = str(tiny_run.folder / "checkpoints" / "step-00000002")
    assert tiny_run.train(*settings, "--resume", source, "train.steps=4") == 3  # no result, its loss is nan
    assert "loss on fixed noise is not finite" in tiny_run.status()["message"]
    assert best_of(tiny_run, 4) is None
    assert not (tiny_run.folder / "lora_best").exists()
    assert (tiny_run.folder / ".left-lora_best-1" / LORA).is_file()


def test_a_damaged_best_checkpoint_is_the_best_no_more(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = (*held_out(tiny_run), "validation.every_steps=2", "output.keep_checkpoints=1")
    measure(monkeypatch, 9.0, 1.0, 2.0)
    assert tiny_run.train(*settings, "train.steps=4") == 0
    assert steps_kept(tiny_run) == [2, 4]
    adapter = tiny_run.folder / "checkpoints" / "step-00000002" / "adapter.safetensors"
    content = adapter.read_bytes()
    adapter.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    measure(monkeypatch, 3.0)
    assert tiny_run.train(*settings) == 0
    assert "adapter.safetensors is damaged" in caplog.text
    assert best_of(tiny_run, 6)["step"] == 6
    assert steps_kept(tiny_run) == [6]
    assert differing(best_lora(tiny_run), lora_of_step(tiny_run, 6)) == []


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> TinyRun:
    """A run of four steps, of which the second was the best on held-out data."""
    run = make_run(tmp_path_factory.mktemp("measured"), tiny_model)
    settings = (
        *(*UNWATCHED, *held_out(run), "validation.every_steps=2", "train.ema_decay=0.6"),
        *("output.keep_checkpoints=1", "train.stop_after=9"),
    )
    with pytest.MonkeyPatch.context() as patch:
        measure(patch, 9.0, 1.0, 2.0)
        assert run.train(*settings, "train.steps=4") == 0
    AcceleratorState._reset_state(reset_partial_state=True)
    return replace(run, settings=settings)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("validation.loss_items=2", "(changed or unknown: held-out items and validation.loss_items)"),
        ("validation.data={root}/fewer", "(changed or unknown: held-out items and validation.loss_items)"),
        ("validation.seed=7", "(changed or unknown: validation.seed)"),
        ("validation.use_ema=false", "(changed or unknown: validation.use_ema and train.ema_decay)"),
        ("validation.data={root}/moved", None),
    ],
)
def test_a_best_that_was_measured_otherwise_is_compared_with_nothing(
    measured: TinyRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    change: str,
    named: str | None,
) -> None:
    run = copy_run(measured, tmp_path)
    shutil.copytree(run.root / "data", run.root / "moved")
    (shutil.copytree(run.root / "data", run.root / "fewer") / "0.png").unlink()
    measure(monkeypatch, 3.0)
    assert run.train(change.format(root=run.root)) == 0
    assert caplog.text.count("cannot be compared") == bool(named)
    assert named is None or named in caplog.text
    source = "adapter" if named and "use_ema" in named else "ema"
    # A finite loss of the average does not show that the weights of step 6 are good: 4 stays, too.
    known_good = [4] if source == "ema" else []
    expected = ([*known_good, 6], 6) if named else ([2, *known_good, 6], 2)
    assert (steps_kept(run), best_of(run, 6)["step"]) == expected
    assert differing(best_lora(run), lora_of_step(run, best_of(run, 6)["step"], source)) == []
    assert (run.folder / ".left-lora_best-1").exists() is bool(named)
    waited = state_of(run, 6)["stop_after"]
    assert (waited["step"], waited["num_since"]) == ((6, 0) if named else (2, 2))


def test_a_best_of_which_nothing_says_how_it_was_measured_is_compared_with_nothing(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = (*held_out(tiny_run), "validation.every_steps=2")
    measure(monkeypatch, 9.0, 1.0, 2.0)
    with monkeypatch.context() as patched:
        patched.setattr(saver, "measured_by", lambda *_, **__: None)
        assert tiny_run.train(*settings, "train.steps=4") == 0
    measure(monkeypatch, 3.0)
    assert tiny_run.train(*settings) == 0
    assert "cannot be compared" in caplog.text
    assert best_of(tiny_run, 6)["step"] == 6
