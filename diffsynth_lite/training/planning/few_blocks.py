"""This file has a few blocks of a model stand for all of them, under any policy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

from torch import nn

from diffsynth_lite.core.gradient import BlockPolicy, blocks_in
from diffsynth_lite.core.planning import Repeat, fewer_blocks


@dataclass(frozen=True, kw_only=True)
class FewBlocks:
    """Blocks of a model that stand for all of them under a policy.

    Attributes:
        kept: their places in each list of blocks.
        kinds: a number for each of them, the same for blocks that are alike.
        policy: what happens to them.
        repeats: which of them stand for more. All else is the same for models that differ in the length of
            their runs alone.
    """

    kept: tuple[tuple[int, ...], ...]
    kinds: tuple[int, ...]
    policy: BlockPolicy
    repeats: tuple[Repeat, ...]


class BlockLists:
    """The lists of blocks of a model, and which of their blocks are alike.

    Args:
        model: may be on the meta device.
        names: of its lists, as in ``blocks_in``.
        ranks: of the layers with adapters, by their full names in the model: of each adapter that can be on
            one, 0 for none.
        are_alike: whether any of them are; else each stands for itself.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        ranks: Mapping[str, tuple[int, ...]],
        *,
        are_alike: bool = True,
    ) -> None:
        self._names, self._layers = tuple(names), tuple(ranks)
        known: dict[Any, int] = {}
        self._kinds = [
            [
                known.setdefault(_kind(block, f"{name}.", ranks) if are_alike else name, len(known))
                for block, name in _named_blocks(model, block_list)
            ]
            for block_list in names
        ]
        self.num_blocks = sum(map(len, self._kinds))

    def few(self, policy: BlockPolicy, *, num_neighbours: int) -> FewBlocks:
        """The blocks that stand for all under a policy.

        Args:
            policy: of the whole model.
            num_neighbours: as in ``fewer_blocks``.
        """
        is_chosen = [False] * self.num_blocks
        for place in policy.selection(self.num_blocks):
            is_chosen[place] = True
        all_kept, kinds = [], list[tuple[int, bool]]()
        repeats = list[Repeat]()
        place = 0
        for of_list in self._kinds:
            treated = list(zip(of_list, is_chosen[place : place + len(of_list)], strict=True))
            kept, found = fewer_blocks(treated, num_neighbours)
            repeats += [replace(repeat, first=repeat.first + len(kinds)) for repeat in found]
            kinds += [treated[index] for index in kept]
            all_kept.append(tuple(kept))
            place += len(of_list)
        selected = tuple(compress(range(len(kinds)), (chosen for _, chosen in kinds)))
        return FewBlocks(
            kept=tuple(all_kept),
            kinds=tuple(kind for kind, _ in kinds),
            policy=replace(policy, select="only", n=None, blocks=selected),
            repeats=tuple(repeats),
        )

    def keep_in(self, model: nn.Module, few: FewBlocks) -> dict[str, str]:
        """Leave the other blocks out of a model like this one.

        Returns:
            The names that the layers with adapters then have, and those that they had.
        """
        names = {name: name for name in self._layers}
        for block_list, of_list, kept in zip(self._names, self._kinds, few.kept, strict=True):
            if len(kept) < len(of_list):
                blocks = blocks_in(model, [block_list])
                model.set_submodule(block_list, nn.ModuleList([blocks[index] for index in kept]))
                names = _renamed(names, block_list, kept)
        return names


def _named_blocks(model: nn.Module, block_list: str) -> list[tuple[nn.Module, str]]:
    blocks = blocks_in(model, [block_list])
    if not isinstance(model.get_submodule(block_list), nn.ModuleList):
        return [(blocks[0], block_list)]
    return [(block, f"{block_list}.{index}") for index, block in enumerate(blocks)]


def _kind(block: nn.Module, prefix: str, ranks: Mapping[str, tuple[int, ...]]) -> tuple[Any, ...]:
    """Equal for blocks that are alike: their class, shapes of weights, and ranks of layers with adapters."""
    shapes = tuple((name, tuple(weight.shape)) for name, weight in block.named_parameters())
    adapted = frozenset(
        (name.removeprefix(prefix), rank) for name, rank in ranks.items() if name.startswith(prefix)
    )
    return type(block), shapes, adapted


def _renamed(names: Mapping[str, str], block_list: str, kept: Sequence[int]) -> dict[str, str]:
    """Names of layers, and those that they had, after some blocks of a list were left out."""
    renamed, prefix = dict[str, str](), f"{block_list}."
    for name, old in names.items():
        if not name.startswith(prefix):
            renamed[name] = old
            continue
        index, _, rest = name.removeprefix(prefix).partition(".")
        if int(index) in kept:
            renamed[f"{prefix}{kept.index(int(index))}.{rest}"] = old
    return renamed
