"""This file defines the update of a layer by a LoRA, a DoRA or a LoKr, and converts it between peft and
files.

Sources for the tensors of a file: ComfyUI's ``comfy/weight_adapter/``, which multiplies a Kronecker product
with alpha over the rank where the file has a tensor for alpha and one of the two matrices is a product
itself, and with 1 otherwise; ``_create_lokr_config`` and ``_create_lora_config`` of diffusers.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from diffsynth_lite.lora.kinds import AdapterKind, Dora, Lokr, Lora
from diffsynth_lite.lora.layers import COMFYUI_SCALE, MAGNITUDE
from diffsynth_lite.lora.spelling import Spelling

LoraFile: TypeAlias = tuple[dict[str, Tensor], dict[str, Any]]
"""An adapter of peft: tensors by peft's names, such as ``to_q.lora_A.weight``, and peft's settings."""

_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"


class LayerUpdate(Protocol):
    """The update of one layer's weight by an adapter of some kind."""

    @property
    def sizes(self) -> tuple[int, int]:
        """Inputs and outputs of the layer."""

    @property
    def norm(self) -> float:
        """Frobenius norm of the update; of a DoRA without the norms of its rows."""

    def distance(self, other: Any) -> float:
        """Frobenius norm of the difference of two updates of a layer, which is zero where they are equal.

        It is infinite between those of different kinds.
        """

    def rounding_bound(self, dtype: torch.dtype) -> float:
        """Largest distance to the update in a file whose matrices are in a dtype."""

    def file_tensors(self, layer: str, spelling: Spelling, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors of a file for it, by name.

        Args:
            layer: component and name.
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
        return self.down.shape[1], self.up.shape[0]

    def with_alpha(self, alpha: float) -> "LoraPair":
        """The same update with another alpha, in ``up``; exact if the two differ by a power of two."""
        if alpha == self.alpha:
            return self
        return LoraPair(down=self.down, up=self.up.float() * (self.alpha / alpha), alpha=alpha)

    def _scaled(self) -> tuple[Tensor, Tensor]:
        """Two matrices in fp32 whose product is the update; of a convolution, its rows flattened."""
        return self.down.float().flatten(1), self.up.float().flatten(1) * (self.alpha / self.rank)

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
        # Small from the start: subtracting the two products would cancel large numbers.
        return _norm_of_product(
            torch.cat([other_up - up, up], dim=1), torch.cat([other_down, other_down - down])
        )

    def rounding_bound(self, dtype: torch.dtype) -> float:
        """``|B' A' - B A| <= |B' - B| |A'| + |B| |A' - A|``; alpha is folded into B in fp32 before."""
        down, up = self._scaled()
        norm_down, norm_up = float(down.norm()), float(up.norm())
        off_down = rounding_of(down, dtype)
        off_up = rounding_of(up, dtype) + FOLD * norm_up
        return off_up * (norm_down + off_down) + norm_up * off_down

    def file_tensors(self, layer: str, spelling: Spelling, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors of a file for it in a spelling, by name. Alpha, if it is not folded, stays in fp32."""
        alpha = spelling.alpha(layer)
        pair = self if alpha else self.with_alpha(self.rank)
        key, matrices = spelling.key(layer), (pair.down, pair.up)
        tensors = {} if alpha is None else {alpha: torch.tensor(float(pair.alpha))}
        for ending, matrix in zip(spelling.endings, matrices, strict=True):
            tensors[f"{key}{ending}"] = matrix.to(dtype).contiguous()
        return tensors


FOLD = 2 * torch.finfo(torch.float32).eps
"""Largest error of a matrix that was multiplied by a number in fp32, relative to its norm."""


def rounding_of(matrix: Tensor, dtype: torch.dtype) -> float:
    """Norm of the largest error of a matrix that is rounded to a dtype.

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
        settings: peft's; without ``lora_alpha`` it is the rank. ``alpha_pattern`` is by names of layers, as
            ``adapter_settings`` has it.
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
    """The tensors of a file in a spelling, by name."""
    tensors: dict[str, Tensor] = {}
    for layer, update in updates.items():
        tensors |= update.file_tensors(layer, spelling, dtype)
    return tensors


LOKR_NAME = re.compile(r"(?P<key>.*)\.lokr_w(?P<side>[12])(?P<part>|_a|_b)")
"""Name of a tensor of a LoKr."""

Factors: TypeAlias = tuple[Tensor, ...]
"""One matrix, or two whose product it is."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DoraUpdate:
    """A LoRA's update of a weight, whose rows then get new norms.

    Attributes:
        magnitude: the norms, (outputs,).
        comfyui: ComfyUI's ``dora_scale``, (outputs,); None where it is not known.
    """

    pair: LoraPair
    magnitude: Tensor
    comfyui: Tensor | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        return self.pair.sizes

    @property
    def norm(self) -> float:
        """Frobenius norm of the update of the pair; NaN or infinite where a norm of a row is."""
        return self.pair.norm + 0.0 * float(self.magnitude.abs().sum())

    def distance(self, other: Any) -> float:
        """Distance of the pairs; infinite if the magnitudes differ."""
        is_same = isinstance(other, DoraUpdate) and torch.equal(self.magnitude, other.magnitude)
        if is_same and self.comfyui is not None:
            is_same = other.comfyui is not None and torch.equal(self.comfyui, other.comfyui)
        return self.pair.distance(other.pair) if is_same else math.inf

    def rounding_bound(self, dtype: torch.dtype) -> float:
        """Bound of the pair: the magnitudes are in fp32 in a file of any dtype."""
        return self.pair.rounding_bound(dtype)

    def file_tensors(self, layer: str, spelling: Spelling, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors of a file for it: the magnitudes both for diffusers and for ComfyUI."""
        tensors = self.pair.file_tensors(layer, spelling, dtype)
        tensors[f"{spelling.key(layer)}{MAGNITUDE}"] = self.magnitude.float().contiguous()
        if self.comfyui is not None:
            # ComfyUI recognises magnitudes of outputs by the first axis.
            tensors[f"{spelling.key(layer)}{COMFYUI_SCALE}"] = self.comfyui.float().reshape(-1, 1)
        return tensors


@dataclass(frozen=True, kw_only=True, eq=False)
class LokrUpdate:
    """The update of a layer's weight: ``scale * kron(left, right)``.

    Attributes:
        left: of the smaller matrix.
        right: of the larger one.
        scale: alpha over rank, by which the file's own numbers were multiplied.
    """

    left: Factors
    right: Factors
    scale: float = 1.0

    @property
    def sizes(self) -> tuple[int, int]:
        return (
            self.left[-1].shape[1] * self.right[-1].shape[1],
            self.left[0].shape[0] * self.right[0].shape[0],
        )

    @property
    def inner_rank(self) -> int | None:
        """Rank of the matrix that is a product, the larger matrix first; None if both are whole."""
        return next((len(side[1]) for side in (self.right, self.left) if len(side) == 2), None)

    @property
    def norm(self) -> float:
        """Frobenius norm of the update: the product of those of the two matrices."""
        return _norm(self.folded[0]) * _norm(self.right)

    @property
    def folded(self) -> tuple[Factors, Factors]:
        """Left and right in fp32, with the scale in the first of them."""
        first, *rest = (matrix.float() for matrix in self.left)
        return (first if self.scale == 1 else first * self.scale, *rest), tuple(
            matrix.float() for matrix in self.right
        )

    def distance(self, other: Any) -> float:
        """Frobenius norm of the difference, by ``L R - L' R' = (L - L') R + L' (R - R')``."""
        if not isinstance(other, LokrUpdate) or _shapes(self) != _shapes(other):
            return math.inf
        (left, right), (other_left, other_right) = (
            tuple(map(_product, update.folded)) for update in (self, other)
        )
        one, two = left - other_left, right - other_right
        square = one.norm() ** 2 * right.norm() ** 2 + other_left.norm() ** 2 * two.norm() ** 2
        crossed = 2 * (one * other_left).sum() * (right * two).sum()
        return math.sqrt(float((square + crossed).clamp(min=0)))

    def rounding_bound(self, dtype: torch.dtype) -> float:
        """``|L' R' - L R| <= |L' - L| (|R| + |R' - R|) + |L| |R' - R|``."""
        left, right = self.folded
        off_left, off_right = _rounding(left, dtype), _rounding(right, dtype)
        return off_left * (_norm(right) + off_right) + _norm(left) * off_right

    def file_tensors(self, layer: str, spelling: Spelling, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors of a file for it, with the scale folded in and no tensor for alpha."""
        return _named(spelling.key(layer), self.folded, dtype)


def updates_of(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any], prefix: str = ""
) -> dict[str, LayerUpdate]:
    """The updates of an adapter of any kind, by layer; see :func:`pairs_of`."""
    updates: dict[str, LayerUpdate] = {}
    for name, pair in pairs_of(tensors, settings, prefix).items():
        layer = name.removeprefix(prefix)
        magnitude = tensors.get(f"{layer}{MAGNITUDE}")
        updates[name] = pair
        if magnitude is not None:
            scale = tensors.get(f"{layer}{COMFYUI_SCALE}")
            scale = None if scale is None else scale.flatten()
            updates[name] = DoraUpdate(pair=pair, magnitude=magnitude, comfyui=scale)
    for layer, update in lokr_updates(tensors).items():
        updates[f"{prefix}{layer}"] = replace(update, scale=_scale(settings, layer))
    return updates


def lokr_updates(tensors: Mapping[str, Tensor]) -> dict[str, LokrUpdate]:
    """The Kronecker products among tensors by the names of files or of peft, by layer, with a scale of 1.

    Raises:
        ValueError: those of a layer do not fit together.
    """
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if match := LOKR_NAME.fullmatch(name):
            layers.setdefault(match["key"], {})[match["side"] + match["part"]] = tensor
    updates = {}
    for layer, parts in layers.items():
        sides = [_factors(parts, side) for side in "12"]
        if len(parts) != sum(map(len, sides)) or not all(map(_fits, sides)):
            found = ", ".join(f"lokr_w{name} {tuple(parts[name].shape)}" for name in sorted(parts))
            raise ValueError(f"{layer} is not a LoKr, with {found}")
        updates[layer] = LokrUpdate(left=sides[0], right=sides[1])
    return updates


def adapter_of(updates: Mapping[str, LayerUpdate]) -> LoraFile:
    """The opposite of :func:`updates_of`, without a prefix, for updates of one kind.

    Pairs have the rank and alpha of the first for all; updates of another alpha are scaled to that one, so
    that they stay the same. The scale of a LoKr is folded, and no settings are left.
    """
    tensors: dict[str, Tensor] = {}
    settings: dict[str, Any] = {}
    for layer, update in updates.items():
        if isinstance(update, LokrUpdate):
            tensors |= _named(layer, update.folded, torch.float32)
            continue
        pair = _pair(update)
        settings = settings or {"r": pair.rank, "lora_alpha": pair.alpha}
        tensors |= {f"{layer}{_DOWN}": pair.down, f"{layer}{_UP}": pair.with_alpha(settings["lora_alpha"]).up}
        if isinstance(update, DoraUpdate):
            tensors[f"{layer}{MAGNITUDE}"] = update.magnitude
    return tensors, settings


def kind_of(update: LayerUpdate) -> type[AdapterKind]:
    """Kind of adapter of an update."""
    return {DoraUpdate: Dora, LokrUpdate: Lokr}.get(type(update), Lora)


def rank_of(update: LayerUpdate) -> int | None:
    """The rank of an update; None of a Kronecker product of whole matrices."""
    return update.inner_rank if isinstance(update, LokrUpdate) else _pair(update).rank


def _pair(update: LayerUpdate) -> LoraPair:
    pair = update.pair if isinstance(update, DoraUpdate) else update
    assert isinstance(pair, LoraPair)
    return pair


def trained_tensors(update: LayerUpdate, layer: str, *, rank: int, alpha: float) -> dict[str, Tensor]:
    """Tensors of the same update in an adapter with this rank and alpha, by peft's names, in fp32."""
    if isinstance(update, LokrUpdate):
        (first, *rest), right = update.folded
        return _named(layer, ((first / (alpha / rank), *rest), right), torch.float32)
    scaled = _pair(update).with_alpha(alpha)
    tensors = {f"{layer}{_DOWN}": scaled.down.float(), f"{layer}{_UP}": scaled.up.float()}
    return tensors | (
        {f"{layer}{MAGNITUDE}": update.magnitude.float()} if isinstance(update, DoraUpdate) else {}
    )


def _factors(parts: Mapping[str, Tensor], side: str) -> Factors:
    if side in parts:
        return (parts[side],)
    product = tuple(parts[name] for name in (f"{side}_a", f"{side}_b") if name in parts)
    return product if len(product) == 2 else ()


def _fits(factors: Factors) -> bool:
    if not factors or any(matrix.ndim != 2 for matrix in factors):
        return False
    return len(factors) == 1 or factors[0].shape[1] == factors[1].shape[0]


def _scale(settings: Mapping[str, Any], layer: str) -> float:
    if "alpha" not in settings:
        return 1.0
    alpha = settings.get("alpha_pattern", {}).get(layer, settings["alpha"])
    return float(alpha / settings.get("rank_pattern", {}).get(layer, settings["r"]))


def _named(key: str, factors: Sequence[Factors], dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        f"{key}.lokr_w{side}{part}": matrix.to(dtype).contiguous()
        for side, matrices in zip((1, 2), factors, strict=True)
        for part, matrix in zip(("",) if len(matrices) == 1 else ("_a", "_b"), matrices, strict=True)
    }


def _shapes(update: LokrUpdate) -> list[tuple[int, int]]:
    return [(side[0].shape[0], side[-1].shape[1]) for side in (update.left, update.right)]


def _product(factors: Factors) -> Tensor:
    return factors[0] if len(factors) == 1 else factors[0] @ factors[1]


def _norm(factors: Factors) -> float:
    return float(_product(factors).norm())


def _rounding(factors: Factors, dtype: torch.dtype) -> float:
    """Norm of the largest error of a product of matrices that are each rounded to a dtype."""
    norms = [float(matrix.norm()) for matrix in factors]
    offs = [rounding_of(matrix, dtype) + FOLD * norm for matrix, norm in zip(factors, norms, strict=True)]
    if len(factors) == 1:
        return offs[0]
    return offs[0] * (norms[1] + offs[1]) + norms[0] * offs[1]
