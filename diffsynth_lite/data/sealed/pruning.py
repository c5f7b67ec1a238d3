"""This file deletes what a cache's folder holds beside entries, once nothing reads it."""

import re
from collections.abc import Collection
from pathlib import Path

from diffsynth_lite.data.cache import Pruned, delete, is_abandoned, is_young
from diffsynth_lite.data.sealed.mapped_file import is_mapped
from diffsynth_lite.data.sealed.orders import locked_orders

_ORDER = re.compile(r"[0-9a-f]{32}\.order")
_TABLE = re.compile(r"([0-9a-f]{32})\.table")


def prune_orders(folder: Path, *, dry_run: bool) -> Pruned:
    """Delete the orders of :class:`StoredOrders` that no process has mapped and that are older than a day.

    Locks may not be seen by other machines, hence the day. A run draws again what it finds gone.
    """
    if not folder.is_dir():
        return Pruned(num_files=0, num_bytes=0)
    with locked_orders(folder):
        idle = [path for path in _files(folder) if _ORDER.fullmatch(path.name) and _is_idle(path)]
        return delete([*idle, *_abandoned(folder)], dry_run=dry_run)


def prune_tables(folder: Path, keep: Collection[str], *, dry_run: bool) -> Pruned:
    """Delete the copies of tables that :meth:`Seal.map_table` made, as :func:`prune_orders` does orders.

    Args:
        folder: holds them.
        keep: digests of the seals whose tables stay.
        dry_run: only count.
    """
    tables = [(path, _TABLE.fullmatch(path.name)) for path in _files(folder)]
    idle = [path for path, name in tables if name and name[1] not in keep and _is_idle(path)]
    return delete([*idle, *_abandoned(folder)], dry_run=dry_run)


def prune_unfinished(folder: Path, *, dry_run: bool) -> Pruned:
    """Delete what killed writers left in a folder more than a day ago."""
    return delete(_abandoned(folder), dry_run=dry_run)


def _is_idle(path: Path) -> bool:
    return not is_young(path) and not is_mapped(path)


def _abandoned(folder: Path) -> list[Path]:
    return [path for path in _files(folder) if is_abandoned(path)]


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []
