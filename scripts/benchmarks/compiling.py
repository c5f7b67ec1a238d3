"""Time and memory of a training step with compiled blocks beside plain ones: in turns, in one run.

    python scripts/benchmarks/compiling.py --model ltx --train lora

Time is the median of the ratios of neighbouring steps, compiled to plain, with a bootstrap interval of 90 %;
on the CPU it is that of the thread. Memory is what is kept on the device from forward to backward: all that
autograd saves, each storage once, without weights. Compiling is in no time.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from functools import partial

from meters import STRATEGIES, EngineMethod, mebibytes, meter_for, print_table, take_step, take_turns
from peers import ratio_of
from subjects import KINDS, Subject, add_arguments, build_subject, size_of
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from diffsynth_lite.core.gradient import BlockCompiler, BlockPolicy, blocks_of

ROWS = ("none", "every block", "offload every block")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all rows and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_arguments(parser)
    parser.add_argument("--backend", default="inductor", help="of torch.compile (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.device == "meta":
        parser.error("--device meta: nothing runs there, and nothing is compiled")
    size = size_of(options)
    plain, compiled = (build_subject(options, size) for _ in range(2))
    blocks = blocks_of(compiled.model, [KINDS[options.model].block_list])
    compiler = BlockCompiler(blocks, backend=options.backend)
    table = [
        row_of(name, plain, compiled, num_warmup=options.warmup, num_rounds=options.rounds) for name in ROWS
    ]
    (told,) = compiler.report().lines()
    print_table(f"{options.model} on {options.device}, {size}\n{told}\nMemory in MiB.", table)


def row_of(
    name: str, plain: Subject, compiled: Subject, *, num_warmup: int, num_rounds: int
) -> dict[str, str]:
    """One row: what happens to all blocks, plain and compiled.

    Args:
        num_warmup: steps of each that are not measured.
        num_rounds: steps of each that are.
    """
    policy = BlockPolicy(selected=STRATEGIES[name])
    sides = [
        (subject, EngineMethod(name, policy, subject, meter_for(subject.device)))
        for subject in (plain, compiled)
    ]
    clock = time.perf_counter if plain.device.type == "cuda" else time.thread_time
    steps = {side: partial(take_step, *each) for side, each in zip(("plain", "compiled"), sides, strict=True)}
    times = take_turns(steps, num_warmup=num_warmup, num_rounds=num_rounds, clock=clock)
    kept = [kept_bytes(subject, method) for subject, method in sides]
    return {
        "recompute": name,
        **{f"{side}, s": f"{statistics.median(seconds):.3f}" for side, seconds in times.items()},
        "ratio": ratio_of(times["compiled"], times["plain"]),
        "kept, plain": mebibytes(kept[0]),
        "kept, compiled": mebibytes(kept[1]),
    }


def kept_bytes(subject: Subject, method: EngineMethod) -> int:
    """Bytes that autograd keeps on the device after a forward pass."""
    weights = {weight.untyped_storage().data_ptr() for weight in subject.model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = method.loss(subject)
    del loss
    return sum(kept.values())


if __name__ == "__main__":
    main()
