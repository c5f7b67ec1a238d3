"""Speed and memory of a training step by what happens to its blocks, all rows in one run.

The rows none, every block, every 2nd and every 4th are those of diffusers pull request 10611, whose subject
(LTX-Video 2B, 512 x 768, 81 frames, every weight trains) is the default on CUDA and meta. Memory is what the
step adds to weights and input: between forward and backward, for all blocks and for four fewer, and at its
peak. On CUDA torch counts it. On cpu and meta every tensor is counted by its size, and what offloading moves
to the host is counted by itself. Steps are timed in turns, with the time as a ratio to the first row.

On meta nothing is computed, so that the memory of models of any size can be had on any machine:

    python scripts/benchmarks/checkpointing.py --device meta --model wan --train lora --num-blocks 8
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace

from meters import STRATEGIES, EngineMethod, Meter, cells, measure, mebibytes, meter_for, print_table
from subjects import Subject, add_arguments, build_subject, size_of

from diffsynth_lite.core.gradient import KEEP, OFFLOAD, RECOMPUTE, BlockPolicy, BlockStrategy

PERIOD = 4
"""Blocks after which every selection repeats itself."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all rows and print the table."""
    options = parse_arguments(arguments)
    size = replace(size_of(options), **({"num_blocks": options.num_blocks} if options.num_blocks else {}))
    subject = build_subject(options, size)
    meter = meter_for(subject.device)
    methods = rows(subject, meter)
    counts = [subject.num_blocks - PERIOD, subject.num_blocks]
    figures = measure(subject, methods, meter, counts, num_warmup=options.warmup, num_rounds=options.rounds)
    trained = sum(weight.numel() for weight in subject.trained())
    print_table(
        f"{options.model} on {options.device}, {size}\n{trained:,} weights train; all weights take "
        f"{mebibytes(subject.weight_bytes)} MiB, which are not in the table. Memory in MiB.",
        cells("recompute", figures),
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


if __name__ == "__main__":
    main()
