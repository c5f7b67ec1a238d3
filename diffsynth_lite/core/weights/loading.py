"""This file fills a frozen model from safetensors files, a few rows at a time, into memory made before.

So the most that is in memory is the model as it will be, and a few rows as they are in the file. A file's own
pages are the system's to drop.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor, nn

from diffsynth_lite.core.weights.formats import NotFiniteError
from diffsynth_lite.core.weights.frozen_linear import FrozenLinear

_NUM_ROWS = 64
"""Rows that are read at once; a multiple of each format's ``row_step``. While 256 rows of
4096 numbers were quantised, bitsandbytes took 24 MiB on the CPU; with 64 it is 2."""


@dataclass(frozen=True, kw_only=True)
class StoredTensors:
    """The tensors of some files, of which the headers are read.

    Attributes:
        shapes: by name.
        files: that hold them, by name.
    """

    shapes: Mapping[str, tuple[int, ...]]
    files: Mapping[str, Path]

    @classmethod
    def in_files(cls, files: Sequence[Path]) -> Self:
        """Those of safetensors files.

        Raises:
            safetensors.SafetensorError: a file is damaged.
            OSError: a file cannot be read.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        places: dict[str, Path] = {}
        for file in files:
            with safe_open(file, framework="pt") as opened:
                names = list(opened.keys())
                shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in names}
                places |= dict.fromkeys(names, file)
        return cls(shapes=shapes, files=places)

    def lacking(self, model: nn.Module) -> list[str]:
        """Names of a plain model's tensors that are not in the files, or have another shape there."""
        wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        return sorted(name for name, shape in wanted.items() if self.shapes.get(name) != shape)


def load_frozen(
    model: nn.Module,
    stored: StoredTensors,
    *,
    device: torch.device,
    dtype_of: Callable[[str, torch.dtype], torch.dtype],
) -> None:
    """Make memory for all of a model's tensors, and fill it from files; the model is frozen then.

    Args:
        model: with its parameters on the meta device, and each :class:`FrozenLinear` in its place.
        stored: holds all tensors of the model as it is without formats; what else it holds is not read.
        device: where the model goes.
        dtype_of: the dtype that a tensor is to have, by its name and its dtype in the model.

    Raises:
        NotFiniteError: a weight to quantise is not finite.
        safetensors.SafetensorError: a file is damaged.
        OSError: a file cannot be read.
    """
    writers = _make_memory(model.requires_grad_(False), device, dtype_of)
    for file in dict.fromkeys(stored.files.values()):
        names = [name for name in writers if stored.files[name] == file]
        with safe_open(file, framework="pt") as opened:
            for name in names:
                _copy(opened, name, writers[name])


_Write = Callable[[Tensor, int], object]
"""Takes rows as they are in a file, and the first one's place in the tensor."""


def _make_memory(
    model: nn.Module, device: torch.device, dtype_of: Callable[[str, torch.dtype], torch.dtype]
) -> dict[str, _Write]:
    """Memory for each tensor of the model, and what writes to it, by the tensor's name in the files."""
    writers: dict[str, _Write] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        prefix, _, leaf = name.rpartition(".")
        owner = model.get_submodule(prefix)
        if isinstance(owner, FrozenLinear) and leaf != "bias":
            writers[f"{prefix}.weight"] = owner.write
            continue
        memory = torch.empty(tensor.shape, dtype=dtype_of(name, tensor.dtype), device=device)
        is_parameter = isinstance(tensor, nn.Parameter)
        setattr(owner, leaf, nn.Parameter(memory, requires_grad=False) if is_parameter else memory)
        writers[name] = partial(_write_plain, memory)
    # The others are in no file: tables that a model computes when it is made.
    for name, buffer in model.named_buffers():
        if name not in writers:
            prefix, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(prefix), leaf, buffer.to(device))
    return writers


def _write_plain(memory: Tensor, rows: Tensor, first_row: int) -> None:
    # A tensor without dimensions has no rows.
    (memory[first_row : first_row + len(rows)] if memory.ndim else memory).copy_(rows)


def _copy(opened: Any, name: str, write: _Write) -> None:
    """Have one tensor of an open file written, some rows at a time."""
    part = opened.get_slice(name)
    shape = part.get_shape()
    if not shape:
        write(opened.get_tensor(name), 0)
        return
    for first_row in range(0, shape[0], _NUM_ROWS):
        try:
            write(part[first_row : first_row + _NUM_ROWS], first_row)
        except NotFiniteError as error:
            raise NotFiniteError(f"{name} {error}") from None
