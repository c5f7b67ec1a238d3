"""This file has the formats that frozen weights are kept in: 8 bits by row, and 4 bits by blocks of 64.

Each keeps a weight as two plain tensors, values and scales, and makes it again where it is needed. It can be
written some rows at a time, so that a weight never has to be in memory as it was.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

_INT8_MAX = 127
_NUMBERS_AT_ONCE = 2**22
"""Of a weight that are rotated back together, in fp32."""


class MissingKernelsError(ImportError):
    """A format needs a package that is not installed; the message names it."""


class NotFiniteError(ValueError):
    """A weight holds infinities or NaN, which no model can compute with.

    Attributes:
        tensor: its name, where it is known; the message begins with it then.
    """

    def __init__(self, tensor: str = "") -> None:
        super().__init__(f"{tensor} holds numbers that are not finite".strip())
        self.tensor = tensor


def is_finite(numbers: Tensor) -> bool:
    """Whether no number of a tensor is infinite or NaN, by its smallest and largest, which NaN becomes.

    On the CPU that takes a fortieth of the time that it takes to ask each number, and no memory.
    """
    if not numbers.numel():
        return True
    # One row, or one number, of what is expanded: weights that stand in for real ones are one zero.
    once = numbers[tuple(slice(1 if step == 0 else None) for step in numbers.stride())]
    return all(bool(bound.isfinite()) for bound in once.aminmax())


def require_finite(rows: Tensor) -> None:
    """Check that a weight, or some rows of it, are numbers."""
    if not is_finite(rows):
        raise NotFiniteError


class WeightFormat(ABC):
    """How the weight of a linear layer is kept.

    Attributes:
        row_step: rows are written from a multiple of it on.
    """

    name: ClassVar[str]
    row_step: ClassVar[int] = 1

    def require_kernels(self) -> None:
        """Check that the format can be computed with.

        Raises:
            MissingKernelsError: its kernels are not installed.
        """
        return  # most need only torch

    @abstractmethod
    def empty(self, num_rows: int, num_columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Memory for the values and the scales of a weight (num_rows, num_columns)."""

    def write(
        self,
        rows: Tensor | tuple[Tensor, Tensor],
        first_row: int,
        values: Tensor | None,
        scales: Tensor | None,
        *,
        starts: Sequence[int] = (0, 0),
    ) -> None:
        """Quantise some rows of a weight, on their device, into the memory that ``empty`` gave.

        Args:
            rows: (R, num_columns), floating; or values (R, num_columns) and scales in the format already.
            first_row: their place in the weight, a multiple of ``row_step``.
            values: of the weight, on any device, as ``scales``; None is not written.
            starts: places of the first numbers of both among all of the weight, where the memory is a part
                of it; what belongs elsewhere is not written.

        Raises:
            NotFiniteError: a number is infinite or NaN.
        """
        assert first_row % self.row_step == 0, f"{self.name} is not written from row {first_row} on"
        if isinstance(rows, Tensor):
            require_finite(rows)
            num_columns, parts = rows.shape[1], self._quantised(rows.float())
        else:
            num_columns, parts = rows[0].shape[1], rows
        first, spans = first_row * num_columns, self._spans(num_columns)
        written = zip((values, scales), parts, spans, starts, strict=True)
        for memory, part, span, start in written:
            if memory is not None:
                place, flat, part = first // span - start, memory.view(-1), part.view(-1)
                begin, end = max(place, 0), min(place + len(part), len(flat))  # what lies in the memory
                if begin < end:
                    flat[begin:end].copy_(part[begin - place : end - place])

    def rows_of(self, values: range, scales: range, num_columns: int) -> range:
        """The rows that must be written to fill these numbers of the values and of the scales."""
        spans = self._spans(num_columns)
        parts = [(part, span) for part, span in zip((values, scales), spans, strict=True) if part]
        if not parts:
            return range(0)
        first = min(part.start * span for part, span in parts) // num_columns
        # To the end of what has one scale: without the rest of it the scale would be another one.
        block = max(spans)
        stop = -(-max(part.stop * span for part, span in parts) // block) * block
        return range(first // self.row_step * self.row_step, -(-stop // num_columns))

    def group_of(self, num_columns: int) -> int | None:
        """How many columns are rotated together, 1 for none; None: a row is not in 8 bits with one scale."""
        return None

    def with_group(self, group: int) -> "WeightFormat":
        """The format with groups of so many columns, where it has any."""
        return self

    @abstractmethod
    def _quantised(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Values and scales of finite rows in fp32."""

    @abstractmethod
    def _spans(self, num_columns: int) -> tuple[int, int]:
        """How many weights one number of the values stands for, and one of the scales."""

    def rows(self, values: Tensor, scales: Tensor, rows: range, num_columns: int) -> tuple[Tensor, Tensor]:
        """Views of the values and the scales of some rows, which ``dense`` takes like those of a weight.

        Args:
            rows: in order, from a multiple of ``row_step`` on.
        """
        assert rows.start % self.row_step == 0, f"{self.name} is not read from row {rows.start} on"
        first, last = rows.start * num_columns, rows.stop * num_columns
        value_span, scale_span = self._spans(num_columns)
        return (
            values.view(-1)[first // value_span : -(-last // value_span)],
            scales.view(-1)[first // scale_span : -(-last // scale_span)],
        )

    @abstractmethod
    def dense(self, values: Tensor, scales: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The weight again, of this shape, computed in fp32 and rounded once to ``dtype``."""


class Int8(WeightFormat):
    """8 bits a weight: each row as whole numbers in [-127, 127], times a scale in fp32.

    A number is off by at most half of its row's scale, which is the largest of the row divided by 127.
    """

    name = "int8"

    def empty(self, num_rows: int, num_columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
        values = torch.empty(num_rows, num_columns, dtype=torch.int8, device=device)
        return values, torch.empty(num_rows, 1, dtype=torch.float32, device=device)

    def _quantised(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        # A row of zeros has no scale of its own, but must not be divided by 0.
        smallest = torch.finfo(torch.float32).tiny
        scale = (rows.abs().amax(1, keepdim=True) / _INT8_MAX).clamp_(min=smallest)
        return (rows / scale).round_().clamp_(-_INT8_MAX, _INT8_MAX).to(torch.int8), scale

    def group_of(self, num_columns: int) -> int | None:
        return 1

    def _spans(self, num_columns: int) -> tuple[int, int]:
        return 1, num_columns

    def dense(self, values: Tensor, scales: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        weight = torch.empty(*shape, dtype=dtype, device=values.device)
        # Into memory of another dtype the kernel computes in fp32; a scale in bf16 would bend whole rows.
        return torch.mul(values.view(*shape), scales.view(-1, 1), out=weight)


class Int8ConvRot(Int8):
    """8 bits a weight of rotated rows, in which a column of large numbers is spread over its group.

    Source: ConvRot (arXiv:2512.03673), as ``docs/int8_convrot.md`` of stable-diffusion.cpp defines it for
    files. Groups have 256 columns, or the largest power of 4 that divides their number, as ai-toolkit's
    ``ConvRotInt8Quantizer`` has it; layers that would have fewer than 16 are not rotated.

    Args:
        group: columns in a group, in place of these: a power of 4, or 1 for no rotation.
    """

    name = "int8_convrot"

    def __init__(self, group: int | None = None) -> None:
        self._group = group

    def group_of(self, num_columns: int) -> int:
        if self._group is not None:
            return self._group
        return next((group for group in (256, 64, 16) if num_columns % group == 0), 1)

    def with_group(self, group: int) -> "Int8ConvRot":
        return Int8ConvRot(group)

    def _quantised(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return super()._quantised(_rotated(rows, self.group_of(rows.shape[1])))

    def dense(self, values: Tensor, scales: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        group = self.group_of(shape[-1])
        if group == 1:
            return super().dense(values, scales, shape, dtype)
        weight = torch.empty(*shape, dtype=dtype, device=values.device)
        values, scales = values.view(*shape), scales.view(-1, 1)
        step = max(1, _NUMBERS_AT_ONCE // shape[-1])
        for rows in (slice(first, first + step) for first in range(0, shape[0], step)):
            torch.mul(_rotated_whole(values[rows].float(), group), scales[rows], out=weight[rows])
        return weight


def _rotated(rows: Tensor, group: int) -> Tensor:
    """Each group of columns times the regular Hadamard matrix of its size, which is its own inverse.

    That of 4 has 1/2 everywhere but -1/2 on the other diagonal: half the sum of four numbers, less the
    opposite one. Larger ones are its Kronecker powers. In a fixed order of sums, so that rows do not depend
    on how many there are.
    """
    columns, step = rows.reshape(-1, group).T.contiguous(), 1  # so, sums of neighbours are fast, too
    while step < group:
        first, second, third, last = columns.view(-1, 4, step * columns.shape[1]).unbind(1)
        half = ((first + second) + (third + last)) / 2
        columns = torch.stack([half - last, half - third, half - second, half - first], 1).view(group, -1)
        step *= 4
    return columns.T.contiguous().view(rows.shape)


def _rotated_whole(rows: Tensor, group: int) -> Tensor:
    """The same of whole numbers of 8 bits, by products of matrices: each sum is exact, whatever its order."""
    shape, step = rows.shape, 1
    while step < group:
        side = min(16, group // step)
        matrix = _rotated(torch.eye(side, dtype=rows.dtype, device=rows.device), side)
        rows = rows.reshape(-1, side) @ matrix if step == 1 else matrix @ rows.reshape(-1, side, step)
        step *= side
    return rows.reshape(shape)


class Nf4(WeightFormat):
    """4.5 bits a weight: each block of 64 as places in a table of 16 numbers, times a scale in fp32.

    Source: QLoRA (Dettmers et al. 2023, arXiv:2305.14314), section 3, by the kernels of bitsandbytes and
    without its second quantisation, of the scales. On the meta device it needs none.
    """

    name = "nf4"
    block_size: ClassVar[int] = 64
    row_step = block_size

    @staticmethod
    def _kernels() -> Any:
        # Looked up each time: a format that held a module could not be copied with its model.
        try:
            from bitsandbytes import functional
        except ImportError as error:
            raise MissingKernelsError("bitsandbytes") from error
        return functional

    def require_kernels(self) -> None:
        self._kernels()

    def empty(self, num_rows: int, num_columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
        size = num_rows * num_columns
        values = torch.empty(-(-size // 2), dtype=torch.uint8, device=device)
        return values, torch.empty(-(-size // self.block_size), dtype=torch.float32, device=device)

    def _quantised(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        # Flat: blocks run on from row to row, so that no width is too odd.
        packed, state = self._kernels().quantize_4bit(
            rows.flatten(), blocksize=self.block_size, quant_type="nf4"
        )
        return packed, state.absmax

    def _spans(self, num_columns: int) -> tuple[int, int]:
        return 2, self.block_size

    def dense(self, values: Tensor, scales: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if values.is_meta:
            return torch.empty(*shape, dtype=dtype, device=values.device)
        kernels = self._kernels()
        state = kernels.QuantState(
            absmax=scales,
            shape=(math.prod(shape),),
            dtype=dtype,
            blocksize=self.block_size,
            quant_type="nf4",
        )
        weight: Tensor = kernels.dequantize_4bit(values[:, None], state)
        return weight.view(*shape)


_FORMATS: dict[str, type[WeightFormat]] = {one.name: one for one in (Int8, Int8ConvRot, Nf4)}


def weight_format(name: str) -> WeightFormat:
    """The format of a name, ``int8``, ``int8_convrot`` or ``nf4``, ready to compute."""
    chosen = counted_format(name)
    chosen.require_kernels()
    return chosen


def counted_format(name: str) -> WeightFormat:
    """The same for weights on the meta device, which needs no kernels."""
    return _FORMATS[name]()
