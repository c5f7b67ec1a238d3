"""K4 and K5: signals to the trainer and its launchers, at every stage of a run, and logs that are lost."""

import os
import signal
import sys
import time
from typing import Any

from diffsynth_lite.pipelines.qwen_image import QwenImage
from diffsynth_lite.training import trainer
from diffsynth_lite.training.checkpoint.manifest import read_checkpoint
from diffsynth_lite.training.checkpoint.store import CheckpointStore
from faults.bench import (
    PLAIN,
    Bench,
    Run,
    assert_ended,
    assert_same,
    at_call,
    fault,
    gone_within,
    processes_of,
    torchrun,
    wait_for_steps,
)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
TRAIN = (sys.executable, "train.py")
LAUNCHERS: dict[str, tuple[str, ...]] = {
    "train.py": TRAIN,
    "accelerate launch": (
        *(sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1"),
        *("--mixed_precision", "no", "--dynamo_backend", "no", "train.py"),
    ),
    "torchrun": torchrun(2, "train.py"),
}
GRACE_S = 60.0
"""Within which all processes of a tiny run that was signalled must be gone."""


@fault("K4", "exit 75, checkpoint there, no process left; continued bit for bit")
def signal_everything(bench: Bench) -> str:
    """SIGTERM, SIGUSR1, SIGINT, SIGHUP to train.py, accelerate launch, torchrun; at each stage."""
    launchers = [(name, number) for name in LAUNCHERS for number in bench.pick(SIGNALS[:1], SIGNALS, SIGNALS)]
    repeats = bench.pick(1, 1, 5)
    for name, number in launchers * repeats:
        run = bench.images(name=f"{name} {number.name} {time.monotonic()}")
        signal_a_launcher(run, LAUNCHERS[name], number)
    stages = 0
    for stage in STAGES:
        for number in bench.pick(SIGNALS[:1], SIGNALS[:1], SIGNALS):
            signal_at_a_stage(bench.images(name=f"{stage} {number.name}"), stage, number)
            stages += 1
    return f"{len(launchers) * repeats} starts by 3 launchers, {stages} stages"


@fault("K5", "exit 0, status and metrics as ever, equal")
def lose_the_log(bench: Bench) -> str:
    """The log lost: a closed pipe, a terminal that is gone, a full disk under it."""
    run = bench.images(*PLAIN)
    whole = run.finish("whole")
    for number, opened in enumerate((os.pipe, os.openpty, _full_disk)):
        folder = run.root / f"lost {number}"
        *reader, writer = opened()
        for end in reader:
            os.close(end)
        lost = {"capture_output": False, "stdout": writer, "stderr": writer}
        done = run.launched(TRAIN, f"output.dir={folder}", **lost)
        os.close(writer)
        assert done.returncode == 0, (opened, done.returncode)
        assert_ended(folder, "finished", 0)
        assert run.metrics(folder) == run.metrics(whole)
        assert_same(whole, folder, 6)
    return "3 logs"


def _full_disk() -> tuple[int, ...]:
    return (os.open("/dev/full", os.O_WRONLY),)


def signal_a_launcher(run: Run, command: tuple[str, ...], number: signal.Signals) -> None:
    """Signal the process that was started, while its run trains; all is saved and nothing is left running."""
    endless = ("train.steps=100000", "train.micro_batch_size=1", "output.checkpoint_every_steps=1000")
    process = run.started(command, *PLAIN, *endless)
    try:
        wait_for_steps(run.folder, 3)
        process.send_signal(number)
        process.wait(timeout=GRACE_S)
        gone_within(run.root, GRACE_S)
    finally:
        for left in processes_of(run.root):
            os.kill(left, signal.SIGKILL)
        process.wait()
    status = assert_ended(run.folder, "interrupted", 75)
    assert command != TRAIN or process.returncode == 75, process.returncode
    assert read_checkpoint(run.folder / "checkpoints" / f"step-{status['step']:08d}").step >= 3


STAGES: dict[str, tuple[Any, str, int]] = {
    "caching captions": (QwenImage, "load_prompt_encoder", 1),
    "caching media": (QwenImage, "load_media_encoder", 1),
    "loading the model": (QwenImage, "load_transformer", 1),
    "first previews": (QwenImage, "sample", 1),
    "a step": (trainer, "train_step", 3),
    "saving": (CheckpointStore, "save", 1),
    "later previews": (QwenImage, "sample", 2),
}
"""By name the call before which the signal comes."""


def signal_at_a_stage(run: Run, stage: str, number: signal.Signals) -> None:
    """Signal a trainer at one stage: exit code 75, and the same command ends as if nothing had been."""
    run = run.having("train.steps=4", "validation.every_steps=2")
    with at_call(*STAGES[stage], lambda *_: os.kill(os.getpid(), number)):
        code = run.exit_code("stopped")
    assert code == 75, f"exit code {code} after {number.name} while {stage}"
    assert_same(run.finish("stopped"), run.finish("whole"), 4)
