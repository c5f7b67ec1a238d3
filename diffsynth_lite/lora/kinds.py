"""This file defines each kind of adapter: peft's settings for it, and the tensors that train."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from peft import LoKrConfig, LoraConfig, PeftConfig
from peft.tuners.lokr.layer import factorization
from torch import Tensor, nn

from diffsynth_lite.lora.layers import COMFYUI_SCALE, MAGNITUDE, LokrLinear, fill_magnitudes, use_lora_linear

_NEAR_SQUARE = -1
"""peft's value for splitting the sides into factors that are as near to each other as possible."""
_ORTHOGONAL_SIZE = 0.1
"""Scale of the two matrices that start orthogonal to each other, as in peft."""


@dataclass(frozen=True)
class TrainedTensor:
    """One of the trained tensors of a layer's adapter.

    Attributes:
        starts_at_zero: whether all its numbers are zero before the first step.
    """

    shape: tuple[int, ...]
    starts_at_zero: bool = False

    @property
    def size(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class AdapterKind(ABC):
    """A kind of adapter, with the tensors that it trains for each frozen layer.

    Attributes:
        matrices: the ends of trained parameters' names, after their layer's: first matrices, then second
            ones; kinds without such pairs have one entry.
        undecayed: the same for those that no weight decay may pull to zero.
        derived: the same for vectors (outputs,) in fp32 that are computed when a file is written.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    matrices: ClassVar[tuple[str, ...]]
    undecayed: ClassVar[tuple[str, ...]] = ()
    derived: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def config(
        self, layers: Sequence[str], *, rank: int, alpha: float, dropout: float, **patterns: Mapping[str, Any]
    ) -> PeftConfig:
        """peft's settings of an adapter.

        Args:
            patterns: ``rank_pattern`` and ``alpha_pattern``.
        """

    @abstractmethod
    def tensors(self, num_outputs: int, num_inputs: int, rank: int) -> dict[str, TrainedTensor]:
        """The trained tensors of one layer, by the part of peft's names after the layer's."""

    @abstractmethod
    def start(
        self, model: nn.Module, layers: Sequence[str], adapter: str, device: torch.device | None
    ) -> None:
        """Change the initial values of peft's adapter on a model, in fp32, where the kind needs others.

        Args:
            device: to read frozen weights on; None is where they are.
        """

    def num_constants(self, num_outputs: int) -> int:
        """Number of values in fp32 that are stored with a layer and not trained."""
        return 0


@dataclass(frozen=True)
class Lora(AdapterKind):
    """Two matrices of low rank, whose product is added to the weight (Hu et al. 2021, arXiv:2106.09685).

    Attributes:
        is_orthogonal: whether both matrices start with numbers, orthogonal to each other so that their
            product is zero, but for rounding; otherwise the second one starts at zero.
    """

    name, title = "lora", "LoRA"
    matrices = (".lora_A", ".lora_B")
    is_orthogonal: bool = False

    def config(
        self, layers: Sequence[str], *, rank: int, alpha: float, dropout: float, **patterns: Mapping[str, Any]
    ) -> PeftConfig:
        config = LoraConfig(
            r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=list(layers), **patterns
        )
        use_lora_linear(config)
        return config

    def tensors(self, num_outputs: int, num_inputs: int, rank: int) -> dict[str, TrainedTensor]:
        up = TrainedTensor((num_outputs, rank), starts_at_zero=not self.is_orthogonal)
        return {".lora_A.weight": TrainedTensor((rank, num_inputs)), ".lora_B.weight": up}

    def start(
        self, model: nn.Module, layers: Sequence[str], adapter: str, device: torch.device | None
    ) -> None:
        if not self.is_orthogonal:
            return
        for name in layers:
            layer: Any = model.get_submodule(name)
            down, up = (matrices[adapter].weight for matrices in (layer.lora_A, layer.lora_B))
            num_outputs, rank = up.shape
            for matrix, values in zip(
                (down, up), _orthogonal_pair(num_outputs, rank, down.shape[1]), strict=True
            ):
                matrix.data.copy_(values)


@dataclass(frozen=True)
class Dora(Lora):
    """A LoRA and the norm of each row of the weight (Liu et al. 2024, arXiv:2402.09353)."""

    name, title = "dora", "DoRA"
    undecayed = (MAGNITUDE,)
    derived = (COMFYUI_SCALE,)

    def config(
        self, layers: Sequence[str], *, rank: int, alpha: float, dropout: float, **patterns: Mapping[str, Any]
    ) -> PeftConfig:
        config = super().config(layers, rank=rank, alpha=alpha, dropout=dropout, **patterns)
        config.use_dora = True
        return config

    def tensors(self, num_outputs: int, num_inputs: int, rank: int) -> dict[str, TrainedTensor]:
        return super().tensors(num_outputs, num_inputs, rank) | {MAGNITUDE: TrainedTensor((num_outputs,))}

    def start(
        self, model: nn.Module, layers: Sequence[str], adapter: str, device: torch.device | None
    ) -> None:
        super().start(model, layers, adapter, device)
        fill_magnitudes(model, layers, adapter, device)

    def num_constants(self, num_outputs: int) -> int:
        return num_outputs


@dataclass(frozen=True)
class Lokr(AdapterKind):
    """The Kronecker product of two matrices, of which the larger has a low rank (Yeh et al. 2023,
    arXiv:2309.14859).

    Where the rank is at least half the longer side of the larger matrix, that one is trained whole.

    Attributes:
        factor: rows and columns of the smaller matrix, where they divide those of the weight; None takes the
            divisors nearest to their square roots.
    """

    name, title = "lokr", "LoKr"
    matrices = (".lokr_",)
    factor: int | None = None

    def config(
        self, layers: Sequence[str], *, rank: int, alpha: float, dropout: float, **patterns: Mapping[str, Any]
    ) -> PeftConfig:
        assert not dropout, "peft drops whole layers of a LoKr, or rows, and no inputs"
        return LoKrConfig(
            r=rank,
            alpha=alpha,
            decompose_factor=self._factor,
            # As LyCORIS: the larger matrix starts at zero. In peft's own way it would be the smaller one.
            init_weights="lycoris",
            target_modules=list(layers),
            **patterns,
        )

    @property
    def _factor(self) -> int:
        return _NEAR_SQUARE if self.factor is None else self.factor

    def tensors(self, num_outputs: int, num_inputs: int, rank: int) -> dict[str, TrainedTensor]:
        (outer_rows, rows), (outer_columns, columns) = (
            factorization(side, self._factor) for side in (num_outputs, num_inputs)
        )
        tensors = {".lokr_w1": TrainedTensor((outer_rows, outer_columns))}
        if rank >= max(rows, columns) / 2:
            return tensors | {".lokr_w2": TrainedTensor((rows, columns), starts_at_zero=True)}
        last = TrainedTensor((rank, columns), starts_at_zero=True)
        return tensors | {".lokr_w2_a": TrainedTensor((rows, rank)), ".lokr_w2_b": last}

    def start(
        self, model: nn.Module, layers: Sequence[str], adapter: str, device: torch.device | None
    ) -> None:
        for name in layers:
            # peft accepts patterns of layers in the settings of a LoRA, but not of a LoKr.
            model.get_submodule(name).__class__ = LokrLinear


LORA = Lora()
"""The default kind."""


def _orthogonal_pair(num_outputs: int, rank: int, num_inputs: int) -> tuple[Tensor, Tensor]:
    """Matrices (rank, inputs) and (outputs, rank) in fp32 whose product is zero but for rounding.

    As peft starts them (https://datta0.github.io/posts/rethink-lora-init/#orthogonal-initialisation), whose
    own are in the base's dtype, in which the product is further from zero, or in none, where that is
    quantised.
    """
    basis = torch.linalg.qr(torch.randn(rank, rank)).Q
    down = torch.randn(num_inputs, rank // 2) @ basis[0::2]
    up = torch.randn(num_outputs, rank // 2) @ basis[1::2]
    return _ORTHOGONAL_SIZE * down.T, _ORTHOGONAL_SIZE * up
