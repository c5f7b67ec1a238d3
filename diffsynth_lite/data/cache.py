"""This file keeps computed tensors on disk under the hash of everything that they depend on.

An entry appears whole or not at all, is never changed afterwards, and is checked whenever it is read, so any
number of runs and processes can share one folder. It is a safetensors file: data only, no code.
"""

import hashlib
import json
import logging
import os
import uuid
from collections.abc import Mapping
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from diffsynth_lite.data.file_memory import FileState

logger = logging.getLogger(__name__)

_SCHEMA = 1


def file_fingerprint(path: Path) -> str:
    """The sha256 of the bytes of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class TensorCache:
    """Entries of named tensors below ``folder``; the folder is made when the first one is written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def key(self, **parts: str | int) -> str:
        """Key of the entry that is determined by ``parts``, 64 hexadecimal digits."""
        text = json.dumps({"schema": _SCHEMA, "parts": parts}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def path(self, key: str) -> Path:
        """Where an entry is, or would be: 256 folders, so 4000 files in each at a million entries."""
        return self.folder / key[:2] / f"{key}.safetensors"

    def read(self, key: str) -> dict[str, Tensor] | None:
        """Tensors of an entry on the CPU, or None where there is none that is whole.

        A damaged one is renamed to ``*.damaged``, so that the next start makes it again.
        """
        path = self.path(key)
        try:
            state = FileState.of(path)
        except FileNotFoundError:
            return None
        try:
            with safe_open(path, framework="pt") as file:
                stored = (file.metadata() or {}).get("xxh3")
                # Copied, because the tensors of an open file are views of it, whatever it may become.
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            _set_aside(path, state, str(error))
            return None
        except OSError as error:
            logger.warning("%s: the cache entry cannot be read: %s", path, error)
            return None
        if stored != _digest(key, tensors):
            _set_aside(path, state, "its hash does not fit")
            return None
        return tensors

    def write(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Store an entry in one atomic step; one that is there already is replaced.

        Raises:
            ValueError: a tensor holds NaN or infinity, which would poison every run that reads it.
        """
        contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        require_finite(contiguous)
        path = self.path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.parent / f".{uuid.uuid4().hex}.tmp"
        try:
            with aside.open("xb") as file:
                file.write(save(contiguous, metadata={"xxh3": _digest(key, contiguous)}))
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)


def require_finite(tensors: Mapping[str, Tensor]) -> None:
    """Check that no number is NaN or infinite.

    Raises:
        ValueError: naming the tensor.
    """
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ValueError(f"{name} holds NaN or infinity")


def _set_aside(path: Path, state: FileState, reason: str) -> None:
    """Rename a damaged entry, unless another process has just put a whole one in its place."""
    logger.warning("%s: damaged cache entry is set aside: %s", path, reason)
    try:
        if FileState.of(path) == state:
            path.replace(path.with_suffix(".damaged"))
    except OSError as error:
        logger.warning("%s: cannot be renamed: %s", path, error)


def _digest(key: str, tensors: Mapping[str, Tensor]) -> str:
    """Hash of the key and the name, type, shape and bytes of each tensor.

    It finds damage, not forgery, and every entry that training reads is hashed: XXH3 does in 0.1 ms what
    takes SHA-256 2 ms.
    """
    digest = xxhash.xxh3_128(key.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
