"""D3 to D5 and D7: run folders that are damaged, gone, hold files of others, or are taken by two trainers."""

import os
import random
import shutil
import signal
from itertools import product
from pathlib import Path

import pytest
from damages import CERTAIN, RANDOM

from diffsynth_lite.errors import CheckpointError
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.training import trainer
from diffsynth_lite.training.checkpoint.manifest import read_checkpoint
from diffsynth_lite.training.checkpoint.store import CheckpointStore
from faults.bench import PLAIN, Bench, Run, assert_same, at_call, fault, wait_for_steps, waited

MOMENTS = ((trainer, "train_step"), (CheckpointStore, "save"))
"""After which a folder is lost: the second is in a save, before its export."""
SETTINGS = (*PLAIN, "train.ema_decay=0.6", "train.steps=4")


@fault("D7", "exit 3, nothing in its place; what was moved continued bit for bit")
def lose_the_folder(bench: Bench) -> str:
    """The run folder renamed, removed, or become another run's, in a step and inside a save."""
    run = bench.images(*PLAIN)
    whole, folder, moved = run.finish("whole"), run.root / "run", run.root / "moved"

    def replace_it() -> None:
        folder.rename(moved)
        assert run.in_child(lambda: _begin_another(folder), 60) == 0

    ways = (lambda: folder.rename(moved), lambda: shutil.rmtree(folder), replace_it)
    for number, (way, (owner, name)) in enumerate(product(ways, MOMENTS)):
        with at_call(owner, name, 2, lambda *_: way(), after=True):  # noqa: B023
            assert run.exit_code(folder) == 3, number
        assert folder.exists() == (way is replace_it), number
        left = {path.name for path in folder.glob("*")} - {"report.html"}
        assert left == ({".lock", "status.json"} if way is replace_it else set()), left
        assert_same(whole, run.finish(moved if moved.exists() else folder), 6)
        for done in (moved, folder):
            shutil.rmtree(done, ignore_errors=True)
    return f"{len(ways) * len(MOMENTS)} runs"


def _begin_another(folder: Path) -> int:
    """What another trainer does first."""
    other = RunFolder(folder)
    with other.lock():
        other.write_status("running", exit_code=None, step=0, message="started")
    return 0


@fault("D3", "0 read; set aside untouched, and the one before it continued bit for bit")
def damage_checkpoints(bench: Bench) -> str:
    """Each file of a checkpoint altered; a run that finds its newest checkpoint damaged."""
    wanted = bench.pick(500, 2000, 20_000)
    run = bench.images(*SETTINGS)
    whole = run.finish("whole")
    good = whole / "checkpoints" / "step-00000004"
    num_altered = alter_each_file(good, bench, wanted)
    assert read_checkpoint(good).step == 4
    names = sorted(path.name for path in good.iterdir())
    damaged, dice = names[:: bench.pick(len(names), 3, 1)], bench.new_dice()
    for name in damaged:
        continue_after_a_damaged_one(run, whole, name, dice)
    return f"{num_altered} alterations, {len(damaged)} continued runs"


def alter_each_file(good: Path, bench: Bench, wanted: int) -> int:
    """Alter copies of a checkpoint, one file at a time; none may be read."""
    files = sorted(path.name for path in good.iterdir())
    ways = [*CERTAIN, *RANDOM * max(1, (wanted // len(files) - len(CERTAIN)) // len(RANDOM))]
    dice = bench.new_dice()
    altered = bench.root / "altered" / good.name
    for name in files:
        for way in ways:
            shutil.copytree(good, altered)
            way(altered / name, dice)
            with pytest.raises(CheckpointError):
                read_checkpoint(altered)
            shutil.rmtree(altered.parent)
    return len(files) * len(ways)


def continue_after_a_damaged_one(run: Run, whole: Path, name: str, dice: random.Random) -> None:
    """A newest checkpoint with one damaged file is set aside, and the run continues from the one before."""
    folder = run.stop_after(3, "damaged")
    newest = folder / "checkpoints" / "step-00000003"
    dice.choice(RANDOM)(newest / name, dice)
    content = {path.name: path.read_bytes() for path in newest.iterdir()}
    assert_same(whole, run.finish(folder), 4)
    (aside,) = (folder / "checkpoints").glob(".bad-step-00000003-*")
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == content
    shutil.rmtree(folder)


@fault("D4", "untouched; the run continues")
def leave_foreign_files(bench: Bench) -> str:
    """Foreign files in the run folder; an old checkpoint that cannot be removed, or has vanished."""
    run = bench.images(*SETTINGS, "output.keep_checkpoints=1")
    whole, folder = run.finish("whole"), run.stop_after(1, run.folder)
    store = folder / "checkpoints"
    for name in ("step-abc", "step-12 copy", "step-0000000099", "Step-00000099", "step-00000098.bak"):
        (store / name).mkdir()
        (store / name / "notes.txt").write_text("mine")
    for name in ("step-00000005", "notes.txt", "latest"):
        (store / name).write_text("mine")
    outside = bench.root / "outside"
    shutil.copytree(whole / "checkpoints" / "step-00000004", outside)
    (store / "step-00000097").symlink_to(outside, target_is_directory=True)
    (folder / "thesis").mkdir()
    (folder / "thesis" / "chapter.tex").write_text("mine")
    foreign = [store, outside, folder / "thesis"]
    before = _contents(foreign, ours=folder)
    assert_same(whole, run.finish(folder), 4)
    assert _contents(foreign, ours=folder) == before
    _rotate_around_obstacles(run, run.root / "rotated")
    return f"{len(before)} foreign files, 2 obstacles"


def _contents(folders: list[Path], *, ours: Path) -> dict[str, bytes]:
    """Content of every file that no trainer wrote."""
    return {
        str(path): path.read_bytes()
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file() and not (path.parent.parent.parent == ours and (path.parent / "COMPLETE").exists())
    }


def _rotate_around_obstacles(run: Run, folder: Path) -> None:
    """An old checkpoint that cannot be renamed, or is gone when it is to go, is a warning."""
    rename = Path.rename

    def unwilling(self: Path, target: Path) -> Path:
        if self.name == "step-00000001":
            raise PermissionError(13, "Permission denied")
        if self.name == "step-00000002":
            shutil.rmtree(self)
        return rename(self, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", unwilling)
        run.finish(folder, "output.checkpoint_every_steps=1")
    names = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
    # 3 as the newest whose weights have given a finite loss.
    assert names == ["step-00000001", "step-00000003", "step-00000004"], names


@fault("D5", "refused with exit 2, the first continues; no lock stays")
def start_two_trainers(bench: Bench) -> str:
    """A second trainer in the same folder; a lock of a killed one."""
    run = bench.images(*PLAIN, "train.steps=100000")
    tries = bench.pick(2, 5, 20)
    for number in range(tries):
        folder = run.root / f"run {number}"
        child = run.forked(folder)
        wait_for_steps(folder, 3)
        assert run.exit_code(folder) == 2
        assert waited(child, 0.2) is None, "the first trainer has ended"
        if number % 2:
            os.kill(child, signal.SIGKILL)
            assert waited(child, 30) == -signal.SIGKILL
        else:
            os.kill(child, signal.SIGTERM)
            assert waited(child, 60) == 75
        run.stop_after(1, folder)
    return f"{tries} pairs"
