"""What training takes of a device and of host memory, under every combination of settings, for releases.

Counted on torch's meta device at full size, weights included, for a LoRA on the family's default layers and a
batch of one, under bf16 autocast as on CUDA. A row is a format of weights and how many blocks are streamed,
a column what happens to all blocks, as in families.py. Each number is the most on the device at once, in GiB,
and in brackets that in host memory. What kernels, the allocator and CUDA itself take comes on top.

    python scripts/benchmarks/memory_tables.py [--model NAME ...]
    python scripts/benchmarks/memory_tables.py --whole [--model NAME ...]

A count takes a few blocks of each kind in place of all. The second form counts all blocks as well, of all
releases unless told otherwise, and says how the two differ.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from families import HEADINGS
from family_inputs import COUNTED, CountedRelease
from family_subject import conditioning_of
from meters import STRATEGIES, print_table

from diffsynth_lite.core.gradient import BlockPolicy
from diffsynth_lite.core.planning import Repeat, fewer_blocks
from diffsynth_lite.lora import find_target_layers
from diffsynth_lite.pipelines import load_family
from diffsynth_lite.pipelines.base.release_folder import write_release
from diffsynth_lite.training.planning import memory_count
from diffsynth_lite.training.planning.memory_count import MemoryCount, MemoryCounter, StepSettings

SHOWN = ("Qwen-Image", "Wan 2.1 T2V 14B", "FLUX.2 dev")
FORMATS = {"none": "bfloat16", "int8": "int8", "nf4": "nf4"}
CHECKED = ("every block", "offload every block and attention")
"""What happens to blocks where few are compared with all."""
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
    width, height, num_frames = release.pixels
    frames = f", {num_frames} frames" if num_frames > 1 else ""
    with counter_of(release) as counter:
        table = list(rows(counter))
        count = counter.count(next(iter(STEPS.values())))
        print_table(
            f"{release.name}, {width} x {height}{frames}. A LoRA of rank {RANK} and AdamW take "
            f"{gib(count.lora + count.optimizer)} GiB, which are in the columns from none on.",
            table,
        )


def every_block(kinds: Sequence[Any], _: int) -> tuple[list[int], list[Repeat]]:
    """All blocks, in place of ``fewer_blocks``."""
    return list(range(len(kinds))), []


def whole_row(release: CountedRelease, name: str) -> dict[str, str]:
    """A count with a few blocks beside that with all."""
    found, seconds = [], []
    for chosen in (fewer_blocks, every_block):
        with counter_of(release) as counter, patch.object(memory_count, "fewer_blocks", chosen):
            began = time.process_time()
            found.append(counter.count(STEPS[name]))
            seconds.append(time.process_time() - began)
    few, whole = found
    return {
        "model": release.name,
        "blocks": HEADINGS[name],
        "few, GiB": f"{few.device / GIB:.3f}",
        "all, GiB": f"{whole.device / GIB:.3f}",
        "bytes apart": f"{max(abs(few.device - whole.device), abs(few.host - whole.host)):,}",
        "few, s": f"{seconds[0]:.1f}",
        "all, s": f"{seconds[1]:.1f}",
    }


def gib(num_bytes: float) -> str:
    """``num_bytes`` in GiB, with one decimal."""
    return f"{num_bytes / GIB:,.1f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", action="append", choices=[release.name for release in COUNTED])
    parser.add_argument("--whole", action="store_true", help="count all blocks, too")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    names = options.model or ([release.name for release in COUNTED] if options.whole else SHOWN)
    releases = [release for release in COUNTED if release.name in names]
    if options.whole:
        print_table("A few blocks and all.", [whole_row(one, name) for one in releases for name in CHECKED])
        return
    for release in releases:
        print_release(release)


if __name__ == "__main__":
    main()
