"""A2: what a run keeps besides its newest checkpoints, when it is killed at calls to the disk."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tiny_run import TinyRun, differing

from diffsynth_lite.training.stopping import Requests
from faults.asked import check_best, with_held_out
from faults.bench import (
    Bench,
    assert_same,
    at_call,
    fault,
    forked,
    losses,
    stopped_after,
    train,
    train_in_child,
    waited,
)
from faults.kills import kill, strike_in

STEPS, STRUCK_FROM = 5, 3
SETTINGS = (
    *(f"train.steps={STEPS}", "validation.prompts=[]", "validation.every_steps=1"),
    # Always over, so that each step is saved.
    *("output.checkpoint_every_minutes=0.000001", "output.checkpoint_every_steps=2"),
    *("output.keep_checkpoints=1", "output.keep_every_steps=2"),
)


@fault("A2", "equal to the undisturbed run; the same checkpoints kept, lora_best/ that of the best")
def kill_what_is_kept(bench: Bench) -> str:
    """Kill -9 at calls to the disk of steps that save by time, for good, and as the best."""
    stride = bench.pick(23, 7, 2)
    run = with_held_out(bench.images(), *SETTINGS)
    whole, stopped, tried = run.root / "whole", run.root / "stopped", run.root / "tried"
    assert train(run, whole) == 0
    check_best(whole)
    num_best = len([step for step in _steps_that_were_the_best(whole) if step >= STRUCK_FROM])
    assert num_best > 1, "no best checkpoint gives way to another one where the run is killed"
    stopped_after(run, STRUCK_FROM - 1, stopped)
    for num_calls in range(0, 10_000, stride):
        shutil.copytree(stopped, tried)
        code = waited(forked(_killed_after(run, tried, num_calls), run.root / "log"), 240)
        if code == 0:
            break
        assert code == -9, f"exit code {code} after {num_calls} good calls"
        again = train_in_child(run, tried, limit_s=240)
        assert again == 0, f"exit code {again} in the next start, after {num_calls} good calls"
        _check_equal(run, whole, tried)
        shutil.rmtree(tried)
    return f"{num_calls // stride} of {num_calls} calls; {num_best} of the steps were the best so far"


def _killed_after(run: TinyRun, folder: Path, num_good_calls: int) -> Callable[[], int]:
    """A start that is killed at the disk call after so many good ones, from what follows a step on."""

    def work() -> int:
        with (
            pytest.MonkeyPatch.context() as patch,
            at_call(Requests, "gather", STRUCK_FROM, lambda *_: strike_in(patch, num_good_calls, kill)),
        ):
            return train(run, folder)

    return work


def _steps_that_were_the_best(folder: Path) -> list[int]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    measured = [(row["validation_loss"], row["step"]) for row in rows if "validation_loss" in row]
    return [
        step
        for place, (loss, step) in enumerate(measured)
        if step > 0 and all(loss < earlier for earlier, _ in measured[1:place])
    ]


def _check_equal(run: TinyRun, whole: Path, tried: Path) -> None:
    """All that is kept is what an undisturbed run keeps, bit for bit, and nothing else is left."""
    checkpoints = [
        sorted(path.name for path in (folder / "checkpoints").iterdir()) for folder in (whole, tried)
    ]
    assert checkpoints[0] == checkpoints[1], checkpoints
    for name in checkpoints[0]:
        assert_same(whole, tried, int(name.removeprefix("step-")))
    assert losses(run, tried) == losses(run, whole)
    check_best(tried)
    for folder in ("lora", "lora_ema", "lora_best"):
        (expected,) = (whole / folder).glob("*.safetensors")
        different = differing(load_file(tried / folder / expected.name), load_file(expected))
        assert not different, f"{folder}: {different[0]}"
    leftovers = [path.name for path in tried.rglob(".*") if path.name != ".lock"]
    assert not leftovers, leftovers
