"""This file finds the layers of a model by the names that other programs have for them.

Trainers and programs that draw share few names: those of diffusers, those of the code that a model was first
released with, in which several layers may be one, and these again with ``_`` in place of each dot, as kohya's
trainers write them.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

_NUMBER = "*"


@dataclass(frozen=True)
class Original:
    """Which layers of diffusers one layer of another program is.

    Attributes:
        layers: names in diffusers' model; several are one layer there, with their outputs in this order.
        rows: shares that they have of its outputs.
        halves_swapped: whether, where it has two outputs for each input, their halves come in the other order
            there, as scale and shift do in the last normalisation of some models.
        growth: outputs for each input, where that tells a model from others with the same names.
    """

    layers: tuple[str, ...]
    rows: tuple[int, ...] = (1,)
    halves_swapped: bool = False
    growth: int | None = None

    def fits(self, num_inputs: int, num_outputs: int) -> bool:
        """Whether it can be of this size."""
        return self.growth is None or num_outputs == self.growth * num_inputs

    def swaps(self, num_inputs: int, num_outputs: int) -> bool:
        """Whether the halves of its outputs are swapped, if it is of this size."""
        return self.halves_swapped and num_outputs == 2 * num_inputs


def renamed(layer: str, growth: int | None = None) -> Original:
    """One layer that is called otherwise."""
    return Original((layer,), growth=growth)


def fused(*layers: str, rows: tuple[int, ...] | None = None) -> Original:
    """Several layers that are one, those with a share of 1 in ``rows`` with as many outputs as inputs."""
    rows = rows or (1,) * len(layers)
    return Original(layers, rows, growth=sum(rows))


@dataclass(frozen=True, kw_only=True)
class LayerNames:
    """The layers of one component that files may have a LoRA on. ``*`` in a name is the number of a block.

    Attributes:
        layers: diffusers' names.
        kohya: those layers that kohya's trainers call otherwise, by their names with dots.
        others: further names in files, which are read and never written.
        num_blocks: of the released model, by their lists, where its layers are called as those of a model
            that is trained more: a file of as many is taken to be of this one, and no other is.
    """

    layers: tuple[str, ...]
    kohya: Mapping[str, Original] = field(default_factory=lambda: MappingProxyType({}))
    others: Mapping[str, Original] = field(default_factory=lambda: MappingProxyType({}))
    num_blocks: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def find(self, name: str) -> Original | None:
        """What a name in a file stands for, with dots or ``_`` between its parts; None where nothing does."""
        parts = _parts(name)
        for pattern, place in self._by_outline.get(_outline(parts), ()):
            if (numbers := _numbers(parts, pattern)) is not None:
                return _filled(place, numbers)
        return None

    def in_kohya(self, layer: str) -> tuple[str, Original]:
        """What kohya's trainers call a layer of diffusers, and which layers that is."""
        parts = _parts(layer)
        for pattern, name, place in self._kohya_by_outline.get(_outline(parts), ()):
            if (numbers := _numbers(parts, pattern)) is not None:
                return _fill(name, numbers), _filled(place, numbers)
        return layer, renamed(layer)

    @cached_property
    def _by_outline(self) -> dict[tuple[str, ...], list[tuple[tuple[str, ...], Original]]]:
        found = defaultdict(list)
        for name, place in self._all():
            found[_outline(_parts(name))].append((_parts(name), place))
        return found

    @cached_property
    def _kohya_by_outline(self) -> dict[tuple[str, ...], list[tuple[tuple[str, ...], str, Original]]]:
        found = defaultdict(list)
        for name, place in self.kohya.items():
            for layer in place.layers:
                found[_outline(_parts(layer))].append((_parts(layer), name, place))
        return found

    def _all(self) -> Iterator[tuple[str, Original]]:
        yield from ((layer, renamed(layer)) for layer in self.layers)
        yield from self.kohya.items()
        yield from self.others.items()


def _parts(name: str) -> tuple[str, ...]:
    # Files with dots are read so, too: some trainers write dots where the model has "_".
    return tuple(name.replace(".", "_").split("_"))


def _outline(parts: tuple[str, ...]) -> tuple[str, ...]:
    """The parts of a name or pattern without its numbers, which all candidates for it share."""
    return tuple(_NUMBER if part.isdecimal() else part for part in parts)


def _numbers(parts: tuple[str, ...], pattern: tuple[str, ...]) -> list[str] | None:
    """What the stars of a pattern of the same outline are in a name; None where a fixed number differs."""
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
