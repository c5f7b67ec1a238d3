"""H2: data workers that die or hang."""

import multiprocessing
import shutil
import sys
import time
from pathlib import Path

from diffsynth_lite.training import trainer
from faults.bench import PLAIN, PROVOKED, Bench, Run, assert_same, at_call, fault, gone_within

TIMEOUT_S = 25.0
"""For a worker; it takes some of it to start."""
LATE_S = 60.0
"""A trainer first uses up what a worker had made, and then ends; on busy cores this takes a while."""


@fault("H2", "exit 3 at once, or after the timeout; no process left; continued bit for bit")
def lose_a_worker(bench: Bench) -> str:
    """A data worker killed; a data worker that hangs in a read."""
    run = bench.images(*PLAIN, "train.steps=20")
    whole = run.finish("whole")
    killed, hanging = [], []
    tries = bench.pick(1, 1, 5)
    for _ in range(tries):
        folder = run.stop_after(3, "lost")
        killed.append(_kill(run, folder))
        run.stop_after(3, folder)
        hanging.append(_hang(run, folder))
        assert_same(whole, run.finish(folder), 20)
        shutil.rmtree(folder)
    assert max(killed) < LATE_S, killed
    assert max(hanging) < TIMEOUT_S + LATE_S, hanging
    return (
        f"{tries} of each: exit {max(killed):.1f} s after the kill, {max(hanging):.1f} s after the hang "
        f"(timeout {TIMEOUT_S:.0f} s)"
    )


def _kill(run: Run, folder: Path) -> float:
    """Seconds from the kill of the worker until the trainer has ended."""
    struck_at = []

    def strike(*_: object) -> None:
        (worker,) = multiprocessing.active_children()
        worker.kill()
        struck_at.append(time.monotonic())

    with at_call(trainer, "train_step", 4, strike):
        code = run.exit_code(folder, "data.num_workers=1")
    assert code == 3, code
    return time.monotonic() - struck_at[0]


def _hang(run: Run, folder: Path) -> float:
    """Seconds from the first step of a run whose worker hangs in a read until its trainer has ended."""
    entry = next((run.root / "cache").rglob("*.safetensors"))
    content = entry.read_bytes()
    command = (sys.executable, PROVOKED, "impatient", str(entry), str(TIMEOUT_S))
    done = run.launched(command, f"output.dir={folder}", "data.num_workers=1")
    seconds = time.time() - entry.stat().st_ctime
    assert done.returncode == 3, (done.returncode, done.stderr)
    assert "a data worker died or hangs" in done.stderr
    gone_within(folder, 5)
    entry.unlink()
    entry.write_bytes(content)
    return seconds
