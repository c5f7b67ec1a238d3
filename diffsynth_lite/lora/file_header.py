"""This file writes the metadata of a LoRA file anew, so that equal files have equal bytes.

safetensors writes metadata in another order each time: it keeps them in a map with a random seed. Its format,
https://github.com/huggingface/safetensors#format, is 8 bytes with the length of the header, the header as
json, padded with spaces to whole words of 8 bytes, and then the data.
"""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from diffsynth_lite.files import replacing

_LENGTH_BYTES = 8
_CHUNK_BYTES = 1 << 20
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def add_metadata(file: Path, metadata: Mapping[str, str]) -> None:
    """Replace a file by one with more metadata, in the order of their names; its tensors stay as they are.

    What is told of the tensors is added: ``modelspec.hash_sha256`` and ``sshs_model_hash``, the sha256 of all
    that follows the header, as ModelSpec and sd-scripts have it, and ``diffsynth_lite.dtype``.

    Args:
        file: a safetensors file.
        metadata: wins over what the file has of the same name.
    """
    with file.open("rb") as source:
        header = _read_header(source)
        start = source.tell()
        digest = hashlib.sha256()
        for chunk in _chunks(source):
            digest.update(chunk)
        told = {
            **header.pop("__metadata__", {}),
            **metadata,
            "modelspec.hash_sha256": f"0x{digest.hexdigest()}",
            "sshs_model_hash": digest.hexdigest(),
            "diffsynth_lite.dtype": _dtype(header),
        }
        source.seek(start)
        with replacing(file) as temporary, temporary.open("wb") as target:
            target.write(_encoded({"__metadata__": dict(sorted(told.items())), **header}))
            shutil.copyfileobj(source, target, _CHUNK_BYTES)


def _read_header(source: IO[bytes]) -> dict[str, Any]:
    length = int.from_bytes(source.read(_LENGTH_BYTES), "little")
    header: dict[str, Any] = json.loads(source.read(length))
    return header


def _encoded(header: Mapping[str, Any]) -> bytes:
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _chunks(source: IO[bytes]) -> Iterator[bytes]:
    while chunk := source.read(_CHUNK_BYTES):
        yield chunk


def _dtype(header: Mapping[str, Any]) -> str:
    """That of most tensors: the alphas beside matrices are few numbers."""
    num_bytes: Counter[str] = Counter()
    for entry in header.values():
        start, end = entry["data_offsets"]
        num_bytes[entry["dtype"]] += end - start
    stored = num_bytes.most_common(1)[0][0]
    return _DTYPES.get(stored, stored)
