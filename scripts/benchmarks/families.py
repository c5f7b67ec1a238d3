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
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from meters import STRATEGIES, EngineMethod, Meter, TrainedModel, mebibytes, meter_for, print_table, take_step
from peft import LoraConfig
from torch import Tensor, nn

from diffsynth_lite.core.gradient import BlockPolicy, BlockStrategy, gradient_engine
from diffsynth_lite.lora import find_target_layers
from diffsynth_lite.lora.layers import use_lora_linear
from diffsynth_lite.pipelines import ModelFamily, family_names, load_family, releases_of
from diffsynth_lite.pipelines.base.model_function import INPUT
from diffsynth_lite.pipelines.base.release_folder import write_release
from diffsynth_lite.releases import Release

META = torch.device("meta")
NUM_BLOCKS = 4
"""Of each block list. Three of them are counted, and two: the last one has layers without an adapter."""
Kept = tuple[int, int]
"""Bytes that are kept between forward and backward on the device, and in host memory."""
_HEADINGS = ("none", "every", "offload", "every, save att.", "every, offload att.", "offload, save att.")
HEADINGS = dict(zip(STRATEGIES, (*_HEADINGS, "offload both"), strict=True))


class FamilySubject(TrainedModel):
    """What a family trains, on the meta device, with a LoRA on its default target modules and a batch of one.

    Args:
        family: in a folder that holds the settings of the model to build.
        release: at whose size it generates.

    Attributes:
        kinds: block lists, and blocks outside of a list, that stand for all.
        left_out: see ``use_blocks``.
    """

    def __init__(self, family: ModelFamily, release: Release) -> None:
        (component,) = family.trained[:1]
        model = family.parts_of(family.empty_transformer())[component]
        self._blocks = {name: model.get_submodule(name) for name in family.block_lists}
        self._keep_few(model)
        layers = find_target_layers(
            model, family.default_target_modules, unused_modules=family.unused_modules(model)
        )
        lora = LoraConfig(r=16, lora_alpha=16, target_modules=layers)
        use_lora_linear(lora)
        super().__init__(model, META, torch.bfloat16, lora)
        self._family = type(family)(family.folder, trained=[component])
        self.left_out: tuple[int, ...] = ()
        width, height, _ = release.size
        shape = family.latents_shape(*release.size)
        self._noisy = torch.randn(1, *shape, device=META)
        self._sigma = torch.full((1,), 0.5, device=META)
        given = family.example_conditioning(shape)
        assert given is not None, f"{type(family).__name__} has no example of its conditioning"
        if family.record_kinds == ("edit",):
            given |= {f"{INPUT}0": torch.ones(family.latents_shape(width, height, 1))}
        self._conditioning = given
        self.num_tokens = family.num_tokens(shape)

    def _keep_few(self, model: nn.Module) -> None:
        """Leave so few blocks in each list."""
        first: dict[tuple[Any, ...], str] = {}
        for name, blocks in self._blocks.items():
            one = blocks
            if isinstance(blocks, nn.ModuleList):
                one, last = blocks[0], len(blocks) - 1
                alike = [blocks[i] if i < last else deepcopy(one) for i in range(NUM_BLOCKS - 1)]
                self._blocks[name] = nn.ModuleList([*alike, blocks[-1]])
            model.set_submodule(name, self._blocks[name])
            # Of the many numbered lists of a UNet one stands for those that are alike.
            shapes = tuple(weight.shape for weight in one.parameters())
            first.setdefault((re.sub(r"\d+", "", name), shapes), name)
        self.kinds = tuple(first.values())

    def fewer_and_more(self, block_list: str) -> tuple[int, int]:
        """Two numbers of blocks, of which the second has one more."""
        is_list = isinstance(self._blocks[block_list], nn.ModuleList)
        return (NUM_BLOCKS - 2, NUM_BLOCKS - 1) if is_list else (0, 1)

    def use_blocks(self, block_list: str, num_blocks: int) -> None:
        """From now on run the first ``num_blocks`` blocks of one list, and the first block of the others.

        The places of those left out that are called all the same, in call order, are then in ``left_out``.

        Args:
            block_list: its name, or that of a block outside of a list.
            num_blocks: of it; 0 is for a block outside of a list.
        """
        place, left_out = 0, []
        for name, blocks in self._blocks.items():
            number, used = num_blocks if name == block_list else 1, blocks
            if isinstance(blocks, nn.ModuleList):
                used = blocks[:number]
            elif not number:
                used = _NoBlock(blocks.out_channels)
                left_out.append(place)
            self.model.set_submodule(name, used)
            place += len(used) if isinstance(used, nn.ModuleList) else 1
        self.left_out = tuple(left_out)

    def loss(self) -> Tensor:
        """A forward pass through the family, by the switches of the engine in scope."""
        with self.attention():
            velocity = self._family.predict(self.model, self._noisy, self._sigma, [self._conditioning])
        return velocity.float().square().mean()


class _NoBlock(nn.Module):
    """Stands for a ResNet block: gives something of the same shape, and keeps nothing for backward."""

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self._num_channels = num_channels

    def forward(self, hidden_bchw: Tensor, *_: Any) -> Tensor:
        return hidden_bchw[:, : self._num_channels].clone()


def counted_families() -> list[str]:
    """The families with a release whose blocks can be counted by a few of them."""
    names = [name for name in family_names() if releases_of(name)]
    return [name for name in names if load_family(name).is_counted_by_few_blocks]


@contextmanager
def subject_of(family: str, release: Release) -> Iterator[FamilySubject]:
    """The model of a release, whose settings are in a folder meanwhile."""
    with TemporaryDirectory() as path:
        yield FamilySubject(load_family(family)(write_release(release, Path(path))), release)


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
            (device, host), (more_device, more_host) = counts
            counted[block_list][name] = more_device - device, more_host - host
    return counted


def count_kept(subject: FamilySubject, method: FamilyMethod, meter: Meter) -> Kept:
    """What a second step keeps; in the first an engine learns what blocks share."""
    with meter:
        take_step(subject, method)
        meter.start()
        loss = method.loss(subject)
        kept = meter.num_bytes, method.host_bytes()
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
            HEADINGS[strategy]: mebibytes(device) + (f" ({mebibytes(host)})" if host else "")
            for strategy, (device, host) in by_strategy.items()
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
        # What is trained comes first.
        trained, *_ = release.components.values()
        print(f"{release.name}: {trained.source}.")


if __name__ == "__main__":
    main()
