"""What training takes of a device and of host memory, under every combination of settings, for releases.

Counted on torch's meta device at full size, weights included, for a LoRA on the family's default layers and a
batch of one, under bf16 autocast as on CUDA. A row is a format of weights and how many blocks are streamed,
a column what happens to all blocks, as in families.py. Each number is the most on the device at once, in GiB,
and in brackets that in host memory. What kernels, the allocator and CUDA itself take comes on top.

    python scripts/benchmarks/memory_tables.py [--model NAME ...]
    python scripts/benchmarks/memory_tables.py --whole [--model NAME ...]

A count takes a few blocks of each kind in place of all. The second form counts all blocks as well, of every
release unless told otherwise, those that share model and size once, and says how the two differ. All of them
take most of an hour.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from families import HEADINGS
from family_inputs import COUNTED, CountedRelease, every_release
from family_subject import conditioning_of
from meters import STRATEGIES, print_table

from diffsynth_lite.core.gradient import BlockPolicy
from diffsynth_lite.core.planning import Repeat, fewer_blocks
from diffsynth_lite.lora import find_target_layers
from diffsynth_lite.pipelines import load_family
from diffsynth_lite.pipelines.base.release_folder import write_release
from diffsynth_lite.training.planning import few_blocks
from diffsynth_lite.training.planning.memory_count import MemoryCount, MemoryCounter
from diffsynth_lite.training.planning.step import StepSettings

RELEASED = tuple(every_release())
SHOWN = ("Qwen-Image", "Wan 2.1 T2V 14B", "FLUX.2 dev")
FORMATS = {"none": "bfloat16", "int8": "int8", "nf4": "nf4"}
CHECKED = (
    ("none", "none"),
    ("none", "every block"),
    ("none", "offload every block"),
    ("none", "offload every block and attention"),
    ("int8", "every block"),
)
"""The format of weights, and what happens to blocks, where few are compared with all."""
RANK = 32
GIB = 1024**3
STEPS = {
    name: StepSettings(
        use_gradient_checkpointing=strategy.recompute,
        use_gradient_checkpointing_offload=strategy.offload,
        policy=BlockPolicy(selected=strategy) if strategy.recompute else BlockPolicy(),
    )
    for name, strategy in STRATEGIES.items()
}


@contextmanager
def counter_of(release: CountedRelease) -> Iterator[MemoryCounter]:
    """Counts steps of a release."""
    with TemporaryDirectory() as folder:
        family = load_family(release.family)(write_release(release.release, Path(folder)))
        model = family.empty_transformer()
        yield MemoryCounter(
            family,
            find_target_layers(
                model, family.default_target_modules, unused_modules=family.unused_modules(model)
            ),
            rank=RANK,
            latents_shape=family.latents_shape(*release.pixels),
            conditioning=conditioning_of(family, release, release.pixels),
        )


def rows(counter: MemoryCounter) -> Iterator[dict[str, str]]:
    """The rows of a release: each format of the weights, with no, half of the and all blocks streamed."""
    for quantize, written in FORMATS.items():
        for streamed in (0, counter.num_blocks // 2, "all"):
            counts = {
                name: counter.count(replace(settings, quantize=quantize, stream_blocks=streamed))
                for name, settings in STEPS.items()
            }
            one = next(iter(counts.values()))
            yield {
                "weights in": written,
                "streamed": str(streamed),
                "weights": gib(one.weights),
                "slots": gib(one.slots),
                **{HEADINGS[name]: _total(count) for name, count in counts.items()},
            }


def _total(count: MemoryCount) -> str:
    return gib(count.device) + (f" ({gib(count.host)})" if count.host else "")


def print_release(release: CountedRelease) -> None:
    """Print the table of a release."""
    with counter_of(release) as counter:
        table = list(rows(counter))
        count = counter.count(next(iter(STEPS.values())))
        print_table(
            f"{_named(release)}. A LoRA of rank {RANK} and AdamW take "
            f"{gib(count.lora + count.optimizer)} GiB, which are in the columns from none on.",
            table,
        )


def every_block(kinds: Sequence[Any], _: int) -> tuple[list[int], list[Repeat]]:
    """All blocks, in place of ``fewer_blocks``."""
    return list(range(len(kinds))), []


def whole_row(release: CountedRelease) -> dict[str, str]:
    """Counts with a few blocks beside those with all."""
    (few, few_s), (whole, whole_s) = (
        checked_counts(release, chosen) for chosen in (fewer_blocks, every_block)
    )
    pairs = [(few[name], count) for name, count in whole.items()]
    differences = [(one.device - other.device, one.host - other.host) for one, other in pairs]
    ratio_apart = max(abs(one.device / other.device - 1) for one, other in pairs)
    return {
        "model": _named(release),
        **{name: _total(count) for name, count in whole.items()},
        "bytes apart": f"{max(abs(number) for pair in differences for number in pair):,}",
        "%": f"{100 * ratio_apart:.2f}",
        "s, with few": f"{few_s:.1f}",
        "s, with all": f"{whole_s:.1f}",
    }


def checked_counts(
    release: CountedRelease, chosen: Callable[..., tuple[list[int], list[Repeat]]]
) -> tuple[dict[str, MemoryCount], float]:
    """Counts by their headings, and the seconds that they took together.

    Args:
        chosen: which blocks are counted.
    """
    began = time.process_time()
    with counter_of(release) as counter, patch.object(few_blocks, "fewer_blocks", chosen):
        counts = {
            HEADINGS[name] + ("" if quantize == "none" else f", {quantize}"): counter.count(
                replace(STEPS[name], quantize=quantize)
            )
            for quantize, name in CHECKED
        }
    return counts, time.process_time() - began


def _named(release: CountedRelease) -> str:
    width, height, num_frames = release.pixels
    frames = f" x {num_frames}" if num_frames > 1 else ""
    edit = ", edit" if release.num_inputs else ""
    return f"{release.name}{edit}, {width} x {height}{frames}"


def gib(num_bytes: float) -> str:
    """``num_bytes`` in GiB, with one decimal."""
    return f"{num_bytes / GIB:,.1f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--model", action="append", choices=sorted({one.name for one in (*COUNTED, *RELEASED)})
    )
    parser.add_argument("--whole", action="store_true", help="count all blocks, too")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.whole:
        wanted = [one for one in RELEASED if not options.model or one.name in options.model]
        print_table("A few blocks and all.", [whole_row(one) for one in wanted])
        return
    for release in COUNTED:
        if release.name in (options.model or SHOWN):
            print_release(release)


if __name__ == "__main__":
    main()
