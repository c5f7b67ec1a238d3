"""R1, R4 to R6: a run that is stopped and continued, at every step and in every way, is the same run."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tiny_run import TinyRun

from diffsynth_lite.data.batches import BatchStream
from diffsynth_lite.training.optimization.averages import MovingAverage
from faults.bench import Bench, assert_same, fault, losses, recorded, stopped_after, train

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

    run: TinyRun
    folder: Path
    steps: int
    samples: Sequence[dict[str, Any]]

    @classmethod
    def of(cls, run: TinyRun, steps: int) -> "Whole":
        folder = run.root / "whole"
        every = ("output.checkpoint_every_steps=1", f"output.keep_checkpoints={steps}")
        run = run.having(f"train.steps={steps}")
        return cls(run=run, folder=folder, steps=steps, samples=recorded(run, folder, *every))

    def check_resumed_at(self, step: int, *settings: str) -> None:
        """Continue from the checkpoint of a step to the end: samples, numbers and weights are the same."""
        folder = self.run.root / f"from step {step}"
        source = self.folder / "checkpoints" / f"step-{step:08d}"
        last = f"output.checkpoint_every_steps={self.steps}"
        samples = recorded(self.run, folder, "--resume", str(source), last, *settings)
        assert samples == [row for row in self.samples if row["step"] >= step], f"samples after step {step}"
        assert losses(self.run, folder) == losses(self.run, self.folder, after=step), f"losses after {step}"
        assert_same(self.folder, folder, self.steps)
        shutil.rmtree(folder)
        shutil.rmtree(f"{folder}.records")


def plans(bench: Bench) -> dict[str, TinyRun]:
    """The runs that are resumed: three of images with 1, 2 and 4 micro-batches a step, and one of clips."""

    def plan(run: TinyRun, *settings: str) -> TinyRun:
        return run.having(*settings)

    return {
        "images": plan(bench.mixed("one"), "train.micro_batch_size=4", *COSINE),
        "images, 2 micro-batches": plan(bench.mixed("two"), *CONSTANT),
        "images, 4 micro-batches": plan(
            bench.mixed("four"), "train.micro_batch_size=1", *AVERAGED, "train.lr_scheduler=linear"
        ),
        "clips, 2 micro-batches": plan(bench.clips(), *COSINE),
    }


@fault("R1", "every step: samples, losses, rates, tensors bit for bit")
def resume_at_every_step(bench: Bench) -> str:
    """Resumed at every step."""
    steps = bench.pick(4, 8, 25)
    names = bench.pick(("images", "clips, 2 micro-batches"), None, None)
    num_points = 0
    for name, run in plans(bench).items():
        if names is not None and name not in names:
            continue
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
            stopped_after(whole.run, 1, parts)
            assert_same(whole.folder, parts, step)
        assert train(whole.run, parts) == 0
        assert_same(whole.folder, parts, steps)
        assert losses(run, parts) == losses(run, whole.folder)
        before = {path: path.stat().st_mtime_ns for path in parts.rglob("*") if path.name != ".lock"}
        assert train(whole.run, parts) == 0  # past its end
        assert {path: path.stat().st_mtime_ns for path in before} == before
    return f"{len(runs) * (steps + 1)} starts"


@fault("R5", "bit for bit")
def resume_with_other_flags(bench: Bench) -> str:
    """Checkpointing and offload flags changed between the halves."""
    steps = bench.pick(4, 4, 8)
    names = bench.pick(("images",), ("images", "clips, 2 micro-batches"), None)
    tried = 0
    for name, run in plans(bench).items():
        if names is not None and name not in names:
            continue
        whole = Whole.of(run, steps)
        for flags in FLAGS:
            whole.check_resumed_at(steps // 2, *flags)
            tried += 1
    return f"{tried} changes"


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


@contextmanager
def _must_be_seen(name: str) -> Iterator[None]:
    try:
        yield
    except AssertionError:
        return
    raise AssertionError(f"R1 does not see it: {name}")


@fault("R6", "R1 sees every one")
def break_the_resume(bench: Bench) -> str:
    """A resume that is wrong on purpose."""
    whole = Whole.of(plans(bench)["images"], 4)
    for name, (apply, settings) in CONTROLS.items():
        with _must_be_seen(name), pytest.MonkeyPatch.context() as patch:
            apply(patch)
            whole.check_resumed_at(2, *settings)
        shutil.rmtree(bench.root / "one" / "from step 2")
        shutil.rmtree(bench.root / "one" / "from step 2.records")
    whole.check_resumed_at(2)
    return f"{len(CONTROLS)} controls"
