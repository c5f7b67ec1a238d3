"""K1, K2 and A2: a trainer that is killed with signal 9, at any moment and at each call to the disk."""

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
import save_until_killed
from safetensors.torch import load_file
from tiny_run import differing

from diffsynth_lite.training.checkpoint.store import CheckpointStore
from diffsynth_lite.training.saver import Saver
from diffsynth_lite.training.stopping import Requests
from faults.asked import check_best, with_held_out
from faults.bench import PLAIN, Bench, Run, assert_same, at_call, end, fault, waited

SETTINGS = (*PLAIN, "train.ema_decay=0.6", "data.caption_dropout=0.3", "train.warmup_steps=3")
KEEPING = (
    *("train.steps=5", "validation.prompts=[]", "validation.every_steps=1"),
    # Always over, so that each step is saved.
    *("output.checkpoint_every_minutes=0.000001", "output.checkpoint_every_steps=2"),
    *("output.keep_checkpoints=1", "output.keep_every_steps=2"),
)
STRUCK_FROM = 3
"""Step of a run of ``KEEPING`` from which on it is killed."""
DISK_CALLS = ("mkdir", "open", "write", "fsync", "rename", "replace", "unlink", "rmdir")


@fault("K1", "0 saved steps lost; equal to the uninterrupted run")
def kill_real_runs(bench: Bench) -> str:
    """Kill -9 at random moments of real runs, until done."""
    wanted = bench.pick(2, 60, 300)
    steps = bench.pick(8, 24, 24)
    runs = [bench.images()] if bench.scale == "ci" else [bench.images(), bench.clips()]
    dice = bench.new_dice()
    tally: Counter[str] = Counter()
    for number, run in enumerate(runs, start=1):
        run = run.having(*SETTINGS, f"train.steps={steps}")
        run.finish_in_child("cached", "train.warmup_steps=0", "train.steps=1")
        started_at = time.monotonic()
        whole = run.finish_in_child("whole")
        seconds = time.monotonic() - started_at
        while tally["kills"] < wanted * number / len(runs):
            folder = run.root / "killed"
            while not _killed(run, folder, dice.uniform(0.05, 1.1) * seconds, tally):
                pass
            assert_same(whole, folder, steps)
            assert run.losses(folder) == run.losses(whole)
            tally["runs"] += 1
            shutil.rmtree(folder)
    return ", ".join(f"{number} {what}" for what, number in tally.items())


def _killed(run: Run, folder: Path, seconds: float, tally: Counter[str]) -> bool:
    """Start or continue a run, and kill it after so many seconds; True if it had ended before."""
    store = CheckpointStore(folder / "checkpoints", keep=1)
    saved = max(store.steps(), default=0)
    code = waited(child := run.forked(folder), seconds)
    if code is None:
        end(child)
        tally["kills"] += 1
        tally["before a checkpoint"] += not store.steps()
        tally["inside a save"] += any(entry.name.startswith(".tmp-step") for entry in store._entries())
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
    num_calls = at_each_call_of_a_save(bench.images(), stride, kill, code=-SIGKILL)
    return f"{num_random} random, {num_calls} calls"


@fault("A2", "equal to the undisturbed run; the same checkpoints kept, lora_best/ that of the best")
def kill_what_is_kept(bench: Bench) -> str:
    """Kill -9 at calls to the disk of steps that save by time, for good, and as the best."""
    stride = bench.pick(23, 7, 2)
    run = with_held_out(bench.images(), *KEEPING)
    whole = run.finish("whole")
    check_best(whole)
    num_best = len([step for step in _steps_that_were_the_best(run, whole) if step >= STRUCK_FROM])
    assert num_best > 1, "no best checkpoint gives way to another one where the run is killed"
    stopped = run.stop_after(STRUCK_FROM - 1, "stopped")
    start = partial(_struck, run, (Requests, "gather", STRUCK_FROM), kill)
    num_calls = _at_each_call(
        run, stopped, stride, start, code=-SIGKILL, check=partial(_check_kept, run, whole)
    )
    return f"{num_calls} of {num_calls * stride} calls; {num_best} of the steps were the best so far"


def kill() -> None:
    """This process, with signal 9."""
    os.kill(os.getpid(), SIGKILL)


def at_each_call_of_a_save(run: Run, stride: int, act: Callable[[], None], *, code: int) -> int:
    """Provoke a fault at every so-many-th disk call of the last save of a run, and let the run finish.

    Args:
        stride: 1 tries each call.
        act: happens instead of the call, in the trainer's process.
        code: which that then ends with.

    Returns:
        Calls that were tried.
    """
    run = run.having(*SETTINGS, "train.steps=4")
    whole, stopped = run.finish("whole"), run.stop_after(3, "stopped")

    def check(tried: Path) -> None:
        assert_same(whole, tried, 4)
        assert (tried / "lora" / "pytorch_lora_weights.safetensors").is_file()
        leftovers = [path.name for name in (".tmp-step*", ".bad-*") for path in tried.rglob(name)]
        assert not leftovers, leftovers

    start = partial(_struck, run, (Saver, "save", 1), act, is_only_in_it=True)
    return _at_each_call(run, stopped, stride, start, code=code, check=check)


def _at_each_call(
    run: Run,
    stopped: Path,
    stride: int,
    start: Callable[[Path, int], int],
    *,
    code: int,
    check: Callable[[Path], None],
) -> int:
    """Continue copies of a run folder, each with a fault at a later disk call, until one meets no fault.

    Args:
        stride: how many calls later each fault is.
        start: continues a folder with a fault after so many good calls; returns the exit code.
        code: which that is where there was a fault.
        check: of each folder after it was continued to its end.

    Returns:
        Faults that were met.
    """
    for num_calls in range(0, 10_000, stride):
        tried = shutil.copytree(stopped, run.root / "tried")
        found = run.in_child(partial(start, tried, num_calls), 240)
        if found == 0:
            break
        assert found == code, f"exit code {found} after {num_calls} good calls"
        check(run.finish_in_child(tried))
        shutil.rmtree(tried)
    return num_calls // stride


def _struck(
    run: Run,
    begin: tuple[type, str, int],
    act: Callable[[], None],
    folder: Path,
    num_good_calls: int,
    *,
    is_only_in_it: bool = False,
) -> int:
    """Start a run in which the disk call after so many good ones is a fault; counted from a call on."""
    with (
        pytest.MonkeyPatch.context() as patch,
        at_call(*begin, lambda *_: _strike_in(patch, num_good_calls, act)),
        at_call(*begin, lambda *_: patch.undo(), after=True) if is_only_in_it else nullcontext(),
    ):
        return run.exit_code(folder)


def _strike_in(patch: pytest.MonkeyPatch, num_good_calls: int, act: Callable[[], None]) -> None:
    """Let the disk call after so many good ones be a fault; a write is half done before."""
    left = [num_good_calls]

    def striking(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] != -1:
                return call(*args, **kwargs)
            if call is _WRITE:
                call(args[0], args[1][: len(args[1]) // 2])
            return act()

        return wrapped

    for name in DISK_CALLS:
        patch.setattr(os, name, striking(getattr(os, name)))


_WRITE = os.write


def _steps_that_were_the_best(run: Run, folder: Path) -> list[int]:
    rows = run.metrics(folder)
    measured = [(row["validation_loss"], row["step"]) for row in rows if "validation_loss" in row]
    return [
        step
        for place, (loss, step) in enumerate(measured)
        if step > 0 and all(loss < earlier for earlier, _ in measured[1:place])
    ]


def _check_kept(run: Run, whole: Path, tried: Path) -> None:
    """All that is kept is what an undisturbed run keeps, bit for bit, and nothing else is left."""
    checkpoints = [
        sorted(path.name for path in (folder / "checkpoints").iterdir()) for folder in (whole, tried)
    ]
    assert checkpoints[0] == checkpoints[1], checkpoints
    for name in checkpoints[0]:
        if name.startswith("step-"):
            assert_same(whole, tried, int(name.removeprefix("step-")))
    assert run.losses(tried) == run.losses(whole)
    check_best(tried)
    copies = [f"checkpoints/{name}" for name in checkpoints[0] if name.startswith("lora")]
    for folder in ("lora", "lora_ema", "lora_best", *copies):
        (expected,) = (whole / folder).glob("*.safetensors")
        different = differing(load_file(tried / folder / expected.name), load_file(expected))
        assert not different, f"{folder}: {different[0]}"
    leftovers = [path.name for path in tried.rglob(".*") if path.name != ".lock"]
    assert not leftovers, leftovers
