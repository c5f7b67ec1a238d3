"""A released model of a family with a few blocks and a batch of one, ready for training steps."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import LoraConfig
from subjects import TrainedModel
from torch import Tensor, nn

from diffsynth_lite.lora import find_target_layers
from diffsynth_lite.lora.layers import use_lora_linear
from diffsynth_lite.pipelines import ModelFamily, family_names, load_family, releases_of
from diffsynth_lite.pipelines.base.model_function import INPUT
from diffsynth_lite.pipelines.base.release_folder import write_release
from diffsynth_lite.releases import Release

META = torch.device("meta")
NUM_BLOCKS = 4
"""Of each block list. Three of them are counted, and two: the last one has layers without an adapter."""


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
