"""A released model of a family with a few blocks and a batch of one, ready for training steps."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from family_inputs import CountedRelease
from peft import LoraConfig
from subjects import TrainedModel
from torch import Tensor, nn

from diffsynth_lite.lora import find_target_layers
from diffsynth_lite.lora.layers import use_lora_linear
from diffsynth_lite.pipelines import Conditioning, ModelFamily, load_family
from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily
from diffsynth_lite.pipelines.base.model_function import INPUT
from diffsynth_lite.pipelines.base.release_folder import full_config, write_release
from diffsynth_lite.releases.release import Pixels

NUM_BLOCKS = 4
"""Of each block list. Three of them are counted, and two: the last one has layers without an adapter."""


class FamilySubject(TrainedModel):
    """What is trained of a family, with a LoRA on its default target modules, and a batch of one.

    Args:
        family: in a folder that holds the config of the model to build.
        release: whose inputs it gets.
        pixels: of what it makes.
        device: cpu, cuda or meta.
        dtype: of the weights; the LoRA is in float32.
    """

    def __init__(
        self,
        family: DiffusersFamily,
        release: CountedRelease,
        pixels: Pixels,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        torch.manual_seed(0)
        (component,) = family.trained
        with device:
            model = family.component_class(component).from_config(family.folder.component_config(component))
        layers = find_target_layers(
            model,
            family.default_target_modules,
            unused_modules=family.unused_modules(model),
        )
        lora = LoraConfig(r=16, lora_alpha=16, target_modules=layers)
        use_lora_linear(lora)
        super().__init__(model, device, dtype, lora)
        self._family = family
        self._blocks = {name: model.get_submodule(name) for name in family.block_lists}
        self.counted = release.counted or tuple(self._blocks)
        self.left_out: tuple[int, ...] = ()
        shape = family.latents_shape(*pixels)
        self._noisy = torch.randn(1, *shape, device=device)
        self._sigma = torch.full((1,), 0.5, device=device)
        self._conditioning = conditioning_of(family, release, pixels)
        self.num_tokens = family.num_tokens(shape)

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
            velocity = self._family.predict(
                self.model,
                self._noisy,
                self._sigma,
                [self._conditioning],
            )
        return velocity.float().square().mean()


class _NoBlock(nn.Module):
    """Stands for a ResNet block: gives something of the same shape, and keeps nothing for backward."""

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self._num_channels = num_channels

    def forward(self, hidden_bchw: Tensor, *_: Any) -> Tensor:
        return hidden_bchw[:, : self._num_channels].clone()


def conditioning_of(family: ModelFamily, release: CountedRelease, pixels: Pixels) -> Conditioning:
    """What the family's encoders would give for one sample, of ones."""
    width, height, _ = pixels
    given = family.example_conditioning(family.latents_shape(*pixels))
    assert given is not None, f"{release.family} does not say it"
    image = torch.ones(family.latents_shape(width, height, 1))
    return given | {f"{INPUT}{place}": image for place in range(release.num_inputs)}


@contextmanager
def family_of(release: CountedRelease, changes: Mapping[str, Any]) -> Iterator[ModelFamily]:
    """The family of a release, in a folder with its config, and a few blocks.

    Args:
        release: whose config it is.
        changes: to that config.
    """
    depths = dict.fromkeys(release.depths, NUM_BLOCKS)
    with TemporaryDirectory() as path:
        family = load_family(release.family)(write_release(release.release, Path(path)))
        (name,) = family.trained
        config = {**full_config(release.release.components[name]), **depths, **release.with_few, **changes}
        (Path(path) / name / "config.json").write_text(json.dumps(config))
        yield family
