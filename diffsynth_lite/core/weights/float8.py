"""This file finds the scales of weights that are stored as 8-bit floats, as in ComfyUI's fp8_scaled files.

Facts of the format, in both of its spellings: ``QUANTIZATION.md``, ``comfy/quant_ops.py`` and
``convert_old_quants`` in ``comfy/utils.py`` of ComfyUI.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_NUMBERS = (torch.float32, torch.float16, torch.bfloat16)
_HEADER = "_quantization_metadata"
_OLD_MARKER = "scaled_fp8"
_MARKER = ".comfy_quant"
_SCALES = (".scale_weight", ".weight_scale")
_OF_ACTIVATIONS = (".scale_input", ".input_scale")
"""How to round what goes into a layer: nothing that its weight depends on."""
_FORMATS = {str(dtype).removeprefix("torch."): dtype for dtype in FLOAT8}
_SETTINGS = {"format", "full_precision_matrix_mult"}
"""Of a layer's marker; the second is about how it is computed. Others might change what a weight means."""
_OF_OTHERS = {
    ".weight_scale_2": "nvfp4",
    ".weight_s_rel": "asym_w4a8_int8",
    ".pre_quant_scale": "smoothed weights",
    ".weight_scale_inv": "fp8 by blocks",
    ".wscales": "SVDQuant (Nunchaku)",
    ".weight.absmax": "bitsandbytes' 4 bits",
    ".SCB": "bitsandbytes' 8 bits",
}
"""Tensors by which other formats are known, and their names."""
_WOULD_DO = (
    "take one in bfloat16, float16, float32, plain fp8, ComfyUI's fp8_scaled or GGUF; model.quantize makes "
    "it small in memory"
)


class StoredFormatError(ValueError):
    """Weights are stored in a format that is not read, or their scales do not fit; the message names it."""


def separate_scales(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights among stored tensors, and what those in 8 bits are to be multiplied by.

    Weights in 8 bits that no scale and no marker is stored with are numbers as they are.

    Args:
        tensors: by name; of weights only shape and dtype are looked at.

    Returns:
        All but scales and markers; for each row of a scaled weight its scale, (rows, 1, ...), fp32, by the
        weight's name.

    Raises:
        StoredFormatError: weights are in another format; a scale is missing, left over, of a shape that does
            not fit, not finite or 0.
    """
    settings = dict(_layer_settings(tensors, metadata))
    _refuse_others(tensors, settings)
    scales = dict(_scales(tensors))
    weights = {name: tensor for name, tensor in tensors.items() if not is_scale(name)}
    marked = {f"{layer}.weight" for layer in settings}
    if scales or marked or any(_is_old_marker(name) for name in tensors):
        in_8_bits = {name for name, tensor in weights.items() if tensor.dtype in FLOAT8}
        if lacking := sorted(in_8_bits.union(marked).difference(scales)):
            raise StoredFormatError(
                f"{len(lacking)} of its layers in 8 bits lack their scale or their weight, such as "
                f"{lacking[0]}; get the file again"
            )
        if not scales:
            raise StoredFormatError(f"it is marked {_OLD_MARKER}, but holds no scales; get the file again")
    return weights, scales


def _is_old_marker(name: str) -> bool:
    return name == _OLD_MARKER or name.endswith(f".{_OLD_MARKER}")


def is_scale(name: str) -> bool:
    """Whether a tensor is a scale or a marker of weights in 8 bits."""
    return name.endswith((_MARKER, *_SCALES, *_OF_ACTIVATIONS)) or _is_old_marker(name)


def _refuse_others(tensors: Mapping[str, Tensor], settings: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse weights in another format, by its name; by their dtype where the file does not name one."""
    for name in tensors:
        known = next((known for ending, known in _OF_OTHERS.items() if name.endswith(ending)), None)
        if known is not None:
            raise StoredFormatError(f"it is in {known} ({name}), which is not read; {_WOULD_DO}")
    for layer, one in settings.items():
        _require_format(layer, one, tensors)
    for name, tensor in tensors.items():
        narrow = tensor.dtype.itemsize == 1 and tensor.dtype not in FLOAT8
        if narrow and not is_scale(name):
            kind = str(tensor.dtype).removeprefix("torch.")
            layer = name.removesuffix(".weight")
            if kind == "int8" and any(f"{layer}{ending}" in tensors for ending in _SCALES):
                kind = "int8 with a scale, as ComfyUI's int8_tensorwise and ConvRot"
            raise StoredFormatError(f"it holds {name} in {kind}, which is not read; {_WOULD_DO}")


def _layer_settings(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The settings of layers in markers and header, by the layers' names."""
    for name, tensor in tensors.items():
        if name.endswith(_MARKER):
            text = bytes(tensor.flatten().tolist()) if tensor.dtype == torch.uint8 else b""
            yield name.removesuffix(_MARKER), _json_object(text, name)
    if _HEADER in metadata:
        layers = _json_object(metadata[_HEADER], _HEADER).get("layers")
        if not isinstance(layers, dict) or not all(isinstance(one, dict) for one in layers.values()):
            raise StoredFormatError(f"{_HEADER} in its header lists no layers; get the file again")
        yield from layers.items()


def _json_object(text: str | bytes, place: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise StoredFormatError(f"{place} holds no JSON object; get the file again")
    return document


def _require_format(layer: str, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    name = str(settings.get("format"))
    if unknown := sorted(settings.keys() - _SETTINGS):
        name = f"{name} with {', '.join(unknown)}"
    if name not in _FORMATS:
        raise StoredFormatError(f"{layer} is in {name}, which is not read; {_WOULD_DO}")
    weight = tensors.get(f"{layer}.weight")
    if weight is not None and weight.dtype != _FORMATS[name]:
        dtype = str(weight.dtype).removeprefix("torch.")
        raise StoredFormatError(f"{layer}.weight is {dtype}, but marked as {name}; get the file again")


def _scales(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The scales of each row, by the weight's name."""
    found: dict[str, str] = {}
    for name, scale in tensors.items():
        ending = next((ending for ending in _SCALES if name.endswith(ending)), None)
        if ending is None:
            continue
        weight = f"{name.removesuffix(ending)}.weight"
        if weight not in tensors or tensors[weight].dtype not in FLOAT8:
            raise StoredFormatError(f"{name} belongs to no weight in 8 bits; get the file again")
        if other := found.get(weight):
            raise StoredFormatError(f"{weight} has two scales, {other} and {name}; get the file again")
        found[weight] = name
        yield weight, _of_rows(name, scale, tensors[weight])


def _of_rows(name: str, scale: Tensor, weight: Tensor) -> Tensor:
    """A scale of all of a weight, or one of each row, as (rows, 1, ...), fp32."""
    one_each = scale.shape in (weight.shape[:1], (*weight.shape[:1], 1))
    if scale.dtype not in _NUMBERS or not (scale.numel() == 1 or one_each):
        raise StoredFormatError(
            f"{name} is {str(scale.dtype).removeprefix('torch.')} of shape {list(scale.shape)}, for a weight "
            f"of shape {list(weight.shape)}; read are scales of all the weight or of its rows, in float32"
        )
    if not scale.isfinite().all() or (scale == 0).any():
        raise StoredFormatError(f"{name} is 0 or not finite; get the file again")
    rows = weight.shape[:1]
    return scale.float().flatten().expand(rows.numel()).view(*rows, *(1,) * (weight.ndim - 1))
