"""R2, R3, K3 and H1: runs in several processes, resumed, killed, stopped, and fed with NaN on one of them."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import torch
from tiny_run import checkpoint_tensors

from faults.bench import (
    PLAIN,
    PROVOKED,
    Bench,
    Run,
    assert_ended,
    assert_same,
    fault,
    gone_within,
    processes_of,
    torchrun,
    wait_for_steps,
)
from faults.resume import COSINE, Whole

SHARDED = ("memory.shard_base=all",)
MAX_WEIGHT_DIFFERENCE = 1e-6
GONE_WITHIN_S = 45.0
"""torchrun gives the others 30 s after one of them has died."""

STEP_TIMEOUT_S = 15.0
"""More than a step of two tiny processes takes on a busy machine."""


@fault("R2", "bit for bit")
def resume_with_two_processes(bench: Bench) -> str:
    """Resumed with 2 processes."""
    steps, stride = bench.pick((4, 2), (7, 3), (25, 3))
    runs = [bench.mixed()] if bench.scale != "full" else [bench.mixed(), bench.clips()]
    points = range(stride, steps, stride)
    for run in runs:
        whole = Whole.of(run.having(*COSINE), steps, num_processes=2)
        for step in points:
            whole.check_resumed_at(step)
    return f"{len(runs) * len(points)} points"


@fault("R3", "samples, noise, timesteps, rates identical; weights within 1e-6")
def change_the_number_of_processes(bench: Bench) -> str:
    """Another number of processes in each part."""
    chain = bench.pick((1, 2, 1), (1, 2, 1), (1, 2, 4, 1))
    part = bench.pick(2, 3, 6)
    steps = part * len(chain)
    run = bench.mixed("train.micro_batch_size=1", "train.ema_decay=0.6")
    whole, parts = run.root / "whole", run.root / "parts"
    expected = run.recorded(whole, f"train.steps={steps}")
    for number, world in enumerate(chain, start=1):
        found = run.recorded(parts, f"train.steps={part * number}", num_processes=world)
    assert found == expected
    rates = [[(row["step"], row["learning_rate"]) for row in run.losses(folder)] for folder in (whole, parts)]
    assert rates[0] == rates[1]
    ours, theirs = checkpoint_tensors(parts, steps), checkpoint_tensors(whole, steps)
    assert ours.keys() == theirs.keys()
    names = [name for name in ours if name.startswith(("adapter/", "ema/"))]
    difference = max(float((ours[name] - theirs[name]).abs().max()) for name in names)
    largest = max(float(theirs[name].abs().max()) for name in names)
    assert difference <= MAX_WEIGHT_DIFFERENCE, difference
    return (
        f"{len(expected)} samples, {' to '.join(map(str, chain))} processes, weights within "
        f"{difference:.1e} (largest {largest:.2f})"
    )


@fault("K3", "no process left 45 s later (for good: after train.step_timeout_minutes); continued bit for bit")
def lose_a_process(bench: Bench) -> str:
    """One of 2 processes killed; stopped for seconds; stopped for good."""
    saving = ("train.steps=120", "output.checkpoint_every_steps=5")
    run = bench.images(*PLAIN, "train.micro_batch_size=1", *saving)
    whole = run.finish("whole", num_processes=2)
    times = []
    tries = bench.pick(1, 2, 20)
    for number in range(tries):
        folder = run.root / "killed"
        shared = SHARDED if number % 2 else ()
        launcher, _ = _signal_one_of_two(run, folder, signal.SIGKILL, str(number % 2), *shared)
        times.append(_seconds_until_gone(launcher, folder, GONE_WITHIN_S))
        assert_same(whole, run.finish(folder, *shared, num_processes=2), 120)
        shutil.rmtree(folder)
    launcher, stopped = _signal_one_of_two(run, run.root / "stopped", signal.SIGSTOP, "1")
    time.sleep(3)
    os.kill(stopped, signal.SIGCONT)
    assert launcher.wait(timeout=300) == 0
    assert_same(whole, run.root / "stopped", 120)
    outcome = f"{tries} killed, all gone after {max(times):.1f} s at most; 1 stopped for 3 s"
    if bench.scale == "ci":
        return outcome
    frozen = run.root / "frozen"
    timeout = f"train.step_timeout_minutes={STEP_TIMEOUT_S / 60}"
    launcher, _ = _signal_one_of_two(run, frozen, signal.SIGSTOP, "1", timeout)
    seconds = _seconds_until_gone(launcher, frozen, STEP_TIMEOUT_S + GONE_WITHIN_S)
    assert_same(whole, run.finish(frozen, num_processes=2), 120)
    return f"{outcome}; 1 for good, all gone after {seconds:.0f} s"


def _signal_one_of_two(
    run: Run, folder: Path, number: int, rank: str, *settings: str
) -> tuple["subprocess.Popen[bytes]", int]:
    """Start two processes, and signal one of them while they train: the launcher, and the one."""
    launcher = run.started(torchrun(2, "train.py"), *settings, f"output.dir={folder}")
    wait_for_steps(folder, 7)
    ranks = {pid: Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in processes_of(folder)}
    signalled = next(pid for pid, variables in ranks.items() if f"RANK={rank}".encode() in variables)
    os.kill(signalled, number)
    return launcher, signalled


def _seconds_until_gone(launcher: "subprocess.Popen[bytes]", folder: Path, limit_s: float) -> float:
    """Seconds from now until all processes have ended, the launcher with an error."""
    began_at = time.monotonic()
    launcher.wait(timeout=limit_s)
    gone_within(folder, GONE_WITHIN_S)
    assert launcher.returncode != 0
    return time.monotonic() - began_at


@fault("H1", "skipped by both; weights finite; no process waits; exit code 3 where the last was skipped")
def spoil_one_process(bench: Bench) -> str:
    """NaN or infinity in loss, gradient, latents or captions of one of 2 processes."""
    spoiled = {2: "loss", 4: "gradient", 6: "latents", 8: "captions", 10: "loss", 11: "gradient", 13: "loss"}
    run = bench.images(*PLAIN, "train.steps=13", "train.micro_batch_size=1")
    for rank in bench.pick(("1",), ("1",), ("0", "1")):
        notes = run.root / f"notes of {rank}"
        notes.mkdir()
        folder = run.root / f"rank {rank}"
        plan = json.dumps({"rank": rank, "steps": spoiled, "notes": str(notes)})
        done = run.launched((*torchrun(2, PROVOKED, "spoiled"), plan), f"output.dir={folder}", timeout=300)
        assert done.returncode != 0, done.stderr
        assert_ended(folder, "diverged", 3)  # its last step was skipped
        skipped = {path.name: json.loads(path.read_text()) for path in notes.iterdir()}
        assert skipped == {"0": list(spoiled), "1": list(spoiled)}, skipped
        tensors = checkpoint_tensors(folder, 13)
        assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
        counts = {float(value) for name, value in tensors.items() if name.endswith("::step")}
        assert counts == {13.0 - len(spoiled)}, counts
    return f"{len(spoiled) * bench.pick(1, 1, 2)} steps"
