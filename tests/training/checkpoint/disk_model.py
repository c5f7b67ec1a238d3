"""A model of what a disk holds after a power cut, replayed from the calls that a writer made.

After a cut, what was synced is there. What was not may be there or not: a folder has its names as of its last
sync or as they were at the cut; a file not synced has its content, half of it, zeros, or nothing.
"""

import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

Tree = bytes | dict[str, "Tree"]
Operation = tuple[str, Path, Any]


@dataclass
class File:
    content: bytes = b""
    synced: bool = False


@dataclass
class Folder:
    entries: dict[str, "File | Folder"] = field(default_factory=dict)
    synced_entries: dict[str, "File | Folder"] = field(default_factory=dict)


def record(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> list[Operation]:
    """Run an action and return its calls that change a disk, in order."""
    operations: list[Operation] = []
    opened: dict[int, Path] = {}
    real = {name: getattr(os, name) for name in ("open", "write", "fsync", "mkdir", "rename", "replace")}
    real_rmtree = shutil.rmtree

    def open_(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        descriptor: int = real["open"](path, flags, *args, **kwargs)
        opened[descriptor] = Path(path)
        if flags & os.O_CREAT:
            operations.append(("create", Path(path), None))
        return descriptor

    def write(descriptor: int, data: bytes) -> int:
        # A short write, as a nearly full disk may make.
        written: int = real["write"](descriptor, data[: max(1, len(data) // 2)])
        operations.append(("write", opened[descriptor], bytes(data[:written])))
        return written

    def fsync(descriptor: int) -> None:
        real["fsync"](descriptor)
        operations.append(("sync", opened[descriptor], None))

    def mkdir(path: Any, *args: Any) -> None:
        real["mkdir"](path, *args)
        operations.append(("mkdir", Path(path), None))

    def rename(source: Any, target: Any) -> None:
        real["rename"](source, target)
        operations.append(("rename", Path(source), Path(target)))

    def replace(source: Any, target: Any) -> None:
        real["replace"](source, target)
        operations.append(("rename", Path(source), Path(target)))

    def rmtree(path: Any) -> None:
        operations.append(("rmtree", Path(path), None))
        real_rmtree(path)

    with monkeypatch.context() as patch:
        for replacement in (write, fsync, mkdir, rename, replace):
            patch.setattr(os, replacement.__name__, replacement)
        patch.setattr(os, "open", open_)
        patch.setattr(shutil, "rmtree", rmtree)
        action()
    return operations


def crash_states(root: Path, before: Tree, operations: Sequence[Operation]) -> Iterator[dict[str, Tree]]:
    """Everything that ``root`` may hold when the power is cut after the operations.

    Args:
        root: the operations on other paths are ignored.
        before: content of ``root`` before them, safely on the disk.
        operations: as recorded.
    """
    disk = _node(before)
    assert isinstance(disk, Folder)
    for name, path, argument in operations:
        if path.is_relative_to(root):
            _replay(disk, name, path.relative_to(root), argument)
    for state in _survivors(disk):
        assert isinstance(state, dict)
        yield state


def read_tree(path: Path) -> Tree:
    """Content of a folder, or of a file."""
    if path.is_file():
        return path.read_bytes()
    return {entry.name: read_tree(entry) for entry in path.iterdir()}


def write_tree(path: Path, tree: Tree) -> None:
    """The inverse of ``read_tree``."""
    if isinstance(tree, bytes):
        path.write_bytes(tree)
        return
    path.mkdir()
    for name, child in tree.items():
        write_tree(path / name, child)


def _node(tree: Tree) -> File | Folder:
    if isinstance(tree, bytes):
        return File(tree, synced=True)
    entries = {name: _node(child) for name, child in tree.items()}
    return Folder(entries, dict(entries))


def _replay(disk: Folder, name: str, path: Path, argument: Any) -> None:
    if name == "sync":
        _sync(_find(disk, path))
        return
    parent = _find(disk, path.parent)
    assert isinstance(parent, Folder)
    if name == "create":
        parent.entries[path.name] = File()
    elif name == "mkdir":
        parent.entries[path.name] = Folder()
    elif name == "rename":
        parent.entries[argument.name] = parent.entries.pop(path.name)
    elif name == "write":
        file = parent.entries[path.name]
        assert isinstance(file, File)
        file.content, file.synced = file.content + argument, False
    else:
        # Contents go at once and for good, the name only once its folder is synced: the worst order.
        removed = parent.entries.pop(path.name)
        assert isinstance(removed, Folder)
        removed.entries, removed.synced_entries = {}, {}


def _sync(node: File | Folder) -> None:
    if isinstance(node, File):
        node.synced = True
    else:
        node.synced_entries = dict(node.entries)


def _find(disk: Folder, path: Path) -> File | Folder:
    node: File | Folder = disk
    for part in path.parts:
        assert isinstance(node, Folder)
        node = node.entries[part]
    return node


def _survivors(node: File | Folder) -> list[Tree]:
    if isinstance(node, File):
        whole = node.content
        torn = [] if node.synced else [whole[: len(whole) // 2], bytes(len(whole)), b""]
        return list(dict.fromkeys([whole, *torn]))
    states: list[Tree] = []
    for entries in (node.entries, node.synced_entries):
        for children in itertools.product(*(_survivors(child) for child in entries.values())):
            state: Tree = dict(zip(entries, children, strict=True))
            if state not in states:
                states.append(state)
    return states
