"""This file finds weights that a file keeps in fewer bits, in ComfyUI's formats, and makes numbers of them.

Facts of the formats: ``QUANTIZATION.md``, ``comfy/quant_ops.py``, ``_load_quantized_module`` in
``comfy/ops.py`` and ``convert_old_quants`` in ``comfy/utils.py`` of ComfyUI; and what dequantises in
``comfy_kitchen/backends/eager`` of comfy-kitchen (7d86acf6), which each class names.
"""

import json
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from diffsynth_lite.core.weights.formats import Int8ConvRot

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_NUMBERS = (torch.float32, torch.float16, torch.bfloat16)
_HEADER = "_quantization_metadata"
_OLD_MARKER = "scaled_fp8"
_MARKER = "comfy_quant"
_SCALES = ("scale_weight", "weight_scale")
_PARTS = {*_SCALES, "weight_scale_2", "weight_s_rel", "weight_s_channel", "weight_codebook"}
_BYTES = (torch.float8_e4m3fn, torch.uint8)
_OF_ACTIVATIONS = {"scale_input", "input_scale"}
"""How to round what goes into a layer: nothing that its weight depends on."""
_OF_ATTENTION = ".comfy_attention.config"  # which kernels compute an attention
_NEXT_TO_ALL = {"weight", "bias", _MARKER, *_OF_ACTIVATIONS}
_SETTINGS = {"format", "full_precision_matrix_mult", "linear_dtype", "orig_dtype", "orig_shape", "per_row"}
"""Of a layer's marker: how it is computed and was made. Others might change what a weight means."""
_OF_OTHERS = {
    "weight_scale_2": "nvfp4 without ComfyUI's marker",
    "weight_s_rel": "asym_w4a8_int8 without ComfyUI's marker",
    "pre_quant_scale": "smoothed weights",
    "weight_scale_inv": "fp8 by blocks",
    "wscales": "SVDQuant (Nunchaku)",
    "absmax": "bitsandbytes' 4 bits",
    "SCB": "bitsandbytes' 8 bits",
}
"""Last names of tensors by which other formats are known, and the names of these."""
_GROUPS = (4, 16, 64, 256, 1024, 4096)  # columns that can be rotated together
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of 4-bit floats, by their last three bits

_Expected = dict[str, tuple[Sequence[torch.dtype], Sequence[Sequence[int]]]]
"""Dtypes and shapes that tensors next to a weight may have, by their last names."""


class StoredFormatError(ValueError):
    """Weights are stored in a format that is not read, or their scales do not fit; the message names it."""


@dataclass(frozen=True, kw_only=True)
class QuantisedWeight(ABC):
    """A weight as a file keeps it, which becomes numbers some rows at a time.

    Attributes:
        layer: its name in the file.
        format: ComfyUI's name for it.
        parts: tensors of the layer by their last names: ``weight``, and those next to it.
        settings: of the layer's marker.
    """

    choices: ClassVar[Mapping[str, Sequence[object]]] = MappingProxyType({})
    """Settings of its own, and what they may be."""
    packed: ClassVar[int] = 1  # columns in a byte
    columns: ClassVar[int] = 1  # how many have one scale, if ``group_size`` is not set
    is_rotated: ClassVar[bool] = False  # if ``convrot`` is not set

    layer: str
    format: str
    parts: Mapping[str, Tensor]
    settings: Mapping[str, Any]

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight's numbers."""
        *rows, last = self.parts["weight"].shape
        return torch.Size((*rows, last * self.packed))

    @property
    def block(self) -> int:
        """How many columns have one scale; 1 if all."""
        return int(self.settings.get("group_size", self.columns))

    @property
    def group(self) -> int:
        """How many columns are rotated together; 1 if none."""
        rotated = self.settings.get("convrot", self.is_rotated)
        return int(self.settings.get("convrot_groupsize", 256)) if rotated else 1

    def check(self) -> None:
        """Refuse settings and parts that are not those of the format."""
        place = f"{self.layer} is in {self.format}"
        if unknown := sorted(self.settings.keys() - _SETTINGS - self.choices.keys()):
            raise StoredFormatError(f"{place} with {', '.join(unknown)}, which is not read; {_WOULD_DO}")
        for key, allowed in {**self.choices, "orig_shape": ([*self.shape],)}.items():
            if key in self.settings and self.settings[key] not in allowed:
                read = " or ".join(map(str, allowed))
                raise StoredFormatError(f"{place} with {key} {self.settings[key]}; read is {read}")
        multiple = max(self.group, self.block)
        if multiple > 1 and (len(self.shape) != 2 or self.shape[1] % multiple):
            raise StoredFormatError(
                f"{place} with shape {list(self.shape)}; read are whole groups of {multiple} columns"
            )
        expected = self._expected()
        if unknown := sorted(self.parts.keys() - expected.keys() - _NEXT_TO_ALL):
            raise StoredFormatError(f"{place} with {', '.join(unknown)}, which is not read; {_WOULD_DO}")
        for part, (dtypes, shapes) in expected.items():
            if part not in self.parts:
                raise _lacking(self.layer)
            stored, allowed = self.parts[part], [[*shape] for shape in shapes]
            if stored.dtype not in dtypes or [*stored.shape] not in allowed:
                raise StoredFormatError(
                    f"{self.layer}.{part} is {_name_of(stored.dtype)} of shape {list(stored.shape)}, for a "
                    f"weight of shape {list(self.shape)} in {self.format}; read is "
                    f"{' or '.join(map(_name_of, dtypes))} of shape {' or '.join(map(str, allowed))}"
                )

    def is_of(self, values: Tensor, rows: slice) -> bool:
        """Whether converted rows can be read: not where columns left those that they belong to."""
        stored = self.parts["weight"][rows]
        is_by_column = max(self.group, self.block, self.packed) == 1
        return is_by_column or torch.equal(values.view(torch.uint8), stored.view(torch.uint8))

    @abstractmethod
    def _expected(self) -> _Expected:
        """What is next to the weight."""

    @abstractmethod
    def numbers(self, values: Tensor, rows: slice) -> Tensor:
        """Some rows of the weight, of which ``values`` are stored, in fp32."""

    def _in_blocks(self, numbers: Tensor) -> Tensor:
        return numbers.view(len(numbers), -1, self.block)


class _ByRow(QuantisedWeight):
    """Numbers times a scale of all the weight, or one of each row.

    Source: ``dequantize_per_tensor_fp8``; scales of rows as of 8-bit whole numbers.
    """

    @property
    def _scale(self) -> str:
        return next((part for part in _SCALES if part in self.parts), _SCALES[-1])

    def _expected(self) -> _Expected:
        num_rows = self.shape[0]
        return {self._scale: (_NUMBERS, ([], [1], [num_rows], [num_rows, 1]))}

    def check(self) -> None:
        super().check()
        scale = self.parts[self._scale]
        if not scale.isfinite().all() or (scale == 0).any():
            raise StoredFormatError(f"{self.layer}.{self._scale} is 0 or not finite; get the file again")

    def scales(self, rows: slice) -> Tensor:
        """What each of some rows is to be multiplied by, (R, 1), fp32."""
        return self.parts[self._scale].float().flatten().expand(self.shape[0])[rows, None]

    def numbers(self, values: Tensor, rows: slice) -> Tensor:
        return values.float() * self.scales(rows).view(-1, *(1,) * (values.ndim - 1))


class Int8Weight(_ByRow):
    """Whole numbers of 8 bits times a scale of all the weight or of each row; with ConvRot, rotated.

    Source: ``dequantize_int8_simple`` and ``dequantize_int8_convrot_weight``.
    """

    choices = MappingProxyType({"convrot": (False, True), "convrot_groupsize": _GROUPS})

    def whole_numbers(self, values: Tensor, rows: slice) -> Tensor:
        """Some rows, rotated and without their scales, int8."""
        return values

    def numbers(self, values: Tensor, rows: slice) -> Tensor:
        if self.group == 1:
            return super().numbers(values, rows)
        whole = self.whole_numbers(values, rows)
        return Int8ConvRot(self.group).dense(whole, self.scales(rows), whole.shape, torch.float32)


class _Int4(Int8Weight):
    """Rotated rows in whole numbers of 4 bits, two in a byte, the lower half first, times a scale of each.

    Source: ``dequantize_convrot_w4a4_weight``.
    """

    choices = MappingProxyType({"convrot_groupsize": _GROUPS})
    packed, is_rotated = 2, True

    def whole_numbers(self, values: Tensor, rows: slice) -> Tensor:
        return (_halves(values) ^ 8).sub_(8).to(torch.int8)  # the upper bit is the sign


class _Int4Table(_Int4):
    """Places in a table of 16, times a scale of a group of columns, rounded to 8 bits; then rotated rows.

    Source: ``dequantize_w4a8_int8_weight``, without its rounding to 16 bits before the rotation. Without a
    table the numbers are -8 to 7. Its ``correction``, which ComfyUI does not read, is refused.
    """

    choices = MappingProxyType({"convrot_groupsize": _GROUPS, "group_size": (4, 8, 16, 32, 64, 128, 256)})
    columns = 16
    _scale = "weight_s_channel"

    def _expected(self) -> _Expected:
        rows, columns = self.shape
        table: _Expected = {"weight_codebook": (_NUMBERS, ([16],))} if "weight_codebook" in self.parts else {}
        scales = (*_BYTES, torch.float32), ([rows, columns // self.block],)
        return table | {"weight_s_rel": scales, "weight_s_channel": (_NUMBERS, ([rows],))}

    def whole_numbers(self, values: Tensor, rows: slice) -> Tensor:
        table = self.parts.get("weight_codebook", torch.arange(-8, 8)).float()
        scales = _as_float8(self.parts["weight_s_rel"][rows])[..., None]
        levels = self._in_blocks(table[_halves(values)]) * scales
        return levels.round_().clamp_(-127, 127).flatten(1).to(torch.int8)


class _Nvfp4(QuantisedWeight):
    """4-bit floats, two in a byte, the upper half first, times a scale of 16 columns and one of the weight.

    Source: ``dequantize_nvfp4``.
    """

    choices = MappingProxyType({"group_size": (16,)})
    packed, columns = 2, 16

    def _expected(self) -> _Expected:
        scales = _BYTES, (_tiled(self.shape, self.block),)
        return {"weight_scale": scales, "weight_scale_2": (_NUMBERS, ([], [1]))}

    def numbers(self, values: Tensor, rows: slice) -> Tensor:
        table = torch.tensor([sign * number for sign in (1, -1) for number in _E2M1])
        scales = _as_float8(_tiles(self.parts["weight_scale"], rows, self.shape[1] // self.block))
        scales = scales * self.parts["weight_scale_2"].float()
        return (self._in_blocks(table[_halves(values, low_first=False)]) * scales[..., None]).flatten(1)


class _Mxfp8(QuantisedWeight):
    """8-bit floats times a power of two for 32 columns.

    Source: ``dequantize_mxfp8``.
    """

    choices = MappingProxyType({"group_size": (32,)})
    columns = 32

    def _expected(self) -> _Expected:
        kinds = torch.float8_e8m0fnu, torch.uint8
        return {"weight_scale": (kinds, (_tiled(self.shape, self.block),))}

    def numbers(self, values: Tensor, rows: slice) -> Tensor:
        exponents = _tiles(self.parts["weight_scale"], rows, self.shape[1] // self.block).int()
        scales = (exponents << 23).view(torch.float32)  # made of bits, so that 0 is 0, as in the source
        return (self._in_blocks(values.float()) * scales[..., None]).flatten(1)


_FORMATS: Mapping[str, tuple[type[QuantisedWeight], torch.dtype]] = MappingProxyType(
    {
        "float8_e4m3fn": (_ByRow, torch.float8_e4m3fn),
        "float8_e5m2": (_ByRow, torch.float8_e5m2),
        "int8_tensorwise": (Int8Weight, torch.int8),
        "convrot_w4a4": (_Int4, torch.int8),
        "asym_w4a8_int8": (_Int4Table, torch.int8),
        "nvfp4": (_Nvfp4, torch.uint8),
        "mxfp8": (_Mxfp8, torch.float8_e4m3fn),
    }
)
_WOULD_DO = (
    "take one in bfloat16, float16, float32, plain fp8, GGUF, or with ComfyUI's marker in "
    f"{', '.join(_FORMATS)}; model.quantize makes it small in memory"
)


def separate_quantised(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> tuple[dict[str, Tensor], dict[str, QuantisedWeight]]:
    """The weights among stored tensors, and those of them that are kept in fewer bits.

    Weights in 8-bit floats that no scale and no marker is stored with are numbers as they are.

    Args:
        tensors: by name; of weights only shape and dtype are looked at.

    Returns:
        All but scales and markers, by name; and again those in a format.

    Raises:
        StoredFormatError: weights are in another format; a scale is missing, left over, of a shape that does
            not fit, not finite or 0.
    """
    layers: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        layer, _, leaf = name.rpartition(".")
        layers[layer][leaf] = tensor
    settings = dict(_layer_settings(layers, metadata))
    is_marked = bool(settings) or any(_OLD_MARKER in parts for parts in layers.values())
    for layer, parts in layers.items():
        if layer not in settings:
            _refuse_unmarked(layer, parts)
            if not parts.keys().isdisjoint(_SCALES):
                settings[layer] = {"format": _name_of(parts["weight"].dtype)}
    weights = {
        name: tensor
        for name, tensor in tensors.items()
        if not is_scale(name) and not name.endswith(_OF_ATTENTION)
    }
    quantised = {f"{layer}.weight": _quantised(layer, one, layers[layer]) for layer, one in settings.items()}
    if quantised or is_marked:
        in_8_bits = {name for name, tensor in weights.items() if tensor.dtype in FLOAT8}
        if lacking := sorted(in_8_bits.difference(quantised)):
            raise _lacking(lacking[0].removesuffix(".weight"))
        if not quantised:
            raise StoredFormatError(f"it is marked {_OLD_MARKER}, but holds no scales; get the file again")
    return weights, quantised


def is_scale(name: str) -> bool:
    """Whether a tensor is a scale or a marker of weights in fewer bits."""
    leaf = name.rpartition(".")[2]
    return leaf in _PARTS or leaf in _OF_ACTIVATIONS or leaf in (_MARKER, _OLD_MARKER)


def _refuse_unmarked(layer: str, parts: Mapping[str, Tensor]) -> None:
    """Refuse a layer without a marker that is in another format than 8-bit floats, by its name or dtype."""
    for leaf in parts:
        if leaf in _OF_OTHERS:
            raise StoredFormatError(
                f"it is in {_OF_OTHERS[leaf]} ({layer}.{leaf}), which is not read; {_WOULD_DO}"
            )
    for leaf, tensor in parts.items():
        narrow = tensor.dtype.itemsize == 1 and tensor.dtype not in FLOAT8
        if narrow and not is_scale(leaf) and not f"{layer}.{leaf}".endswith(_OF_ATTENTION):
            kind = _name_of(tensor.dtype)
            if kind == "int8" and not parts.keys().isdisjoint(_SCALES):
                kind = "int8 with a scale, but without ComfyUI's marker"
            raise StoredFormatError(f"it holds {layer}.{leaf} in {kind}, which is not read; {_WOULD_DO}")
    for leaf in _SCALES:
        if leaf in parts and ("weight" not in parts or parts["weight"].dtype not in FLOAT8):
            raise StoredFormatError(f"{layer}.{leaf} belongs to no weight in 8 bits; get the file again")


def _layer_settings(
    layers: Mapping[str, Mapping[str, Tensor]], metadata: Mapping[str, str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The settings of layers in markers and header, by the layers' names."""
    for layer, parts in layers.items():
        if _MARKER in parts:
            marker = parts[_MARKER]
            text = bytes(marker.flatten().tolist()) if marker.dtype == torch.uint8 else b""
            yield layer, _json_object(text, f"{layer}.{_MARKER}")
    if _HEADER in metadata:
        listed = _json_object(metadata[_HEADER], _HEADER).get("layers")
        if not isinstance(listed, dict) or not all(isinstance(one, dict) for one in listed.values()):
            raise StoredFormatError(f"{_HEADER} in its header lists no layers; get the file again")
        yield from listed.items()


def _json_object(text: str | bytes, place: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise StoredFormatError(f"{place} holds no JSON object; get the file again")
    return document


def _quantised(layer: str, settings: Mapping[str, Any], parts: Mapping[str, Tensor]) -> QuantisedWeight:
    """The weight of a layer, which fits its format."""
    params = settings.get("params")
    if isinstance(params, dict):  # ComfyUI's reader looks there for what is not next to the format
        settings = params | {key: value for key, value in settings.items() if key != "params"}
    name = str(settings.get("format"))
    if name not in _FORMATS:
        raise StoredFormatError(f"{layer} is in {name}, which is not read; {_WOULD_DO}")
    if "weight" not in parts:
        raise _lacking(layer)
    kind, dtype = _FORMATS[name]
    if parts["weight"].dtype != dtype:
        stored = _name_of(parts["weight"].dtype)
        raise StoredFormatError(f"{layer}.weight is {stored}, but marked as {name}; get the file again")
    weight = kind(layer=layer, format=name, parts=parts, settings=settings)
    weight.check()
    return weight


def _lacking(layer: str) -> StoredFormatError:
    return StoredFormatError(f"{layer} lacks its weight or a scale of it; get the file again")


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _halves(packed: Tensor, *, low_first: bool = True) -> Tensor:
    """The two numbers in 0 to 15 of each byte, (R, C) to (R, 2 C)."""
    whole = packed.view(torch.uint8).int()
    low_and_high = torch.stack([whole & 15, whole >> 4], -1)
    return (low_and_high if low_first else low_and_high.flip(-1)).flatten(1)


def _as_float8(scales: Tensor) -> Tensor:
    """Scales that may be 8-bit floats stored as bytes, in fp32."""
    return (scales.view(torch.float8_e4m3fn) if scales.dtype == torch.uint8 else scales).float()


def _tiled(shape: Sequence[int], block: int) -> tuple[int, int]:
    """Shape of the scales of a matrix in the layout of cuBLAS: whole tiles of 128 rows and 4 scales."""
    return -(-shape[0] // 128) * 128, -(-shape[1] // block // 4) * 4


def _tiles(scales: Tensor, rows: slice, num_columns: int) -> Tensor:
    """The scales of some rows, as bytes, from the layout of cuBLAS, (R, num_columns).

    A tile of 128 rows and 4 scales is stored as 32 rows of 16: those of rows 0, 32, 64 and 96, and so on.
    """
    row, column = torch.arange(rows.start, rows.stop)[:, None], torch.arange(num_columns)
    tile = row // 128 * -(-num_columns // 4) + column // 4
    place = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
    return scales.view(torch.uint8).flatten()[place]
