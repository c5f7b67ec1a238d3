"""This file reads weights from GGUF files, with the package ``gguf``, which has their formats.

``comfy.gguf.orig_shape`` is of ComfyUI-GGUF's converter: the shape of a tensor that it stored in another one.
"""

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffsynth_lite.core.weights.float8 import StoredFormatError
from diffsynth_lite.core.weights.formats import MissingKernelsError
from diffsynth_lite.core.weights.loading import StoredTensors

_PLAIN = {"F32", "F16", "BF16"}


@dataclass(frozen=True, kw_only=True)
class GgufTensors(StoredTensors):
    """Tensors as a GGUF file has them, most of them as bytes; the number of a row is that of its format."""

    @classmethod
    def in_file(cls, file: Path) -> "GgufTensors":
        """Those of a file, mapped into memory.

        Raises:
            MissingKernelsError: gguf is not installed.
            StoredFormatError: the file is damaged, or in a format that gguf cannot read.
            OSError: it cannot be read.
        """
        try:
            # Not read-only, of which torch warns; what is written, which nothing is, stays out of the file.
            reader = _gguf().GGUFReader(file, mode="c")
        except (ValueError, IndexError) as error:
            raise StoredFormatError(f"it is damaged ({error}); get it again") from error
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
    try:
        _dequantize(stored.data[:1], stored.tensor_type)
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
    if kind not in _PLAIN or tensor.numel() != math.prod(shape):
        raise StoredFormatError(
            f"it holds {stored.name}, of shape {shape}, in another one in {kind}, which is not read"
        )
    return tensor.reshape(shape)
