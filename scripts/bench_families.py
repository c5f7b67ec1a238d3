"""What a block of each model family keeps under each policy, and what that costs in time.

Bytes are those of the released models at full width, with a few blocks and random weights, counted exactly
on torch's meta device: what one block more adds on the device between forward and backward, and, in brackets,
in host memory. Tokens are those of what is made, without prompt and inputs. A LoRA of rank 16 trains on the
family's default target modules, through the family's own ``predict``. Times are those of a step of
a narrower model on this machine, as a ratio to no checkpointing; steps take turns. On a CPU it is the
process's own time, which other programs on the machine do not lengthen.

All blocks are treated alike: kept (none), recomputed (every), or recomputed with their inputs in host memory
(park); beside that, the outputs of their attention are kept on the device (save att.) or parked (park att.).

    python scripts/bench_families.py [--family NAME ...] [--rounds 0]
"""

import argparse
import importlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from bench_meters import (
    TREATMENTS,
    EngineMethod,
    Meter,
    measure_times,
    mebibytes,
    meter_for,
    print_table,
    take_step,
)
from bench_releases import RELEASES, Pixels, Release
from bench_trained_model import TrainedModel
from peft import LoraConfig
from torch import Tensor, nn

from diffsynth_lite.core.gradient import BlockPolicy, Treatment, gradient_engine
from diffsynth_lite.lora import find_target_layers
from diffsynth_lite.pipelines import Conditioning, ModelFamily, PipelineFolder, family_names, load_family
from diffsynth_lite.pipelines.contract.input_pictures import INPUT

NUM_BLOCKS = 4
"""Of each block list. Three of them are counted, and two: the last one has layers without an adapter."""

HEADINGS = dict(
    zip(
        TREATMENTS,
        ("none", "every", "park", "every, save att.", "every, park att.", "park, save att.", "park both"),
        strict=True,
    )
)


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What is kept between forward and backward.

    Attributes:
        device: bytes on the device.
        host: bytes in host memory.
    """

    device: int
    host: int


class FamilySubject(TrainedModel):
    """A family's transformer with a LoRA on its default target modules, and a batch of one.

    Args:
        family: in a folder whose transformer's config is the one to build.
        release: whose inputs it gets.
        pixels: of what it makes.
        device: cpu, cuda or meta.
        dtype: of the weights; the LoRA is in float32.
    """

    def __init__(
        self,
        family: ModelFamily,
        release: Release,
        pixels: Pixels,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        torch.manual_seed(0)
        config = family.folder.component_config("transformer")
        with device:
            model = type(family).transformer_class.from_config(config)
        layers = find_target_layers(
            model,
            family.default_target_modules,
            unused_modules=family.unused_modules(model),
        )
        super().__init__(model, device, dtype, LoraConfig(r=16, target_modules=layers))
        self._family = family
        self._blocks = {name: list(model.get_submodule(name)) for name in family.block_lists}
        shape = family.latents_shape(*pixels)
        self._noisy = torch.randn(1, *shape, device=device)
        self._sigma = torch.full((1,), 0.5, device=device)
        self._conditioning = conditioning_of(family, release, pixels)
        self.num_tokens = family.num_tokens(shape)

    @property
    def block_lists(self) -> tuple[str, ...]:
        """Names of the block lists, in call order."""
        return tuple(self._blocks)

    def use_blocks(self, num_blocks: Mapping[str, int]) -> None:
        """From now on run only the first blocks of each list, as many as ``num_blocks`` says."""
        for block_list, number in num_blocks.items():
            setattr(self.model, block_list, nn.ModuleList(self._blocks[block_list][:number]))

    def loss(self) -> Tensor:
        """A forward pass through the family, with both gradient switches on."""
        with self.attention():
            velocity = self._family.predict(
                self.model,
                self._noisy,
                self._sigma,
                [self._conditioning],
                use_gradient_checkpointing=True,
                use_gradient_checkpointing_offload=True,
            )
        return velocity.float().square().mean()


class FamilyMethod(EngineMethod):
    """All blocks of a family under one treatment, through an engine of their own."""

    def loss(self, subject: FamilySubject) -> Tensor:
        """The forward pass of ``subject``."""
        with gradient_engine(self.engine):
            return subject.loss()


def conditioning_of(family: ModelFamily, release: Release, pixels: Pixels) -> Conditioning:
    """What the family's encoders would give for one sample, of ones."""
    width, height, _ = pixels
    inputs = {
        f"{INPUT}{place}": family.latents_shape(width, height, 1) for place in range(release.num_inputs)
    }
    return {name: torch.ones(shape) for name, shape in {**release.prompt, **inputs}.items()}


@contextmanager
def family_of(name: str, release: Release, changes: Mapping[str, Any]) -> Iterator[ModelFamily]:
    """A family in a folder with the released config, and a few blocks.

    Args:
        name: of the family.
        release: whose config it is.
        changes: to that config.
    """
    family_class = load_family(name)
    depths = dict.fromkeys(release.depths, NUM_BLOCKS)
    with TemporaryDirectory() as path:
        # The other components of the tiny pipeline have the real ones' channels and compression.
        importlib.import_module(family_class.__module__).tiny().save_pretrained(path)
        config = {**release.config, **depths, **changes}
        (Path(path) / "transformer" / "config.json").write_text(json.dumps(config))
        yield family_class(PipelineFolder(path=Path(path)))


def methods_of(
    subject: FamilySubject, meter: Meter, treatments: Mapping[str, Treatment]
) -> list[FamilyMethod]:
    """One for each treatment of all blocks."""
    return [
        FamilyMethod(name, BlockPolicy(selected=treatment), subject, meter)
        for name, treatment in treatments.items()
    ]


def count_bytes(
    subject: FamilySubject, treatments: Mapping[str, Treatment] = TREATMENTS
) -> dict[str, dict[str, Kept]]:
    """What one block more keeps, by block list and treatment; the other block lists have one block."""
    meter = meter_for(subject.device)
    counted: dict[str, dict[str, Kept]] = {}
    for block_list in subject.block_lists:
        counted[block_list] = {}
        for method in methods_of(subject, meter, treatments):
            counts = []
            for num_blocks in (NUM_BLOCKS - 2, NUM_BLOCKS - 1):
                subject.use_blocks({**dict.fromkeys(subject.block_lists, 1), block_list: num_blocks})
                counts.append(count_kept(subject, method, meter))
            fewer, more = counts
            counted[block_list][method.name] = Kept(
                device=more.device - fewer.device, host=more.host - fewer.host
            )
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


def bytes_rows(name: str, device: torch.device, *, is_small: bool = False) -> list[dict[str, str]]:
    """The rows of a family in the table of bytes, one for each kind of its blocks."""
    release = RELEASES[name]
    pixels = release.small_pixels if is_small else release.pixels
    with family_of(name, release, release.small if is_small else {}) as family:
        subject = FamilySubject(family, release, pixels, device, torch.bfloat16)
        counted = count_bytes(subject)
    return [
        {"family": name, "block of": block_list, "tokens": f"{subject.num_tokens:,}"}
        | {
            HEADINGS[treatment]: mebibytes(kept.device) + (f" ({mebibytes(kept.host)})" if kept.host else "")
            for treatment, kept in by_treatment.items()
        }
        for block_list, by_treatment in counted.items()
    ]


def time_row(name: str, device: torch.device, num_rounds: int) -> dict[str, str]:
    """The row of a family in the table of times."""
    release = RELEASES[name]
    with family_of(name, release, release.small) as family:
        subject = FamilySubject(family, release, release.small_pixels, device, torch.float32)
        methods = methods_of(subject, meter_for(subject.device), TREATMENTS)
        # Other programs on the machine take none of a process's own time.
        clock = time.process_time if device.type == "cpu" else time.perf_counter
        seconds = measure_times(subject, methods, num_warmup=1, num_rounds=num_rounds, clock=clock)
    reference = seconds["none"]
    ratios = {HEADINGS[treatment]: f"{taken / reference:.2f}" for treatment, taken in seconds.items()}
    return {"family": name, "ms, none": f"{1000 * reference:.0f}", **ratios}


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--family", action="append", choices=sorted(RELEASES), help="default: all (repeatable)"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="timed steps of each kind; 0: no times (default: %(default)s)"
    )
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
    """Measure and print both tables, and say which families have no released config here."""
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    names = [name for name in family_names() if name in (options.family or RELEASES)]
    meta = torch.device("meta")
    rows = [row for name in names for row in bytes_rows(name, meta, is_small=options.small)]
    print_table("MiB that one block more keeps on the device, and in brackets in host memory.", rows)
    for name in names:
        print(f"{name}: {RELEASES[name].name}; {RELEASES[name].source}.")
    if options.rounds:
        times = [time_row(name, torch.device(options.device), options.rounds) for name in names]
        print_table(f"Time of a step on {options.device}, as a ratio to none, and that in ms.", times)
    if missing := [name for name in family_names() if name not in RELEASES]:
        print(f"No released config yet in bench_releases.py: {', '.join(missing)}.")


if __name__ == "__main__":
    main()
