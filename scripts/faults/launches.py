"""P1 and P2: launchers used by mistake, and processes that were started for different runs."""

import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from processes import free_port
from tiny_run import LOG_LINE, tiny_image

import diffsynth_lite
from faults.bench import PLAIN, PROVOKED, Bench, Run, environment, fault, torchrun

DIFFERING = (PROVOKED, "differing")
TWO = ("train.steps=1", "train.micro_batch_size=1", *PLAIN)
"""Settings of a short run of two processes."""
DIFFER = "the processes of this run differ: "
LAUNCH = (
    *(sys.executable, "-m", "accelerate.commands.launch", "--num_machines", "1", "--num_processes", "2"),
    *("--mixed_precision", "no", "--dynamo_backend", "no"),
)
SRUN = {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "{}", "SLURM_LOCALID": "{}"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "{}",
    "OMPI_COMM_WORLD_LOCAL_RANK": "{}",
}


@dataclass(frozen=True)
class _Launch:
    """One way to start: ``says`` is in the log, ``{}`` in a variable is the number of the process."""

    says: str
    command: tuple[str, ...]
    variables: Mapping[str, str]
    num_processes: int = 1


@fault("P1", "refused in one line with exit 2 and the command that is right; the others are one run")
def mistake_the_launcher(bench: Bench) -> str:
    """Launchers used by mistake, for train, cache and sample; variables of torchrun and MPI on the CPU."""
    run = bench.images()
    refused, taken = list(_refused()), list(_taken())
    for place, launch in enumerate([*refused, *taken]):
        folder = run.root / f"run {place}"
        codes, printed = _launch(run, launch, folder)
        lines = [line for line in printed.splitlines() if launch.says in line and LOG_LINE.match(line)]
        assert len(lines) == 1, printed
        if launch in taken:
            assert set(codes) == {0}, printed
            assert (folder / "lora").is_dir(), printed
            continue
        # accelerate and torchrun have exit codes of their own, and print that of what they started.
        assert set(codes) == {2} or re.search(r"exit status 2\.|exitcode\s*: 2 ", printed), printed
        assert not folder.exists(), printed
    return f"{len(refused)} mistakes, {len(taken)} others"


def _refused() -> Iterator[_Launch]:
    python = (sys.executable, "train.py")
    yield _Launch("was asked for 2 processes and started one", (*LAUNCH, "--cpu", "train.py"), {})
    if not torch.cuda.is_available():
        yield _Launch("was asked for 2 processes and started one", (*LAUNCH, "train.py"), {})
        yield _Launch("torch sees none here", (*LAUNCH, "--multi_gpu", "train.py"), {})
    yield _Launch("FSDP is not supported", (*LAUNCH, "--use_fsdp", "train.py"), {})
    yield _Launch("without RANK, LOCAL_RANK", python, {"WORLD_SIZE": "2"})
    yield _Launch("srun: started 2 tasks", python, SRUN, 2)
    cache = (sys.executable, "-m", "diffsynth_lite.cli.main", "cache", "fill")
    yield _Launch("srun: started 2 tasks", cache, SRUN, 2)
    sample = (sys.executable, "-m", "diffsynth_lite.cli.main", "sample", "--scale", "0", "--prompt", "a star")
    yield _Launch("without RANK, LOCAL_RANK", sample, {"WORLD_SIZE": "2"})


def _taken() -> Iterator[_Launch]:
    on_cpu = {"ACCELERATE_USE_CPU": "true"} if torch.cuda.is_available() else {}
    yield _Launch("Runs in 2 processes", torchrun(2, "train.py"), on_cpu)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    yield _Launch("Runs in 2 processes", (sys.executable, "train.py"), OPEN_MPI | meeting | on_cpu, 2)


def _launch(run: Run, launch: _Launch, folder: Path) -> tuple[list[int], str]:
    """Exit codes, and all that was printed."""
    shared = {name: value for name, value in environment().items() if name != "ACCELERATE_USE_CPU"}
    log = run.root / f"log of {folder.name}"
    started = []
    for rank in range(launch.num_processes):
        variables = shared | {name: value.format(rank) for name, value in launch.variables.items()}
        settings = (*TWO, f"output.dir={folder}")
        started.append(run.started(launch.command, *settings, log=log, variables=variables))
    return [process.wait(timeout=600) for process in started], log.read_text()


@fault("P2", "all end with exit 2 before anything is loaded; the log says what differs")
def start_different_runs(bench: Bench) -> str:
    """Process 1 of 2 with other settings, base, images, versions or sources."""
    run = bench.images()
    cases = dict(_differences(run))
    for name, (says, other) in cases.items():
        folder = run.root / name
        command = (*torchrun(2, *DIFFERING), json.dumps(other))
        done = run.launched(command, *TWO, f"output.dir={folder}")
        (line,) = [line for line in done.stderr.splitlines() if DIFFER in line and LOG_LINE.match(line)]
        assert says in line, line
        assert "exitcode  : 2" in done.stderr, done.stderr
        assert "Loading" not in done.stderr, done.stderr
        assert not (folder / "checkpoints").exists()
    return f"{len(cases)} differences"


def _differences(run: Run) -> Iterator[tuple[str, tuple[str, dict[str, list[str]]]]]:
    """What the message says, and what is different for process 1."""

    def of(*settings: str, packages: Path | None = None) -> dict[str, list[str]]:
        return {"settings": list(settings), "packages": [str(packages)] if packages else []}

    yield "seed", ("train.seed is 0 on process 0", of("train.seed=1"))
    yield "interval", ("output.checkpoint_every_steps is 2", of("output.checkpoint_every_steps=1"))
    base = run.root / "another base"
    shutil.copytree(run.model, base)
    (weights,) = (base / "vae").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\0")
    yield "base", ("vae of model.path is", of(f"model.path={base}"))
    images = run.root / "other images"
    shutil.copytree(run.root / "data", images)
    tiny_image(80, 48, 99).save(images / "0.png")
    yield "image", ("images and clips of data is", of(f"data.path={images}"))
    fewer = run.root / "fewer images"
    shutil.copytree(run.root / "data", fewer)
    (fewer / "4.png").unlink()
    (fewer / "4.txt").unlink()
    yield "number", ("number of items of data is 5 on process 0", of(f"data.path={fewer}"))
    older = run.root / "older" / "peft-0.0.1.dist-info"
    older.mkdir(parents=True)
    (older / "METADATA").write_text("Metadata-Version: 2.1\nName: peft\nVersion: 0.0.1\n")
    yield "peft", ('"0.0.1" on process 1', of(packages=older.parent))
    ours = Path(diffsynth_lite.__file__).parent
    clone = run.root / "clone" / ours.name
    shutil.copytree(ours, clone, ignore=shutil.ignore_patterns("__pycache__"))
    with (clone / "errors.py").open("a") as file:
        file.write("# another commit\n")
    yield "clone", ("diffsynth_lite is", of(packages=clone.parent))
