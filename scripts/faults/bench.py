"""Where the faults are provoked: tiny runs in folders of their own, and how often each is tried."""

import os
import random
import re
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
from accelerate.state import AcceleratorState
from recorded_train import read_records, recorded_step
from release_layouts import two_experts
from tiny_run import (
    REPOSITORY,
    TinyRun,
    checkpoint_tensors,
    differing,
    make_clip_run,
    make_mixed_run,
    make_run,
)

from diffsynth_lite.pipelines import qwen_image, sdxl, wan
from diffsynth_lite.training import trainer

Scale = Literal["ci", "quick", "full"]

PLAIN = ("validation.prompts=[]", "validation.loss_items=0", "validation.item_losses=0")
"""Nothing that only looks at the training."""

PROVOKED = str(Path(__file__).with_name("provoked_train.py"))
"""The training command with a fault in it, named by the first argument."""

_MODELS = {
    "qwen_image": qwen_image.tiny,
    "wan": wan.tiny,
    "wan_experts": two_experts,
    "sdxl": sdxl.tiny,
}


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
        root: of its runs.
        models: folder of the tiny pipelines, shared by all faults.
        scale: how often things are tried.
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

    def images(self, name: str = "images") -> TinyRun:
        """A run on five images of one shape."""
        return make_run(self.root / name, self._model("qwen_image"))

    def mixed(self, name: str = "mixed") -> TinyRun:
        """A run on images of many shapes, from three sources, with all that is drawn by chance."""
        return make_mixed_run(self.root / name, self._model("qwen_image"))

    def clips(self, name: str = "clips") -> TinyRun:
        """A run on clips of many shapes and lengths."""
        run = make_clip_run(self.root / name, self._model("wan"))
        draws = (
            "data.clip=uniform",
            "data.clips_per_video=2",
            "data.crop=random",
            "data.caption_dropout=0.3",
        )
        return run.having(*PLAIN, *draws)

    def experts(self, name: str = "experts") -> TinyRun:
        """A run on images, of two experts of Wan."""
        return make_run(self.root / name, self._model("wan_experts")).having("model.family=wan")

    def unet(self, name: str = "unet") -> TinyRun:
        """A run on images, of SDXL's UNet."""
        return make_run(self.root / name, self._model("sdxl")).having("model.family=sdxl")

    def _model(self, family: str) -> Path:
        folder = self.models / family
        if not folder.exists():
            _MODELS[family]().save_pretrained(folder)
        return folder


def train(run: TinyRun, folder: Path, *settings: str) -> int:
    """The exit code of the training command in this process, in a run folder of its own."""
    try:
        return run.train(*settings, f"output.dir={folder}")
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def train_in_child(run: TinyRun, folder: Path, *settings: str, limit_s: float = 600) -> int | None:
    """The exit code of the training command in a child of this process; None if it takes longer."""
    return waited(forked(partial(train, run, folder, *settings), run.root / "log"), limit_s)


def stopped_after(run: TinyRun, steps: int, folder: Path, *settings: str) -> None:
    """Start or continue a run, and stop it after so many steps."""
    code = run.stopped_after(steps, *settings, f"output.dir={folder}")
    AcceleratorState._reset_state(reset_partial_state=True)
    assert code == 75, code


def recorded(run: TinyRun, folder: Path, *settings: str) -> list[dict[str, Any]]:
    """Train in this process; all samples of it, each with the digests of what it was trained on."""
    records = Path(f"{folder}.records")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "train_step", recorded_step(records))
        code = train(run, folder, *settings)
    assert code == 0, code
    return read_records(records)


def losses(run: TinyRun, folder: Path, *, after: int = 0) -> list[dict[str, Any]]:
    """The logged numbers of the steps after one."""
    return [row for row in run.metrics(folder) if "loss" in row and row["step"] > after]


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


def end(child: int) -> None:
    """Kill a child, with signal 9."""
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def started(
    run: TinyRun, command: Sequence[str], *settings: str, log: Path, start_new_session: bool = False
) -> "subprocess.Popen[bytes]":
    """Start a training command as a process of its own, whose output is added to a log."""
    with log.open("a") as file:
        return subprocess.Popen(
            [*command, *run.arguments, *settings],
            cwd=REPOSITORY,
            env=environment(),
            stdout=file,
            stderr=file,
            start_new_session=start_new_session,
        )


def launched(
    run: TinyRun,
    command: tuple[str, ...],
    *settings: str,
    timeout_s: float = 600,
    variables: dict[str, str] | None = None,
) -> "subprocess.CompletedProcess[str]":
    """Run a training command as processes of their own, to their end; ``variables`` are the environment's."""
    return subprocess.run(
        [*command, *run.arguments, *settings],
        cwd=REPOSITORY,
        env=variables or environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


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


def num_passed(*tests: str) -> int:
    """How many cases of some tests passed in a process of their own; none may fail, be skipped or be missing.

    Args:
        tests: files below ``tests``, or tests in one, as pytest names them.
    """
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    done = subprocess.run(
        [*command, *(f"tests/{test}" for test in tests)],
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    summary = done.stdout.splitlines()[-1]
    found = re.fullmatch(r"(\d+) passed in .*", summary)
    assert found, summary
    return int(found[1])
