"""What a block of each model family keeps under each policy, and what that costs in time.

Bytes are those of the released models at full width, with a few blocks and random weights, counted exactly
on torch's meta device: what one block more adds on the device between forward and backward, and, in brackets,
in host memory. Tokens are those of what is made, without prompt and inputs. A LoRA of rank 16 trains on the
family's default target modules, through the family's own ``predict``. Times are those of a step of
a narrower model on this machine, as a ratio to no checkpointing; steps take turns. On a CPU it is the
process's own time, which other programs on the machine do not lengthen.

All blocks are treated alike: kept (none), recomputed (every), or recomputed with their inputs in host memory
(offload); beside that, the outputs of their attention are kept on the device (save att.) or offloaded
(offload att.).

    python scripts/benchmarks/families.py [--family NAME ...] [--rounds 0]
    python scripts/benchmarks/families.py --outside [--family NAME ...]

The second form says what part of a step on the CPU is the forward pass of what is outside of the blocks: text
and time embeddings, rotary tables, and what our own code does around the model.
"""

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from family_inputs import COUNTED, CountedRelease
from family_subject import FamilySubject, family_of
from meters import (
    STRATEGIES,
    EngineMethod,
    Meter,
    measure_times,
    mebibytes,
    meter_for,
    print_table,
    take_step,
)
from torch import Tensor

from diffsynth_lite.core.gradient import BlockPolicy, BlockStrategy, blocks_in, gradient_engine

HEADINGS = dict(
    zip(
        STRATEGIES,
        (
            "none",
            "every",
            "offload",
            "every, save att.",
            "every, offload att.",
            "offload, save att.",
            "offload both",
        ),
        strict=True,
    )
)


_BLOCKS, _FORWARD = "blocks", "forward"
_SMALLEST_SHOWN = 0.1
"""Percent of a step."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What is kept between forward and backward.

    Attributes:
        device: bytes on the device.
        host: bytes in host memory.
    """

    device: int
    host: int


class FamilyMethod(EngineMethod):
    """All blocks of a family under one strategy, through an engine of their own."""

    def loss(self, subject: FamilySubject) -> Tensor:
        """The forward pass of ``subject``."""
        with gradient_engine(self.engine):
            return subject.loss()


def method_of(name: str, strategy: BlockStrategy, subject: FamilySubject, meter: Meter) -> FamilyMethod:
    """The strategy of all blocks but those that are left out, which are plainly called."""
    policy = BlockPolicy(
        select="skip" if subject.left_out else "all", blocks=subject.left_out, selected=strategy
    )
    return FamilyMethod(name, policy, subject, meter)


def count_bytes(
    subject: FamilySubject, strategies: Mapping[str, BlockStrategy] = STRATEGIES
) -> dict[str, dict[str, Kept]]:
    """What one block more keeps, by block list and strategy; the other block lists have one block."""
    meter = meter_for(subject.device)
    counted: dict[str, dict[str, Kept]] = {}
    for block_list in subject.counted:
        counted[block_list] = {}
        for name, strategy in strategies.items():
            counts = []
            for num_blocks in subject.fewer_and_more(block_list):
                subject.use_blocks(block_list, num_blocks)
                counts.append(count_kept(subject, method_of(name, strategy, subject, meter), meter))
            fewer, more = counts
            counted[block_list][name] = Kept(device=more.device - fewer.device, host=more.host - fewer.host)
    return counted


def count_kept(subject: FamilySubject, method: FamilyMethod, meter: Meter) -> Kept:
    """What a second step keeps; in the first an engine learns what blocks share."""
    with meter:
        take_step(subject, method)
        meter.start()
        loss = method.loss(subject)
        kept = Kept(device=meter.num_bytes, host=method.host_bytes())
        del loss
    return kept


def bytes_rows(
    release: CountedRelease, device: torch.device, *, is_small: bool = False
) -> list[dict[str, str]]:
    """The rows of a release in the table of bytes, one for each kind of its blocks."""
    pixels = release.small_pixels if is_small else release.pixels
    with family_of(release, release.small if is_small else {}) as family:
        subject = FamilySubject(family, release, pixels, device, torch.bfloat16)
        counted = count_bytes(subject)
    return [
        names_of(release)
        | {"block of": block_list, "tokens": f"{subject.num_tokens:,}"}
        | {
            HEADINGS[strategy]: mebibytes(kept.device) + (f" ({mebibytes(kept.host)})" if kept.host else "")
            for strategy, kept in by_strategy.items()
        }
        for block_list, by_strategy in counted.items()
    ]


def time_row(release: CountedRelease, device: torch.device, num_rounds: int) -> dict[str, str]:
    """The row of a release in the table of times."""
    with family_of(release, release.small) as family:
        subject = FamilySubject(family, release, release.small_pixels, device, torch.float32)
        meter = meter_for(device)
        methods = [method_of(name, strategy, subject, meter) for name, strategy in STRATEGIES.items()]
        # Other programs on the machine take none of a process's own time.
        clock = time.process_time if device.type == "cpu" else time.perf_counter
        seconds = measure_times(subject, methods, num_warmup=1, num_rounds=num_rounds, clock=clock)
    reference = seconds["none"]
    ratios = {HEADINGS[strategy]: f"{taken / reference:.2f}" for strategy, taken in seconds.items()}
    return names_of(release) | {"ms, none": f"{1000 * reference:.0f}", **ratios}


def outside_row(release: CountedRelease, num_rounds: int) -> dict[str, str]:
    """What the forward pass of a narrower model does outside of its blocks, in percent of whole steps."""
    with family_of(release, release.small) as family:
        subject = FamilySubject(family, release, release.small_pixels, torch.device("cpu"), torch.float32)
        blocks, spent, whole = blocks_in(subject.model, family.block_lists), Counter[str](), list[float]()
        for block in blocks:
            _count_time(block, _BLOCKS, spent)
        for name, part in subject.model.named_children():
            if not isinstance(part, torch.nn.ModuleList) and set(blocks).isdisjoint(part.modules()):
                _count_time(part, name, spent)
        for _ in range(num_rounds + 1):
            if len(whole) == 1:  # of which the first is no measurement
                spent.clear()
            started_at = time.thread_time()
            loss = subject.loss()
            spent[_FORWARD] += time.thread_time() - started_at
            subject.backward(loss)
            whole.append(time.thread_time() - started_at)
            subject.model.zero_grad(set_to_none=True)
    percent = 100 / sum(whole[1:])
    outside = percent * (spent.pop(_FORWARD) - spent.pop(_BLOCKS))
    parts = {name: percent * seconds for name, seconds in spent.most_common()}
    return names_of(release) | {
        "ms a step": f"{1000 * statistics.median(whole[1:]):.0f}",
        "outside of blocks": f"{outside:.1f} %",
        "of it": ", ".join(f"{name} {part:.1f}" for name, part in parts.items() if part >= _SMALLEST_SHOWN),
    }


def _count_time(module: torch.nn.Module, name: str, spent: Counter[str]) -> None:
    """From now on add up the seconds of a module's forward pass."""

    def begin(*_: Any) -> None:
        spent[name] -= time.thread_time()

    def end(*_: Any) -> None:
        spent[name] += time.thread_time()

    module.register_forward_pre_hook(begin)
    module.register_forward_hook(end)


def names_of(release: CountedRelease) -> dict[str, str]:
    """The first cells of a row."""
    return {"family": release.family, "model": release.name}


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--family",
        action="append",
        choices=sorted({release.family for release in COUNTED}),
        help="default: all (repeatable)",
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="timed steps of each kind; 0: no times (default: %(default)s)"
    )
    parser.add_argument("--outside", action="store_true", help="time what is outside of the blocks")
    parser.add_argument("--small", action="store_true", help="count the narrower models that are timed")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="that steps are timed on (default: %(default)s)",
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print both tables."""
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    releases = [release for release in COUNTED if release.family in (options.family or {release.family})]
    if options.outside:
        rows = [outside_row(release, options.rounds) for release in releases]
        print_table("Outside of the blocks, in forward, in percent of a step's time.", rows)
        return
    meta = torch.device("meta")
    rows = [row for release in releases for row in bytes_rows(release, meta, is_small=options.small)]
    print_table("MiB that one block more keeps on the device, and in brackets in host memory.", rows)
    for release in releases:
        # What is trained stands first.
        trained, *_ = release.release.components.values()
        print(f"{release.name}: {trained.source}.")
    if options.rounds:
        times = [time_row(release, torch.device(options.device), options.rounds) for release in releases]
        print_table(f"Time of a step on {options.device}, as a ratio to none, and that in ms.", times)


if __name__ == "__main__":
    main()
