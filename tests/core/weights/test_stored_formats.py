"""Weights that files keep in fewer bits: read as ComfyUI and comfy-kitchen define them, or refused."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from diffsynth_lite.core.weights.loading import StoredTensors
from diffsynth_lite.core.weights.stored_formats import (
    QuantisedWeight,
    StoredFormatError,
    separate_quantised,
)

E4M3 = torch.float8_e4m3fn
MARKER = {"format": "float8_e4m3fn"}


def weight(rows: int = 4, columns: int = 3, dtype: torch.dtype = E4M3) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype)


def as_bytes(settings: object) -> Tensor:
    return torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8)


def in_header(**layers: object) -> dict[str, str]:
    return {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}


def numbers(quantised: QuantisedWeight) -> Tensor:
    values = quantised.parts["weight"]
    return quantised.numbers(values, slice(0, len(values)))


OLD = {"a.weight": weight(), "scaled_fp8": torch.zeros(2, dtype=E4M3), "a.scale_weight": torch.tensor(0.5)}
NEW = {"a.weight": weight(), "a.comfy_quant": as_bytes(MARKER), "a.weight_scale": torch.tensor([0.5])}


@pytest.mark.parametrize(
    ("tensors", "metadata"),
    [
        (OLD, {}),
        (OLD | {"a.scale_input": torch.tensor(1.0), "scaled_fp8": torch.zeros(0)}, {}),
        (NEW, {}),
        (NEW | {"a.input_scale": torch.tensor(1.0)}, {"format": "pt"}),
        (NEW | {"a.comfy_quant": as_bytes(MARKER | {"full_precision_matrix_mult": True})}, {}),
        ({name: NEW[name] for name in ("a.weight", "a.weight_scale")}, in_header(a=MARKER)),
        ({name: NEW[name] for name in ("a.weight", "a.weight_scale")}, {}),
    ],
    ids=["old", "old, of activations", "new", "new, of activations", "settings", "header", "unmarked"],
)
def test_a_scale_is_found_in_both_spellings(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    weights, quantised = separate_quantised(tensors | {"a.bias": torch.ones(4)}, metadata)
    assert set(weights) == {"a.weight", "a.bias"}
    assert torch.equal(numbers(quantised["a.weight"]), 0.5 * weight().float())


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_each_row_may_have_a_scale(shape: tuple[int, ...]) -> None:
    scales = torch.arange(1.0, 5.0, dtype=torch.bfloat16)
    _, found = separate_quantised(OLD | {"a.scale_weight": scales.view(shape)}, {})
    assert torch.equal(numbers(found["a.weight"]), scales.float()[:, None] * weight().float())


@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2])
def test_a_file_without_scales_and_marker_holds_plain_numbers(dtype: torch.dtype) -> None:
    tensors = {"a.weight": weight(dtype=dtype), "a.bias": torch.ones(4)}
    assert separate_quantised(tensors, {"format": "pt"}) == (tensors, {})


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (OLD | {"b.weight": weight()}, "b lacks its weight or a scale of it"),
        (OLD | {"b.scale_weight": torch.tensor(0.5)}, r"b\.scale_weight belongs to no weight in 8 bits"),
        (OLD | {"a.weight": weight(dtype=torch.bfloat16)}, r"a\.scale_weight belongs to no weight"),
        ({"scaled_fp8": torch.zeros(0), "a.bias": torch.ones(4)}, "marked scaled_fp8, but holds no scales"),
        (NEW | {"b.comfy_quant": as_bytes(MARKER)}, "b lacks its weight or a scale of it"),
        (OLD | {"a.weight_scale": torch.tensor(0.5)}, "a is in float8_e4m3fn with weight_scale, which"),
        (OLD | {"a.scale_weight": torch.ones(3)}, r"a\.scale_weight is float32 of shape \[3\], for a weight"),
        (OLD | {"a.scale_weight": torch.ones(1, 4)}, r"of shape \[1, 4\]"),
        (OLD | {"a.scale_weight": torch.ones((), dtype=torch.uint8)}, r"a\.scale_weight is uint8"),
        (OLD | {"a.scale_weight": torch.tensor(torch.inf)}, r"a\.scale_weight is 0 or not finite"),
        (OLD | {"a.scale_weight": torch.tensor([1.0, 2, 0, 3])}, r"a\.scale_weight is 0 or not finite"),
        (NEW | {"a.comfy_quant": as_bytes({"format": "fp5"})}, "a is in fp5, which is not read; take one in"),
        (NEW | {"a.comfy_quant": as_bytes(MARKER | {"convrot": True})}, "a is in float8_e4m3fn with convrot"),
        (NEW | {"a.comfy_quant": as_bytes({"format": "float8_e5m2"})}, "but marked as float8_e5m2"),
        (NEW | {"a.comfy_quant": as_bytes([1])}, r"a\.comfy_quant holds no JSON object"),
        (NEW | {"a.comfy_quant": torch.tensor([-1.0])}, r"a\.comfy_quant holds no JSON object"),
        (NEW | {"a.weight_scale_2": torch.tensor(1.0)}, r"with weight_scale_2, which is not read"),
        (NEW | {"a.comfy_quant": as_bytes({"format": []})}, r"a is in \[\], which is not read"),
        ({"a.wscales": torch.ones(4)}, "it is in SVDQuant"),
        ({"a.weight": torch.zeros(4, dtype=torch.uint8)}, r"it holds a\.weight in uint8"),
    ],
)
def test_what_is_missing_left_over_or_in_another_format_is_refused(
    tensors: dict[str, Tensor], words: str
) -> None:
    with pytest.raises(StoredFormatError, match=words):
        separate_quantised(tensors, {})


def random_bytes(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(7)).to(torch.int8)


def powers_of_two(*shape: int) -> Tensor:
    """Scales with which the sources' sums in fp32 are exact, so that their order does not show."""
    return 2.0 ** -torch.randint(0, 6, shape, generator=torch.Generator().manual_seed(8))


def unrotated(rows: Tensor, group: int) -> Tensor:
    """``_build_hadamard`` and ``_rotate_weight`` of comfy_kitchen/tensor/int8_utils.py."""
    of_4 = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1.0]])
    matrix = of_4
    while len(matrix) < group:
        matrix = torch.kron(matrix, of_4)
    return (rows.view(len(rows), -1, group) @ (matrix / group**0.5).T).view(rows.shape)


def nibbles(packed: Tensor) -> tuple[Tensor, Tensor]:
    whole = packed.to(torch.int32)
    return whole & 15, whole >> 4 & 15


def side_by_side(first: Tensor, second: Tensor) -> Tensor:
    return torch.stack([first, second], dim=-1).reshape(len(first), -1)


def unblocked(blocked: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """``from_blocked`` of comfy_kitchen/float_utils.py."""
    across, down = -(-num_columns // 4), -(-num_rows // 128)
    tiles = blocked.reshape(-1, 32, 4, 4).transpose(1, 2).reshape(down, across, 128, 4)
    return tiles.permute(0, 2, 1, 3).reshape(down * 128, across * 4)[:num_rows, :num_columns]


Parts = dict[str, Tensor]


def int8(parts: Parts, group: int) -> Tensor:
    """``dequantize_int8_simple`` and ``dequantize_int8_convrot_weight`` of comfy_kitchen/backends/eager."""
    dense = parts["weight"].float() * parts["weight_scale"]
    return unrotated(dense, group) if group > 1 else dense


def convrot_w4a4(parts: Parts, group: int) -> Tensor:
    """``dequantize_convrot_w4a4_weight``."""
    whole = side_by_side(*(torch.where(one >= 8, one - 16, one) for one in nibbles(parts["weight"])))
    return unrotated(whole.float() * parts["weight_scale"].reshape(-1, 1), group)


def asym_w4a8_int8(parts: Parts, group: int) -> Tensor:
    """``_dequant_int4_grouped_to_int8``, then ``_dequantize_w4a8_int8_weight_from_int8`` in fp32."""
    places = side_by_side(*nibbles(parts["weight"]))
    levels = parts["weight_codebook"][places] if "weight_codebook" in parts else places.float() - 8.0
    rows, groups = parts["weight_s_rel"].shape
    scaled = levels.view(rows, groups, -1) * parts["weight_s_rel"].float().unsqueeze(-1)
    whole = scaled.view(rows, -1).round().clamp(-127, 127)
    return unrotated(whole * parts["weight_s_channel"].view(-1, 1), group)


def nvfp4(parts: Parts, _: int) -> Tensor:
    """``dequantize_nvfp4`` with fp32 as its output."""
    positive = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    table = torch.cat([positive, -positive])
    low, high = nibbles(parts["weight"])
    numbers = table[side_by_side(high, low)]
    scales = unblocked(parts["weight_scale"].float(), len(numbers), numbers.shape[1] // 16)
    total = parts["weight_scale_2"] * scales
    return (numbers.view(len(numbers), -1, 16) * total.unsqueeze(-1)).view(numbers.shape)


def mxfp8(parts: Parts, _: int) -> Tensor:
    """``dequantize_mxfp8``, with ``e8m0_to_f32``."""
    weight = parts["weight"].float()
    exponents = unblocked(parts["weight_scale"].view(torch.uint8), len(weight), weight.shape[1] // 32).int()
    scales = torch.where(exponents == 0, 0, 2.0 ** (exponents - 127).double()).float()
    return (weight.view(len(weight), -1, 32) * scales.unsqueeze(-1)).view(weight.shape)


@dataclass
class Case:
    """A layer's settings and tensors, and how comfy-kitchen makes numbers of them."""

    settings: dict[str, object]
    parts: Parts
    source: Callable[[Parts, int], Tensor]
    group: int = 1

    def named(self, name: str, *, marked: bool = True) -> Parts:
        parts = self.parts | ({"comfy_quant": as_bytes(self.settings)} if marked else {})
        return {f"{name}.{leaf}": tensor.clone() for leaf, tensor in parts.items()}


BY_ROW = {"format": "int8_tensorwise", "per_row": True, "orig_dtype": "torch.bfloat16", "convrot": False}
IN_PARAMS = {"format": "int8_tensorwise", "params": {"convrot": True, "convrot_groupsize": 64}}
IN_4_BITS = {"format": "convrot_w4a4", "convrot_groupsize": 16, "linear_dtype": "int8"}
BY_TABLE = {"format": "asym_w4a8_int8", "group_size": 16, "convrot_groupsize": 256}
ROWS = {"weight": random_bytes(70, 512), "weight_scale": powers_of_two(70, 1)}
GROUPED = {"weight": random_bytes(130, 256), "weight_s_channel": powers_of_two(130)}
TABLE = {"weight_s_rel": (torch.rand(130, 32) * 40).to(E4M3), "weight_codebook": torch.linspace(-1, 1, 16)}
BLOCKS = {"weight": random_bytes(130, 48).view(torch.uint8), "weight_scale": torch.rand(256, 8).to(E4M3)}
E8M0 = (torch.arange(256 * 8) % 200).to(torch.uint8).view(torch.float8_e8m0fnu).view(256, 8)
CASES = {
    "int8": Case({"format": "int8_tensorwise"}, ROWS | {"weight_scale": torch.tensor(0.3)}, int8),
    "by row": Case(BY_ROW, ROWS | {"weight_scale": torch.rand(70, 1) + 0.1}, int8),
    "convrot": Case({"format": "int8_tensorwise", "convrot": True}, ROWS, int8, 256),
    "in params": Case(IN_PARAMS, ROWS | {"weight_scale": torch.tensor([0.25])}, int8, 64),
    "4 bits": Case(IN_4_BITS, ROWS | {"weight_scale": powers_of_two(70)}, convrot_w4a4, 16),
    "table": Case(BY_TABLE, GROUPED | TABLE, asym_w4a8_int8, 256),
    "no table": Case(
        {"format": "asym_w4a8_int8", "group_size": 32},
        GROUPED | {"weight_s_rel": torch.rand(130, 16) * 20},
        asym_w4a8_int8,
        256,
    ),
    "nvfp4": Case(
        {"format": "nvfp4", "group_size": 16, "orig_shape": [130, 96]},
        BLOCKS | {"weight_scale_2": torch.tensor(0.01)},
        nvfp4,
    ),
    "mxfp8": Case({"format": "mxfp8"}, {"weight": weight(130, 160), "weight_scale": E8M0}, mxfp8),
}
of_cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def in_file(file: Path, tensors: Parts, metadata: dict[str, str] | None = None) -> StoredTensors:
    save_file(tensors, file, metadata)
    return StoredTensors.in_files([file])


@of_cases
def test_a_layer_in_a_format_of_comfyui_gives_the_numbers_of_its_source(case: Case, tmp_path: Path) -> None:
    expected = case.source(case.parts, case.group)
    others = {"a.bias": torch.ones(3), "b.comfy_attention.config": as_bytes({"attention": "any"})}
    # Scales in 8 bits may be stored as bytes.
    as_bytes_too = {
        name: tensor.view(torch.uint8) if "weight_s" in name and tensor.dtype.itemsize == 1 else tensor
        for name, tensor in case.named("a", marked=False).items()
    }
    for stored in (
        in_file(tmp_path / "marked", case.named("a") | others),
        in_file(tmp_path / "header", as_bytes_too | others, in_header(a=case.settings)),
    ):
        assert set(stored.tensors) == {"a.weight", "a.bias"}
        assert stored.shape("a.weight") == expected.shape
        parts = [slice(first, first + 64) for first in range(0, len(expected), 64)]
        assert torch.equal(torch.cat([stored.numbers("a.weight", part) for part in parts]), expected)


@of_cases
def test_rows_keep_their_numbers_in_another_layout_and_columns_are_not_moved(
    case: Case, tmp_path: Path
) -> None:
    stored = in_file(tmp_path / "two", case.named("a") | case.named("b"))
    expected, rows = case.source(case.parts, case.group), slice(2, 68)

    def joined(tensors: Parts) -> Parts:
        return {"c.weight": torch.cat([tensors["a.weight"][1::2], tensors["b.weight"]])}

    found = stored.converted(joined).numbers("c.weight", rows)
    assert torch.equal(found, torch.cat([expected[1::2], expected])[rows])

    def turned(tensors: Parts) -> Parts:
        return {"c.weight": torch.cat(tensors["a.weight"].tensor_split(2, dim=1)[::-1], dim=1)}

    moved, half = stored.converted(turned), expected.shape[1] // 2
    if case.group == 1 and case.source is int8:
        assert torch.equal(moved.numbers("c.weight", rows), expected.roll(half, 1)[rows])
        return
    with pytest.raises(StoredFormatError, match=r"columns of c\.weight, in .*, would be moved"):
        moved.numbers("c.weight", rows)


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("convrot", {"convrot_groupsize": 128}, "in int8_tensorwise with convrot_groupsize 128; read is 4"),
        ("convrot", {"convrot_groupsize": 1024}, r"shape \[70, 512\]; read are whole groups of 1024 columns"),
        ("convrot", {"zero_point": 3}, "a is in int8_tensorwise with zero_point, which is not read"),
        ("convrot", {"format": "int8_blockwise"}, "a is in int8_blockwise, which is not read; take one in"),
        ("convrot", {"a.weight_scale": torch.ones(512)}, r"a\.weight_scale is float32 of shape \[512\], "),
        ("convrot", {"a.weight_scale": torch.tensor(torch.nan)}, r"a\.weight_scale is 0 or not finite"),
        ("table", {"a.weight_correction": torch.ones(1)}, "asym_w4a8_int8 with weight_correction, which is"),
        ("table", {"a.weight_s_rel": torch.ones(130, 16)}, r"float32 of shape \[130, 32\]"),
        ("nvfp4", {"orig_shape": [129, 90]}, r"with orig_shape \[129, 90\]; read is \[130, 96\]"),
        ("nvfp4", {"a.weight_scale": torch.ones(130, 6).to(E4M3)}, r"or uint8 of shape \[256, 8\]"),
        ("nvfp4", {"a.pre_quant_scale": torch.ones(96)}, "in nvfp4 with pre_quant_scale, which is not read"),
        ("mxfp8", {"group_size": 16}, "a is in mxfp8 with group_size 16; read is 32"),
        ("nvfp4", None, r"it is in nvfp4 without ComfyUI's marker \(a\.weight_scale_2\)"),
        ("table", None, "it is in asym_w4a8_int8 without ComfyUI's marker"),
        ("convrot", None, r"a\.weight in int8 with a scale, but without ComfyUI's marker, which is not read"),
        ("mxfp8", None, r"a\.weight_scale is float8_e8m0fnu of shape \[256, 8\]"),
    ],
)
def test_what_differs_from_the_source_is_refused_by_its_name(
    kind: str, changes: dict[str, Any] | None, words: str
) -> None:
    case = CASES[kind]
    stored = case.named("a", marked=False)
    if changes is not None:
        stored |= {name: value for name, value in changes.items() if isinstance(value, Tensor)}
        added = {name: value for name, value in changes.items() if name not in stored}
        stored["a.comfy_quant"] = as_bytes(case.settings | added)
    with pytest.raises(StoredFormatError, match=words):
        separate_quantised(stored, {})


@pytest.mark.parametrize("header", ["{", "[" * 100_000, "[]", '{"layers": {"a": "float8_e4m3fn"}}'])
def test_a_damaged_header_is_refused(header: str) -> None:
    with pytest.raises(StoredFormatError, match="_quantization_metadata"):
        separate_quantised({"a.weight": weight()}, {"_quantization_metadata": header})
