"""This file reads checkpoints: complete is a folder whose manifest lists every file with its size and hash.

The manifest, ``COMPLETE``, is written last. Its first line is json, its second the sha256 of the first; so a
folder that is torn, altered or half copied cannot be taken for a checkpoint. Nothing in it is pickled.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from diffsynth_lite.errors import CheckpointError, UserError
from diffsynth_lite.files import parse_json, signed_line
from diffsynth_lite.run_folder.reading import read_run_file

SCHEMA = 1
MANIFEST_NAME = "COMPLETE"

_FILE_NAME = re.compile(r"(pictures/)?[A-Za-z0-9_-]+\.(safetensors|json|md|png|mp4)")
_FOLDER_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose every file has been verified."""

    path: Path
    step: int
    documents: dict[str, Any]

    @property
    def lineage(self) -> list[dict[str, Any]]:
        """The starts of the run up to the one that wrote this; none where an old version did."""
        lineage: list[dict[str, Any]] = self.documents["state"].get("lineage", [])
        return lineage

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Tensors of ``<name>.safetensors``, on the CPU.

        Raises:
            CheckpointError: the checkpoint has no such file, or it has become unreadable.
        """
        path = self.path / f"{name}.safetensors"
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error


@dataclass(frozen=True)
class ListedFile:
    """Size and hash (hexadecimal) of one file."""

    num_bytes: int
    sha256: str

    @classmethod
    def of(cls, content: bytes) -> "ListedFile":
        """The entry of a file with this content."""
        return cls(len(content), hashlib.sha256(content).hexdigest())


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Step and files of a checkpoint, the manifest itself not among them."""

    step: int
    files: Mapping[str, ListedFile]

    def encode(self) -> bytes:
        """Content of the manifest file."""
        files = {
            name: {"bytes": entry.num_bytes, "sha256": entry.sha256} for name, entry in self.files.items()
        }
        line = json.dumps({"schema": SCHEMA, "step": self.step, "files": files}, sort_keys=True).encode()
        return signed_line(line)


def folder_name(step: int) -> str:
    """Name of the checkpoint folder of a step, ``step-00000200``."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Step of a checkpoint folder's name; None for any other name."""
    match = _FOLDER_NAME.fullmatch(name)
    if match is None or folder_name(int(match[1])) != name:
        return None
    return int(match[1])


def is_file_name(name: str) -> bool:
    """Whether a name is a plain one of a checkpoint, a LoRA or its card, which cannot leave the folder."""
    return _FILE_NAME.fullmatch(name) is not None


def require_file_name(name: str) -> None:
    """Check that a name is one of :func:`is_file_name`."""
    if not is_file_name(name):
        raise ValueError(f"{name!r} is not a name for a file of a checkpoint")


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint and verify every byte of it."""
    try:
        return _read(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of a checkpoint, and compare names and sizes of its files with it (not the hashes).

    Raises:
        CheckpointError: names the damaged file.
        OSError: a file cannot be read.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder, so not a checkpoint")
    if not _is_plain_file(path / MANIFEST_NAME):
        raise CheckpointError(f"{path} is not a complete checkpoint: it has no file {MANIFEST_NAME}")
    manifest = _parse(path / MANIFEST_NAME)
    present = {entry.name for entry in path.iterdir()} - {MANIFEST_NAME}
    listed = {name.partition("/")[0] for name in manifest.files}
    if present != listed:
        difference = sorted(present ^ listed)
        raise CheckpointError(f"{path} has files missing or added since it was written: {difference}")
    for name, entry in manifest.files.items():
        if not _is_plain_file(path / name):
            raise CheckpointError(f"{path / name} is not a plain file")
        if (size := (path / name).stat().st_size) != entry.num_bytes:
            raise CheckpointError(
                f"{path / name} is damaged: {size} bytes where {entry.num_bytes} were written"
            )
    return manifest


def _read(path: Path) -> Checkpoint:
    manifest = read_manifest(path)
    for name, entry in manifest.files.items():
        with (path / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != entry.sha256:
            raise CheckpointError(f"{path / name} is damaged: its sha256 is not the one in {MANIFEST_NAME}")
    if step_of(path.name) not in (None, manifest.step):
        raise CheckpointError(f"{path} was renamed: it holds step {manifest.step}")
    documents = {
        name.removesuffix(".json"): _document(path / name)
        for name in manifest.files
        if name.endswith(".json")
    }
    return Checkpoint(path=path, step=manifest.step, documents=documents)


def _document(path: Path) -> Any:
    try:
        return parse_json(read_run_file(path))
    except ValueError as error:
        raise CheckpointError(f"{path} is not json ({error}); another program wrote it") from error


def _parse(path: Path) -> Manifest:
    try:
        content = read_run_file(path)
    except UserError as error:
        raise CheckpointError(str(error)) from error
    line = content.partition(b"\n")[0]
    if content != signed_line(line):
        raise CheckpointError(f"{path} is damaged: its sha256 is not the one on its second line")
    try:
        document = parse_json(line)
        schema = document["schema"]
        files = {
            name: ListedFile(entry["bytes"], entry["sha256"]) for name, entry in document["files"].items()
        }
        manifest = Manifest(step=document["step"], files=files)
        for name in files:
            require_file_name(name)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is not a manifest of ours: {error}") from error
    if schema != SCHEMA:
        raise CheckpointError(f"{path} has schema {schema}; this version of diffsynth_lite reads {SCHEMA}")
    return manifest


def _is_plain_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()
