"""The scripts of examples/slurm do what their README says, with stand-ins for the programs that they call.

scripts/faults runs them under SLURM itself.
"""

import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from processes import wait_for

EXAMPLES = Path(__file__).parents[2] / "examples" / "slurm"
JOB = {
    "SLURM_JOB_ID": "41007",
    "SLURM_JOB_NODELIST": "node-[a-b]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_CPUS_PER_TASK": "32",
}
SCONTROL = '[ "$1" = show ] && printf "node-a\\nnode-b\\n" || echo "$@" > requeued'
SRUN = 'printf "%s\\n" "$@" > started; while [ ! -e asked ]; do sleep 0.02; done; exit "$(cat asked)"'


def started(script: str, folder: Path, *arguments: str, **variables: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        ["bash", str(EXAMPLES / script), *arguments],
        cwd=folder,
        env={**os.environ, **variables, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        text=True,
    )


def make_programs(folder: Path, programs: Mapping[str, str]) -> None:
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)


@pytest.mark.parametrize(("ends_with", "is_queued_again"), [("1", True), ("0", False)])
def test_a_job_whose_time_is_up_is_queued_again_unless_its_run_has_finished(
    tmp_path: Path, ends_with: str, is_queued_again: bool
) -> None:
    scancel = f'echo "$@" > signalled; echo {ends_with} > asked'
    make_programs(tmp_path, {"scontrol": SCONTROL, "srun": SRUN, "scancel": scancel})
    job = started("train.sh", tmp_path, "--config", "my own.yaml", **JOB)
    wait_for((tmp_path / "started").exists)
    job.send_signal(signal.SIGUSR1)
    printed, _ = job.communicate()
    assert job.returncode == int(ends_with)
    assert (tmp_path / "signalled").read_text().split() == ["--signal=TERM", "41007"]
    assert (tmp_path / "requeued").exists() == ("queued again" in printed) == is_queued_again
    command = (tmp_path / "started").read_text().splitlines()
    assert command[command.index("--rdzv_endpoint") + 1] == "node-a:21007"
    assert command[command.index("--nproc_per_node") + 1] == "8"
    assert command[-4:] == ["-m", "diffsynth_lite.cli.train", "--config", "my own.yaml"]


def test_a_run_that_fails_before_its_time_is_up_is_not_queued_again(tmp_path: Path) -> None:
    make_programs(tmp_path, {"scontrol": SCONTROL, "srun": SRUN})
    (tmp_path / "asked").write_text("3")
    job = started("train.sh", tmp_path, **JOB)
    job.communicate()
    assert job.returncode == 3
    assert not (tmp_path / "requeued").exists()


def test_a_job_of_an_array_fills_its_part_of_the_cache(tmp_path: Path) -> None:
    make_programs(tmp_path, {"diffsynth-lite": 'printf "%s|" "$@"; exit 2'})
    job = started("fill.sh", tmp_path, "64", "--config", "my own.yaml", SLURM_ARRAY_TASK_ID="17")
    printed, _ = job.communicate()
    assert printed == "cache|fill|--config|my own.yaml|--part|17/64|"
    assert job.returncode == 2
