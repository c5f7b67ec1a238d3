"""This file looks after all entries of a cache: which are there and whole, and which nobody needs."""

import re
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from diffsynth_lite.data.cache import TensorCache
from diffsynth_lite.data.file_memory import FileMemory, FileState

_FOLDER = re.compile(r"[0-9a-f]{2}")
_ENTRY = re.compile(r"([0-9a-f]{64})\.safetensors")
_DAMAGED = re.compile(r"[0-9a-f]{64}\.damaged")
_UNFINISHED = re.compile(r"\.[0-9a-f]{32}\.tmp")
_UNFINISHED_AGE_S = 24 * 3600
"""Younger ones may be in the hands of a process that writes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """What a check of all entries found.

    Attributes:
        num_entries: entries that were read.
        damaged: keys of those that were damaged, and are set aside.
    """

    num_entries: int
    damaged: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruned:
    """Files that were deleted: how many, and their size in bytes."""

    num_files: int
    num_bytes: int


def is_present(cache: TensorCache, memory: FileMemory, key: str) -> bool:
    """Whether the cache holds a whole entry; one that is known and unchanged is not read for that."""
    try:
        state = FileState.of(cache.path(key))
    except FileNotFoundError:
        return False
    if memory.recall(_name(key), state) is not None:
        return True
    if cache.read(key) is None:
        return False
    memory.remember(_name(key), state, "")
    return True


def remember_written(cache: TensorCache, memory: FileMemory, key: str) -> None:
    """Note that an entry was just written, so that the next start need not read it."""
    memory.remember(_name(key), FileState.of(cache.path(key)), "")


def verify(cache: TensorCache, progress: Callable[[int, int], None]) -> Verified:
    """Read all entries; damaged ones are set aside, and made again by the next run that needs them.

    Args:
        cache: to check.
        progress: is told after each entry how many are read, and how many there are.
    """
    keys = list(_keys(cache))
    damaged = []
    for place, key in enumerate(keys, start=1):
        is_there = cache.path(key).exists()  # else another process has pruned it meanwhile
        if is_there and cache.read(key) is None:
            damaged.append(key)
        progress(place, len(keys))
    return Verified(num_entries=len(keys), damaged=tuple(damaged))


def prune(cache: TensorCache, keep: Collection[str], *, dry_run: bool) -> Pruned:
    """Delete the entries that are not kept, damaged ones, and what killed processes left unfinished.

    Nothing else in the folder is touched.

    Args:
        cache: to prune.
        keep: keys of the entries that stay; a set, when they are many.
        dry_run: only count.
    """
    num_files = num_bytes = 0
    for path in _files(cache):
        if _is_kept(path, keep):
            continue
        num_files += 1
        num_bytes += path.stat().st_size
        if not dry_run:
            path.unlink(missing_ok=True)
    return Pruned(num_files=num_files, num_bytes=num_bytes)


def _is_kept(path: Path, keep: Collection[str]) -> bool:
    if entry := _ENTRY.fullmatch(path.name):
        return entry[1] in keep or not entry[1].startswith(path.parent.name)
    if _DAMAGED.fullmatch(path.name):
        return False
    is_unfinished = _UNFINISHED.fullmatch(path.name) is not None
    return not (is_unfinished and time.time() - path.stat().st_mtime > _UNFINISHED_AGE_S)


def _keys(cache: TensorCache) -> Iterator[str]:
    for path in _files(cache):
        if entry := _ENTRY.fullmatch(path.name):
            yield entry[1]


def _files(cache: TensorCache) -> Iterator[Path]:
    """Files in the folders that entries lie in."""
    if not cache.folder.is_dir():
        return
    for folder in sorted(cache.folder.iterdir()):
        if _FOLDER.fullmatch(folder.name) and folder.is_dir() and not folder.is_symlink():
            yield from sorted(path for path in folder.iterdir() if path.is_file() and not path.is_symlink())


def _name(key: str) -> str:
    return f"entry {key}"
