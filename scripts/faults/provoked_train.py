"""The training command with a fault in it: `provoked_train.py FAULT [VALUE ...] ARGUMENT ...`.

A fault is a function below whose name is the first argument; the values that it takes follow, and then the
arguments of the training command.
"""

import dataclasses
import errno
import inspect
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

Arguments = list[str]


def trained(arguments: Arguments) -> int:
    """The exit code of the training command."""
    from diffsynth_lite.cli.train import main

    return main(arguments)


def differing(arguments: Arguments, other: str) -> int:
    """Process 1 is as on another machine.

    Args:
        other: json: where process 1 looks for packages first (``packages``), and what is added to its command
            (``settings``).
    """
    if os.environ["RANK"] == "1":
        sys.path[:0] = json.loads(other)["packages"]
        arguments += json.loads(other)["settings"]
    return trained(arguments)


def full_disk(arguments: Arguments) -> int:
    """Process 0 finds the disk full at step 4; each process notes next to the config how it ended."""
    from diffsynth_lite.cli import train
    from diffsynth_lite.errors import exit_code
    from diffsynth_lite.training.checkpoint import store as module

    store: Any = module
    config = Path(arguments[arguments.index("--config") + 1])
    write, run = store.write_synced, train._train

    def full_at_step_4(path: Path, content: bytes) -> None:
        if "step-00000004" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, content)

    def noted(*args: object) -> None:
        try:
            run(*args)
        except BaseException as error:
            note = config.parent / f"end-{os.environ['RANK']}"
            note.write_text(f"{exit_code(error)} {error}")
            raise

    store.write_synced, train._train = full_at_step_4, noted
    return trained(arguments)


def impatient(arguments: Arguments, file: str, timeout_s: str) -> int:
    """Data workers hang in reading one file of the cache, and have so many seconds.

    Whoever opens the file waits for a writer of it that never comes, as on a file system that hangs.
    """
    from diffsynth_lite.data import batches
    from diffsynth_lite.training import trainer

    batches.WORKER_TIMEOUT_S = float(timeout_s)
    train_step = trainer.train_step

    def after_the_file_hangs(*args: Any) -> Any:
        if not Path(file).is_fifo():
            Path(file).unlink()
            os.mkfifo(file)
        return train_step(*args)

    trainer.train_step = after_the_file_hangs
    return trained(arguments)


def measured(arguments: Arguments, file: str, every: str) -> int:
    """Before every so-many-th step it writes into a file what its processes hold.

    The steps that it saved are in a file next to that one, ``.saves`` at its end. Linux only.
    """
    from diffsynth_lite.training import trainer
    from diffsynth_lite.training.saver import Saver

    train_step, save = trainer.train_step, Saver.save

    def measured_step(built: Any, step: int) -> Any:
        if (step - 1) % int(every) == 0:
            with Path(file).open("a") as rows:
                rows.write(json.dumps({"step": step - 1, **_held()}) + "\n")
        return train_step(built, step)

    def noted_save(self: Saver, step: int) -> None:
        save(self, step)
        with Path(f"{file}.saves").open("a") as steps:
            steps.write(f"{step}\n")

    Saver.save = noted_save  # type: ignore[method-assign]
    trainer.train_step = measured_step
    return trained(arguments)


def _held() -> dict[str, Any]:
    """Memory, open files, threads, children and temporary files of this process."""
    own = Path("/proc/self")
    children = [int(child) for task in (own / "task").iterdir() for child in _children_of(task)]
    return {
        "rss": _resident_bytes(own),
        "descriptors": _num_descriptors(own),
        "threads": len(list((own / "task").iterdir())),
        "python_threads": threading.active_count(),
        "children": len(children),
        "children_rss": sum(_resident_bytes(Path(f"/proc/{child}")) for child in children),
        "children_descriptors": sum(_num_descriptors(Path(f"/proc/{child}")) for child in children),
        "temporary": len(list(Path(tempfile.gettempdir()).iterdir())),
    }


def _children_of(task: Path) -> list[str]:
    try:
        return (task / "children").read_text().split()
    except FileNotFoundError:  # a thread that has ended meanwhile
        return []


def _resident_bytes(process: Path) -> int:
    line = next(line for line in (process / "status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def _num_descriptors(process: Path) -> int:
    return len(list((process / "fd").iterdir()))


def spoiled(arguments: Arguments, plan: str) -> int:
    """One process meets NaN and infinity at some steps; each process notes the steps that it skips.

    Args:
        plan: json: the process (``rank``), what is spoiled at which step (``steps``, from 1), and the folder
            of the notes (``notes``).
    """
    from recorded_train import replaced_loss

    from diffsynth_lite.training import trainer

    rank, steps, notes = (json.loads(plan)[name] for name in ("rank", "steps", "notes"))
    train_step, skipped = trainer.train_step, []

    def spoiled_step(built: Any, step: int) -> Any:
        what = steps.get(str(step)) if os.environ["RANK"] == rank else None
        loss = built.loss if what is None else _spoiled(built.loss, what)
        try:
            with replaced_loss(built, loss):
                return train_step(built, step)
        finally:
            if built.divergence.num_skipped_in_a_row:
                skipped.append(step)
                (Path(notes) / os.environ["RANK"]).write_text(json.dumps(skipped))

    trainer.train_step = spoiled_step
    return trained(arguments)


def _spoiled(own_loss: Callable[..., Any], what: str) -> Callable[..., Any]:
    nan, infinity = float("nan"), float("inf")

    def loss(model: Any, batch: Any) -> Any:
        if what == "latents":
            batch = dataclasses.replace(batch, latents=batch.latents * nan)
        if what == "captions":
            conditioning = [
                {
                    name: value * infinity if value.is_floating_point() else value
                    for name, value in one.items()
                }
                for one in batch.conditioning
            ]
            batch = dataclasses.replace(batch, conditioning=conditioning)
        value = own_loss(model, batch)
        if what == "gradient":
            value.register_hook(lambda gradient: gradient * infinity)
        return value * nan if what == "loss" else value

    return loss


FAULTS = (differing, full_disk, impatient, measured, spoiled)

if __name__ == "__main__":
    provoke = {fault.__name__: fault for fault in FAULTS}[sys.argv[1]]
    first = 1 + len(inspect.signature(provoke).parameters)
    sys.exit(provoke(sys.argv[first:], *sys.argv[2:first]))
