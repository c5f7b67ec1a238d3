"""This file has an adapter as the updates of layers, of a LoRA a pair of matrices each: between peft and
files."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from diffsynth_lite.lora.spelling import Spelling

LoraFile: TypeAlias = tuple[dict[str, Tensor], dict[str, Any]]
"""An adapter of peft: tensors by peft's names, such as ``to_q.lora_A.weight``, and peft's settings."""

_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"


class LayerUpdate(Protocol):
    """What an adapter of some kind does to the weight of one layer."""

    @property
    def sizes(self) -> tuple[int, int]:
        """Inputs and outputs of the layer."""

    @property
    def norm(self) -> float:
        """Frobenius norm of the update; of what a DoRA multiplies rows with, the norms beside it are not
        part."""

    def distance(self, other: Any) -> float:
        """Frobenius norm of the difference of two updates of a layer, which is zero where they are equal.

        It is infinite between those of different kinds.
        """

    def rounding_bound(self, dtype: torch.dtype) -> float:
        """Largest distance that writing the matrices in a dtype can put between this update and the
        file's."""

    def file_tensors(self, layer: str, spelling: Spelling, dtype: torch.dtype) -> dict[str, Tensor]:
        """What a file has of it, by name.

        Args:
            layer: its name, behind that of its component.
            dtype: of the matrices.
        """


@dataclass(frozen=True, kw_only=True, eq=False)
class LoraPair:
    """The update of one layer's weight: ``alpha / rank * up @ down``.

    Attributes:
        down: (rank, inputs).
        up: (outputs, rank).
        alpha: strength, times the rank.
    """

    down: Tensor
    up: Tensor
    alpha: float

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def sizes(self) -> tuple[int, int]:
        """Inputs and outputs of the layer."""
        return self.down.shape[1], self.up.shape[0]

    def with_alpha(self, alpha: float) -> "LoraPair":
        """The same update with another alpha, in ``up``; exact where the two are a power of two apart."""
        if alpha == self.alpha:
            return self
        return LoraPair(down=self.down, up=self.up.float() * (self.alpha / alpha), alpha=alpha)

    def _scaled(self) -> tuple[Tensor, Tensor]:
        """Two matrices in fp32 whose product is the update."""
        return self.down.float(), self.up.float() * (self.alpha / self.rank)

    @property
    def norm(self) -> float:
        """Frobenius norm of the update, without its product."""
        down, up = self._scaled()
        return _norm_of_product(up, down)

    def distance(self, other: Any) -> float:
        """Frobenius norm of the difference of two updates of a layer; zero where the matrices are equal."""
        if not isinstance(other, LoraPair):
            return math.inf
        (down, up), (other_down, other_up) = self._scaled(), other._scaled()
        if down.shape != other_down.shape:
            return _norm_of_product(torch.cat([up, -other_up], dim=1), torch.cat([down, other_down]))
        # Small numbers from the start: the difference of two products would be one of large ones.
        return _norm_of_product(
            torch.cat([other_up - up, up], dim=1), torch.cat([other_down, other_down - down])
        )

    def rounding_bound(self, dtype: torch.dtype) -> float:
        """Largest distance that writing the matrices in a dtype can put between this update and the file's.

        Each number is off by half its last place, or by half the smallest number that there is; ``up``, into
        which alpha is folded, in fp32 once more. ``|B' A' - B A| <= |B' - B| |A'| + |B| |A' - A|``.
        """
        down, up = self._scaled()
        norm_down, norm_up = float(down.norm()), float(up.norm())
        off_down = rounding_of(down, dtype)
        off_up = rounding_of(up, dtype) + FOLD * norm_up
        return off_up * (norm_down + off_down) + norm_up * off_down

    def file_tensors(self, layer: str, spelling: Spelling, dtype: torch.dtype) -> dict[str, Tensor]:
        """What a file has of it in a spelling, by name. Alpha, where it is not folded, stays in fp32."""
        alpha = spelling.alpha(layer)
        pair = self if alpha else self.with_alpha(self.rank)
        key, matrices = spelling.key(layer), (pair.down, pair.up)
        tensors = {} if alpha is None else {alpha: torch.tensor(float(pair.alpha))}
        for ending, matrix in zip(spelling.endings, matrices, strict=True):
            tensors[f"{key}{ending}"] = matrix.to(dtype).contiguous()
        return tensors


FOLD = 2 * torch.finfo(torch.float32).eps
"""Of a matrix that a number was multiplied into in fp32: how far it is off at most, relative to its norm."""


def rounding_of(matrix: Tensor, dtype: torch.dtype) -> float:
    """How far a matrix is off at most in a dtype, as a norm.

    Each number is off by half its last place, or by half the smallest number that there is.
    """
    half_ulp = torch.finfo(dtype).eps / 2
    half_smallest = half_ulp * torch.finfo(dtype).tiny
    return half_ulp * float(matrix.norm()) + half_smallest * math.sqrt(matrix.numel())


def _norm_of_product(left: Tensor, right: Tensor) -> float:
    """Frobenius norm of ``left @ right``, of which only products as wide as the rank are made."""
    squared = ((left.T @ left) * (right @ right.T)).sum()
    return math.sqrt(float(squared.clamp(min=0)))


def pairs_of(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any], prefix: str = ""
) -> dict[str, LoraPair]:
    """The pairs of an adapter, by layer.

    Args:
        tensors: by peft's names.
        settings: peft's; where they do not say ``lora_alpha`` it is the rank. ``alpha_pattern`` is by names
            of layers, as ``adapter_settings`` has it.
        prefix: of the names of its layers in a pipeline, such as ``transformer.``.
    """
    pairs = {}
    for name, down in tensors.items():
        if name.endswith(_DOWN):
            layer = name.removesuffix(_DOWN)
            of_all = settings.get("lora_alpha", down.shape[0])
            alpha = float(settings.get("alpha_pattern", {}).get(layer, of_all))
            pairs[f"{prefix}{layer}"] = LoraPair(down=down, up=tensors[f"{layer}{_UP}"], alpha=alpha)
    return pairs


def tensors_of(
    updates: Mapping[str, LayerUpdate], spelling: Spelling, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """What a file holds in a spelling, by name.

    Args:
        dtype: of the matrices.
    """
    tensors: dict[str, Tensor] = {}
    for layer, update in updates.items():
        tensors |= update.file_tensors(layer, spelling, dtype)
    return tensors
