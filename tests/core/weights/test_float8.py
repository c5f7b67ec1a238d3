"""Weights stored as 8-bit floats: their scales are found in every spelling, or the file is refused."""

import json

import pytest
import torch
from torch import Tensor

from diffsynth_lite.core.weights.float8 import StoredFormatError, separate_scales

E4M3 = torch.float8_e4m3fn
MARKER = {"format": "float8_e4m3fn"}


def weight(rows: int = 4, columns: int = 3, dtype: torch.dtype = E4M3) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype)


def as_bytes(settings: object) -> Tensor:
    return torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8)


def in_header(**layers: object) -> dict[str, str]:
    return {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}


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
    weights, scales = separate_scales(tensors | {"a.bias": torch.ones(4)}, metadata)
    assert set(weights) == {"a.weight", "a.bias"}
    assert torch.equal(scales["a.weight"], torch.full((4, 1), 0.5))


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_each_row_may_have_a_scale(shape: tuple[int, ...]) -> None:
    scales = torch.arange(1.0, 5.0, dtype=torch.bfloat16)
    _, found = separate_scales(OLD | {"a.scale_weight": scales.view(shape)}, {})
    assert torch.equal(found["a.weight"], scales.float()[:, None])


@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2])
def test_a_file_without_scales_and_marker_holds_plain_numbers(dtype: torch.dtype) -> None:
    tensors = {"a.weight": weight(dtype=dtype), "a.bias": torch.ones(4)}
    assert separate_scales(tensors, {"format": "pt"}) == (tensors, {})


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (OLD | {"b.weight": weight()}, r"1 of its layers in 8 bits lack .* such as b\.weight"),
        (OLD | {"b.scale_weight": torch.tensor(0.5)}, r"b\.scale_weight belongs to no weight in 8 bits"),
        (OLD | {"a.weight": weight(dtype=torch.bfloat16)}, r"a\.scale_weight belongs to no weight"),
        ({"scaled_fp8": torch.zeros(0), "a.bias": torch.ones(4)}, "marked scaled_fp8, but holds no scales"),
        (NEW | {"b.comfy_quant": as_bytes(MARKER)}, r"lack their scale or their weight, such as b\.weight"),
        (OLD | {"a.weight_scale": torch.tensor(0.5)}, r"a\.weight has two scales"),
        (OLD | {"a.scale_weight": torch.ones(3)}, r"a\.scale_weight is float32 of shape \[3\], for a weight"),
        (OLD | {"a.scale_weight": torch.ones(1, 4)}, r"of shape \[1, 4\]"),
        (OLD | {"a.scale_weight": torch.ones((), dtype=torch.uint8)}, r"a\.scale_weight is uint8"),
        (OLD | {"a.scale_weight": torch.tensor(torch.inf)}, r"a\.scale_weight is 0 or not finite"),
        (OLD | {"a.scale_weight": torch.tensor([1.0, 2, 0, 3])}, r"a\.scale_weight is 0 or not finite"),
        (NEW | {"a.comfy_quant": as_bytes({"format": "mxfp8"})}, "a is in mxfp8, which is not read"),
        (NEW | {"a.comfy_quant": as_bytes(MARKER | {"convrot": True})}, "a is in float8_e4m3fn with convrot"),
        (NEW | {"a.comfy_quant": as_bytes({"format": "float8_e5m2"})}, "but marked as float8_e5m2"),
        (NEW | {"a.comfy_quant": as_bytes([1])}, r"a\.comfy_quant holds no JSON object"),
        (NEW | {"a.comfy_quant": torch.tensor([-1.0])}, r"a\.comfy_quant holds no JSON object"),
        (NEW | {"a.weight_scale_2": torch.tensor(1.0)}, r"it is in nvfp4 \(a\.weight_scale_2\)"),
        (NEW | {"a.comfy_quant": as_bytes({"format": []})}, r"a is in \[\], which is not read"),
        ({"a.wscales": torch.ones(4)}, "it is in SVDQuant"),
        ({"a.weight": torch.zeros(4, dtype=torch.uint8)}, r"it holds a\.weight in uint8"),
    ],
)
def test_what_is_missing_left_over_or_in_another_format_is_refused(
    tensors: dict[str, Tensor], words: str
) -> None:
    with pytest.raises(StoredFormatError, match=words):
        separate_scales(tensors, {})


INT8 = {"weight": weight().to(torch.int8), "weight_scale": torch.ones(4, 1)}
INT8_ROTATED = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}
UNMARKED_INT8 = r"a\.weight in int8 with a scale, as ComfyUI's int8_tensorwise and ConvRot"
OTHERS: dict[str, tuple[dict[str, object], dict[str, Tensor], str, str]] = {
    "nvfp4": (
        {"format": "nvfp4"},
        {
            "weight": torch.ones(4, 8, dtype=torch.uint8),
            "weight_scale": torch.ones(4, 1).to(E4M3),
            "weight_scale_2": torch.tensor(1.0),
        },
        "nvfp4",
        "nvfp4",
    ),
    "int8": ({"format": "int8_tensorwise"}, INT8, "a is in int8_tensorwise,", UNMARKED_INT8),
    "int8, rotated": (
        INT8_ROTATED,
        INT8,
        "a is in int8_tensorwise with convrot, convrot_groupsize,",
        UNMARKED_INT8,
    ),
    "4 bits, rotated": ({"format": "convrot_w4a4"}, INT8, "a is in convrot_w4a4,", UNMARKED_INT8),
    "4 bits in groups": (
        {"format": "asym_w4a8_int8", "group_size": 16},
        {
            "weight": torch.ones(4, 8, dtype=torch.int8),
            "weight_s_rel": torch.ones(4, 1).to(E4M3),
            "weight_s_channel": torch.ones(4),
            "weight_codebook": torch.ones(16),
        },
        "asym_w4a8_int8",
        "asym_w4a8_int8",
    ),
}
"""ComfyUI's other formats: a layer's settings, its tensors, and the name, marked and unmarked."""


@pytest.mark.parametrize(("settings", "tensors", "marked", "unmarked"), OTHERS.values(), ids=OTHERS)
def test_other_formats_of_comfyui_are_refused_by_their_names(
    settings: dict[str, object], tensors: dict[str, Tensor], marked: str, unmarked: str
) -> None:
    layer = {f"a.{name}": tensor for name, tensor in tensors.items()}
    without_second = {name: tensor for name, tensor in layer.items() if name != "a.weight_scale_2"}
    for stored, metadata, name in (
        (layer | {"a.comfy_quant": as_bytes(settings)}, {}, marked),
        (layer, in_header(a=settings), marked),
        (without_second, in_header(a=settings), marked),
        (layer, {}, unmarked),
    ):
        with pytest.raises(StoredFormatError, match=f"{name}.* not read; take one in bfloat16, .*GGUF"):
            separate_scales(stored, metadata)


@pytest.mark.parametrize("header", ["{", "[" * 100_000, "[]", '{"layers": {"a": "float8_e4m3fn"}}'])
def test_a_damaged_header_is_refused(header: str) -> None:
    with pytest.raises(StoredFormatError, match="_quantization_metadata"):
        separate_scales({"a.weight": weight()}, {"_quantization_metadata": header})
