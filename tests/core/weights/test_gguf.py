"""Weights of GGUF files: the numbers that gguf makes of them, also in another layout."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from diffsynth_lite.core.weights import StoredFormatError
from diffsynth_lite.core.weights.gguf import GgufTensors

gguf = pytest.importorskip("gguf")
NUMBERS = numpy.random.default_rng(0).standard_normal((128, 512), dtype=numpy.float32)


def write(file: Path, *, shape: tuple[int, ...] | None = None, **formats: str) -> Path:
    """The same numbers in each of the formats, by name; the last one in another shape, if one is given."""
    writer = gguf.GGUFWriter(file, "some_model")
    for name, kind_name in formats.items():
        kind = gguf.GGMLQuantizationType[kind_name]
        writer.add_tensor(name, gguf.quants.quantize(NUMBERS, kind), raw_dtype=kind)
    if shape is not None:
        writer.add_array(f"comfy.gguf.orig_shape.{name}", shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def dense(kind_name: str) -> torch.Tensor:
    kind = gguf.GGMLQuantizationType[kind_name]
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(NUMBERS, kind), kind).copy())


def halves_swapped(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"new.{name}": torch.cat(tensor.chunk(2)[::-1]) for name, tensor in tensors.items()}


def test_rows_are_those_that_gguf_makes_also_in_another_layout(tmp_path: Path) -> None:
    formats = {"a": "Q8_0", "b": "Q4_0", "c": "BF16", "d": "F16", "e": "F32", "f": "Q8_0"}
    stored = GgufTensors.in_file(write(tmp_path / "some.gguf", **formats))
    assert stored.described() == "GGUF, mostly Q8_0"
    swapped = stored.converted(halves_swapped)
    for name, kind in formats.items():
        assert stored.shape(name) == (128, 512)
        assert torch.equal(stored.numbers(name, slice(3, 70)).float(), dense(kind)[3:70]), kind
        moved = swapped.numbers(f"new.{name}", slice(0, 64)).float()
        assert torch.equal(moved, dense(kind)[64:]), kind


def test_a_tensor_that_was_stored_in_another_shape_has_its_own(tmp_path: Path) -> None:
    stored = GgufTensors.in_file(write(tmp_path / "some.gguf", a="F16", shape=(2, 64, 8, 2, 32)))
    assert stored.shape("a") == (2, 64, 8, 2, 32)
    assert torch.equal(stored.numbers("a", slice(0, 2)).float(), dense("F16").view(2, 64, 8, 2, 32))
    with pytest.raises(StoredFormatError, match=r"a, of shape \[65536\], in another one in Q8_0"):
        GgufTensors.in_file(write(tmp_path / "some.gguf", a="Q8_0", shape=(65536,)))


def test_a_file_that_is_cut_off_or_something_else_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "some.gguf", a="Q8_0")
    for content in (file.read_bytes()[:-1000], b"something else"):
        file.write_bytes(content)
        with pytest.raises(StoredFormatError, match="it is damaged"):
            GgufTensors.in_file(file)


def test_a_format_that_gguf_cannot_read_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    def unknown(*_arguments: object) -> None:
        raise NotImplementedError

    file = write(tmp_path / "some.gguf", a="Q8_0")
    monkeypatch.setattr(gguf.quants, "dequantize", unknown)
    with pytest.raises(StoredFormatError, match="a in Q8_0, which gguf cannot read"):
        GgufTensors.in_file(file)
