"""R1, R4 to R6: a run that is stopped and continued, at every step and in every way, is the same run."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from diffsynth_lite.data.batches import BatchStream
from diffsynth_lite.training.optimization.averages import MovingAverage
from faults.bench import Bench, Run, assert_same, fault

AVERAGED = ("train.ema_decay=0.6", "lora.dropout=0.1")
CONSTANT = (*AVERAGED, "train.micro_batch_size=2", "train.lr_scheduler=constant")
COSINE = (*AVERAGED, "train.lr_scheduler=cosine", "train.warmup_steps=3")

FLAGS = (
    ("--use_gradient_checkpointing_offload",),
    ("--no-use_gradient_checkpointing", "train.use_gradient_checkpointing_offload=false"),
    ("memory.policy=every_n", "memory.policy_n=2", "memory.save_attention=park", "memory.skip_dead_ops=off"),
)


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A run that nothing interrupted, with a checkpoint of each step."""

    run: Run
    folder: Path
    steps: int
    samples: Sequence[dict[str, Any]]
    num_processes: int

    @classmethod
    def of(cls, run: Run, steps: int, *, num_processes: int = 1) -> "Whole":
        """Train so many steps in so many processes."""
        folder = run.root / "whole"
        every = ("output.checkpoint_every_steps=1", f"output.keep_checkpoints={steps}")
        run = run.having(f"train.steps={steps}")
        samples = run.recorded(folder, *every, num_processes=num_processes)
        return cls(run=run, folder=folder, steps=steps, samples=samples, num_processes=num_processes)

    def check_resumed_at(self, step: int, *settings: str) -> None:
        """Continue from the checkpoint of a step to the end: samples, numbers and weights are the same."""
        folder = self.run.root / f"from step {step}"
        source = self.folder / "checkpoints" / f"step-{step:08d}"
        last = f"output.checkpoint_every_steps={self.steps}"
        settings = ("--resume", str(source), last, *settings)
        samples = self.run.recorded(folder, *settings, num_processes=self.num_processes)
        assert samples == [row for row in self.samples if row["step"] >= step], f"samples after step {step}"
        assert self.run.losses(folder) == self.run.losses(self.folder, after=step), f"losses after {step}"
        assert_same(self.folder, folder, self.steps)
        shutil.rmtree(folder)
        shutil.rmtree(f"{folder}.records")


def plans(bench: Bench) -> dict[str, Run]:
    """The runs that are resumed: three of images with 1, 2 and 4 micro-batches a step, and one of clips."""
    linear = (*AVERAGED, "train.lr_scheduler=linear")
    return {
        "images": bench.mixed("train.micro_batch_size=4", *COSINE, name="one"),
        "clips, 2 micro-batches": bench.clips(*COSINE),
        "images, 2 micro-batches": bench.mixed(*CONSTANT, name="two"),
        "images, 4 micro-batches": bench.mixed("train.micro_batch_size=1", *linear, name="four"),
    }


@fault("R1", "every step: samples, losses, rates, tensors bit for bit")
def resume_at_every_step(bench: Bench) -> str:
    """Resumed at every step."""
    steps = bench.pick(4, 8, 25)
    num_points = 0
    for run in list(plans(bench).values())[: bench.pick(2, None, None)]:
        whole = Whole.of(run, steps)
        for step in range(1, steps):
            whole.check_resumed_at(step)
            num_points += 1
        # Workers are started again for each: seconds of imports.
        for step in range(steps // 2, steps, bench.pick(steps, steps, 6)):
            if bench.scale != "ci":
                whole.check_resumed_at(step, "data.num_workers=2")
                num_points += 1
    return f"{num_points} points"


@fault("R4", "equal to the whole run; a finished run stays as it is")
def resume_again_and_again(bench: Bench) -> str:
    """Stopped after each step; started again when finished."""
    steps = bench.pick(4, 8, 25)
    runs = [bench.clips()] if bench.scale == "ci" else [bench.mixed(), bench.clips()]
    for run in runs:
        whole = Whole.of(run.having(*COSINE), steps)
        parts = run.root / "parts"
        for step in range(1, steps):
            whole.run.stop_after(1, parts)
            assert_same(whole.folder, parts, step)
        assert_same(whole.folder, whole.run.finish(parts), steps)
        assert run.losses(parts) == run.losses(whole.folder)
        before = {path: path.stat().st_mtime_ns for path in parts.rglob("*") if path.name != ".lock"}
        whole.run.finish(parts)  # past its end
        assert {path: path.stat().st_mtime_ns for path in before} == before
    return f"{len(runs) * (steps + 1)} starts"


@fault("R5", "bit for bit")
def resume_with_other_flags(bench: Bench) -> str:
    """Checkpointing and offload flags changed between the halves."""
    steps = bench.pick(4, 4, 8)
    runs = list(plans(bench).values())[: bench.pick(1, 2, None)]
    for run in runs:
        whole = Whole.of(run, steps)
        for flags in FLAGS:
            whole.check_resumed_at(steps // 2, *flags)
    return f"{len(runs) * len(FLAGS)} changes"


Patch = Callable[[pytest.MonkeyPatch], None]


def _count_one_too_many(patch: pytest.MonkeyPatch) -> None:
    build = BatchStream.__init__

    def shifted(self: BatchStream, *args: Any, start_step: int, **kwargs: Any) -> None:
        build(self, *args, start_step=start_step + 1, **kwargs)

    patch.setattr(BatchStream, "__init__", shifted)


def _forget_the_optimizer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("diffsynth_lite.training.saver.load_optimizer", lambda *_: None)


def _forget_the_average(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MovingAverage, "load", lambda self, *_: self.restart())


def _let_anything_differ(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("diffsynth_lite.training.checkpoint.resume.require_same", lambda *_, **__: [])


CONTROLS: dict[str, tuple[Patch, tuple[str, ...]]] = {
    "counter + 1": (_count_one_too_many, ()),
    "stale optimizer": (_forget_the_optimizer, ()),
    "dropped average": (_forget_the_average, ()),
    "wrong alpha": (_let_anything_differ, ("lora.alpha=4",)),
}


def _is_seen(whole: Whole, apply: Patch, settings: tuple[str, ...]) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        apply(patch)
        try:
            whole.check_resumed_at(2, *settings)
        except AssertionError:
            return True
    return False


@fault("R6", "R1 sees every one")
def break_the_resume(bench: Bench) -> str:
    """A resume that is wrong on purpose."""
    whole = Whole.of(plans(bench)["images"], 4)
    for name, (apply, settings) in CONTROLS.items():
        assert _is_seen(whole, apply, settings), f"R1 does not see it: {name}"
        for ending in ("", ".records"):
            shutil.rmtree(whole.run.root / f"from step 2{ending}")
    whole.check_resumed_at(2)
    return f"{len(CONTROLS)} controls"
