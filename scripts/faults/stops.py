"""K4 and K5: signals to the trainer and its launchers, at every stage of a run, and logs that are lost."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_run import LAUNCH, TRAIN, TinyRun

from diffsynth_lite.pipelines.qwen_image import QwenImage
from diffsynth_lite.run_folder.progress import StepResult
from diffsynth_lite.training import trainer
from diffsynth_lite.training.builder import TrainingObjects
from diffsynth_lite.training.checkpoint.manifest import read_checkpoint
from diffsynth_lite.training.checkpoint.store import CheckpointStore
from faults.bench import PLAIN, Bench, Result, assert_same, environment, forked, torchrun, train
from faults.damage import wait_for_steps
from faults.driver import waited

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
LAUNCHERS: dict[str, tuple[str, ...]] = {
    "train.py": TRAIN,
    "accelerate launch": LAUNCH,
    "torchrun": torchrun(2, "train.py"),
}
GRACE_S = 60.0
"""Within which all processes of a tiny run that was signalled must be gone."""


def signal_everything(bench: Bench) -> Result:
    """K4."""
    launchers = [(name, number) for name in LAUNCHERS for number in bench.pick(SIGNALS[:1], SIGNALS, SIGNALS)]
    repeats = bench.pick(1, 1, 5)
    for name, number in launchers * repeats:
        signal_a_launcher(bench.pictures(f"{name} {number.name} {time.monotonic()}"), LAUNCHERS[name], number)
    stages = 0
    for stage in STAGES:
        for number in bench.pick(SIGNALS[:1], SIGNALS[:1], SIGNALS):
            signal_at_a_stage(bench.pictures(f"{stage} {number.name}"), stage, number)
            stages += 1
    signal_twice(bench.pictures("twice"))
    hang_up_under_nohup(bench.pictures("nohup"))
    return Result(
        f"{len(launchers) * repeats} starts by 3 launchers, {stages} stages, 1 twice, 1 under nohup",
        "exit 75, checkpoint of the last step there, 0 processes left",
    )


def lose_the_log(bench: Bench) -> Result:
    """K5: all that a run prints goes to a closed pipe, a terminal that is gone, a full disk."""
    run = bench.pictures()
    whole = run.root / "whole"
    assert train(run, whole, *PLAIN) == 0
    for number, opened in enumerate((os.pipe, os.openpty, _full_disk)):
        folder = run.root / f"lost {number}"
        *reader, writer = opened()
        for end in reader:
            os.close(end)
        command = [*TRAIN, *run.arguments, *PLAIN, f"output.dir={folder}"]
        place = Path(__file__).parents[2]
        done = subprocess.run(
            command, cwd=place, env=environment(), stdout=writer, stderr=writer, check=False, timeout=600
        )
        os.close(writer)
        assert done.returncode == 0, (opened, done.returncode)
        assert json.loads((folder / "status.json").read_text())["state"] == "finished"
        assert run.metrics(folder) == run.metrics(whole)
        assert_same(whole, folder, 6)
    return Result("3 logs", "exit 0, status and metrics as ever, equal")


def _full_disk() -> tuple[int, ...]:
    return (os.open("/dev/full", os.O_WRONLY),)


def signal_a_launcher(run: TinyRun, command: tuple[str, ...], number: signal.Signals) -> None:
    """Signal the process that was started, while its run trains; all is saved and nothing is left running."""
    settings = (
        *PLAIN,
        "train.steps=100000",
        "train.micro_batch_size=1",
        "output.checkpoint_every_steps=1000",
    )
    log = (run.root / "log").open("w")
    process = subprocess.Popen(
        [*command, *run.arguments, *settings],
        cwd=Path(__file__).parents[2],
        env=environment(),
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        wait_for_steps(run.folder, 3)
        process.send_signal(number)
        process.wait(timeout=GRACE_S)
        gone_within(run.root, GRACE_S)
    finally:
        for left in processes_of(run.root):
            os.kill(left, signal.SIGKILL)
        process.wait()
    status = json.loads((run.folder / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("interrupted", 75), status
    assert command != TRAIN or process.returncode == 75, process.returncode
    assert read_checkpoint(run.folder / "checkpoints" / f"step-{status['step']:08d}").step >= 3


def processes_of(root: Path) -> list[int]:
    """The processes whose command line names a run."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            is_ours = entry.name.isdigit() and str(root) in (entry / "cmdline").read_bytes().decode(
                errors="replace"
            )
        except OSError:  # it has ended meanwhile
            continue
        if is_ours and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


def gone_within(root: Path, seconds: float) -> None:
    """Wait until no process of a run is left.

    Raises:
        AssertionError: some are.
    """
    end = time.monotonic() + seconds
    while left := processes_of(root):
        assert time.monotonic() < end, f"processes {left} of the run are still there"
        time.sleep(0.05)


Stage = Callable[[pytest.MonkeyPatch, Callable[[], None]], None]


def _before(patch: pytest.MonkeyPatch, owner: Any, name: str, act: Callable[[], None], *, call: int) -> None:
    """Act before the so-manieth call of a function."""
    function = getattr(owner, name)
    calls = []

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if len(calls) == call:
            act()
        return function(*args, **kwargs)

    patch.setattr(owner, name, wrapped)


STAGES: dict[str, Stage] = {
    "caching captions": lambda patch, act: _before(patch, QwenImage, "load_prompt_encoder", act, call=1),
    "caching media": lambda patch, act: _before(patch, QwenImage, "load_media_encoder", act, call=1),
    "loading the model": lambda patch, act: _before(patch, QwenImage, "load_transformer", act, call=1),
    "first previews": lambda patch, act: _before(patch, QwenImage, "sample", act, call=1),
    "a step": lambda patch, act: _before(patch, trainer, "train_step", act, call=3),
    "saving": lambda patch, act: _before(patch, CheckpointStore, "save", act, call=1),
    "later previews": lambda patch, act: _before(patch, QwenImage, "sample", act, call=2),
}


def signal_at_a_stage(run: TinyRun, stage: str, number: signal.Signals) -> None:
    """Signal a trainer at one stage: exit code 75, and the same command ends as if nothing had been."""
    run = replace(run, settings=(*run.settings, "train.steps=4", "validation.every_steps=2"))
    whole, folder = run.root / "whole", run.root / "stopped"
    with pytest.MonkeyPatch.context() as patch:
        STAGES[stage](patch, lambda: os.kill(os.getpid(), number))
        code = train(run, folder)
    assert code == 75, f"exit code {code} after {number.name} while {stage}"
    assert train(run, folder) == 0
    assert train(run, whole) == 0
    assert_same(whole, folder, 4)


def hang_up_under_nohup(run: TinyRun) -> None:
    """A run that ignores SIGHUP from its start goes on to its end."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with pytest.MonkeyPatch.context() as patch:
            STAGES["a step"](patch, lambda: os.kill(os.getpid(), signal.SIGHUP))
            assert train(run, run.folder, *PLAIN) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def signal_twice(run: TinyRun) -> None:
    """The second signal, seconds after the first, ends a step that would not end; nothing saved is lost."""
    run = replace(run, settings=(*run.settings, *PLAIN, "train.steps=4"))
    whole, folder = run.root / "whole", run.root / "twice"
    assert train(run, whole) == 0

    def work() -> int:
        train_step = trainer.train_step

        def slow(built: TrainingObjects, step: int) -> StepResult:
            if step == 3:
                (run.root / "slow").touch()
                time.sleep(600)
            return train_step(built, step)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer, "train_step", slow)
            return train(run, folder)

    child = forked(work, run.root / "log")
    while not (run.root / "slow").exists():
        assert waited(child, 0.05) is None
    os.kill(child, signal.SIGTERM)
    assert waited(child, 2.5) is None, "the first signal ended a step"
    os.kill(child, signal.SIGTERM)
    assert waited(child, 10) == -signal.SIGTERM
    assert train(run, folder) == 0
    assert_same(whole, folder, 4)
