"""The trainer's step next to those of others: the same model, adapter and data, in one process, in turns.

    python scripts/benchmarks/peers.py [--batch 8] [--steps 300] [--device cuda]

The mini Qwen-Image of the quickstart, encoded images and prompts, a LoRA of rank 4 on the layers that the
trainer adapts by default, float32, one thread of a CPU. Next to each other are

- the trainer: a run as ``train.py`` starts it, from its checks to its checkpoint, without evaluation; a step
  is all that happens until the next one begins: batch, clipping, finiteness check, engine, metrics, status
  and requests;
- a bare loop: diffusers and peft by hand, fused AdamW, on the trainer's batches, and on batches drawn before;
- the loop of diffusers' training script, as it is, and with fused AdamW;
- DiffSynth-Studio's training loop, as it is, and with fused AdamW, where it is installed.

DiffSynth-Studio gets an environment of its own, with whose Python this script is run:

    python -m venv peers
    peers/bin/pip install -c constraints.txt . einops imageio modelscope pandas
    peers/bin/pip install --no-deps diffsynth==2.1.12

(it asks for torchvision too, of the same build as torch; nothing that is measured here needs it).

First all get the same adapter, noise and noise level, and their losses and gradients are compared. A ratio is
a step's CPU time over that of the bare loop's step of the same round: the median, and in brackets the
interval of the medians of 90 % of resampled rounds. Start and memory are those of a process with one loop. On
CUDA times are those of the clock, and start and memory are not measured.
"""

import argparse
import gc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch
from peer_loops import LEARNING_RATE, WEIGHT_DECAY, Loop, MicroBatch, Work, noise_levels
from torch import Tensor

if TYPE_CHECKING:  # only what a loop needs is imported
    from diffsynth_lite.config import Config
    from diffsynth_lite.training.builder import TrainingObjects

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "quickstart"
MODES = {"plain": (False, False), "checkpointed": (True, False), "offload": (True, True)}
"""The two switches in each. The bare loop is checkpointed where others offload."""
RANK = 4
TRAINER, BASE, IN_MEMORY = "trainer", "bare loop", "bare loop, batches drawn before"
DIFFUSERS, DIFFSYNTH = "diffusers' script", "DiffSynth-Studio"
FUSED = ", fused AdamW"
PEERS = (IN_MEMORY, DIFFUSERS, DIFFUSERS + FUSED, DIFFSYNTH, DIFFSYNTH + FUSED)
SEPARATE = (TRAINER, IN_MEMORY, DIFFUSERS, DIFFSYNTH)
STEPS_SEPARATE = 5
CLOSE = 1e-4
"""Most that loss and gradients may be off, relatively, where the model is diffusers'."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare the loops, or be a process that measures one of them."""
    options = parse_arguments(arguments)
    torch.set_num_threads(1)
    os.environ["ACCELERATE_USE_CPU"] = str(options.device == "cpu").lower()
    if options.separate:
        with quiet(options.folder):
            figures = measure_separate(options)
        print(json.dumps(figures))
        return
    with tempfile.TemporaryDirectory() as folder:
        compare(options, Path(folder))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=1, help="samples of a step (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="measured of each loop (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=10, help="steps before them (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="default: all")
    parser.add_argument("--quick", action="store_true", help="two steps, and no process of its own for any")
    parser.add_argument("--separate", choices=SEPARATE, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps, options.warmup = 2, 1
    return options


def compare(options: argparse.Namespace, folder: Path) -> None:
    """Measure all loops in all modes, and print the tables."""
    from meters import print_table

    make_images(folder)
    numbers, ratios, separate = {}, {}, {}
    for mode in options.modes:
        with quiet(folder):
            differences, times = measure(options, folder, mode)
        numbers[mode] = {name: f"{loss:.0e}, {norm:.0e}" for name, (loss, norm) in differences.items()}
        ratios[mode] = {name: ratio_of(values, times[BASE]) for name, values in times.items()}
        ratios[mode][BASE] = f"1 (of {1000 * statistics.median(times[BASE]):.1f} ms)"
        if not options.quick and options.device == "cpu":
            separate[mode] = {
                name: figures_separate(name, mode, options, folder)
                for name in SEPARATE
                if not why_not(name, mode, options.batch, options.device)
            }
    missing = partial(why_not, num_samples=options.batch, device=options.device)
    print_table(
        "Loss and norm of the gradients: how far from the bare loop's, relatively", rows(numbers, missing)
    )
    print_table(
        f"{'CPU time' if options.device == 'cpu' else 'Time'} of a step over the bare loop's, "
        f"{options.batch} samples a step, {options.steps} rounds",
        rows(ratios, missing),
    )
    if separate:
        print_table(
            "In a process of its own: seconds of CPU until the first step is done; most memory of the "
            "process, MiB; most that the tensors of a forward and a backward pass take, MiB",
            rows(separate, missing),
        )


def make_images(folder: Path) -> None:
    """Make the images that all loops train on."""
    subprocess.run(
        [sys.executable, str(EXAMPLE / "make_data.py"), "--output", str(folder / "images")],
        check=True,
        stdout=subprocess.DEVNULL,
    )


def measure(
    options: argparse.Namespace, folder: Path, mode: str
) -> tuple[dict[str, tuple[float, float]], dict[str, list[float]]]:
    """How far losses and gradients differ, and seconds of each measured step, by loop."""
    from peer_loops.bare import BareLoop
    from step_time import equal_runs

    settings = settings_of(folder, mode, options.batch)
    _, config, checked, (run,) = equal_runs("quickstart.yaml", settings, folder, num_runs=1)
    num_images = len(list((folder / "images").glob("*.png")))
    checkpointing, offload = MODES[mode]
    work = Work(
        base=checked.family.folder.path,
        layers=checked.target_layers,
        rank=RANK,
        batches=[next(run.batches)[0] for _ in range(num_images // options.batch)],
        checkpointing=checkpointing,
        offload=offload,
        device=options.device,
    )
    write_work(work, folder / f"{mode}.json")
    bare = BareLoop(
        work.base,
        work.layers,
        run.batches,
        rank=RANK,
        checkpointing=checkpointing,
        device=torch.device(work.device),
    )
    loops = {BASE: bare} | {
        name: build(name, work) for name in PEERS if not why_not(name, mode, options.batch, options.device)
    }
    differences = differences_of({TRAINER: LossOfRun(config, run), **loops}, work.batches[0])
    times = take_turns(settings, loops, options.warmup + options.steps, options.device)
    return differences, {name: values[options.warmup :] for name, values in times.items()}


def why_not(name: str, mode: str, num_samples: int, device: str) -> str | None:
    """Why a loop is not measured in a mode; None where it is."""
    if name == IN_MEMORY and mode == "offload":
        return "as checkpointed"
    if name.startswith(DIFFUSERS) and mode == "offload":
        return "has none"
    if name.startswith(DIFFSYNTH) and importlib.util.find_spec("diffsynth") is None:
        return "not installed"
    if name.startswith(DIFFSYNTH) and num_samples > 1:
        return "takes one sample"
    if name.startswith(DIFFSYNTH) and device != "cpu":
        return "not set up for it"
    return None


def build(name: str, work: Work) -> Loop:
    """A loop of ``PEERS``. Only what it needs is imported: its start is measured."""
    if name == IN_MEMORY:
        from peer_loops.bare import bare_loop_in_memory

        return bare_loop_in_memory(work)
    if name.startswith(DIFFUSERS):
        from peer_loops.diffusers_script import DiffusersScript

        return DiffusersScript(work, fused=name.endswith(FUSED))
    from peer_loops.diffsynth_studio import DiffSynthStudio

    return DiffSynthStudio(work, fused=name.endswith(FUSED))


def settings_of(folder: Path, mode: str, num_samples: int) -> list[str]:
    """The settings of the trainer's run."""
    checkpointing, offload = MODES[mode]
    return [
        f"model.path={EXAMPLE / 'mini_qwen_image'}",
        f"data.path={folder / 'images'}",
        f"data.cache_dir={folder / 'cache'}",
        f"lora.rank={RANK}",
        f"train.global_batch_size={num_samples}",
        f"train.micro_batch_size={num_samples}",
        f"train.learning_rate={LEARNING_RATE}",
        f"train.weight_decay={WEIGHT_DECAY}",
        f"train.use_gradient_checkpointing={str(checkpointing).lower()}",
        f"train.use_gradient_checkpointing_offload={str(offload).lower()}",
        "train.warmup_steps=0",
        "validation.prompts=[]",
        # No peer evaluates; before the first step the trainer would.
        "validation.loss_items=0",
        "validation.item_losses=0",
        "output.checkpoint_every_steps=1000000",
    ]


def run_trainer(settings: Sequence[str], num_steps: int, step: Callable[..., Any]) -> None:
    """A whole run, in a folder of its own, with ``step`` in place of the trainer's ``train_step``."""
    from rich.console import Console

    from diffsynth_lite.config import load_config
    from diffsynth_lite.training import trainer
    from diffsynth_lite.training.run import run_training
    from diffsynth_lite.training.session import StartupClock, open_run

    gc.freeze()  # as train.py does after its imports; it switches the collector off for them, too
    with tempfile.TemporaryDirectory() as folder, patch.object(trainer, "train_step", step):
        loaded = load_config(
            "quickstart.yaml", [*settings, f"train.steps={num_steps}", f"output.dir={folder}/run"]
        )
        clock = StartupClock(time.perf_counter())
        run_training(open_run(loaded, console=Console(stderr=True), clock=clock))


def take_turns(
    settings: Sequence[str], loops: Mapping[str, Loop], num_rounds: int, device: str
) -> dict[str, list[float]]:
    """Seconds of each step as of :func:`now`, by loop.

    In a round each loop takes one; who comes after whom changes.
    """
    from diffsynth_lite.training.trainer import train_step

    times: dict[str, list[float]] = {TRAINER: [], **{name: [] for name in loops}}
    began_at: list[float] = []

    def turn(built: "TrainingObjects", step: int) -> Any:
        # The trainer's step lasts until it would begin the next one.
        if began_at:
            times[TRAINER].append(now(device) - began_at.pop())
        for name in order if step <= num_rounds else ():
            started_at = now(device)
            next(steps[name])
            times[name].append(now(device) - started_at)
        order.rotate()
        began_at.append(now(device))
        return train_step(built, step)

    with ExitStack() as scope:
        steps = {name: scope.enter_context(closing(loop.steps())) for name, loop in loops.items()}
        order = deque(steps)
        run_trainer(settings, num_rounds + 1, turn)
    return times


def now(device: str) -> float:
    """Seconds of CPU that this process has taken; on CUDA those of a clock, once the device is idle."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


class LossOfRun:
    """What the trainer's steps minimise; it has no steps of its own.

    Args:
        config: of the run.
        run: what its steps work with.
    """

    def __init__(self, config: "Config", run: "TrainingObjects") -> None:
        from diffsynth_lite.training.builder import build_engine

        self.model = run.transformer
        self._engine, self._run = build_engine(config, run.weights), run

    def loss(self, batch: MicroBatch, _sigma: Tensor) -> Tensor:
        """The trainer draws levels by itself, of the same density."""
        from diffsynth_lite.core.gradient import gradient_engine

        with gradient_engine(self._engine):
            loss: Tensor = next(self._run.losses(self.model, batch))
        return loss


def differences_of(loops: Mapping[str, Any], batch: MicroBatch) -> dict[str, tuple[float, float]]:
    """How far loss and norm of the gradients of each loop are from the bare loop's, relatively.

    Raises:
        SystemExit: a loop that runs diffusers' model is too far off.
    """
    found = {name: loss_and_norm(loop, batch) for name, loop in loops.items()}
    loss, norm = found[BASE]
    differences = {name: (abs(a - loss) / loss, abs(b - norm) / norm) for name, (a, b) in found.items()}
    for name, off in differences.items():
        if max(off) > CLOSE and not name.startswith(DIFFSYNTH):
            sys.exit(f"{name}: loss and gradients are {off} off those of the bare loop: it does other work")
    return differences


def loss_and_norm(loop: Any, batch: MicroBatch) -> tuple[float, float]:
    """Of a batch, with an adapter that is the same for all loops and not zero."""
    generator = torch.Generator().manual_seed(0)
    trained = {name: weight for name, weight in loop.model.named_parameters() if weight.requires_grad}
    for name in sorted(trained):
        weight = trained[name]
        weight.data.copy_(0.05 * torch.randn(weight.shape, generator=generator))
    loss = loop.loss(batch, noise_levels(batch))
    loss.backward()
    norm = torch.linalg.vector_norm(torch.stack([weight.grad.norm() for weight in trained.values()]))
    for weight in trained.values():
        weight.grad = None
    return loss.item(), norm.item()


def figures_separate(name: str, mode: str, options: argparse.Namespace, folder: Path) -> str:
    """Start and memory of a loop in a process of its own."""
    command = [sys.executable, __file__, "--separate", name, "--modes", mode, "--batch", str(options.batch)]
    done = subprocess.run([*command, "--folder", str(folder)], check=True, stdout=subprocess.PIPE, text=True)
    start_s, process_bytes, tensor_bytes = json.loads(done.stdout)
    return f"{start_s:.1f}, {process_bytes / 2**20:.0f}, {tensor_bytes / 2**20:.1f}"


def measure_separate(options: argparse.Namespace) -> list[float]:
    """Seconds of CPU until a first step is done; most bytes of the process; most of a pass's tensors."""
    name, mode, folder = options.separate, options.modes[0], options.folder
    figures: list[float] = []
    if name == TRAINER:
        from diffsynth_lite.training.trainer import train_step

        def step(built: "TrainingObjects", number: int) -> Any:
            result = train_step(built, number)
            if number == 1:
                figures.append(time.process_time())
            if number == STEPS_SEPARATE:
                batch = next(built.batches)[0]
                figures.extend(
                    [peak_bytes(), peak_tensor_bytes(lambda: next(built.losses(built.transformer, batch)))]
                )
            return result

        run_trainer(settings_of(folder, mode, options.batch), STEPS_SEPARATE, step)
        return figures
    work = read_work(folder / f"{mode}.json")
    loop = build(name, work)
    with closing(loop.steps()) as steps:
        next(steps)
        figures.append(time.process_time())
        for _ in range(STEPS_SEPARATE - 1):
            next(steps)
        figures.append(peak_bytes())
    batch = work.batches[0]
    return [*figures, peak_tensor_bytes(lambda: loop.loss(batch, noise_levels(batch)))]


def peak_bytes() -> int:
    """Most memory that this process had."""
    # Of resource.getrusage a new process inherits what the one that started it had.
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def peak_tensor_bytes(loss: Callable[[], Tensor]) -> int:
    """Most bytes of the tensors that a forward and a backward pass make, gradients included."""
    from diffsynth_lite.core.planning.meters import CountingMeter

    with CountingMeter() as meter:
        meter.start()
        loss().backward()
        return meter.peak_bytes


def write_work(work: Work, file: Path) -> None:
    """Write what the loops do, for a process that measures one of them: of the batches, their shapes."""
    batch = work.batches[0]
    values = {
        "work": vars(work) | {"base": str(work.base), "batches": len(work.batches)},
        "latents": batch.latents.shape,
        "prompts": [sample["prompt_embeds"].shape for sample in batch.conditioning],
    }
    file.write_text(json.dumps(values))


def read_work(file: Path) -> Work:
    """What ``write_work`` wrote, with batches of random numbers."""
    values = json.loads(file.read_text())
    work, shape = values["work"], values["latents"]

    def batch() -> SimpleNamespace:
        return SimpleNamespace(
            latents=torch.randn(shape),
            noise=torch.randn(shape),
            uniform=torch.rand(shape[0]),
            conditioning=[{"prompt_embeds": torch.randn(prompt)} for prompt in values["prompts"]],
        )

    batches = [batch() for _ in range(work["batches"])]
    return Work(**work | {"base": Path(work["base"]), "batches": batches})


def ratio_of(times: Sequence[float], base: Sequence[float]) -> str:
    """Median of the ratios of the rounds, and the interval of 90 % of the medians of resampled rounds."""
    ratios = np.array(times) / np.array(base)
    places = np.random.default_rng(0).integers(len(ratios), size=(2000, len(ratios)))
    low, high = np.quantile(np.median(ratios[places], axis=1), [0.05, 0.95])
    return f"{np.median(ratios):.3f} [{low:.3f}, {high:.3f}]"


def rows(
    cells: Mapping[str, Mapping[str, str]], missing: Callable[[str, str], str | None]
) -> list[dict[str, str]]:
    """The rows of a table: a loop each, a mode a column.

    Args:
        cells: by mode and loop.
        missing: why a loop has no cell in a mode.
    """
    named = {name for column in cells.values() for name in column}
    return [
        {"": name, **{mode: column.get(name) or missing(name, mode) or "" for mode, column in cells.items()}}
        for name in (TRAINER, BASE, *PEERS)
        if name in named or missing(name, next(iter(cells)))
    ]


@contextmanager
def quiet(folder: Path) -> Iterator[None]:
    """Scope in which what the loops print goes to a file."""
    with (folder / "output.txt").open("a") as file, redirect_stdout(file), redirect_stderr(file):
        yield


if __name__ == "__main__":
    main()
