"""This file finds a model's layers by the names of other programs, and splits and joins updates for them.

Trainers and other programs share few names: those of diffusers, those of the code that a model was first
released with, in which several layers may be one, and these again with ``_`` in place of each dot, as kohya's
trainers write them.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from diffsynth_lite.lora.spelling import Spelling
from diffsynth_lite.lora.updates import LoraPair

_NUMBER = "*"


@dataclass(frozen=True)
class Original:
    """The layers of diffusers that correspond to one layer of another program.

    Attributes:
        layers: names in diffusers' model; several are fused in the other program, with their outputs in this
            order.
        rows: their shares of the outputs.
        halves_swapped: whether, where it has two outputs for each input, their halves come in the other order
            there, as scale and shift do in the last normalisation of some models.
        is_gated: whether its halves, a value and its gate, come in the other order there at any size.
        growth: outputs for each input, if that distinguishes a model from others with the same names.
    """

    layers: tuple[str, ...]
    rows: tuple[int, ...] = (1,)
    halves_swapped: bool = False
    is_gated: bool = False
    growth: int | None = None

    def fits(self, num_inputs: int, num_outputs: int) -> bool:
        """Whether the layer can have this size."""
        return self.growth is None or num_outputs == self.growth * num_inputs

    def swaps(self, num_inputs: int, num_outputs: int) -> bool:
        """Whether the halves of its outputs are swapped for a layer of this size."""
        return self.is_gated or (self.halves_swapped and num_outputs == 2 * num_inputs)


def renamed(layer: str, growth: int | None = None) -> Original:
    """One layer with another name."""
    return Original((layer,), growth=growth)


def fused(*layers: str, rows: tuple[int, ...] | None = None) -> Original:
    """Several layers that are fused; a share of 1 in ``rows`` has as many outputs as inputs."""
    rows = rows or (1,) * len(layers)
    return Original(layers, rows, growth=sum(rows))


def under(prefix: str, names: Iterable[str]) -> tuple[str, ...]:
    """Names of what is in one part of a model, after the name of the part."""
    return tuple(f"{prefix}.{name}" for name in names)


def renamed_in(prefixes: Mapping[str, str], names: Mapping[str, str]) -> dict[str, Original]:
    """Layers by their other names, from those within some blocks, and what the blocks are called."""
    return {
        f"{other}.{name}": renamed(f"{ours}.{layer}")
        for other, ours in prefixes.items()
        for name, layer in names.items()
    }


@dataclass(frozen=True, kw_only=True)
class LayerNames:
    """The layers of one component that files may have a LoRA on. ``*`` in a name is the number of a block.

    Attributes:
        layers: diffusers' names.
        kohya: the layers with another name in kohya's trainers, by that name with dots.
        others: further names in files, which are read and never written.
        num_blocks: of the released model, by their lists, where its layers are called as those of a model
            that is trained more: a file of as many is taken to be of this one, and no other is.
    """

    layers: tuple[str, ...]
    kohya: Mapping[str, Original] = field(default_factory=dict)
    others: Mapping[str, Original] = field(default_factory=dict)
    num_blocks: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def spelled(cls, spelling: Spelling, layers: tuple[str, ...]) -> "LayerNames":
        """Layers of a transformer that kohya's trainers call by the names of one spelling."""
        names = ((layer, spelling.key(f"transformer.{layer}").partition(".")[2]) for layer in layers)
        return cls(layers=layers, kohya={name: renamed(layer) for layer, name in names if name != layer})

    def find(self, name: str) -> Original | None:
        """The layers of a name in a file, with dots or ``_`` between its parts; None if unknown."""
        parts = _parts(name)
        for pattern, place in self._by_outline.get(_outline(parts), ()):
            if (numbers := _numbers(parts, pattern)) is not None:
                return _filled(place, numbers)
        return None

    def in_kohya(self, layer: str) -> tuple[str, Original]:
        """The name of a layer of diffusers in kohya's trainers, and all layers of that name."""
        parts = _parts(layer)
        for pattern, name, place in self._kohya_by_outline.get(_outline(parts), ()):
            if (numbers := _numbers(parts, pattern)) is not None:
                return _fill(name, numbers), _filled(place, numbers)
        return layer, renamed(layer)

    @cached_property
    def _by_outline(self) -> dict[tuple[str, ...], list[tuple[tuple[str, ...], Original]]]:
        found = defaultdict(list)
        own = ((layer, renamed(layer)) for layer in self.layers)
        for name, place in (*own, *self.kohya.items(), *self.others.items()):
            found[_outline(_parts(name))].append((_parts(name), place))
        return found

    @cached_property
    def _kohya_by_outline(self) -> dict[tuple[str, ...], list[tuple[tuple[str, ...], str, Original]]]:
        found = defaultdict(list)
        for name, place in self.kohya.items():
            for layer in place.layers:
                found[_outline(_parts(layer))].append((_parts(layer), name, place))
        return found


LoraLayers: TypeAlias = Mapping[str, LayerNames]
"""Of each component of a pipeline; the one that removes noise is the first."""


def _parts(name: str) -> tuple[str, ...]:
    # Also for files with dots: some trainers write dots where the model has "_".
    return tuple(name.replace(".", "_").split("_"))


def _outline(parts: tuple[str, ...]) -> tuple[str, ...]:
    """The parts of a name or pattern without its numbers, which all candidates for it share."""
    return tuple(_NUMBER if part.isdecimal() else part for part in parts)


def _numbers(parts: tuple[str, ...], pattern: tuple[str, ...]) -> list[str] | None:
    """Values of the stars of a pattern of the same outline; None if a fixed number differs."""
    pairs = list(zip(parts, pattern, strict=True))
    if any(wanted not in (_NUMBER, part) for part, wanted in pairs):
        return None
    return [part for part, wanted in pairs if wanted == _NUMBER]


def _fill(pattern: str, numbers: list[str]) -> str:
    for number in numbers:
        pattern = pattern.replace(_NUMBER, number, 1)
    return pattern


def _filled(place: Original, numbers: list[str]) -> Original:
    return replace(place, layers=tuple(_fill(layer, numbers) for layer in place.layers))


def split(pair: LoraPair, place: Original) -> dict[str, LoraPair]:
    """The updates of the layers of diffusers that are fused in another program; together they are the same.

    Where each of them has its own share of the rank, as trainers join layers that were trained separately,
    they get these shares, without rows that are zero in both matrices: none is left of a layer that had no
    LoRA. Else all have the first matrix in common.
    """
    up = _swapped(pair.up) if place.swaps(pair.down.shape[1], len(pair.up)) else pair.up
    if len(place.layers) == 1:
        return {place.layers[0]: LoraPair(down=pair.down, up=up, alpha=pair.alpha)}
    unit = up.shape[0] // sum(place.rows)
    ups = torch.split(up, [unit * share for share in place.rows])
    own = _own_shares(pair.down, ups)
    if own is None:
        return {
            layer: LoraPair(down=pair.down, up=part, alpha=pair.alpha)
            for layer, part in zip(place.layers, ups, strict=True)
        }
    parts = {}
    for layer, (down, part) in zip(place.layers, own, strict=True):
        used = (down.any(dim=1) | part.any(dim=0)).nonzero()
        if rank := int(used.max()) + 1 if len(used) else 0:
            alpha = pair.alpha / pair.rank * rank
            parts[layer] = LoraPair(down=down[:rank], up=part[:, :rank], alpha=alpha)
    return parts


def join(pairs: Mapping[str, LoraPair], place: Original) -> LoraPair:
    """The opposite of :func:`split`: one update, of layers that may lack some of ``place``.

    Those with the same first matrix share it; else each gets its own share of the rank, which is then that
    of all layers of ``place`` together.
    """
    if len(place.layers) == 1:
        (pair,) = pairs.values()
        up = _swapped(pair.up) if place.swaps(pair.down.shape[1], len(pair.up)) else pair.up
        return LoraPair(down=pair.down, up=up, alpha=pair.alpha)
    if len({pair.alpha / pair.rank for pair in pairs.values()}) > 1:
        pairs = {layer: pair.with_alpha(pair.rank) for layer, pair in pairs.items()}
    first, *others = pairs.values()
    if len(pairs) == len(place.layers) and all(torch.equal(first.down, other.down) for other in others):
        up = torch.cat([pairs[layer].up for layer in place.layers])
        return LoraPair(down=first.down, up=up, alpha=first.alpha)
    rank = max(pair.rank for pair in pairs.values())
    layer, pair = next(iter(pairs.items()))
    unit = pair.up.shape[0] // place.rows[place.layers.index(layer)]
    down = first.down.new_zeros(rank * len(place.layers), first.down.shape[1])
    up = first.up.new_zeros(unit * sum(place.rows), rank * len(place.layers))
    for index, name in enumerate(place.layers):
        if name in pairs:
            column, row = rank * index, unit * sum(place.rows[:index])
            part = pairs[name]
            down[column : column + part.rank] = part.down
            up[row : row + part.up.shape[0], column : column + part.rank] = part.up
    return LoraPair(down=down, up=up, alpha=first.alpha / first.rank * down.shape[0])


def _own_shares(down: Tensor, ups: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]] | None:
    """The matrices of each part, where its outputs use only its own equal share of the rank; else None."""
    if len(down) % len(ups) or not any(up.any() for up in ups):  # all zeros: no shares can be known
        return None
    shares = [up.chunk(len(ups), dim=1) for up in ups]
    foreign = (block for i, row in enumerate(shares) for j, block in enumerate(row) if i != j)
    if any(block.any() for block in foreign):
        return None
    return [(part, shares[i][i]) for i, part in enumerate(down.chunk(len(ups)))]


def _swapped(up: Tensor) -> Tensor:
    return torch.cat(up.chunk(2)[::-1])
