"""H4: runs whose numbers are not finite any more, and how they continue from what their message names."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from tiny_run import TinyRun

from diffsynth_lite.training import trainer
from diffsynth_lite.training.builder import TrainingObjects
from faults.bench import PLAIN, Bench, assert_same, at_call, fault, num_passed, train

STEPS, LAST_GOOD = 14, 6
SETTINGS = (*PLAIN, f"train.steps={STEPS}", "output.checkpoint_every_steps=1", "train.ema_decay=0.6")
SLOWER = ("train.learning_rate=0.005", "resume.allow=[train.learning_rate]")

TESTS = (
    "run_folder/test_metrics.py::test_of_a_run_that_diverges_the_last_steps_have_rows_whatever_the_interval",
    "runs/test_run.py::test_too_many_skipped_steps_in_a_row_stop_the_run",
    "runs/test_run_requests.py::test_a_best_lora_of_a_run_that_goes_on_from_before_any_best_is_set_aside",
    "runs/test_run_adapters.py::test_a_lora_with_a_number_that_is_not_finite_is_refused_by_name",
    "data/test_cache.py",
    "training/test_previews.py::test_an_image_that_is_not_finite_is_logged_in_one_line",
    "runs/test_run_sampling.py::test_an_image_whose_numbers_overflow_is_not_drawn",
)
"""The other places of numbers that are not finite."""

Spoil = Callable[[torch.nn.Parameter], object]


# The first is finite, and its products are not.
WAYS: dict[str, Spoil] = {
    "ruined": lambda weight: weight.fill_(1e30),
    "infinite": lambda weight: weight.fill_(torch.inf),
}


@fault("H4", "exit 3; the last good checkpoint stays, is named, and is continued with a lower rate")
def diverge(bench: Bench) -> str:
    """Weights ruined or infinite in a run that saves after each step; NaN in other places."""
    num_tests = num_passed(*TESTS)
    run = bench.images()
    run = run.having(*SETTINGS)
    whole = run.root / "whole"
    assert train(run, whole, "output.keep_checkpoints=100") == 0
    for way, spoil in WAYS.items():
        folder = run.root / way
        with at_call(trainer, "train_step", LAST_GOOD + 1, partial(_spoil_all, spoil), after=True):
            assert train(run, folder, "output.keep_checkpoints=1") == 3
        named = _named_in_message(folder)
        assert_same(whole, folder, LAST_GOOD)  # No save after it took it away.
        _continue_as_named(run, whole, folder, named)
    return f"{len(WAYS)} runs, {num_tests} tests"


def _spoil_all(spoil: Spoil, built: TrainingObjects, _step: int) -> None:
    with torch.no_grad():
        for weight in built.trained_parameters:
            spoil(weight)


def _named_in_message(folder: Path) -> Path:
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("diverged", 3), status
    named = re.search(r"continue from (checkpoints/step-\d{8})", status["message"])
    assert named, status
    assert named[1] == f"checkpoints/step-{LAST_GOOD:08d}", status
    return folder / named[1]


def _continue_as_named(run: TinyRun, whole: Path, folder: Path, named: Path) -> None:
    """Go on from the checkpoint that the message names, and from that of the undisturbed run."""
    other = folder.with_name(f"{folder.name}, undisturbed")
    assert train(run, folder, "--resume", str(named), *SLOWER) == 0
    assert train(run, other, "--resume", str(whole / "checkpoints" / named.name), *SLOWER) == 0
    assert_same(other, folder, STEPS)
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"
