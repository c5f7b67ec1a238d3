"""What a block of each model family keeps under each policy.

Bytes are those of the released models at full width, with a few blocks and random weights, counted exactly
on torch's meta device: what one block more adds on the device between forward and backward, and, in brackets,
in host memory. Tokens are those of what is made, without prompt and inputs. A LoRA of rank 16 trains on the
family's default target modules, through the family's own ``predict``.

All blocks are treated alike: kept (none), recomputed (every), or recomputed with their inputs in host memory
(offload); also, the outputs of their attention are kept on the device (save att.) or offloaded
(offload att.).

The first release of each family is counted, or those that are named; of block lists whose blocks have weights
of the same shapes, the first.

    python scripts/benchmarks/families.py [--family NAME ...] [--release NAME ...]
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from family_subject import FamilySubject, counted_families, subject_of
from meters import STRATEGIES, EngineMethod, Meter, mebibytes, meter_for, print_table, take_step
from torch import Tensor

from diffsynth_lite.core.gradient import BlockPolicy, BlockStrategy, gradient_engine
from diffsynth_lite.pipelines import releases_of
from diffsynth_lite.releases import Release

_HEADINGS = ("none", "every", "offload", "every, save att.", "every, offload att.", "offload, save att.")
HEADINGS = dict(zip(STRATEGIES, (*_HEADINGS, "offload both"), strict=True))


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
    subject: FamilySubject,
    block_lists: Sequence[str],
    strategies: Mapping[str, BlockStrategy] = STRATEGIES,
) -> dict[str, dict[str, Kept]]:
    """What one block more keeps, by block list and strategy; the other block lists have one block."""
    meter = meter_for(subject.device)
    counted: dict[str, dict[str, Kept]] = {}
    for block_list in block_lists:
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


def bytes_rows(family: str, release: Release) -> list[dict[str, str]]:
    """The rows of a release in the table of bytes, one for each kind of its blocks."""
    with subject_of(family, release) as subject:
        counted = count_bytes(subject, subject.kinds)
    return [
        {"family": family, "model": release.name}
        | {"block of": block_list, "tokens": f"{subject.num_tokens:,}"}
        | {
            HEADINGS[strategy]: mebibytes(kept.device) + (f" ({mebibytes(kept.host)})" if kept.host else "")
            for strategy, kept in by_strategy.items()
        }
        for block_list, by_strategy in counted.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Count, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    released = {name: releases_of(name) for name in counted_families()}
    parser.add_argument("--family", action="append", choices=released, help="default: all (repeatable)")
    parser.add_argument("--release", action="append", help="such as 'FLUX.2 klein 4B' (repeatable)")
    options = parser.parse_args(arguments)
    chosen = [
        (family, release)
        for family in options.family or released
        for release in released[family]
        if (release.name in options.release if options.release else release is released[family][0])
    ]
    if not chosen:
        parser.error(
            f"--release: none of {', '.join(one.name for all_of in released.values() for one in all_of)}"
        )
    rows = [row for family, release in chosen for row in bytes_rows(family, release)]
    print_table("MiB that one block more keeps on the device, and in brackets in host memory.", rows)
    for _, release in chosen:
        # What is trained stands first.
        trained, *_ = release.components.values()
        print(f"{release.name}: {trained.source}.")


if __name__ == "__main__":
    main()
