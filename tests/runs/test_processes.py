"""Runs as processes of their own: launchers, signals and exit codes."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import LIMIT_S, wait_for
from tiny_run import REPOSITORY, UNWATCHED, TinyRun, checkpoint_tensors, differing, forked

from diffsynth_lite.cli.continuation import continuation
from diffsynth_lite.run_folder.folder import RunFolder

OWN_MACHINE = Path(__file__).with_name("own_machine_train.py")


def test_the_config_is_refused_without_importing_torch(tiny_run: TinyRun) -> None:
    command = (sys.executable, "-X", "importtime", "train.py", *tiny_run.arguments, "train.stesp=3")
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    assert done.returncode == 2
    assert "did you mean" in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time")]
    imported = {line.rsplit("|", 1)[-1].strip() for line in lines}
    assert "omegaconf" in imported
    assert not imported & {"torch", "diffusers", "transformers", "accelerate"}


def test_a_trainer_whose_launcher_is_killed_saves_and_stops_and_is_continued_exactly(
    tiny_run: TinyRun, caplog: pytest.LogCaptureFixture
) -> None:
    endless = ("train.steps=100000", "output.checkpoint_every_steps=100000")
    machine = RunFolder(tiny_run.root / "machine 0" / "run")
    agent = forked(
        tiny_run, *endless, "--use_gradient_checkpointing_offload", script=(OWN_MACHINE, 1, tiny_run.root)
    )
    agent.read_until("step 3/")
    agent.kill()
    wait_for(machine.is_abandoned)
    status = json.loads(machine.status_file.read_text())
    assert status["state"] == "interrupted"
    assert 3 <= status["step"] < 100000

    last = status["step"] + 2
    settings = (f"train.steps={last}", "output.checkpoint_every_steps=100000")
    caplog.set_level("INFO")
    assert (
        tiny_run.train(*settings, f"output.dir={machine.path}", "--use_gradient_checkpointing_offload") == 0
    )
    assert f"step-{status['step']:08d}" in caplog.text
    assert tiny_run.train(*settings) == 0
    assert differing(checkpoint_tensors(tiny_run.folder, last), checkpoint_tensors(machine.path, last)) == []


def test_a_signal_to_the_whole_process_group_does_not_take_the_data_workers_first(tiny_run: TinyRun) -> None:
    program = forked(tiny_run, "train.steps=100000", "data.num_workers=1")
    program.read_until("step 3/")
    os.killpg(program.pid, signal.SIGTERM)
    assert program.wait() == 75, program.printed()
    assert "Traceback" not in program.printed()
    assert tiny_run.status()["state"] == "interrupted"


def test_two_processes_train_on_the_same_samples_as_one_and_their_machines_share_no_folder(
    watched_run: TinyRun,
) -> None:
    single, machines = watched_run.root / "single", watched_run.root / "machines"
    double = machines / "machine 0" / "run"
    settings = ("lora.dropout=0", "train.micro_batch_size=1", "train.use_gradient_checkpointing_offload=true")
    settings = (*settings, "lora.kind=dora")
    assert watched_run.train(*settings, *UNWATCHED, f"output.dir={single}") == 0
    program = forked(watched_run, *settings, script=(OWN_MACHINE, 2, machines))
    assert program.wait() == 0, program.printed()
    assert "Runs in 2 processes of 2 machines on the CPU" in program.printed()
    found = continuation(double)
    assert (found.num_processes, found.num_nodes) == (1, 2)
    assert found.shown.endswith(shlex.join(found.arguments))
    rows = [[row for row in watched_run.metrics(folder) if "loss" in row] for folder in (single, double)]
    for one, other in zip(*rows, strict=True):
        for name in (name for name in one if "loss" in name or "samples_by_noise" in name):
            assert one[name] == pytest.approx(other[name], rel=1e-4)  # sums over samples differ in order
    by_noise = [value for name, value in rows[1][0].items() if name.startswith("samples_by_noise/")]
    assert sum(by_noise) == 4
    one, other = (watched_run.metrics(path, name="sample_losses.jsonl")[0] for path in (single, double))
    assert sum(map(len, one["samples"].values())) == 4
    for item, samples in one["samples"].items():
        assert other["samples"][item] == [pytest.approx(sample, rel=2e-3) for sample in samples]
    for name in ("item_losses.jsonl", "layers.jsonl"):
        assert {0, 6} <= {row["step"] for row in watched_run.metrics(double, name=name)}
    ours, theirs = checkpoint_tensors(single, 6), checkpoint_tensors(double, 6)
    assert ours.keys() == theirs.keys()

    settings = (*settings, *UNWATCHED, "train.steps=7")
    program = forked(watched_run, *settings, script=(OWN_MACHINE, 2, machines))
    assert program.wait() == 0, program.printed()
    assert "step-00000006" in program.printed()
    assert checkpoint_tensors(double, 7).keys() == theirs.keys()
    assert sorted(path.name for path in (machines / "machine 1").iterdir()) == ["cache"]
    entries = [
        {path.name: path.read_bytes() for path in (machines / name / "cache").rglob("*.safetensors")}
        for name in ("machine 0", "machine 1")
    ]
    assert entries[0] == entries[1] != {}


def test_wandb_works_offline_without_an_account_and_with_tensorboard(watched_run: TinyRun) -> None:
    trackers = ("logging.trackers=[wandb, tensorboard]", "logging.wandb_mode=offline")
    program = forked(watched_run, "train.steps=2", *trackers)
    assert program.wait() == 0, program.printed()
    trackers = watched_run.folder / "trackers"
    assert list(trackers.rglob("*.wandb"))
    assert list(trackers.rglob("events.out.tfevents.*"))


def test_a_bug_keeps_its_traceback_and_exits_with_1(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def bug(*_arguments: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("diffsynth_lite.training.session.check_before_download", bug)
    with pytest.raises(SystemExit, match="1"):
        tiny_run.train()
    error = capsys.readouterr().err
    assert "Traceback (most recent call last)" in error
    assert "KeyError: 'a bug'" in error


SLOW = str(Path(__file__).with_name("slow_train.py"))
SETTINGS = ("train.steps=4", "train.micro_batch_size=1")


def test_a_launcher_that_would_kill_two_processes_too_early_is_named_once(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "31")
    program = forked(tiny_run, *SETTINGS, script=(SLOW,), num_processes=2)
    assert program.wait() == 0, program.printed()
    (line,) = [line for line in program.printed().splitlines() if "grace" in line]
    assert "31 s grace < 47." in line
    assert "Set TORCH_ELASTIC_SHUTDOWN_TIMEOUT" in line
