"""Weights of GGUF files: the numbers that gguf makes of them, also in another layout; and damaged files."""

import struct
from itertools import count
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from diffsynth_lite.core.weights.gguf import GgufTensors
from diffsynth_lite.core.weights.stored_formats import StoredFormatError

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


def u32(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


def u64(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def string(text: bytes) -> bytes:
    return u64(len(text)) + text


def header(*, tensors: int = 0, fields: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + u32(version) + u64(tensors, fields)


def field(key: bytes, kind: Any, value: bytes) -> bytes:
    return header(fields=1) + string(key) + u32(kind) + value


def tensor(*sizes: int, kind: str = "F32", offset: int = 0) -> bytes:
    number = gguf.GGMLQuantizationType[kind]
    return string(b"a") + u32(len(sizes)) + u64(*sizes) + u32(number) + u64(offset)


def with_shape(kind: Any, value: bytes) -> bytes:
    """A tensor of four numbers, and the shape that it was stored from."""
    numbers = header(tensors=1, fields=1) + string(b"comfy.gguf.orig_shape.a") + u32(kind) + value
    return numbers + tensor(4) + bytes(64)


KIND = gguf.GGUFValueType
ONE = header(tensors=1)
FIELD = string(b"a") + u32(KIND.UINT8) + b"1"
DAMAGED: dict[str, bytes] = {
    "empty": b"",
    "cut in its counts": header()[:-1],
    "version 1": header(version=1),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "a key twice": header(fields=2) + FIELD + FIELD,
    "gguf's own key": field(b"GGUF.version", KIND.UINT8, b"1"),
    "2^60 keys": header(fields=2**60) + bytes(100),
    "2^60 tensors": header(tensors=2**60) + tensor(4) + bytes(64),
    "a key of 2^63 letters": header(fields=1) + u64(2**63) + bytes(64),
    "a string of 2^40 letters": field(b"a", KIND.STRING, u64(2**40) + bytes(64)),
    "a key in no encoding": field(b"\xff", KIND.UINT8, b"1"),
    "a value of no type": field(b"a", 13, bytes(64)),
    "5000 nested arrays": field(b"a", KIND.ARRAY, (u32(KIND.ARRAY) + u64(1)) * 5000),
    "an array of 2^40 numbers": field(b"a", KIND.ARRAY, u32(KIND.UINT8) + u64(2**40)),
    "an array of 2^60 strings": field(b"a", KIND.ARRAY, u32(KIND.STRING) + u64(2**60)),
    "an array of 2^60 arrays": field(b"a", KIND.ARRAY, u32(KIND.ARRAY) + u64(2**60)),
    "no alignment": field(b"general.alignment", KIND.UINT32, u32(0)),
    "alignment beyond the file": header(tensors=1, fields=1)
    + (string(b"general.alignment") + u32(KIND.UINT32, 2**31))
    + tensor(4),
    "2^32 dimensions": ONE + string(b"a") + u32(2**32 - 1) + bytes(64),
    "65 dimensions": ONE + tensor(*[1] * 65) + bytes(64),
    "a size of 2^64 - 1": ONE + tensor(2**64 - 1) + bytes(64),
    "sizes that overflow": ONE + tensor(2**32, 2**32) + bytes(64),
    "no dimensions, in Q8_0": ONE + tensor(kind="Q8_0") + bytes(64),
    "rows of nothing, in Q8_0": ONE + tensor(0, 5, kind="Q8_0") + bytes(64),
    "an offset beyond the file": ONE + tensor(4, offset=2**40) + bytes(64),
    "an offset that overflows": ONE + tensor(4, offset=2**64 - 64) + bytes(64),
    "a tensor twice": header(tensors=2) + tensor(4) * 2 + bytes(64),
    "an own shape below 0": with_shape(KIND.ARRAY, u32(KIND.INT32) + u64(2) + struct.pack("<ii", -1, -4)),
    "an own shape of 9 dimensions": with_shape(
        KIND.ARRAY, u32(KIND.INT32) + u64(9) + struct.pack("<9i", 4, *[1] * 8)
    ),
    "an own shape that is a number": with_shape(KIND.UINT32, u32(4)),
    "an own shape that is a string": with_shape(KIND.STRING, string(b"ab")),
    "an own shape in no encoding": with_shape(KIND.STRING, string(b"\xff")),
    "an own shape of strings": with_shape(KIND.ARRAY, u32(KIND.STRING) + u64(1) + string(b"4")),
    "an own shape of fractions": with_shape(KIND.ARRAY, u32(KIND.FLOAT32) + u64(1) + struct.pack("<f", 4)),
}


@pytest.fixture
def few_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have gguf fail, where it would hang, as soon as it reads far more than these files hold."""
    reads, read = count(), gguf.GGUFReader._get

    def counted(*arguments: Any, **named: Any) -> Any:
        assert next(reads) < 1000
        return read(*arguments, **named)

    monkeypatch.setattr(gguf.GGUFReader, "_get", counted)


@pytest.mark.usefixtures("few_reads")
@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_size_that_the_file_cannot_have_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "some.gguf"
    file.write_bytes(content)
    with pytest.raises(StoredFormatError, match=r"^it is damaged .*; get it again$"):
        GgufTensors.in_file(file)


@pytest.mark.usefixtures("few_reads")
def test_a_header_that_no_model_has_is_refused_whatever_the_length_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "some.gguf"
    for content in (
        field(b"a", KIND.ARRAY, u32(KIND.UINT8) + u64(2**25)),
        field(b"a", KIND.STRING, u64(2**30)),
    ):
        file.write_bytes(content)
        with file.open("r+b") as stream:
            stream.truncate(2**31)  # of which the disk holds nothing
        with pytest.raises(StoredFormatError, match=r"its header has .* more than a transformer needs"):
            GgufTensors.in_file(file)


def test_settings_of_all_types_in_a_header_change_no_weight(tmp_path: Path) -> None:
    array = u32(KIND.ARRAY, KIND.ARRAY) + u64(2)
    fields = (
        string(b"text") + u32(KIND.STRING) + string(b"some model"),
        string(b"words") + u32(KIND.ARRAY, KIND.STRING) + u64(2) + string(b"a") + string(b""),
        string(b"nested") + array + (u32(KIND.INT16) + u64(1) + b"12") * 2,
        string(b"none") + u32(KIND.ARRAY, KIND.FLOAT64) + u64(0),
        *(
            string(kind.name.encode()) + u32(kind) + bytes(size)
            for kinds, size in (
                (("UINT8", "INT8", "BOOL"), 1),
                (("UINT16", "INT16"), 2),
                (("UINT32", "INT32", "FLOAT32"), 4),
                (("UINT64", "INT64", "FLOAT64"), 8),
            )
            for kind in map(KIND.__getitem__, kinds)
        ),
    )
    before = header(tensors=1, fields=len(fields)) + b"".join(fields) + tensor(512, 128)
    file = tmp_path / "some.gguf"
    file.write_bytes(before + bytes(-len(before) % 32) + NUMBERS.tobytes())
    stored = GgufTensors.in_file(file)
    assert torch.equal(stored.numbers("a", slice(None)), torch.from_numpy(NUMBERS))


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
