"""Runs as processes of their own: the launchers, signals and exit codes."""

import json
import os
import signal
import subprocess
import sys

import pytest
from tiny_run import LAUNCH, REPOSITORY, TinyRun, checkpoint_tensors, differing, start


def read_until(process: subprocess.Popen[str], text: str) -> None:
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if text in line:
            return
    pytest.fail("".join(seen))


def test_the_config_is_refused_without_importing_torch(tiny_run: TinyRun) -> None:
    process = start(tiny_run, "train.stesp=3", command=(sys.executable, "-X", "importtime", "train.py"))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "did you mean" in errors
    imported = {
        line.rsplit("|", 1)[-1].strip() for line in errors.splitlines() if line.startswith("import time")
    }
    assert "omegaconf" in imported
    assert not imported & {"torch", "diffusers", "transformers", "accelerate"}


@pytest.mark.slow
def test_accelerate_launch_trains_and_continues_a_stopped_run_exactly(tiny_run: TinyRun) -> None:
    whole = tiny_run.root / "whole"
    settings = ("train.steps=60", "output.checkpoint_every_steps=20")
    process = start(tiny_run, *settings, f"output.dir={whole}", command=LAUNCH)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors

    process = start(tiny_run, *settings)
    read_until(process, "step 3/60")
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 75, errors
    status = tiny_run.status()
    assert status["state"] == "interrupted"
    assert 3 <= status["step"] < 60

    process = start(tiny_run, *settings, "--use_gradient_checkpointing_offload")
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert f"step-{status['step']:08d}" in errors
    assert differing(checkpoint_tensors(whole, 60), checkpoint_tensors(tiny_run.folder, 60)) == []


def test_a_signal_to_the_whole_process_group_does_not_take_the_data_workers_first(tiny_run: TinyRun) -> None:
    process = start(tiny_run, "train.steps=100000", "data.num_workers=1")
    read_until(process, "step 3/")
    os.killpg(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 75, errors
    assert "Traceback" not in errors
    assert tiny_run.status()["state"] == "interrupted"


def test_a_trainer_saves_and_stops_when_its_launcher_is_killed(tiny_run: TinyRun) -> None:
    process = start(tiny_run, "train.steps=100000", command=LAUNCH)
    read_until(process, "step 3/")
    process.kill()
    process.communicate(timeout=120)  # the trainer holds the pipe until it ends
    assert tiny_run.status()["state"] == "interrupted"


def test_two_processes_train_on_the_same_samples_as_one(tiny_run: TinyRun) -> None:
    single, double = tiny_run.root / "single", tiny_run.root / "double"
    settings = ("lora.dropout=0", "train.micro_batch_size=1", "train.use_gradient_checkpointing_offload=true")
    process = start(tiny_run, *settings, f"output.dir={single}")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    torchrun = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        "train.py",
    )
    process = start(tiny_run, *settings, f"output.dir={double}", command=torchrun)
    _, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors
    losses = [
        [row["loss"] for row in tiny_run.metrics(folder) if "loss" in row] for folder in (single, double)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)  # sums over samples differ in their order
    ours, theirs = checkpoint_tensors(single, 6), checkpoint_tensors(double, 6)
    assert ours.keys() == theirs.keys()


def test_wandb_works_offline_without_an_account_and_tensorboard_beside_it(tiny_run: TinyRun) -> None:
    process = start(
        tiny_run, "train.steps=2", "logging.trackers=[wandb, tensorboard]", "logging.wandb_mode=offline"
    )
    _, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors
    trackers = tiny_run.folder / "trackers"
    assert list(trackers.rglob("*.wandb"))
    assert list(trackers.rglob("events.out.tfevents.*"))


def test_a_bug_keeps_its_traceback_and_exits_with_1(tiny_run: TinyRun) -> None:
    code = (
        "import sys; from diffsynth_lite.cli import train; from diffsynth_lite.training import run\n"
        "def bug(*args, **kwargs): raise KeyError('a bug')\n"
        "run.check_run = bug\n"
        f"sys.exit(train.main(['--config', {json.dumps(str(tiny_run.config))}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "KeyError: 'a bug'" in done.stderr
