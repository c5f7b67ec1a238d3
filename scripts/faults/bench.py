"""Where the faults are provoked: tiny runs in folders of their own, and how often each is tried."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal

import pytest
import recorded_train
import tiny_run
from accelerate.state import AcceleratorState
from recorded_train import read_records, recorded_step
from release_layouts import two_experts
from tiny_run import REPOSITORY, TinyRun, checkpoint_tensors, differing

from diffsynth_lite.pipelines import qwen_image, sdxl, wan
from diffsynth_lite.training import trainer

Scale = Literal["ci", "quick", "full"]

PLAIN = ("validation.prompts=[]", "validation.loss_items=0", "validation.item_losses=0")
"""Nothing that only looks at the training."""

PROVOKED = str(Path(__file__).with_name("provoked_train.py"))
"""The training command with a fault in it, named by the first argument."""

_MODELS = {"qwen_image": qwen_image.tiny, "wan": wan.tiny, "wan_experts": two_experts, "sdxl": sdxl.tiny}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault that runs must survive.

    Attributes:
        name: by which the documents know it.
        what: is provoked.
        bar: what must hold; where it does not, ``prove`` raises.
        prove: provokes it; returns how often, with the figures.
        limit_s: by scale ``ci``, to end what hangs; a quick one may take twice, a full one 20 times as long.
        needs: programs without which it is not tried, and ``root`` where only that user can try it.
    """

    name: str
    what: str
    bar: str
    prove: "Callable[[Bench], str]"
    limit_s: float = 1800
    needs: Sequence[str] = ()

    def missing(self) -> list[str]:
        """What it needs and is not here."""
        is_here = {"root": os.geteuid() == 0}
        return [name for name in self.needs if not is_here.get(name, shutil.which(name) is not None)]


def fault(name: str, bar: str, *, needs: Sequence[str] = ()) -> "Callable[[Callable[[Bench], str]], Fault]":
    """Make a fault of the function that proves it, whose docstring says what is provoked."""

    def made(prove: "Callable[[Bench], str]") -> Fault:
        what = " ".join((prove.__doc__ or "").split()).rstrip(".")
        return Fault(name=name, what=what, bar=bar, prove=prove, needs=needs)

    return made


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A folder for one fault, and how often it is tried.

    Attributes:
        models: folder of the tiny pipelines, shared by all faults.
        seed: of the moments that are drawn by chance.
    """

    root: Path
    models: Path
    scale: Scale
    seed: int = 0

    def pick(self, ci: Any, quick: Any, full: Any) -> Any:
        """The value of this bench's scale."""
        return {"ci": ci, "quick": quick, "full": full}[self.scale]

    def new_dice(self) -> random.Random:
        """A generator that draws from the start of what this bench's seed gives: take one, and keep it."""
        return random.Random(self.seed)

    def images(self, *settings: str, name: str = "images") -> "Run":
        """A run on five images of one shape."""
        return Run.of(tiny_run.make_run(self.root / name, self._model("qwen_image")), *settings)

    def mixed(self, *settings: str, name: str = "mixed") -> "Run":
        """A run on images of many shapes, from three sources, with all that is drawn by chance."""
        return Run.of(tiny_run.make_mixed_run(self.root / name, self._model("qwen_image")), *settings)

    def clips(self, *settings: str, name: str = "clips") -> "Run":
        """A run on clips of many shapes and lengths."""
        run = tiny_run.make_clip_run(self.root / name, self._model("wan"))
        draws = (
            "data.clip=uniform",
            "data.clips_per_video=2",
            "data.crop=random",
            "data.caption_dropout=0.3",
        )
        return Run.of(run, *PLAIN, *draws, *settings)

    def experts(self) -> "Run":
        """A run on images, of two experts of Wan."""
        return Run.of(
            tiny_run.make_run(self.root / "experts", self._model("wan_experts")), "model.family=wan"
        )

    def unet(self) -> "Run":
        """A run on images, of SDXL's UNet."""
        return Run.of(tiny_run.make_run(self.root / "unet", self._model("sdxl")), "model.family=sdxl")

    def _model(self, family: str) -> Path:
        folder = self.models / family
        if not folder.exists():
            _MODELS[family]().save_pretrained(folder)
        return folder


class Run(TinyRun):
    """A tiny run that is started in folders: paths, or names below its root."""

    @classmethod
    def of(cls, run: TinyRun, *settings: str) -> "Run":
        """A run with further settings."""
        return cls(run.root, run.config, (*run.settings, *settings))

    def having(self, *settings: str) -> "Run":
        """The run with further settings."""
        return Run.of(self, *settings)

    @property
    def model(self) -> Path:
        """The folder of its base model."""
        line = next(line for line in self.config.read_text().splitlines() if line.startswith("  path:"))
        return Path(line.split(": ")[1])

    @property
    def log(self) -> Path:
        """File of what children and other processes print."""
        return self.root / "log"

    def held_out(self) -> tuple[str, ...]:
        """Write two held-out images; the settings that measure the loss on them."""
        folder = self.root / "held out"
        folder.mkdir()
        for place in range(2):
            tiny_run.tiny_image(80, 48, 200 + place).save(folder / f"{place}.png")
            (folder / f"{place}.txt").write_text("a blue square")
        return f"validation.data={folder}", "validation.loss_items=2"

    def place(self, folder: str | Path) -> Path:
        """The path of a run folder."""
        return folder if isinstance(folder, Path) else self.root / folder

    def exit_code(self, folder: str | Path, *settings: str) -> int:
        """The exit code of the training command in this process."""
        try:
            return self.train(*settings, f"output.dir={self.place(folder)}")
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)

    def finish(self, folder: str | Path, *settings: str, num_processes: int = 1) -> Path:
        """Start or continue the run in this process, or in several others; it must end well. Its folder."""
        if num_processes == 1:
            code, printed = self.exit_code(folder, *settings), ""
        else:
            command = torchrun(num_processes, "train.py")
            done = self.launched(command, *settings, f"output.dir={self.place(folder)}")
            code, printed = done.returncode, done.stderr
        assert code == 0, f"exit code {code} of {folder} with {settings}\n{printed}"
        return self.place(folder)

    def stop_after(self, steps: int, folder: str | Path, *settings: str) -> Path:
        """Start or continue the run, and stop it after so many steps; its folder."""
        code = self.stopped_after(steps, *settings, f"output.dir={self.place(folder)}")
        AcceleratorState._reset_state(reset_partial_state=True)
        assert code == 75, code
        return self.place(folder)

    def in_child(self, work: Callable[[], int], limit_s: float = 600) -> int | None:
        """What ``work`` returns in a child of this process, as its exit code; None if it takes longer."""
        return waited(forked(work, self.log), limit_s)

    def finish_in_child(self, folder: str | Path, *settings: str) -> Path:
        """Start or continue the run in a child of this process, where it must end well; its folder."""
        code = self.in_child(partial(self.exit_code, folder, *settings))
        assert code == 0, f"exit code {code} of {folder} with {settings}"
        return self.place(folder)

    def forked(self, folder: str | Path, *settings: str) -> int:
        """Start or continue the run in a child of this process; the process id."""
        return forked(partial(self.exit_code, folder, *settings), self.log)

    def started(
        self,
        command: Sequence[str],
        *settings: str,
        log: Path | None = None,
        variables: dict[str, str] | None = None,
    ) -> "subprocess.Popen[bytes]":
        """Start a training command as a process group of its own, whose output is added to a log."""
        with (log or self.log).open("a") as file:
            return subprocess.Popen(
                [*command, *self.arguments, *settings],
                cwd=REPOSITORY,
                env=variables or environment(),
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def launched(
        self, command: Sequence[str], *settings: str, variables: dict[str, str] | None = None, **options: Any
    ) -> "subprocess.CompletedProcess[str]":
        """Run a training command as processes of their own, to their end.

        Args:
            command: which the arguments of the run and ``settings`` follow.
            variables: of the environment; those of ``environment`` where they are not given.
            options: of ``subprocess.run``.
        """
        return subprocess.run(
            [*command, *self.arguments, *settings],
            cwd=REPOSITORY,
            env=variables or environment(),
            check=False,
            **{"capture_output": True, "text": True, "timeout": 600, **options},
        )

    def recorded(self, folder: str | Path, *settings: str, num_processes: int = 1) -> list[dict[str, Any]]:
        """Train to the end; all samples of it, each with the digests of what it was trained on."""
        records = Path(f"{self.place(folder)}.records")
        if num_processes == 1:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(trainer, "train_step", recorded_step(records))
                self.finish(folder, *settings)
        else:
            command = (*torchrun(num_processes, recorded_train.__file__), str(records))
            done = self.launched(command, f"output.dir={self.place(folder)}", *settings)
            assert done.returncode == 0, done.stderr
        return read_records(records)

    def losses(self, folder: str | Path, *, after: int = 0) -> list[dict[str, Any]]:
        """The logged numbers of the steps after one."""
        return [row for row in self.metrics(self.place(folder)) if "loss" in row and row["step"] > after]


def assert_ended(folder: Path, state: str, code: int) -> dict[str, Any]:
    """The status of a run folder, which has this state and exit code."""
    status: dict[str, Any] = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == (state, code), status
    return status


def assert_same(first: Path, second: Path, step: int) -> None:
    """Two run folders hold the same checkpoint of a step, bit for bit."""
    different = differing(checkpoint_tensors(first, step), checkpoint_tensors(second, step))
    assert not different, f"{len(different)} tensors differ at step {step}, such as {different[0]}"


@contextmanager
def at_call(
    owner: Any, name: str, number: int, act: Callable[..., object], *, after: bool = False
) -> Iterator[None]:
    """Scope in which the so-manieth call of a function comes after, or before, an act on its arguments."""
    function, calls = getattr(owner, name), count(1)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        is_time = next(calls) == number
        if is_time and not after:
            act(*args)
        result = function(*args, **kwargs)
        if is_time and after:
            act(*args)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, wrapped)
        yield


def limit_memory(num_bytes: int) -> None:
    """From now on this process may take only so much more memory."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes,) * 2)


def end(child: int) -> None:
    """Kill a child, with signal 9."""
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def environment() -> dict[str, str]:
    """Variables of a training process: the CPU, no network, one thread, the package of this repository."""
    folders = (REPOSITORY / "scripts", REPOSITORY / "tests")
    ours = [place for place in sys.path if any(Path(place).is_relative_to(each) for each in folders)]
    return {
        **os.environ,
        "ACCELERATE_USE_CPU": "true",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *ours]),
    }


def torchrun(num_processes: int, *script: str) -> tuple[str, ...]:
    """The command that starts a script in several processes."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    return (*launcher, "--nproc_per_node", str(num_processes), *script)


def forked(work: Callable[[], int], log: Path) -> int:
    """Do something in a child of this process, whose exit code is what ``work`` returns; the process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        code = work()
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(code)


def waited(child: int, limit_s: float) -> int | None:
    """The exit code of a child, negative if a signal ended it; None if it runs longer than the limit."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    return None


def wait_until(is_so: Callable[[], object], what: str, limit_s: float = 120) -> None:
    """Return when something is so.

    Raises:
        AssertionError: it takes too long.
    """
    end = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end, f"{what}: not within {limit_s:.0f} s"
        time.sleep(0.02)


def wait_for_steps(folder: Path, step: int) -> None:
    """Return when a run in another process has logged a step."""
    metrics = folder / "metrics.jsonl"
    wait_until(
        lambda: metrics.is_file() and f'"step": {step},' in metrics.read_text(), f"step {step} in {folder}"
    )


def processes_of(root: Path) -> list[int]:
    """The processes whose command line names a run, without this one."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            if str(root).encode() in (entry / "cmdline").read_bytes() and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found


def gone_within(root: Path, seconds: float) -> None:
    """Wait until no process of a run is left."""
    wait_until(lambda: not processes_of(root), f"the end of all processes of {root}", seconds)
