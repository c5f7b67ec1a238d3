"""What a run trains on at each step: the same samples whatever the number of workers and processes."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recorded_train import read_records, recorded_step
from tiny_run import REPOSITORY, TinyRun, make_mixed_run

from diffsynth_lite.training import trainer

LOG_LINE = re.compile(r"\d\d:\d\d:\d\d ")
SCRIPT = str(Path(__file__).with_name("recorded_train.py"))
ONE = (sys.executable, SCRIPT)
TWO = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", SCRIPT)


@pytest.fixture
def mixed_run(tmp_path: Path, tiny_model: Path) -> TinyRun:
    """Pictures of many shapes in three sources, one of them with masks."""
    run = make_mixed_run(tmp_path, tiny_model)
    steps = ("train.steps=10", "output.checkpoint_every_steps=10")
    return replace(run, settings=(*run.settings, *steps, "lora.dropout=0"))


def samples(run: TinyRun, name: str, *settings: str) -> list[dict[str, Any]]:
    """All samples of a run in this process."""
    folder = run.root / "records" / name
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(trainer, "train_step", recorded_step(folder))
        assert run.train(*settings, f"output.dir={run.root / name}") == 0
    return read_records(folder)


def samples_of_process(
    run: TinyRun, name: str, command: tuple[str, ...], *settings: str
) -> list[dict[str, Any]]:
    """All samples of a run in processes of its own, which must end without a word that is not of the log."""
    folder = run.root / "records" / name
    done = subprocess.run(
        [*command, str(folder), *run.arguments, *settings, f"output.dir={run.root / name}"],
        cwd=REPOSITORY,
        env={**os.environ, "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if not LOG_LINE.match(line)] == []
    return read_records(folder)


@pytest.mark.slow
def test_workers_processes_and_a_resume_change_no_sample_of_any_step(mixed_run: TinyRun) -> None:
    alone = samples(mixed_run, "alone")
    assert [row["position"] for row in alone] == list(range(40))
    assert [row["step"] for row in alone] == [position // 4 for position in range(40)]
    assert len({row["bucket"] for row in alone}) > 3
    assert any("loss_mask" in row["tensors"] for row in alone)
    assert samples_of_process(mixed_run, "workers", ONE, "data.num_workers=2") == alone

    samples(mixed_run, "parts", "train.steps=4")
    assert samples_of_process(mixed_run, "parts", TWO, "data.num_workers=2") == alone
