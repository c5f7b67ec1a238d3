"""K1 and K2: a trainer that is killed with signal 9, at any moment and at each call of a save."""

import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import save_until_killed
from tiny_run import TinyRun

from diffsynth_lite.training.checkpoint.store import CheckpointStore
from diffsynth_lite.training.saver import Saver
from faults.bench import (
    PLAIN,
    Bench,
    assert_same,
    at_call,
    end,
    fault,
    forked,
    losses,
    stopped_after,
    train,
    train_in_child,
    waited,
)

SETTINGS = (*PLAIN, "train.ema_decay=0.6", "data.caption_dropout=0.3", "train.warmup_steps=3")
DISK_CALLS = ("mkdir", "open", "write", "fsync", "rename", "replace", "unlink", "rmdir")


@fault("K1", "0 saved steps lost; equal to the uninterrupted run")
def kill_real_runs(bench: Bench) -> str:
    """Kill -9 at random moments of real runs, until done."""
    wanted = bench.pick(4, 60, 300)
    steps = bench.pick(8, 24, 24)
    runs = [bench.images()] if bench.scale == "ci" else [bench.images(), bench.clips()]
    dice = bench.new_dice()
    tally = _Tally()
    for number, run in enumerate(runs, start=1):
        run = run.having(*SETTINGS, f"train.steps={steps}")
        whole = run.root / "whole"
        assert train_in_child(run, run.root / "cached", "train.warmup_steps=0", "train.steps=1") == 0
        started_at = time.monotonic()
        assert train_in_child(run, whole) == 0
        seconds = time.monotonic() - started_at
        while tally.kills < wanted * number / len(runs):
            folder = run.root / "killed"
            while not _killed(run, folder, dice.uniform(0.05, 1.1) * seconds, tally):
                pass
            assert_same(whole, folder, steps)
            assert losses(run, folder) == losses(run, whole)
            tally.runs += 1
            shutil.rmtree(folder)
    return f"{tally.kills} kills in {tally.runs} runs: {tally}"


@dataclass
class _Tally:
    """Where kills struck."""

    kills: int = 0
    runs: int = 0
    before_a_checkpoint: int = 0
    in_a_save: int = 0

    def __str__(self) -> str:
        return f"{self.before_a_checkpoint} before a checkpoint, {self.in_a_save} inside a save"


def _killed(run: TinyRun, folder: Path, seconds: float, tally: _Tally) -> bool:
    """Start or continue a run, and kill it after so many seconds; True if it had ended before."""
    store = CheckpointStore(folder / "checkpoints", keep=1)
    saved = max(store.steps(), default=0)
    child = forked(lambda: train(run, folder), run.root / "log")
    code = waited(child, seconds)
    if code is None:
        end(child)
        tally.kills += 1
        tally.before_a_checkpoint += not store.steps()
        tally.in_a_save += any(entry.name.startswith(".tmp-step") for entry in store._entries())
    else:
        assert code == 0, code
    checkpoint = store.latest()
    assert checkpoint is None or checkpoint.step >= saved, "a step that was saved is gone"
    assert (checkpoint is None) == (not store.steps())
    assert not list(store.folder.glob(".bad-*")), "a checkpoint was torn"
    return code is not None


@fault("K2", "0 torn checkpoints; continued bit for bit")
def kill_saves(bench: Bench) -> str:
    """Kill -9 inside a save: at random, and at each call to the disk."""
    num_random = bench.pick(20, 150, 1000)
    dice = bench.new_dice()
    for _ in range(num_random):
        steps = save_until_killed.kill_one(bench.root / "loop", num_saves=dice.uniform(0, 2))
        save_until_killed.check(bench.root / "loop", steps[-1])
    stride = bench.pick(7, 2, 1)
    num_calls = at_each_call_of_a_save(bench.images(), stride, kill, ended=lambda code: code == -9)
    return f"{num_random} random, {num_calls} calls"


def kill() -> None:
    """This process, with signal 9."""
    os.kill(os.getpid(), signal.SIGKILL)


def at_each_call_of_a_save(
    run: TinyRun, stride: int, fault: Callable[[], None], *, ended: Callable[[int], bool]
) -> int:
    """Provoke a fault at every so-many-th disk call of the last save of a run, and let the run finish.

    Args:
        run: to train.
        stride: 1 tries each call.
        fault: what happens instead of the call, in the trainer's process.
        ended: whether an exit code is one that the fault may lead to.

    Returns:
        Calls that were tried.
    """
    run = run.having(*SETTINGS, "train.steps=4")
    whole, stopped, tried = run.root / "whole", run.root / "stopped", run.root / "tried"
    assert train(run, whole) == 0
    stopped_after(run, 3, stopped)
    for num_calls in range(0, 10_000, stride):
        shutil.copytree(stopped, tried)
        work = _with_fault(run, tried, num_calls, fault)
        code = waited(forked(work, run.root / "log"), 120)
        if code == 0:
            break
        assert code is not None, f"hangs after {num_calls} good calls"
        assert ended(code), f"exit code {code} after {num_calls} good calls"
        again = train_in_child(run, tried, limit_s=120)
        assert again == 0, f"exit code {again} in the next start, after {num_calls} good calls"
        assert_same(whole, tried, 4)
        assert (tried / "lora" / "pytorch_lora_weights.safetensors").is_file()
        leftovers = [path.name for path in tried.rglob(".tmp-step*")] + [
            path.name for path in tried.rglob(".bad-*")
        ]
        assert not leftovers, leftovers
        shutil.rmtree(tried)
    return num_calls // stride


def _with_fault(
    run: TinyRun, folder: Path, num_good_calls: int, fault: Callable[[], None]
) -> Callable[[], int]:
    """A start of a run in whose save the call after so many good ones is a fault; for a child process."""

    def work() -> int:
        with (
            pytest.MonkeyPatch.context() as patch,
            at_call(Saver, "save", 1, lambda *_: strike_in(patch, num_good_calls, fault)),
            # What follows the save is none of it.
            at_call(Saver, "save", 1, lambda *_: patch.undo(), after=True),
        ):
            return train(run, folder)

    return work


def strike_in(patch: pytest.MonkeyPatch, num_good_calls: int, fault: Callable[[], None]) -> None:
    """Let the disk call after so many good ones be a fault; a write is half done before."""
    left = [num_good_calls]

    def striking(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] != -1:
                return call(*args, **kwargs)
            if call is _WRITE:
                call(args[0], args[1][: len(args[1]) // 2])
            return fault()

        return wrapped

    for name in DISK_CALLS:
        patch.setattr(os, name, striking(getattr(os, name)))


_WRITE = os.write
