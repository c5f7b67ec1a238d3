"""This file reads weights from GGUF files, with the package ``gguf``, which has their formats.

``comfy.gguf.orig_shape`` is of ComfyUI-GGUF's converter: the shape of a tensor that it stored in another one.
What precedes the tensors is described in ``docs/gguf.md`` of ggml.
"""

import math
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy
import torch
from torch import Tensor

from diffsynth_lite.core.weights.formats import MissingKernelsError
from diffsynth_lite.core.weights.loading import StoredTensors
from diffsynth_lite.core.weights.stored_formats import StoredFormatError

_PLAIN = {"F32", "F16", "BF16"}
_DAMAGED = (ValueError, LookupError, ArithmeticError, RecursionError)
"""What gguf raises for a file that is damaged, or in another format."""
_NUM_BYTES = MappingProxyType({0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8})
"""Size of a value in a header, by the number of its type; strings and arrays have a length of their own."""
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 8
_MAX_HEADER_BYTES, _MAX_HEADER_VALUES = 2**26, 2**20
"""Far more than the names, shapes and settings of a transformer take; gguf makes an object of each value."""


@dataclass(frozen=True, kw_only=True)
class GgufTensors(StoredTensors):
    """Tensors as a GGUF file has them, most of them as bytes; the number of a row is that of its format."""

    @classmethod
    def in_file(cls, file: Path) -> "GgufTensors":
        """Those of a file, mapped into memory.

        Raises:
            MissingKernelsError: gguf is not installed.
            StoredFormatError: the file is damaged, or in a format that gguf cannot read.
        """
        gguf = _gguf()
        try:
            with file.open("rb") as stream:
                _Header(stream).check()
            with numpy.errstate(over="raise"):
                # Not read-only, of which torch warns; nothing is written, nor would it get into the file.
                reader = gguf.GGUFReader(file, mode="c")
            return cls._read_by(reader)
        except StoredFormatError:
            raise
        except _DAMAGED as error:
            raise StoredFormatError(f"it is damaged ({shorten(str(error), 200)}); get it again") from error

    @classmethod
    def _read_by(cls, reader: Any) -> "GgufTensors":
        tensors, formats = {}, {}
        for stored in reader.tensors:
            tensor, kind = torch.from_numpy(stored.data), stored.tensor_type
            if kind.name not in _PLAIN:
                _require_readable(stored)
                one_a_row = (len(tensor), *(1,) * (tensor.ndim - 1))
                formats[stored.name] = torch.tensor(float(kind)).expand(one_a_row)
            tensors[stored.name] = _in_own_shape(tensor, stored, reader)
        return cls(tensors=tensors, per_row=formats)

    def shape(self, name: str) -> torch.Size:
        stored = self.tensors[name].shape
        if name not in self.per_row:
            return stored
        block_size, num_bytes = _gguf().GGML_QUANT_SIZES[self._format(name)]
        return torch.Size((*stored[:-1], stored[-1] // num_bytes * block_size))

    def numbers(self, name: str, rows: slice) -> Tensor:
        if name not in self.per_row:
            return super().numbers(name, rows)
        return torch.from_numpy(_dequantize(self.tensors[name][rows].numpy(), self._format(name)))

    def described(self) -> str:
        """The format of most weights, such as ``GGUF, mostly Q4_K``."""
        counts = Counter(self._format(name).name for name in self.per_row)
        return f"GGUF, mostly {counts.most_common(1)[0][0]}" if counts else "GGUF"

    def _format(self, name: str) -> Any:
        return _gguf().GGMLQuantizationType(int(self.per_row[name].flatten()[0]))


class _Header:
    """What precedes the tensors in a file. gguf believes each count in it, so they are checked before."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._size = os.fstat(stream.fileno()).st_size
        self._num_bytes = self._num_values = 0

    def check(self) -> None:
        """Walk over all of it, as far as the file reaches."""
        magic, version = self._number(4).to_bytes(4, "little"), self._number(4)
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"it begins with {magic!r}, version {version}, not with b'GGUF', version 2 or 3")
        num_tensors, num_fields = self._number(8), self._number(8)
        for _ in range(num_fields):
            self._skip_string()
            self._skip_values(self._number(4), 1)
        for _ in range(num_tensors):
            self._skip_string()
            self._skip(8, self._number(4))  # its dimensions
            self._skip(4 + 8)  # its format and its offset

    def _skip_values(self, kind: int, count: int) -> None:
        if kind in _NUM_BYTES:
            self._skip(_NUM_BYTES[kind], count)
        elif kind == _STRING:
            for _ in range(count):
                self._skip_string()
        elif kind == _ARRAY:
            for _ in range(count):
                self._skip_values(self._number(4), self._number(8))
        else:
            raise ValueError(f"its header has a value of type {kind}")

    def _skip_string(self) -> None:
        self._skip(self._number(8))

    def _number(self, num_bytes: int) -> int:
        self._take(num_bytes)
        return int.from_bytes(self._stream.read(num_bytes), "little")

    def _skip(self, num_bytes: int, count: int = 1) -> None:
        self._take(num_bytes, count)
        self._stream.seek(num_bytes * count, os.SEEK_CUR)

    def _take(self, num_bytes: int, count: int = 1) -> None:
        self._num_bytes += num_bytes * count
        self._num_values += count
        if self._num_bytes > self._size:
            raise ValueError("its header counts more than the file holds")
        if self._num_bytes > _MAX_HEADER_BYTES or self._num_values > _MAX_HEADER_VALUES:
            raise StoredFormatError(
                f"its header has over {_MAX_HEADER_BYTES:,} bytes or {_MAX_HEADER_VALUES:,} values, more "
                "than a transformer needs"
            )


def _gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise MissingKernelsError("gguf") from error
    return gguf


def _dequantize(rows: Any, kind: Any) -> Any:
    return _gguf().quants.dequantize(rows, kind)


def _require_readable(stored: Any) -> None:
    if stored.data.ndim < 2:
        raise StoredFormatError(f"it holds {stored.name} in {stored.tensor_type.name}, but as no matrix")
    _, num_bytes = _gguf().GGML_QUANT_SIZES[stored.tensor_type]
    try:
        _dequantize(stored.data.reshape(-1)[:num_bytes], stored.tensor_type)
    except NotImplementedError as error:
        raise StoredFormatError(
            f"it holds {stored.name} in {stored.tensor_type.name}, which gguf cannot read; take another one"
        ) from error


def _in_own_shape(tensor: Tensor, stored: Any, reader: Any) -> Tensor:
    """A tensor in the dtype and shape that it was stored from; of one in another format, its bytes."""
    kind = stored.tensor_type.name
    if kind == "BF16":
        tensor = tensor.view(torch.bfloat16)
    field = reader.get_field(f"comfy.gguf.orig_shape.{stored.name}")
    if field is None:
        return tensor
    shape = field.contents()
    is_short = isinstance(shape, list) and len(shape) <= _MAX_DIMENSIONS
    if not (is_short and all(type(size) is int and size > 0 for size in shape)):
        raise ValueError(f"what {stored.name} was stored from is not a shape")
    if kind not in _PLAIN or tensor.numel() != math.prod(shape):
        raise StoredFormatError(
            f"it holds {stored.name}, of shape {shape}, in another one in {kind}, which is not read"
        )
    return tensor.reshape(shape)
