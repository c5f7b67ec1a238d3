"""Processes of a launcher are one run, or none, as its environment says; how long its agent waits."""

import subprocess
import sys

import pytest
import torch
from torch.distributed.run import get_args_parser

from diffsynth_lite.cli.processes import (
    grace_can_be_set,
    grace_period,
    is_local_main_process,
    is_main_process,
    join_processes,
    parent_command,
)
from diffsynth_lite.errors import UserError
from diffsynth_lite.training.stopping import GracePeriod

COMMAND = ["train.py", "--config", "my run.yaml"]
PROGRAM = "train.py --config 'my run.yaml'"
MEETING = {"MASTER_ADDR": "node-a", "MASTER_PORT": "29500"}
TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", **MEETING}
SRUN = {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
ACCELERATE = {"ACCELERATE_DYNAMO_MODE": "default", "ACCELERATE_MIXED_PRECISION": "no"}


def refusal(environment: dict[str, str]) -> str:
    """The error of a process with this environment, in one line."""
    with pytest.raises(UserError) as refused:
        join_processes(environment, COMMAND)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def seen_by_torch(monkeypatch: pytest.MonkeyPatch, *, num_gpus: int, kind: str | None = None) -> None:
    """Have torch see so many GPUs, or another kind of accelerator."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: num_gpus > 0 or kind is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind or "cuda"))


@pytest.mark.parametrize(
    ("environment", "is_main", "is_local_main"),
    [
        ({}, True, True),
        (TORCHRUN, False, False),
        (TORCHRUN | {"RANK": "4", "LOCAL_RANK": "0"}, False, True),
        (TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0"}, True, True),
        (SRUN, False, False),
        (SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, True, True),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, True, True),
        (OPEN_MPI, False, False),
        (SRUN | HYDRA | {"PMI_RANK": "0"}, True, False),
        (SRUN | TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0"}, True, True),
    ],
)
def test_one_process_of_all_and_one_of_each_machine_is_the_main_one(
    environment: dict[str, str], is_main: bool, is_local_main: bool
) -> None:
    assert is_main_process(environment) == is_main
    assert is_local_main_process(environment) == is_local_main


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WORLD_SIZE": "1"},
        {"SLURM_NTASKS": "16", "SLURM_PROCID": "0"},  # a batch script, with 16 cores for one process
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
        TORCHRUN | SRUN | {"ACCELERATE_USE_CPU": "True"},
        ACCELERATE | {"ACCELERATE_USE_FSDP": "false"},
    ],
)
def test_one_process_and_those_of_torchrun_are_left_as_they_are(environment: dict[str, str]) -> None:
    before = dict(environment)
    join_processes(environment, COMMAND)
    assert environment == before


@pytest.mark.parametrize("found", [OPEN_MPI, HYDRA, OPEN_MPI | SRUN])
def test_processes_of_mpirun_are_numbered_as_those_of_torchrun(found: dict[str, str]) -> None:
    environment = found | {"ACCELERATE_USE_CPU": "true"}
    join_processes(environment, COMMAND)
    assert environment == found | {
        "ACCELERATE_USE_CPU": "true",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


def test_processes_of_mpirun_on_several_machines_meet_at_the_given_address() -> None:
    environment = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "ACCELERATE_USE_CPU": "true"}
    assert "without MASTER_ADDR, MASTER_PORT;" in refusal(dict(environment))
    environment |= MEETING
    join_processes(environment, COMMAND)
    assert environment["MASTER_ADDR"] == "node-a"


ALONE = "started 8 tasks that know nothing of each other"
ONE_MACHINE = "srun --ntasks=1 --ntasks-per-node=1 torchrun --standalone --nproc_per_node 8"
TWO_MACHINES = (
    "srun --ntasks=2 --ntasks-per-node=1 torchrun --nnodes 2 --nproc_per_node 4 --rdzv_backend c10d"
)
# The parent of the process that tests has set no such variables.
ASKED_FOR_SEVERAL = ACCELERATE | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}


def torchrun(num_processes: int) -> str:
    return f"torchrun --standalone --nproc_per_node {num_processes} {PROGRAM}"


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (SRUN | {"SLURM_STEP_NUM_NODES": "1"}, (ALONE, ONE_MACHINE, PROGRAM)),
        (SRUN | {"SLURM_STEP_NUM_NODES": "2"}, (ALONE, TWO_MACHINES, PROGRAM)),
        *(
            (
                TORCHRUN | {f"ACCELERATE_USE_{kind}": "true"},
                (f"{kind} is not supported", "set memory.shard_base: all"),
            )
            for kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG")
        ),
        ({"WORLD_SIZE": "2"}, ("without RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT;", torchrun(2))),
        ({"WORLD_SIZE": "2", "RANK": "0", **MEETING}, ("without LOCAL_RANK;", torchrun(2))),
        ({"LOCAL_RANK": "0"}, ("without WORLD_SIZE, RANK, MASTER_ADDR, MASTER_PORT;", torchrun(1))),
        ({"PMI_SIZE": "2", "PMI_RANK": "1", **MEETING}, ("without LOCAL_RANK;", torchrun(2))),
        ({"WORLD_SIZE": "two"}, ("WORLD_SIZE: is 'two'",)),
        (ASKED_FOR_SEVERAL, ("started one", "several with torchrun --standalone --nproc_per_node")),
        (
            ASKED_FOR_SEVERAL | {"ACCELERATE_USE_CPU": "True"},
            ("started one", "several with ACCELERATE_USE_CPU=true torchrun --standalone --nproc_per_node"),
        ),
    ],
)
def test_processes_that_would_not_be_one_run_are_refused_with_what_would_do(
    environment: dict[str, str], words: tuple[str, ...]
) -> None:
    text = refusal(environment)
    assert [word for word in words if word not in text] == []


def test_without_a_gpu_processes_of_torchrun_run_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seen_by_torch(monkeypatch, num_gpus=0)
    environment = dict(TORCHRUN)
    join_processes(environment, COMMAND)
    assert environment == TORCHRUN | {"ACCELERATE_USE_CPU": "true"}
    assert "on GPUs, and torch sees none" in refusal(TORCHRUN | ACCELERATE)


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_gpus, visible, named in (
        (1, {}, "1 GPU;"),
        (3, {"CUDA_VISIBLE_DEVICES": "0,1,2"}, "3 GPUs (CUDA_VISIBLE_DEVICES=0,1,2);"),
    ):
        seen_by_torch(monkeypatch, num_gpus=num_gpus)
        text = refusal(TORCHRUN | visible)
        assert f"4 processes were started on this machine, where torch sees {named}" in text
        assert f"--nproc_per_node {num_gpus} {PROGRAM}" in text
    seen_by_torch(monkeypatch, num_gpus=0, kind="mps")
    assert "not supported on mps" in refusal(dict(TORCHRUN))
    seen_by_torch(monkeypatch, num_gpus=4)
    environment = dict(TORCHRUN)
    join_processes(environment, COMMAND)
    assert environment == TORCHRUN


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_the_parent_s_command_line_is_that_of_the_process_which_started_this_one() -> None:
    child = "from diffsynth_lite.cli.processes import parent_command; print(parent_command())"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    done = subprocess.run(
        [sys.executable, "-c", parent, "--shutdown-timeout", "7"], capture_output=True, text=True, check=True
    )
    assert "'--shutdown-timeout', '7'" in done.stdout
    assert parent_command()


AGENT = {"TORCHELASTIC_RUN_ID": "none"}
SETTING = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
AGENT_COMMAND = ["python", "torchrun", "--nproc_per_node", "2"]


def test_without_an_agent_nothing_is_known() -> None:
    assert grace_period({SETTING: "5"}, [*AGENT_COMMAND, "--shutdown-timeout=5"], can_be_set=True) is None


@pytest.mark.parametrize(
    ("environment", "arguments", "seconds", "setting"),
    [
        ({}, [], 30, SETTING),
        ({SETTING: "120"}, [], 120, SETTING),
        ({SETTING: "120", "PET_SHUTDOWN_TIMEOUT": "60"}, [], 60, "PET_SHUTDOWN_TIMEOUT"),
        ({SETTING: "120"}, ["--shutdown-timeout", "45"], 45, "--shutdown-timeout"),
        ({SETTING: "120"}, ["--shutdown-timeout=45"], 45, "--shutdown-timeout"),
        ({SETTING: "120"}, ["--shutdown_timeout", "45"], 45, "--shutdown-timeout"),
        ({"PET_SHUTDOWN_TIMEOUT": "60"}, ["--shutdown-timeout=45"], 45, "--shutdown-timeout"),
        ({}, ["--shutdown-timeout=45", "--shutdown-timeout=46"], 46, "--shutdown-timeout"),
    ],
)
def test_the_argument_counts_before_the_variables_and_these_before_the_default(
    environment: dict[str, str], arguments: list[str], seconds: float, setting: str
) -> None:
    command = [*AGENT_COMMAND, *arguments, "train.py", "--config", "a.yaml"]
    found = grace_period(AGENT | environment, command, can_be_set=True)
    assert found == GracePeriod(seconds=seconds, setting=setting)


@pytest.mark.parametrize("arguments", [["--shutdown-timeout"], ["--shutdown-timeout="]])
def test_what_is_no_number_is_not_guessed_at(arguments: list[str]) -> None:
    assert grace_period(AGENT, arguments, can_be_set=True) is None
    assert grace_period(AGENT | {SETTING: "a minute"}, [], can_be_set=True) is None


def test_an_agent_that_looks_at_no_setting_waits_as_it_always_did() -> None:
    command = [*AGENT_COMMAND, "--shutdown-timeout=600"]
    found = grace_period(AGENT | {SETTING: "600"}, command, can_be_set=False)
    assert found == GracePeriod(seconds=30, setting=None)


def test_whether_the_agent_of_this_torch_does_is_known() -> None:
    assert grace_can_be_set() == ("shutdown-timeout" in get_args_parser().format_help())
