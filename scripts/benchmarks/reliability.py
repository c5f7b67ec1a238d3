"""What reliability costs: the share of a step that exactness takes, and the time of a checkpoint.

    python scripts/benchmarks/reliability.py step          # needs the quickstart's pictures
    python scripts/benchmarks/reliability.py save --rank 32

The loop with the counter-based draws, the finiteness check and the exchange of what a run is asked for, and
the loop without them (constant noise, no check, no exchange) take turns, and a second loop with all of them
tells how far two equal loops are apart. All three train the same model: two that are alike but lie elsewhere
in memory can be a percent apart. Each of the three parts is also timed alone. Under torchrun the exchange is
one between processes (with train.micro_batch_size lowered so that the batch divides).

A checkpoint has the adapter and the two moments of each of its weights, for the layers that the released
Qwen-Image trains by default, in the shapes of that model.
"""

import argparse
import hashlib
import os
import pkgutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import safetensors.torch
import torch
from diffusers import QwenImageTransformer2DModel
from meters import mebibytes, print_table, take_turns
from peers import ratio_of
from step_time import Step, equal_runs

from diffsynth_lite.core.gradient import count_blocks, gradient_engine
from diffsynth_lite.core.randomness import normal, torch_seed, uniform
from diffsynth_lite.lora.targets import find_target_layers
from diffsynth_lite.pipelines.qwen_image import QwenImage
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.training.builder import TrainingObjects, build_engine
from diffsynth_lite.training.checkpoint.store import CheckpointStore
from diffsynth_lite.training.stopping import Requests, StopRequest
from diffsynth_lite.training.trainer import train_step

BATCHES = "diffsynth_lite.data.batches"
STEPS = "diffsynth_lite.training.trainer"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the command line asks for."""
    options = parse_arguments(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if options.what == "save":
            measure_saving(options, Path(folder))
            return
        measure_steps(options, Path(folder))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("step", "save"))
    parser.add_argument("--config", default="quickstart.yaml", help="of the steps (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="measured of each loop (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=32, help="of the saved LoRA (default: %(default)s)")
    parser.add_argument("--saves", type=int, default=3, help="checkpoints (default: %(default)s)")
    parser.add_argument("--folder", help="where they are written (default: that of temporary files)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as for train.py")
    return parser.parse_intermixed_args(arguments)


def measure_steps(options: argparse.Namespace, folder: Path) -> None:
    """Print what a step takes with all of it, without it, and each part alone."""
    accelerator, config, _, (run,) = equal_runs(options, folder, num_runs=1)
    requests = Requests(RunFolder(folder), StopRequest(), accelerator, save_every_minutes=None)
    steps: dict[str, Step] = {
        "with all": _with_all(run, requests),
        "without": _without(run),
        "with all, again": _with_all(run, requests),
    }
    with gradient_engine(build_engine(config, run.weights)):
        seconds = take_turns(steps, num_warmup=10, num_rounds=options.steps)
    batch = next(run.batches)[0]
    parts = {
        "draws": lambda: _draw(config.train.seed, batch.latents.shape),
        "finiteness check": _finite,
        "exchange": requests.gather,
    }
    alone = {
        name: statistics.median(times)
        for name, times in take_turns(parts, num_warmup=0, num_rounds=300).items()
    }
    if not accelerator.is_main_process:
        return
    base = statistics.median(seconds["without"])
    rows = [_row(name, statistics.median(values), base) for name, values in seconds.items()]
    rows += [_row(f"{name}, alone", value, base, share=True) for name, value in alone.items()]
    rows.append(_row("the three, alone", sum(alone.values()), base, share=True))
    title = (
        f"{options.steps} steps of {config.train.global_batch_size}, {accelerator.num_processes} process(es)"
    )
    print_table(title, rows)
    for other in ("without", "with all, again"):
        print(f"with all / {other}, of neighbours: {ratio_of(seconds['with all'], seconds[other])}")


def _row(name: str, seconds: float, base: float, *, share: bool = False) -> dict[str, str]:
    ratio = f"{100 * seconds / base:.2f} %" if share else f"{seconds / base:.4f}"
    return {"": name, "ms a step": f"{1000 * seconds:.3f}", "to the loop without": ratio}


def _with_all(run: TrainingObjects, requests: Requests) -> Step:
    """The trainer's step, and what it is asked for after it."""
    real = {name: pkgutil.resolve_name(name) for name in _stand_ins()}
    numbers = count(1)

    def take() -> None:
        with _replaced(real):
            train_step(run, next(numbers))
            requests.gather()

    return take


def _without(run: TrainingObjects) -> Step:
    """The step with constant noise and noise levels, a constant seed of the dropout, and no check."""
    stand_ins, numbers = _stand_ins(), count(1)

    def take() -> None:
        with _replaced(stand_ins):
            train_step(run, next(numbers))

    return take


def _stand_ins() -> dict[str, Any]:
    noise: dict[tuple[int, ...], torch.Tensor] = {}

    def constant_noise(_seed: int, _purpose: str, _position: int, shape: tuple[int, ...]) -> torch.Tensor:
        if shape not in noise:
            noise[shape] = torch.randn(shape)
        return noise[shape]

    return {
        f"{BATCHES}.normal": constant_noise,
        f"{BATCHES}.uniform": lambda *_: 0.5,
        f"{STEPS}.torch_seed": lambda *_: 0,
        f"{STEPS}.math": SimpleNamespace(isfinite=lambda _: True),
    }


@contextmanager
def _replaced(values: Mapping[str, Any]) -> Iterator[None]:
    """Scope in which names of modules have other values; both loops pay for it alike."""
    with ExitStack() as patched:
        for name, value in values.items():
            patched.enter_context(patch(name, value))
        yield


def _draw(seed: int, shape: torch.Size) -> None:
    """All draws of a step of one micro-batch."""
    torch.stack([normal(seed, "noise", place, shape[1:]) for place in range(shape[0])])
    for place in range(shape[0]):
        uniform(seed, "timestep", place)
    uniform(seed, "step", 0)
    torch_seed(seed, "dropout", 0)


def _finite() -> bool:
    loss, norm = torch.stack([torch.tensor(1.0), torch.tensor(2.0)]).tolist()
    return bool(torch.isfinite(torch.tensor([loss, norm])).all())


def measure_saving(options: argparse.Namespace, folder: Path) -> None:
    """Print what a checkpoint of a LoRA for the released Qwen-Image takes, by what is done."""
    tensors = lora_tensors(options.rank)
    num_bytes = sum(tensor.nbytes for named in tensors.values() for tensor in named.values())
    store = CheckpointStore(folder / "checkpoints", keep=1)
    rows = []
    for step in range(1, options.saves + 1):
        with timed_calls() as seconds:
            started_at = time.perf_counter()
            store.save(step, tensors, {"state": {"step": step}})
            total = time.perf_counter() - started_at
        started_at = time.perf_counter()
        store.latest()
        read = time.perf_counter() - started_at
        rest = total - sum(seconds.values())
        columns = {**seconds, "check for NaN, the rest": rest, "all of it": total, "verified read": read}
        rows.append({"save": str(step)} | {name: f"{value:.2f} s" for name, value in columns.items()})
    print_table(f"LoRA of rank {options.rank}: {mebibytes(num_bytes)} MiB with its moments", rows)


def lora_tensors(rank: int) -> dict[str, dict[str, torch.Tensor]]:
    """Adapter and moments, by file, in the shapes of the released Qwen-Image's default LoRA."""
    with torch.device("meta"):
        model = QwenImageTransformer2DModel()
    (blocks,) = QwenImage.block_lists
    last_block = f"{blocks}.{count_blocks(model, [blocks]) - 1}"
    unused = [f"{last_block}.{ending}" for ending in QwenImage.unused_in_last_block]
    layers = find_target_layers(model, QwenImage.default_target_modules, unused_modules=unused)
    adapter = {}
    for name in layers:
        linear = model.get_submodule(name)
        adapter[f"{name}.lora_A.weight"] = torch.randn(rank, linear.in_features)
        adapter[f"{name}.lora_B.weight"] = torch.randn(linear.out_features, rank)
    moments = {
        f"{name}::{moment}": torch.randn_like(tensor)
        for name, tensor in adapter.items()
        for moment in ("exp_avg", "exp_avg_sq")
    }
    return {"adapter": adapter, "optimizer": moments}


@contextmanager
def timed_calls() -> Iterator[dict[str, float]]:
    """Scope in which the calls of a save are timed, by what they do."""
    seconds = {"serialize": 0.0, "write": 0.0, "sync": 0.0, "hash": 0.0}

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            started_at = time.perf_counter()
            result = call(*args, **kwargs)
            seconds[name] += time.perf_counter() - started_at
            return result

        return wrapped

    calls = (
        *(("serialize", safetensors.torch, "save"), ("write", os, "write"), ("sync", os, "fsync")),
        ("hash", hashlib, "sha256"),
    )
    with ExitStack() as patched:
        for name, module, function in calls:
            patched.enter_context(patch.object(module, function, timed(name, getattr(module, function))))
        yield seconds


if __name__ == "__main__":
    main()
