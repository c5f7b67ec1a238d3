"""This file takes the tensors out of a block's nested arguments and puts tensors back in their places.

``torch.utils.checkpoint`` shows its saved-tensor hooks, its RNG handling and its device inference only the
tensors that are positional arguments of their own. A tensor in a keyword or in a tuple is therefore never
offloaded, and on CUDA its dropout draws another mask in the recompute. ``torch.utils._pytree`` would help
with neither dataclasses nor subclasses of dict (diffusers' and transformers' outputs are both), so the walk
is our own.
"""

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


class _Place:
    """Marks the place of a tensor that was taken out; not None, which output classes treat as absent."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


_CONSTANTS = frozenset([bool, int, float, str, type(None), torch.dtype, torch.device])


def take_tensors(tree: Any) -> tuple[list[Tensor], Any]:
    """Separate the tensors of ``tree`` from everything else.

    Args:
        tree: any nesting of tuples (also named), lists, dicts (also subclasses) and dataclasses. It is not
            changed. Containers must not contain themselves.

    Returns:
        The distinct tensors in the order of their first appearance, and a template for ``put_tensors`` that
        refers to none of them. A container without tensors is in the template itself, not as a copy.
    """
    tensors: list[Tensor] = []
    places: dict[int, _Place] = {}

    def mark(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in places:
            places[id(leaf)] = _Place(len(tensors))
            tensors.append(leaf)
        return places[id(leaf)]

    return tensors, _replace_leaves(tree, mark)


def put_tensors(template: Any, tensors: Sequence[Tensor]) -> Any:
    """A new tree like the one given to ``take_tensors``, with ``tensors`` in the places of its tensors.

    Args:
        template: from ``take_tensors``; it can be used any number of times.
    """
    return _replace_leaves(template, lambda leaf: tensors[leaf.index] if isinstance(leaf, _Place) else leaf)


def _replace_leaves(tree: Any, replacement: Callable[[Any], Any]) -> Any:
    """``tree`` with ``replacement(leaf)`` for every leaf; a container in which nothing changes is left."""
    # Four walks in every block call: to ask of each leaf whether it is a dataclass took half of their time.
    kind = type(tree)
    if kind in _CONSTANTS:
        return tree
    if kind is Tensor or kind is _Place:
        return replacement(tree)
    if isinstance(tree, tuple):
        items = [_replace_leaves(item, replacement) for item in tree]
        if all(map(operator.is_, items, tree)):
            return tree
        make = getattr(type(tree), "_make", type(tree))
        return make(items)
    entries = _entries(tree)
    if entries is None:
        return replacement(tree)
    changed = {key: new for key, old in entries if (new := _replace_leaves(old, replacement)) is not old}
    if not changed:
        return tree
    rebuilt = copy.copy(tree)
    for key, value in changed.items():
        if isinstance(rebuilt, dict | list):
            rebuilt[key] = value
        else:
            # Past the ban of a frozen dataclass. Its __init__ is not run: it may refuse or derive values.
            object.__setattr__(rebuilt, key, value)
    return rebuilt


def _entries(tree: Any) -> Iterable[tuple[Any, Any]] | None:
    """(key, value) of each entry of a dict, list or dataclass instance; None for anything else."""
    if isinstance(tree, dict):
        return tree.items()
    if isinstance(tree, list):
        return enumerate(tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = (field.name for field in dataclasses.fields(tree))
        return [(name, getattr(tree, name)) for name in names if hasattr(tree, name)]
    return None
