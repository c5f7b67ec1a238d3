"""This file takes an update apart where another program has several layers as one, and joins it again."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from diffsynth_lite.lora.layer_names import Original
from diffsynth_lite.lora.pairs import LoraPair


def split(pair: LoraPair, place: Original) -> dict[str, LoraPair]:
    """The updates of the layers of diffusers that another program has as one; together they are the same.

    Where each of them has its own share of the rank, as trainers join what was trained apart, they get these
    shares, without what is zero in both matrices: all of it, where a layer had none. Else all have the first
    matrix in common.
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
        if rank := _used_rank(down, part):
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
    if len(pairs) == len(place.layers) and all(_same(first.down, other.down) for other in others):
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
    """The matrices of each part, where its outputs use its own equal share of the rank alone; else None.

    Zeros everywhere say nothing of shares.
    """
    if len(down) % len(ups) or not any(up.any() for up in ups):
        return None
    shares = [up.chunk(len(ups), dim=1) for up in ups]
    foreign = (block for i, row in enumerate(shares) for j, block in enumerate(row) if i != j)
    if any(block.any() for block in foreign):
        return None
    return [(part, shares[i][i]) for i, part in enumerate(down.chunk(len(ups)))]


def _used_rank(down: Tensor, up: Tensor) -> int:
    """The rank without what is zero in both matrices at its end."""
    used = (down.any(dim=1) | up.any(dim=0)).nonzero()
    return int(used.max()) + 1 if len(used) else 0


def _swapped(up: Tensor) -> Tensor:
    return torch.cat(up.chunk(2)[::-1])


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)
