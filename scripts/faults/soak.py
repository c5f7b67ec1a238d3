"""B1: a run of thousands of steps holds at its end what it held after its first hundreds."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from diffsynth_lite.run_folder.loras import lora_copies
from faults.bench import PROVOKED, Bench, Run, environment, fault

MAX_GROWTH = 0.05
SAVE_EVERY = 20
SAVE_EVERY_MINUTES = 0.005
"""Far less than the steps between two saves take, and each save starts this time again."""
KEEP, KEEP_EVERY, KEEP_LORAS = 2, 1000, 3
WARM_UP = 0.2
"""Of the run: allocators and caches fill."""
NUM_MEASUREMENTS = 100
BOUNDED = ("threads", "children", "temporary")
"""What must be as many at the end as after the warm-up."""
HANDED_OVER = 2
"""Files that are open while a worker hands a batch over, in each process one."""


@fault("B1", "memory grows by less than 5 %, open files and threads not at all; no folder too many")
def soak(bench: Bench) -> str:
    """Thousands of steps with saves, previews, held-out loss and a data worker."""
    steps = bench.pick(300, 1000, 5000)
    runs = {"one shape": _of_one_shape(bench)}
    if bench.scale != "ci":
        runs["many shapes"] = _of_many_shapes(bench)
    found = [Soaked.train(run, steps).report(name) for name, run in runs.items()]
    return f"{len(runs)} runs of {steps} steps; {'; '.join(found)}"


def _of_one_shape(bench: Bench) -> Run:
    run = bench.images()
    return run.having(*_with_everything(run))


def _of_many_shapes(bench: Bench) -> Run:
    run = bench.mixed()
    prompts = ("validation.prompts=[a red circle]", "validation.width=32", "validation.height=32")
    return run.having(*_with_everything(run), *prompts)


def _with_everything(run: Run) -> tuple[str, ...]:
    """Saves, previews, a loss on held-out data, a moving average and a data worker."""
    return (
        *(*run.held_out(), "validation.every_steps=100"),
        *("validation.num_inference_steps=2", "train.ema_decay=0.9", "train.learning_rate=0.001"),
        *(f"output.checkpoint_every_steps={SAVE_EVERY}", f"output.keep_checkpoints={KEEP}"),
        f"output.keep_adapters={KEEP_LORAS}",
        *(f"output.keep_every_steps={KEEP_EVERY}", f"output.checkpoint_every_minutes={SAVE_EVERY_MINUTES}"),
        *("data.num_workers=1", "logging.trackers=[tensorboard]"),
    )


@dataclass(frozen=True, kw_only=True)
class Soaked:
    """A run that has ended, and what its processes held while it continued.

    Attributes:
        rows: of ``provoked_train.py measured``, after the warm-up.
        saves: steps that were saved, in order.
    """

    run: Run
    steps: int
    rows: Sequence[dict[str, Any]]
    saves: Sequence[int]

    @classmethod
    def train(cls, run: Run, steps: int) -> "Soaked":
        """Train in a process of its own, whose temporary files have a folder of their own."""
        file, temporary = run.root / "measured.jsonl", run.root / "temporary"
        temporary.mkdir()
        command = (sys.executable, PROVOKED, "measured", str(file), str(max(1, steps // NUM_MEASUREMENTS)))
        variables = {**environment(), "TMPDIR": str(temporary)}
        done = run.launched(command, f"train.steps={steps}", variables=variables, timeout=6000)
        assert done.returncode == 0, done.stderr
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        saves = [int(line) for line in Path(f"{file}.saves").read_text().splitlines()]
        return cls(
            run=run,
            steps=steps,
            rows=[row for row in rows if row["step"] >= WARM_UP * steps],
            saves=saves,
        )

    def report(self, name: str) -> str:
        """The figures, which must hold."""
        self._check_folders()
        by_time = self._num_saves_by_time()
        for what in BOUNDED:
            counts = {row[what] for row in self.rows}
            assert len(counts) == 1, f"{name}: {what} vary: {counts}"
        grown = {what: self._growth(what) for what in ("rss", "children_rss")}
        for what, growth in grown.items():
            assert growth < MAX_GROWTH, f"{name}: {what} grew by {growth:.1%}"
        first, last = (
            max(row["descriptors"] + row["children_descriptors"] for row in part) for part in self._halves()
        )
        assert last <= first + HANDED_OVER, f"{name}: open files went from {first} to {last}"
        rss = self.rows[-1]["rss"] / 2**20
        return (
            f"{name}: {len(self.saves)} saves, {by_time} of them by time, "
            f"memory {grown['rss']:+.1%} ({rss:.0f} MiB), worker's {grown['children_rss']:+.1%}, "
            f"at most {first}, then {last} open files, {self.rows[-1]['threads']} threads throughout"
        )

    def _num_saves_by_time(self) -> int:
        """Saves of other steps than every so-many-th; all of those were saved too, and none twice."""
        saves = set(self.saves)
        assert len(saves) == len(self.saves), "a step was saved twice"
        due = set(range(SAVE_EVERY, self.steps + 1, SAVE_EVERY))
        assert due <= saves, due - saves
        assert saves - due, "no save by time"
        return len(saves - due)

    def _growth(self, what: str) -> float:
        """From the fifth after the warm-up to the last fifth of the run, as a part."""
        part = len(self.rows) // 4
        first, last = (median(row[what] for row in rows) for rows in (self.rows[:part], self.rows[-part:]))
        return last / first - 1

    def _halves(self) -> tuple[Sequence[dict[str, Any]], Sequence[dict[str, Any]]]:
        middle = len(self.rows) // 2
        return self.rows[:middle], self.rows[middle:]

    def _check_folders(self) -> None:
        """The checkpoints that the settings keep, a preview for each time it was due, nothing aside."""
        folder = self.run.folder
        names = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
        copies = [copy.step for copy in lora_copies(folder / "checkpoints")]
        assert {f"step-{step:08d}" for step in copies} >= set(names), (copies, names)
        assert len(copies) == len(names) + KEEP_LORAS, (copies, names)
        best = json.loads((folder / "checkpoints" / names[-1] / "state.json").read_text())["best"]
        for_good = {f"step-{step:08d}" for step in range(KEEP_EVERY, self.steps + 1, KEEP_EVERY)}
        stay = for_good | {f"step-{best['step']:08d}"}
        assert stay <= set(names), (stay, names)
        # By time, so that only their number is known.
        assert set(names[:-KEEP]) <= stay, names
        assert names[-1] == f"step-{self.steps:08d}", names
        previews = {path.name.split("-prompt")[0] for path in (folder / "previews").glob("step-*")}
        assert previews == {f"step-{step:08d}" for step in range(0, self.steps + 1, 100)}, previews
        aside = [path for path in folder.rglob(".*") if path.name != ".lock"]
        assert not aside, aside
