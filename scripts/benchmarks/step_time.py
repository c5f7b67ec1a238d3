"""Step time of the trainer against a bare PyTorch loop: same model, batches and flags, in one run.

Prints the ratio of the median step times. Steps alternate between the two, so that whatever else the machine
does hits both alike.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import torch
from accelerate import Accelerator
from meters import take_turns
from peer_loops.bare import BareLoop

from diffsynth_lite.config import Config, load_config
from diffsynth_lite.core.gradient import gradient_engine
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.training.builder import (
    TrainingObjects,
    build_compiler,
    build_engine,
    build_run,
    build_transformer,
)
from diffsynth_lite.training.checks import CheckedRun, check_run
from diffsynth_lite.training.encoding.run_encoding import encode_run
from diffsynth_lite.training.frozen_weights import place_weights
from diffsynth_lite.training.optimization.optimizers import build_optimizer
from diffsynth_lite.training.trainer import train_step


def main() -> None:
    """Run both loops and print the ratio."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        times = measure(arguments, Path(folder))
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, seconds in medians.items():
        print(f"{name:24} {seconds * 1000:8.2f} ms a step (median of {arguments.steps})")
    print(f"ratio trainer / bare loop: {medians['trainer'] / medians['bare loop']:.3f}")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--config", default="quickstart.yaml", help="config (default: %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=100, help="steps measured of each (default: %(default)s)"
    )
    parser.add_argument("--warmup", type=int, default=10, help="steps before them (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")
    parser.add_argument(
        "--cpu-time", action="store_true", help="of the processor, where other programs are at work on it"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as for train.py")
    return parser.parse_intermixed_args()


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Seconds of each measured step of both loops, which take turns; each has its own model and batches."""
    accelerator, config, checked, runs = equal_runs(arguments.config, arguments.overrides, folder, num_runs=2)
    trainer, other = runs
    # What a person would write by hand with diffusers and peft, without any of the trainer's code.
    bare = BareLoop(
        checked.family.folder.path,
        checked.target_layers,
        other.batches,
        rank=config.lora.rank,
        checkpointing=config.train.use_gradient_checkpointing,
        learning_rate=config.train.learning_rate,
        weight_decay=config.train.weight_decay,
        device=accelerator.device,
        dtype=getattr(torch, config.model.dtype),
        autocast=config.train.mixed_precision == "bf16",
    ).steps()
    numbers = count(1)
    with gradient_engine(build_engine(config, trainer.weights)):
        return take_turns(
            {"trainer": lambda: train_step(trainer, next(numbers)), "bare loop": lambda: next(bare)},
            num_warmup=arguments.warmup,
            num_rounds=arguments.steps,
            clock=time.process_time if arguments.cpu_time else time.perf_counter,
        )


def equal_runs(
    file: str, overrides: Sequence[str], folder: Path, *, num_runs: int
) -> tuple[Accelerator, Config, CheckedRun, list[TrainingObjects]]:
    """The same run several times, each with a model and a stream of batches of its own."""
    overrides = [*overrides, f"data.cache_dir={folder / 'cache'}", "validation.prompts=[]"]
    config = load_config(file, overrides).config
    accelerator = Accelerator(mixed_precision=config.train.mixed_precision)
    checked = check_run(config, accelerator)
    encoded = encode_run(config, checked, accelerator)
    runs = [
        build_run(
            config,
            checked,
            encoded,
            accelerator=accelerator,
            transformer=(transformer := build_transformer(config, checked)),
            compiler=build_compiler(config, checked.family, transformer),
            weights=place_weights(config, checked.family, transformer, accelerator.device),
            optimizer=build_optimizer(config, transformer, checked.groups),
            averaged=None,
            start_step=0,
            folder=RunFolder(folder),
        )
        for _ in range(num_runs)
    ]
    return accelerator, config, checked, runs


if __name__ == "__main__":
    main()
