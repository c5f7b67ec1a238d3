"""This file defines what a model family offers for LoRA files."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from diffsynth_lite.lora.kinds import LORA, AdapterKind
from diffsynth_lite.lora.known_names import LoraLayers
from diffsynth_lite.lora.spelling import DIFFUSERS, Spelling
from diffsynth_lite.lora.updates import LayerUpdate, LoraFile, updates_of


class LoraFormat(ABC):
    """How adapters of a family become files that diffusers and ComfyUI read, and files become adapters.

    Attributes:
        lora_spelling: the names of layers in its files; diffusers' by default.
        lora_layers: the layers that files of other programs may have, by all their names; a family that gives
            none reads only files with diffusers' names on the layers that it trains.
        pipeline_loads_adapter: whether its pipeline loads files of the kind of adapter that is trained.
    """

    lora_spelling: Spelling = DIFFUSERS
    lora_layers: LoraLayers = MappingProxyType({})
    pipeline_loads_adapter: bool = True

    @abstractmethod
    def save_lora(
        self,
        folder: Path,
        tensors: Mapping[str, torch.Tensor],
        settings: Mapping[str, Any],
        *,
        dtype: torch.dtype = torch.float32,
    ) -> list[Path]:
        """Write an adapter in ``lora_spelling``.

        Args:
            tensors: the adapter, by peft's names in the model that is trained.

        Returns:
            The files written, one for each expert.
        """

    @abstractmethod
    def read_lora(self, place: Path) -> LoraFile:
        """Read an adapter from its folder or its one file, of this or another program.

        A family without ``lora_layers`` reads what its diffusers pipeline does.

        Returns:
            Tensors by peft's names in the model that is trained, and ``lora_alpha`` for all of them.
        """

    def loaded_lora(self, folder: Path) -> dict[str, LayerUpdate]:
        """The update of each layer after the family's diffusers pipeline has loaded the files of
        ``save_lora``.

        For a kind that the pipeline does not load, the update in the file.

        Returns:
            By the names of the layers in the model that is trained.
        """
        return updates_of(*self.read_lora(folder))

    def settle_lora_spelling(
        self, model: nn.Module, layers: Sequence[str], *, rank: int, kind: AdapterKind = LORA
    ) -> None:
        """Make ``lora_spelling`` one in which diffusers loads an adapter on these layers.

        Logs if diffusers cannot load this kind of adapter, and warns of layers for which ComfyUI has no name.

        Args:
            model: may be on the meta device.
        """
        return  # diffusers' own names are what a pipeline loads
