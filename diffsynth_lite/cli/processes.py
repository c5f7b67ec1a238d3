"""This file joins the processes of a launcher in one run, or refuses them, and knows its grace period.

torch and Accelerate know the processes of a run by the variables that torchrun sets. Without them each would
silently train for itself.
"""

import os
import shlex
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from diffsynth_lite.errors import UserError

if TYPE_CHECKING:
    from diffsynth_lite.training.stopping import GracePeriod

_USE_CPU = "ACCELERATE_USE_CPU"
_BY_ACCELERATE = "ACCELERATE_DYNAMO_MODE"
"""``accelerate launch`` sets it, whatever it starts, and hardly anybody else."""
_SHARDED_BY = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG")
"""Modes of ``accelerate launch``, set as ``ACCELERATE_USE_...``, that are not supported."""
_ON = ("1", "on", "t", "true", "y", "yes")
"""As Accelerate reads a flag."""


@dataclass(frozen=True)
class _Numbering:
    """Variables in which a launcher passes the number of processes, and which one this is."""

    num_processes: str
    rank: str
    local_rank: str
    num_local: str

    def numbers(self, environment: Mapping[str, str]) -> bool:
        """Whether the process is one of several of this launcher."""
        return self.rank in environment and environment.get(self.num_processes, "1") != "1"


_TORCHRUN = _Numbering("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")
"""Where the processes find each other."""
_HERE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
"""Where Accelerate has the processes of one machine meet."""
_MPI = (
    _Numbering(*(f"OMPI_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE"))),
    _Numbering(*(f"MV2_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE"))),
    _Numbering("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
"""Open MPI, MVAPICH2, and the Hydra of MPICH and Intel MPI."""
_SRUN = _Numbering("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
"""Of a job step. ``SLURM_NTASKS`` is only what a job may start: many ask for cores with it."""
_DEFAULT_GRACE_S = 30
"""Of torch's elastic agent, which is torchrun, and `accelerate launch` with several processes."""
_TIMEOUT_ARGUMENTS = ("--shutdown-timeout", "--shutdown_timeout")
_TIMEOUT_VARIABLES = ("PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
"""The first one replaces the argument, as torchrun has one for each argument."""


def is_main_process(environment: Mapping[str, str]) -> bool:
    """Whether this process is the first of those that a launcher started together."""
    return environment.get(_numbering(environment).rank, "0") == "0"


def is_local_main_process(environment: Mapping[str, str]) -> bool:
    """Whether this process is the first of them on this machine."""
    return environment.get(_numbering(environment).local_rank, "0") == "0"


def is_one_of_several(environment: Mapping[str, str]) -> bool:
    """Whether a launcher has started more processes for the same run."""
    return _numbering(environment).numbers(environment)


def join_processes(environment: MutableMapping[str, str], command: Sequence[str]) -> None:
    """See to it that Accelerate will take the processes of a launcher for one run.

    Processes of ``mpirun`` get the variables that torchrun would have set. Those of torchrun on a machine
    without a GPU get the variable that selects the CPU: Accelerate would make each of them a run of its own.

    Args:
        environment: of this process; it is changed.
        command: of this process, to name the one that would be right.
    """
    for name in _SHARDED_BY:
        if _is_on(environment, f"ACCELERATE_USE_{name}"):
            raise UserError(
                f"accelerate launch: {name} is not supported; use one device, or several with plain data "
                "parallelism (accelerate launch --multi_gpu, or torchrun), and set memory.shard_base: all "
                "where they are to share the model"
            )
    program = shlex.join(command)
    numbering = _numbering(environment)
    if numbering is _SRUN:
        raise UserError(_srun_refused(environment, program))
    if numbering in _MPI:
        _number_as_torchrun(environment, numbering)
    _require_all_variables(environment, program)
    _require_as_many_as_asked(environment, program)
    if _count(environment, _TORCHRUN.num_processes) > 1:
        _require_devices(environment, program)


def refuse_group(environment: Mapping[str, str], task: str) -> None:
    """Refuse a process that a launcher has made one of several of a run.

    Tasks of srun are not: they know nothing of each other, and each may have a part of its own.

    Args:
        task: the work of a single process, for the message.
    """
    numbering = _numbering(environment)
    count = 1 if numbering is _SRUN else _count(environment, numbering.num_processes)
    if count > 1:
        raise UserError(
            f"{task}: needs one process, and {numbering.num_processes}={count} in the environment means that "
            f"this is one of {count}; start it without a launcher"
        )


def grace_period(
    environment: Mapping[str, str], launcher: Sequence[str], *, can_be_set: bool
) -> "GracePeriod | None":
    """How long the elastic agent that started this process waits for it; None without an agent.

    Args:
        launcher: command line of the parent process, as the agent passes its arguments to nobody.
        can_be_set: whether the agent of this torch reads any setting.
    """
    from diffsynth_lite.training.stopping import GracePeriod

    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    if not can_be_set:
        return GracePeriod(seconds=_DEFAULT_GRACE_S, setting=None)
    settings = {_TIMEOUT_ARGUMENTS[0]: argument(launcher, _TIMEOUT_ARGUMENTS)}
    settings |= {name: environment.get(name) for name in _TIMEOUT_VARIABLES}
    given = [(name, text) for name, text in settings.items() if text is not None]
    setting, text = given[0] if given else (_TIMEOUT_VARIABLES[-1], str(_DEFAULT_GRACE_S))
    return GracePeriod(seconds=float(text), setting=setting) if text.strip().isdecimal() else None


def grace_can_be_set() -> bool:
    """Whether torch's elastic agent has a setting for it; older ones always wait 30 s."""
    from torch.distributed.launcher.api import LaunchConfig

    return any(field.name == "shutdown_timeout" for field in fields(LaunchConfig))


def parent_command() -> list[str]:
    """Command line of the parent process; empty where the system does not show it."""
    return _shown_of_parent("cmdline")


def argument(command: Sequence[str], names: Sequence[str]) -> str | None:
    """The value of an argument in a command line, under any of its names; the last one counts."""
    found = None
    for place, word in enumerate(command):
        name, equals, value = word.partition("=")
        if name in names:
            found = value if equals else "".join(command[place + 1 : place + 2])
    return found


def _numbering(environment: Mapping[str, str]) -> _Numbering:
    if _TORCHRUN.rank in environment:
        return _TORCHRUN
    # mpirun may have started its own daemons with srun.
    return next((one for one in (*_MPI, _SRUN) if one.numbers(environment)), _TORCHRUN)


def _is_on(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "").strip().lower() in _ON


def _count(environment: Mapping[str, str], name: str) -> int:
    """The number that a variable holds; 1 where it is not set."""
    text = environment.get(name, "1")
    if not text.isdecimal():
        raise UserError(f"{name}: is {text!r} in the environment, and should be a number; unset it")
    return int(text)


def _torchrun(num_processes: int | str, program: str) -> str:
    """The command that starts so many processes on one machine."""
    return f"torchrun --standalone --nproc_per_node {num_processes} {program}"


def _srun_refused(environment: Mapping[str, str], program: str) -> str:
    tasks = _count(environment, _SRUN.num_processes)
    nodes = _count(environment, "SLURM_STEP_NUM_NODES")
    agent = _torchrun(tasks, program)
    if nodes > 1:
        agent = (
            f"torchrun --nnodes {nodes} --nproc_per_node {max(1, tasks // nodes)} --rdzv_backend c10d "
            f"--rdzv_endpoint FIRST_NODE:29500 {program}"
        )
    return (
        f"srun: started {tasks} tasks that know nothing of each other, {tasks} runs in place of one; start "
        f"one task a node, and torchrun in it: srun --ntasks={nodes} --ntasks-per-node=1 {agent} "
        "(several runs: srun --ntasks=1 for each)"
    )


def _number_as_torchrun(environment: MutableMapping[str, str], numbering: _Numbering) -> None:
    """Set the variables of torchrun to those of MPI, and on one machine the address where the processes
    meet."""
    is_one_machine = environment.get(numbering.num_local) == environment[numbering.num_processes]
    given = zip(astuple(_TORCHRUN), astuple(numbering), strict=True)
    found = {name: environment[source] for name, source in given if source in environment}
    for name, value in (found | (_HERE if is_one_machine else {})).items():
        environment.setdefault(name, value)


def _require_all_variables(environment: Mapping[str, str], program: str) -> None:
    """Refuse some of torchrun's variables without the others: left over, or of a launcher like it."""
    size = _count(environment, _TORCHRUN.num_processes)
    if size == 1 and _TORCHRUN.local_rank not in environment:
        return
    needed = (_TORCHRUN.num_processes, _TORCHRUN.rank, _TORCHRUN.local_rank, *_RENDEZVOUS)
    missing = [name for name in needed if not environment.get(name)]
    if missing:
        given = [name for name in needed if name not in missing]
        values = ", ".join(f"{name}={environment[name]}" for name in given)
        raise UserError(
            f"{values}: in the environment mean that this is one of {size} processes, which would not find "
            f"each other without {', '.join(missing)}; start with {_torchrun(size, program)}, or for one "
            f"process unset {', '.join(given)}"
        )


def _require_as_many_as_asked(environment: Mapping[str, str], program: str) -> None:
    """Refuse the one process that ``accelerate launch`` starts where it was asked for several on the CPU."""
    if _BY_ACCELERATE not in environment or _TORCHRUN.rank in environment:
        return
    # It sets where the processes would meet, and starts one.
    of_launcher = dict(entry.split("=", 1) for entry in _shown_of_parent("environ") if "=" in entry)
    if all(environment.get(name) == of_launcher.get(name) for name in _RENDEZVOUS):
        return
    # The number may also be in a file of its own.
    asked = argument(parent_command(), ("--num_processes", "--num-processes")) or "N"
    on_cpu = f"{_USE_CPU}=true " if _is_on(environment, _USE_CPU) else ""
    raise UserError(
        f"accelerate launch: was asked for {'several' if asked == 'N' else asked} processes and "
        "started one, as it does on the CPU, and where there are not several GPUs; start one with "
        f"--num_processes 1, several with {on_cpu}{_torchrun(asked, program)}"
    )


def _require_devices(environment: MutableMapping[str, str], program: str) -> None:
    """Refuse more processes than GPUs; where there is none at all, have them run on the CPU."""
    import torch

    if _is_on(environment, _USE_CPU):
        return
    size = _count(environment, _TORCHRUN.num_processes)
    if torch.cuda.is_available():
        num_gpus, num_local = torch.cuda.device_count(), _count(environment, _TORCHRUN.num_local)
        if num_local > num_gpus:
            visible = environment.get("CUDA_VISIBLE_DEVICES")
            raise UserError(
                f"{num_local} processes were started on this machine, where torch sees "
                f"{num_gpus} GPU{'s' * (num_gpus != 1)}"
                f"{'' if visible is None else f' (CUDA_VISIBLE_DEVICES={visible})'}; start one for each: "
                f"{_torchrun(num_gpus, program)}"
            )
    elif torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        raise UserError(
            f"{size} processes were started, which is not supported on {kind}; start one, or all on the CPU: "
            f"{_USE_CPU}=true {_torchrun(size, program)}"
        )
    elif _BY_ACCELERATE in environment:
        raise UserError(
            f"accelerate launch: was asked for {size} processes on GPUs, and torch sees none here; for the "
            f"CPU start {_torchrun(size, program)}"
        )
    else:
        environment[_USE_CPU] = "true"


def _shown_of_parent(name: str) -> list[str]:
    """Entries of a file that Linux shows of the parent process; none where the system does not show it."""
    if sys.platform != "linux":
        return []
    try:
        raw = Path(f"/proc/{os.getppid()}/{name}").read_bytes()
    except OSError:
        return []
    return [os.fsdecode(part) for part in raw.split(b"\0")]
