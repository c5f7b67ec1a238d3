"""Speed and memory of a training step by what happens to its blocks, all rows in one run.

The rows none, every block, every 2nd and every 4th are those of diffusers pull request 10611, whose subject
(LTX-Video 2B, 512 x 768, 81 frames, every weight trains) is the default on CUDA and meta. Memory is what the
step adds to weights and input. On CUDA torch counts it. On cpu and meta every tensor is counted by its size,
and what offloading moves to the host is counted apart. Steps are timed in turns, with the time as a ratio to
the first row.

On meta nothing is computed, so that the memory of models of any size can be had on any machine:

    python scripts/benchmarks/checkpointing.py --device meta --model wan --train lora --num-blocks 8
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from meters import (
    STRATEGIES,
    EngineMethod,
    Memory,
    Meter,
    measure_memory,
    measure_times,
    mebibytes,
    meter_for,
    print_table,
)
from subjects import Subject, add_arguments, build_subject, size_of

from diffsynth_lite.core.gradient import KEEP, OFFLOAD, RECOMPUTE, BlockPolicy, BlockStrategy

PERIOD = 4
"""Blocks after which every selection repeats itself."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What was measured of one row.

    Attributes:
        memory: of a step; None if it did not fit.
        block_bytes: what one block more adds on the device between forward and backward.
        seconds: of a step; None if it was not timed.
    """

    memory: Memory | None
    block_bytes: float = 0
    seconds: float | None = None


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all rows and print the table."""
    options = parse_arguments(arguments)
    size = replace(size_of(options), **({"num_blocks": options.num_blocks} if options.num_blocks else {}))
    subject = build_subject(options, size)
    meter = meter_for(subject.device)
    methods = rows(subject, meter)
    figures = measure(subject, methods, meter, num_warmup=options.warmup, num_rounds=options.rounds)
    trained = sum(weight.numel() for weight in subject.trained())
    print_table(
        f"{options.model} on {options.device}, {size}\n{trained:,} weights train; all weights take "
        f"{mebibytes(subject.weight_bytes)} MiB, which are not in the table. Memory in MiB.",
        cells(figures),
    )


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_arguments(parser)
    parser.add_argument("--num-blocks", type=int, help="default: those of the model, on cpu 8")
    options = parser.parse_args(arguments)
    if options.num_blocks is not None and options.num_blocks < 2 * PERIOD:
        parser.error(f"--num-blocks {options.num_blocks}: at least {2 * PERIOD} are needed")
    return options


def measure(
    subject: Subject, methods: Sequence[EngineMethod], meter: Meter, *, num_warmup: int, num_rounds: int
) -> dict[str, Figures]:
    """The figures of every row, by its name."""
    figures = {method.name: figures_of(subject, method, meter) for method in methods}
    if subject.device.type == "meta":
        return figures
    fitting = [method for method in methods if figures[method.name].memory is not None]
    times = measure_times(subject, fitting, num_warmup=num_warmup, num_rounds=num_rounds)
    return {name: replace(row, seconds=times.get(name)) for name, row in figures.items()}


def rows(subject: Subject, meter: Meter) -> list[EngineMethod]:
    """The ways to run the blocks that are compared; the first is the measure of the others."""

    def row(name: str, strategy: BlockStrategy, every: int = 1, **options: bool) -> EngineMethod:
        policy = BlockPolicy(select="every_n", n=every, selected=strategy)
        return EngineMethod(name, lambda _: policy, subject, meter, **options)

    def first_half(name: str, strategy: BlockStrategy) -> EngineMethod:
        return EngineMethod(
            name,
            lambda num_blocks: BlockPolicy(select="first_k", n=num_blocks // 2, selected=strategy),
            subject,
            meter,
        )

    methods = [
        row("none", KEEP),
        row("every block", RECOMPUTE),
        row("every 2nd", RECOMPUTE, 2),
        row("every 4th", RECOMPUTE, 4),
        first_half("first half", RECOMPUTE),
        row("offload every block", OFFLOAD),
        first_half("offload first half", OFFLOAD),
    ]
    named = {method.name for method in methods}
    methods += [row(name, strategy) for name, strategy in STRATEGIES.items() if name not in named]
    if not all(weight.requires_grad for weight in subject.model.parameters()):
        methods.insert(2, row("every block, dead ops run", RECOMPUTE, skip_dead_ops=False))
    return methods


def figures_of(subject: Subject, method: EngineMethod, meter: Meter) -> Figures:
    """The memory of one row, at full length and one period shorter."""
    num_blocks = subject.num_blocks
    try:
        memory = measure_memory(subject, method, meter)
        subject.use_blocks(num_blocks - PERIOD)
        shorter = measure_memory(subject, method, meter)
    except torch.OutOfMemoryError:
        subject.model.zero_grad(set_to_none=True)
        return Figures(memory=None)
    finally:
        subject.use_blocks(num_blocks)
    return Figures(memory=memory, block_bytes=(memory.after_forward - shorter.after_forward) / PERIOD)


def cells(figures: dict[str, Figures]) -> list[dict[str, str]]:
    """The table: memory in MiB, speed where it was measured."""
    reference = next((row.seconds for row in figures.values() if row.seconds), None)
    table = []
    for name, row in figures.items():
        line = {"recompute": name}
        if reference is not None:
            line["it/s"] = f"{1 / row.seconds:.2f}" if row.seconds else "-"
            line["time"] = f"{row.seconds / reference:.3f}" if row.seconds else "-"
        memory = row.memory
        line["after forward"] = mebibytes(memory.after_forward) if memory else "out of memory"
        line["a block more"] = mebibytes(row.block_bytes) if memory else "-"
        line["peak"] = mebibytes(memory.peak) if memory else "-"
        line["in host memory"] = mebibytes(memory.host) if memory else "-"
        table.append(line)
    return table


if __name__ == "__main__":
    main()
