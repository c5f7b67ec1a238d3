"""This file fills a frozen model with stored tensors, a few rows at a time, into memory made before.

So the most that is in memory is the model as it will be, and a few rows as they are stored. A file's own
pages are the system's to drop.
"""

import logging
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor, nn

from diffsynth_lite.core.weights.formats import NotFiniteError, require_finite
from diffsynth_lite.core.weights.frozen_linear import FrozenLinear
from diffsynth_lite.core.weights.packing import HostBlocks, place_in_line
from diffsynth_lite.core.weights.sharding import BaseShards, local_part, own_rows
from diffsynth_lite.core.weights.stored_formats import (
    FLOAT8,
    Int8Weight,
    QuantisedWeight,
    StoredFormatError,
    separate_quantised,
)
from diffsynth_lite.progress_log import ProgressLog

logger = logging.getLogger(__name__)

_NUM_ROWS = 64
"""Rows that are read at once; a multiple of each format's ``row_step``. While 256 rows of
4096 numbers were quantised, bitsandbytes took 24 MiB on the CPU; with 64 it is 2."""


@dataclass(frozen=True, kw_only=True)
class StoredTensors:
    """Tensors that are read where they are used: those of files take no memory of their own.

    Attributes:
        per_row: a number for each row of some, (rows, 1, ...), by the same names: its place among the rows of
            ``quantised``.
        quantised: weights in fewer bits, by the places of their first rows, in order.
    """

    tensors: Mapping[str, Tensor]
    per_row: Mapping[str, Tensor] = field(default_factory=dict)
    quantised: Mapping[int, QuantisedWeight] = field(default_factory=dict)

    @classmethod
    def in_files(cls, files: Sequence[Path]) -> Self:
        """Those of safetensors files, mapped into memory; only headers are read.

        Raises:
            StoredFormatError: weights are in a format that is not read, or lack their scales.
            safetensors.SafetensorError: a file is damaged.
        """
        tensors: dict[str, Tensor] = {}
        metadata: dict[str, str] = {}
        for file in files:
            with safe_open(file, framework="pt") as opened:
                tensors |= {name: opened.get_tensor(name) for name in list(opened.keys())}
                metadata |= opened.metadata() or {}
        weights, in_fewer_bits = separate_quantised(tensors, metadata)
        for name, tensor in weights.items():
            whole = not tensor.is_floating_point() and name not in in_fewer_bits
            if whole and name.endswith((".weight", ".bias")):
                raise StoredFormatError(f"{name} holds {tensor.dtype}, and no floating-point numbers")
        per_row, quantised, place = {}, {}, 1
        for name, weight in in_fewer_bits.items():
            stop = place + len(weight.parts["weight"])
            per_row[name] = torch.arange(place, stop).view(_one_a_row(weight.parts["weight"]))
            quantised[place] = weight
            place = stop + 1  # between two weights is a gap, so that no row follows one of another weight
        return cls(tensors=weights, per_row=per_row, quantised=quantised)

    def shape(self, name: str) -> torch.Size:
        """Shape of a tensor's numbers."""
        shape = self.tensors[name].shape
        if name not in self.per_row:
            return shape
        return torch.Size((*shape[:-1], shape[-1] * self._sources(name)[0].packed))

    def numbers(self, name: str, rows: slice) -> Tensor:
        """Rows of a tensor as floating-point numbers, of a dtype to compute with.

        Args:
            rows: of a tensor without dimensions, all.
        """
        if name in self.per_row:
            return torch.cat([weight.numbers(values, own) for weight, values, own in self._runs(name, rows)])
        tensor = self.tensors[name]
        if tensor.ndim:
            tensor = tensor[rows]
        return tensor.float() if tensor.dtype in FLOAT8 else tensor  # torch computes little in these

    def int8_group(self, name: str) -> int | None:
        """How many columns are rotated together in a weight that is stored in 8 bits by row; else None."""
        if not self.quantised or name not in self.per_row:
            return None
        sources = self._sources(name)
        kinds = {(type(weight), weight.group) for weight in sources}
        return sources[0].group if len(kinds) == 1 and type(sources[0]) is Int8Weight else None

    def int8_rows(self, name: str, rows: slice) -> tuple[Tensor, Tensor]:
        """Rows of such a weight as they are stored, int8, and their scales, (R, 1), fp32."""
        runs = self._runs(name, rows)
        scales = [weight.scales(own) for weight, _, own in runs if isinstance(weight, Int8Weight)]
        return self.tensors[name][rows], torch.cat(scales)

    def _sources(self, name: str) -> list[QuantisedWeight]:
        """The stored weights that the rows of one are from."""
        firsts = torch.tensor(list(self.quantised))
        found = set(torch.bucketize(self.per_row[name].flatten(), firsts, right=True).tolist())
        return [self.quantised[int(firsts[place - 1])] for place in sorted(found)]

    def _runs(self, name: str, rows: slice) -> Iterator[tuple[QuantisedWeight, Tensor, slice]]:
        """Rows of a weight as they are stored, in order: what they are from, themselves, and where there."""
        places, firsts = self.per_row[name][rows].flatten(), list(self.quantised)
        jumps = (places.diff() != 1).nonzero().flatten() + 1
        stored = self.tensors[name][rows].tensor_split(jumps)
        for run, values in zip(places.tensor_split(jumps), stored, strict=True):
            first = firsts[bisect_right(firsts, int(run[0])) - 1]
            weight, start = self.quantised[first], int(run[0]) - first
            own = slice(start, start + len(run))
            if not weight.is_of(values, own):
                raise StoredFormatError(
                    f"the columns of {name}, in {weight.format}, would be moved in its conversion to "
                    "diffusers' layout; take a file in bfloat16"
                )
            yield weight, values, own

    def converted(self, convert: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Self:
        """The same tensors in another layout, with the numbers of their rows.

        Args:
            convert: to the other layout; it may rename tensors, leave some out, and cut them between rows
                and put them together again.

        Raises:
            StoredFormatError: scales do not fit afterwards.
        """
        tensors = convert(dict(self.tensors))
        if not self.per_row:
            return replace(self, tensors=tensors)
        # By the same names, so that the same happens to the number of a row as to the row; none of them is 0.
        zero = torch.zeros((), dtype=next(iter(self.per_row.values())).dtype)
        zeros = {name: zero.expand(_one_a_row(tensor)) for name, tensor in self.tensors.items()}
        moved = {name: rows for name, rows in convert(zeros | dict(self.per_row)).items() if rows.any()}
        # Of a file that has numbers for rows each weight in 8 bits or fewer has them, and no other.
        narrow = {name for name, tensor in tensors.items() if tensor.dtype.itemsize == 1}
        for name in sorted(narrow | moved.keys()):
            rows = moved.get(name)
            # What is narrow is among the tensors.
            is_lost = name not in narrow or rows is None or rows.shape != _one_a_row(tensors[name])
            if is_lost or not moved[name].all():
                raise StoredFormatError(
                    f"the scale of {name} would be lost in its conversion to diffusers' layout; "
                    "take a file in bfloat16"
                )
        return replace(self, tensors=tensors, per_row=moved)

    def described(self) -> str:
        """How numbers are stored, such as ``bfloat16``, or ``nvfp4 in 400 weights``."""
        counts = Counter(self._sources(name)[0].format for name in self.per_row)
        if counts:
            return ", ".join(f"{kind} in {count} weights" for kind, count in counts.most_common())
        sizes: Counter[torch.dtype] = Counter()
        for tensor in self.tensors.values():
            sizes[tensor.dtype] += tensor.numel()
        return str(sizes.most_common(1)[0][0]).removeprefix("torch.") if sizes else "nothing"

    def lacking(self, model: nn.Module) -> list[str]:
        """Names of a plain model's tensors that are not among these, or have another shape."""
        shapes = {name: self.shape(name) for name in self.tensors}
        return sorted(name for name, tensor in model.state_dict().items() if shapes.get(name) != tensor.shape)

    def scales_left_over(self, model: nn.Module) -> list[str]:
        """Names with numbers for rows that are not tensors of a plain model."""
        return sorted(self.per_row.keys() - model.state_dict().keys())


def load_frozen(
    model: nn.Module,
    stored: StoredTensors,
    *,
    device: torch.device,
    host_blocks: HostBlocks | None = None,
    shards: BaseShards | None = None,
) -> None:
    """Make memory for all of a model's tensors, and fill it with stored ones; the model is frozen then.

    What goes to the CPU and is stored in the dtype that it is to have stays where it is: in its file. Tensors
    that are one in several places of the model, as tied weights are, stay one.

    Args:
        model: with its parameters on the meta device, in the dtypes that they are to have, and each
            :class:`FrozenLinear` in its place.
        stored: holds all tensors of the model as it is without formats; what else it holds is not read.
        device: where the model goes, and weights are quantised.
        shards: which parts of the weights this process gets; of the others nothing is read. None is all.

    Raises:
        NotFiniteError: a weight is not finite; those that stay in their file are not looked at.
        HostMemoryError: the system has too little host memory for the blocks.
    """
    model.requires_grad_(False)
    if shards is not None:
        shards.apply_to(model)
    in_place = _usable_in_place(model, stored) if device.type == "cpu" and shards is None else {}
    on_host: set[nn.Parameter] = set()
    if host_blocks is not None:
        names = {parameter: name for name, parameter in model.named_parameters()}
        # Where they would be if they were not streamed.
        on_host = host_blocks.make_memory(
            model, lambda weight: place_in_line(in_place[names[weight]]) if names[weight] in in_place else 0
        )
    _make_memory(model, in_place, device, on_host)
    state = model.state_dict(keep_vars=True)
    kept = _kept_in_int8(model, stored)
    filled: set[Tensor] = {state[name] for name in in_place} - on_host
    if host_blocks is not None and host_blocks.memory.is_filled_elsewhere:
        filled |= on_host
    writers = _writers(model, device, filled)
    progress = ProgressLog(None, len(writers), phase="loading")
    for name, (rows, write) in writers.items():
        read = stored.int8_rows if name in kept else stored.numbers
        for first_row in range(rows.start, rows.stop, _NUM_ROWS):
            part = slice(first_row, min(first_row + _NUM_ROWS, rows.stop))
            try:
                write(read(name, part), first_row)
            except NotFiniteError:
                raise NotFiniteError(name) from None
        progress.advance()


def _usable_in_place(model: nn.Module, stored: StoredTensors) -> dict[str, Tensor]:
    """The stored tensors that can serve as those of the model, on the CPU."""
    found = {}
    for name, tensor in model.state_dict().items():
        if not _is_quantised(model, name):
            there = stored.tensors[name]
            if there.dtype == tensor.dtype and there.is_contiguous():
                found[name] = there
    return found


def _make_memory(
    model: nn.Module, in_place: Mapping[str, Tensor], device: torch.device, on_host: Set[nn.Parameter]
) -> None:
    """Memory for each tensor of the model, but for those on the host, which have theirs."""
    state = model.state_dict(keep_vars=True)
    made: dict[Tensor, Tensor] = {tensor: tensor for tensor in on_host}
    for name, tensor in state.items():
        if tensor not in made:
            memory = in_place[name] if name in in_place else torch.empty_like(tensor, device=device)
            is_parameter = isinstance(tensor, nn.Parameter)
            made[tensor] = nn.Parameter(memory, requires_grad=False) if is_parameter else memory
        _set(model, name, made[tensor])
    # The others are not stored: tables that a model computes when it is made.
    for name, buffer in model.named_buffers():
        if name not in state:
            _set(model, name, buffer.to(device))


def _kept_in_int8(model: nn.Module, stored: StoredTensors) -> set[str]:
    """Names of weights that are kept as they are stored; their layers get the groups that these have."""
    kept = set()
    for name, layer in model.named_modules():
        weight = f"{name}.weight"
        group = stored.int8_group(weight) if isinstance(layer, FrozenLinear) else None
        if group is not None:
            layer.format = layer.format.with_group(group)
            if layer.format.group_of(layer.in_features) == group:
                kept.add(weight)
    if kept:
        logger.info("%d weights are kept in 8 bits as their file has them.", len(kept))
    return kept


_Writer = tuple[range, Callable[[Any, int], object]]
"""The rows that are wanted of a tensor, and what writes some of them as they are stored, from a first one on,
to the tensor of the model, or to the shard of it that is here."""


def _writers(model: nn.Module, device: torch.device, filled: Set[Tensor]) -> dict[str, _Writer]:
    """What writes to each tensor of the model that is not filled, by the stored name."""
    writers: dict[str, _Writer] = {}
    done = set(filled)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor in done:
            continue
        done.add(tensor)
        if _is_quantised(model, name):
            layer = name.rpartition(".")[0]
            owner = model.get_submodule(layer)
            assert isinstance(owner, FrozenLinear)
            writers[f"{layer}.weight"] = _quantiser(owner, device, filled)
        else:
            rows = own_rows(tensor)
            writers[name] = rows, partial(_write_plain, local_part(tensor.data), rows.start)
    return writers


def _quantiser(layer: FrozenLinear, device: torch.device, filled: Set[Tensor]) -> _Writer:
    parts = layer.weight, layer.weight_scale
    values, scales = (None if part in filled else local_part(part.data) for part in parts)
    own_values, own_scales = map(_own_numbers, parts)
    starts = own_values.start, own_scales.start

    def write(rows: Tensor | tuple[Tensor, Tensor], first_row: int) -> None:
        if isinstance(rows, Tensor):
            rows = rows.to(device)
        layer.format.write(rows, first_row, values, scales, starts=starts)

    return layer.format.rows_of(own_values, own_scales, layer.in_features), write


def _own_numbers(tensor: Tensor) -> range:
    """Places among all numbers of a tensor, row by row, of those that are here."""
    rows, width = own_rows(tensor), tensor.numel() // len(tensor)
    return range(rows.start * width, rows.stop * width)


def _is_quantised(model: nn.Module, name: str) -> bool:
    """Whether a tensor of the model is the weight of a layer in its format, or a part of it."""
    layer, _, leaf = name.rpartition(".")
    return leaf != "bias" and isinstance(model.get_submodule(layer), FrozenLinear)


def _set(model: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, tensor)


def _write_plain(memory: Tensor, start: int, rows: Tensor, first_row: int) -> None:
    # A tensor without dimensions has no rows.
    place = first_row - start
    part = memory[place : place + len(rows)] if memory.ndim else memory
    part.copy_(rows)
    require_finite(part)


def _one_a_row(tensor: Tensor) -> tuple[int, ...]:
    """Shape of one number for each row of a tensor."""
    return (*tensor.shape[:1], *(1,) * (tensor.ndim - 1))
