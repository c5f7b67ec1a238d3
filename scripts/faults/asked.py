"""A1: SAVE, SAMPLE and STOP files at random moments of runs, some of which are then killed with signal 9."""

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from tiny_run import checkpoint_tensors, differing

from diffsynth_lite.training.checkpoint.store import CheckpointStore
from faults.bench import Bench, Run, assert_same, fault, processes_of, torchrun, wait_until, waited

LIMIT_S = 240.0
"""For a tiny run to start, to see a file, or to end, on a busy machine."""
_LORA = "pytorch_lora_weights.safetensors"

Start = Callable[[Path], int]
"""Starts a trainer in a run folder; gives its process id."""


@fault("A1", "each done and gone; 0 saved steps lost; equal to the undisturbed run, the best the right one")
def ask_at_random(bench: Bench) -> str:
    """SAVE, SAMPLE and STOP files at random moments of runs of 1 and 2 processes, some then killed."""
    steps, repeats = bench.pick((30, 1), (60, 1), (150, 3))
    tally: Counter[str] = Counter()
    for world in bench.pick((1,), (1, 2), (1, 2)):
        run = with_held_out(bench.images(name=f"{world} processes"), f"train.steps={steps}")
        run = run.having("output.keep_checkpoints=1000")
        start = _starter(run, world)
        whole = run.root / "whole"
        assert waited(start(whole), LIMIT_S) == 0
        for number in range(repeats):
            folder = run.root / f"asked {number}"
            dice = random.Random(bench.seed + number)
            while not _Round(start, folder, dice, tally).finished():
                pass
            assert_same(whole, folder, steps)
            assert run.losses(folder) == run.losses(whole)
            check_best(folder)
    return ", ".join(f"{count} {name}" for name, count in tally.items())


def with_held_out(run: Run, *settings: str) -> Run:
    """A run that measures its loss on held-out images; it saves at its end only."""
    return run.having(
        *(*run.held_out(), "validation.num_inference_steps=2"),
        *("train.micro_batch_size=1", "train.ema_decay=0.6", "train.learning_rate=0.002"),
        *("output.checkpoint_every_steps=1000", *settings),
    )


def check_best(folder: Path) -> None:
    """The best is the first with the least loss of all that were measured, and its LoRA is that one's."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    measured = [row for row in rows if row["step"] > 0 and row.get("validation_loss") is not None]
    least = min(measured, key=lambda row: (row["validation_loss"], row["step"]))
    checkpoints = sorted((folder / "checkpoints").glob("step-*"))
    best = json.loads((checkpoints[-1] / "state.json").read_text())["best"]
    assert (best["step"], best["loss"]) == (least["step"], least["validation_loss"]), (best, least)
    averages = {
        # The file's second matrices have alpha over rank in them, which is 2.
        f"transformer.{name.removeprefix('ema/').replace('.default.', '.')}": tensor
        * (1 + ("lora_B" in name))
        for name, tensor in checkpoint_tensors(folder, best["step"]).items()
        if name.startswith("ema/")
    }
    different = differing(load_file(folder / "lora_best" / _LORA), averages)
    assert not different, f"lora_best is not that of step {best['step']}: {different[0]}"


def _starter(run: Run, world: int) -> Start:
    """Trainers in a fork of this process, or in several of their own."""
    launchers = []  # One that nobody holds any more may be waited for by subprocess itself.

    def start(folder: Path) -> int:
        if world == 1:
            return run.forked(folder)
        launchers.append(run.started(torchrun(world, "train.py"), f"output.dir={folder}"))
        return launchers[-1].pid

    return start


class _Round:
    """One start of a run: files are dropped until it is asked to stop, is killed, or ends.

    Args:
        start: starts it.
        folder: of the run.
        dice: decides what is dropped and when.
        tally: counts what was done.
    """

    def __init__(self, start: Start, folder: Path, dice: random.Random, tally: Counter[str]) -> None:
        self._folder = folder
        self._dice = dice
        self._tally = tally
        self._store = CheckpointStore(folder / "checkpoints", keep=1)
        self._saved_before = self._store.steps()
        self._begun_at = time.time()
        self._seen = {"SAVE": 0, "SAMPLE": 0}
        self._code: int | None = None
        self._child = start(folder)

    def finished(self) -> bool:
        """Drop files, and check what was done; True if the run has come to its end."""
        self._wait_for_a_step()
        while self._wait(self._dice.uniform(0, 0.5)) is None:
            name = self._dice.choice(("SAVE", "SAMPLE", "STOP", "kill"))
            if name == "kill":
                return self._kill()
            if self._drop(name) and name == "STOP":
                self._wait(LIMIT_S)
                self._tally[name] += 1
                break
        assert self._code is not None, f"did not end within {LIMIT_S} s"
        status = json.loads((self._folder / "status.json").read_text())
        assert status["exit_code"] in (0, 75), status
        self._check_done(status)
        return bool(status["exit_code"] == 0)

    def _wait(self, seconds: float) -> int | None:
        if self._code is None:
            self._code = waited(self._child, seconds)
        return self._code

    def _wait_for_a_step(self) -> None:
        """Of this start: the engine's report follows its first step."""
        wait_until(lambda: self._wait(0.02) is not None or self._reports(), "a step", LIMIT_S)

    def _reports(self) -> bool:
        file = self._folder / "metrics.jsonl"
        return file.exists() and any(
            row["time"] >= self._begun_at and "blocks_run" in row for row in _rows(file)
        )

    def _drop(self, name: str) -> bool:
        """Whether the run has seen the file; else it has ended meanwhile."""
        file = self._folder / name
        file.touch()
        wait_until(lambda: not file.exists() or self._wait(0.005) is not None, f"the end of {name}", LIMIT_S)
        if file.exists():
            return False
        if name in self._seen:
            self._seen[name] += 1
            self._tally[name] += 1
        return True

    def _kill(self) -> bool:
        """While something is done that was asked for; what had been saved is still there."""
        saved = self._store.steps()
        (self._folder / self._dice.choice(("SAVE", "SAMPLE"))).touch()
        if self._wait(self._dice.uniform(0, 0.4)) is None:
            for process in {self._child, *processes_of(self._folder)}:
                os.kill(process, signal.SIGKILL)
            self._wait(LIMIT_S)
            self._tally["kills"] += 1
        latest = self._store.latest()
        assert set(saved) <= set(self._store.steps()), "a step that was saved is gone"
        assert latest is None or latest.step == max(self._store.steps()), "a checkpoint was torn"
        return self._code == 0

    def _check_done(self, status: dict[str, Any]) -> None:
        """A checkpoint for each SAVE, each best step and the last one; previews for each evaluation."""
        rows = [row for row in _rows(self._folder / "metrics.jsonl") if row["time"] >= self._begun_at]
        measured = [row["step"] for row in rows if "validation_loss" in row]
        previews = [
            path.name
            for path in (self._folder / "previews").glob("step-*-prompt-00-*")
            if path.stat().st_mtime >= self._begun_at
        ]
        assert len(previews) == len(measured), (previews, measured)
        is_end = status["exit_code"] == 0
        planned = int(0 in measured) + int(is_end and bool(rows))
        # One that was asked for after the last step is the planned one.
        wanted = self._seen["SAMPLE"] + planned
        assert wanted - is_end <= len(measured) <= wanted, (measured, self._seen)
        new = set(self._store.steps()) - set(self._saved_before)
        assert status["step"] in new | set(self._saved_before)
        wanted = self._seen["SAVE"]
        assert wanted <= len(new) <= wanted + 1 + len(measured), (sorted(new), self._seen)


def _rows(file: Path) -> list[dict[str, Any]]:
    """Rows of the metrics without a torn last one."""
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]]
