"""What training takes of a device and of host memory, under every combination of settings, for releases.

Counted on torch's meta device at full size, weights included, for a LoRA on the family's default layers and a
batch of one, under bf16 autocast as on CUDA. A row is a format of weights and how many blocks are streamed,
a column what happens to all blocks, as in families.py. Each number is the most on the device at once, in GiB,
and in brackets that in host memory. What kernels, the allocator and CUDA itself take comes on top.

    python scripts/benchmarks/memory_tables.py [--model NAME ...]
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from families import HEADINGS
from family_inputs import COUNTED, CountedRelease
from family_subject import conditioning_of
from meters import STRATEGIES, print_table

from diffsynth_lite.core.gradient import BlockPolicy
from diffsynth_lite.lora import find_target_layers
from diffsynth_lite.pipelines import load_family
from diffsynth_lite.pipelines.base.release_folder import write_release
from diffsynth_lite.training.planning.memory_count import MemoryCount, MemoryCounter
from diffsynth_lite.training.planning.step import StepSettings

SHOWN = ("Qwen-Image", "Wan 2.1 T2V 14B", "FLUX.2 dev")
FORMATS = {"none": "bfloat16", "int8": "int8", "nf4": "nf4"}
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
        width, height, num_frames = release.pixels
        frames = f" x {num_frames}" if num_frames > 1 else ""
        count = counter.count(next(iter(STEPS.values())))
        print_table(
            f"{release.name}, {width} x {height}{frames}. A LoRA of rank {RANK} and AdamW take "
            f"{gib(count.lora + count.optimizer)} GiB, which are in the columns from none on.",
            table,
        )


def gib(num_bytes: float) -> str:
    """``num_bytes`` in GiB, with one decimal."""
    return f"{num_bytes / GIB:,.1f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", action="append", choices=sorted({one.name for one in COUNTED}))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for release in COUNTED:
        if release.name in (options.model or SHOWN):
            print_release(release)


if __name__ == "__main__":
    main()
