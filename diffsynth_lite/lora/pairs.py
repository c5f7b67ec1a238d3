"""This file has a LoRA as pairs of matrices, one a layer: between an adapter of peft and a file's tensors."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from diffsynth_lite.lora.spelling import Spelling

LoraFile: TypeAlias = tuple[dict[str, Tensor], dict[str, Any]]
"""An adapter of peft: tensors by peft's names, such as ``to_q.lora_A.weight``, and peft's settings."""

_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"


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

    def distance(self, other: "LoraPair") -> float:
        """Frobenius norm of the difference of two updates of a layer; zero where the matrices are equal."""
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
        half_ulp = torch.finfo(dtype).eps / 2
        half_smallest = half_ulp * torch.finfo(dtype).tiny
        fold = 2 * torch.finfo(torch.float32).eps
        norm_down, norm_up = float(down.norm()), float(up.norm())
        off_down = half_ulp * norm_down + half_smallest * math.sqrt(down.numel())
        off_up = (half_ulp + fold) * norm_up + half_smallest * math.sqrt(up.numel())
        return off_up * (norm_down + off_down) + norm_up * off_down


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


def adapter_of(pairs: Mapping[str, LoraPair]) -> LoraFile:
    """The opposite of :func:`pairs_of`, without a prefix, with the rank and alpha of the first for all.

    Updates of another alpha are scaled to that one, so that they stay the same.
    """
    first = next(iter(pairs.values()))
    tensors: dict[str, Tensor] = {}
    for layer, pair in pairs.items():
        tensors |= {f"{layer}{_DOWN}": pair.down, f"{layer}{_UP}": pair.with_alpha(first.alpha).up}
    return tensors, {"r": first.rank, "lora_alpha": first.alpha}


def tensors_of(
    pairs: Mapping[str, LoraPair], spelling: Spelling, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """What a file holds in a spelling, by name.

    Args:
        dtype: of the matrices. Alpha, where it is not folded, stays in fp32.
    """
    tensors = {}
    for layer, pair in pairs.items():
        if (alpha := spelling.alpha(layer)) is None:
            pair = pair.with_alpha(pair.rank)
        else:
            tensors[alpha] = torch.tensor(float(pair.alpha))
        for ending, matrix in zip(spelling.endings, (pair.down, pair.up), strict=True):
            tensors[f"{spelling.key(layer)}{ending}"] = matrix.to(dtype).contiguous()
    return tensors
