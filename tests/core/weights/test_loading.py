"""Filling a frozen model from files: the same numbers, a few rows at a time."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from diffsynth_lite.core.transfer.backends import PlainBackend
from diffsynth_lite.core.transfer.shared_memory import HostMemory
from diffsynth_lite.core.weights.formats import (
    Int8,
    Int8ConvRot,
    NotFiniteError,
    WeightFormat,
)
from diffsynth_lite.core.weights.frozen_linear import FrozenLinear, Quantization
from diffsynth_lite.core.weights.loading import StoredTensors, load_frozen
from diffsynth_lite.core.weights.packing import HostBlocks
from diffsynth_lite.core.weights.stored_formats import StoredFormatError

# As a run of several processes names it: memory that is moved there is new memory.
CPU = torch.device("cpu:0")
INT8 = Quantization(format=Int8(), layers=("1",), device=CPU)


class Model(nn.Sequential):
    """Tensors of all kinds: with two dimensions, four and none, and buffers that files hold or do not."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(20, 300), nn.Linear(300, 520), nn.Conv2d(3, 5, 2))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("count", torch.tensor([3, 4]))
        self.register_buffer("table", torch.arange(6.0), persistent=False)


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(tensor.shape, generator=generator) if tensor.is_floating_point() else tensor * 5
        for name, tensor in Model().state_dict().items()
    }


def files_of(tensors: dict[str, Tensor], folder: Path) -> list[Path]:
    """The tensors in two files, with one that no model has."""
    names = [*tensors, "unused"]
    files = [folder / f"{place}.safetensors" for place in range(2)]
    for place, file in enumerate(files):
        save_file({name: tensors.get(name, torch.ones(3)).contiguous() for name in names[place::2]}, file)
    return files


def empty(quantization: Quantization) -> Model:
    model = Model()
    for name, parameter in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        dtype = kept_or_bfloat16(name, parameter.dtype)
        setattr(model.get_submodule(owner), leaf, nn.Parameter(parameter.to("meta", dtype)))
    quantization.apply_to(model)
    return model


def kept_or_bfloat16(name: str, present: torch.dtype) -> torch.dtype:
    if not present.is_floating_point:
        return present
    return torch.float32 if name.startswith("2.") else torch.bfloat16


def test_all_tensors_are_as_in_the_files_in_their_dtypes_and_frozen(
    tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    stored = StoredTensors.in_files(files_of(tensors, tmp_path))
    assert stored.lacking(Model()) == []
    model = empty(INT8)
    load_frozen(model, stored, device=CPU)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(model.table, torch.arange(6.0))
    # It is in the file as it is to be.
    assert model[2].weight.data_ptr() == stored.tensors["2.weight"].data_ptr()

    layer = model[1]
    assert isinstance(layer, FrozenLinear)
    values, scales = Int8().empty(520, 300, CPU)
    Int8().write(tensors["1.weight"], 0, values, scales)
    assert torch.equal(layer.weight, values)
    assert torch.equal(layer.weight_scale, scales)

    state = model.state_dict()
    for name, tensor in tensors.items():
        if name != "1.weight":
            expected = tensor.to(kept_or_bfloat16(name, tensor.dtype))
            assert state[name].dtype == expected.dtype
            assert torch.equal(state[name], expected), name
    assert isinstance(model.scale, nn.Parameter)


class Fills(HostMemory):
    """Memory of this process that is never taken for empty."""

    def take(self, num_bytes: int) -> Tensor:
        return super().take(num_bytes).fill_(7)


@pytest.mark.parametrize("is_filled_elsewhere", [False, True])
@pytest.mark.parametrize("min_bytes", [0, 10_000])
def test_weights_of_blocks_are_put_into_host_memory_unless_another_process_does_it(
    is_filled_elsewhere: bool, min_bytes: int, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    memory = Fills(PlainBackend(), is_filled_elsewhere=is_filled_elsewhere)
    blocks = HostBlocks(lambda model: [model[1], model[2]], CPU, min_bytes=min_bytes, memory=memory)
    stored = StoredTensors.in_files(files_of(tensors, tmp_path))
    model, resident = empty(INT8), empty(INT8)
    load_frozen(model, stored, device=CPU, host_blocks=blocks)
    load_frozen(resident, stored, device=CPU)
    on_host = {"1.weight", "1.weight_scale", "1.bias", "2.weight", "2.bias"}
    if min_bytes:
        on_host = {"1.weight"}
    assert len(blocks.packed) == len({name[0] for name in on_host})
    ranges = [(block.host.data_ptr(), block.host.nbytes) for block in blocks.packed.values()]
    for name, tensor in resident.state_dict().items():
        found = model.state_dict()[name]
        assert (found.dtype, found.stride()) == (tensor.dtype, tensor.stride())
        is_there = any(start <= found.data_ptr() < start + size for start, size in ranges)
        assert is_there == (name in on_host), name
        if is_there and is_filled_elsewhere:
            assert (found.view(torch.uint8) == 7).all()
        else:
            assert torch.equal(found, tensor), name
        assert found.data_ptr() % 64 == tensor.data_ptr() % 64


def test_a_weight_is_read_some_rows_at_a_time(
    tensors: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[int, int]] = []
    write = WeightFormat.write

    def watched(
        self: WeightFormat, rows: Tensor, first_row: int, *memory: Tensor, starts: Sequence[int]
    ) -> None:
        written.append((first_row, len(rows)))
        write(self, rows, first_row, *memory, starts=starts)

    monkeypatch.setattr(WeightFormat, "write", watched)
    stored = StoredTensors.in_files(files_of(tensors, tmp_path))
    load_frozen(empty(INT8), stored, device=CPU)
    assert written == [(first, 64) for first in range(0, 512, 64)] + [(512, 8)]


def test_what_the_files_lack_and_what_has_another_shape_is_named(
    tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    del tensors["scale"]
    tensors["0.bias"] = torch.zeros(7)
    stored = StoredTensors.in_files(files_of(tensors, tmp_path))
    assert stored.lacking(Model()) == ["0.bias", "scale"]


@pytest.mark.parametrize("layers", [INT8.layers, ()])
def test_a_weight_that_is_not_finite_is_named(
    tensors: dict[str, Tensor], tmp_path: Path, layers: tuple[str, ...]
) -> None:
    tensors["1.weight"][400, 7] = torch.nan
    stored = StoredTensors.in_files(files_of(tensors, tmp_path))
    with pytest.raises(NotFiniteError, match=r"1\.weight holds numbers that are not finite"):
        load_frozen(empty(replace(INT8, layers=layers)), stored, device=CPU)


def in_8_bits(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """All tensors of the model with rows in 8 bits, each with a scale of its own or of its rows."""
    stored: dict[str, Tensor] = {"scaled_fp8": torch.zeros(0)}
    for place, (name, tensor) in enumerate(tensors.items()):
        stored[name] = tensor
        if name.endswith(".weight"):
            stored[name] = tensor.to(torch.float8_e4m3fn)
            scale = torch.rand(len(tensor) if place % 2 else 1) + 0.1
            stored[f"{name.removesuffix('.weight')}.scale_weight"] = scale
    return stored


def halves_swapped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: torch.cat(tensor.chunk(2)[::-1]) if tensor.ndim == 2 else tensor
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("convert", [dict, halves_swapped])
def test_weights_in_8_bits_are_multiplied_by_their_scales_also_in_another_layout(
    convert: Any, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    file = tmp_path / "scaled.safetensors"
    stored = in_8_bits(tensors)
    save_file(stored, file)
    dense = dict(tensors)
    for name in ("0.weight", "1.weight", "2.weight"):
        scale = stored[f"{name[0]}.scale_weight"]
        dense[name] = stored[name].float() * scale.view(-1, *(1,) * (tensors[name].ndim - 1))
    expected = convert(dense)

    found = StoredTensors.in_files([file]).converted(convert)
    assert found.described() == "float8_e4m3fn in 3 weights"
    model = empty(INT8)
    load_frozen(model, found, device=CPU)
    values, scales = Int8().empty(520, 300, CPU)
    Int8().write(expected.pop("1.weight"), 0, values, scales)
    state = model.state_dict()
    assert torch.equal(state["1.weight"], values)
    assert torch.equal(state["1.weight_scale"], scales)
    for name in tensors.keys() - {"1.weight"}:
        assert torch.equal(state[name], expected[name].to(state[name].dtype)), name


@pytest.mark.parametrize(
    ("kept_as", "group"), [(Int8(), 1), (Int8ConvRot(), 1), (Int8ConvRot(), 4), (Int8(), 4)]
)
def test_rows_in_8_bits_are_kept_as_they_are_stored_with_the_groups_of_their_file(
    kept_as: Int8, group: int, tensors: dict[str, Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values, scales = torch.randint(-128, 128, (520, 300)).to(torch.int8), torch.rand(520, 1) + 0.1
    settings: dict[str, object] = {"format": "int8_tensorwise"}
    if group > 1:
        settings |= {"convrot": True, "convrot_groupsize": group}
    marker = torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8)
    of_layer = {"1.weight": values, "1.weight_scale": scales, "1.comfy_quant": marker}
    save_file(tensors | of_layer, tmp_path / "int8.safetensors")
    stored = StoredTensors.in_files([tmp_path / "int8.safetensors"]).converted(halves_swapped)
    quantization = replace(INT8, format=kept_as)
    model, elsewhere = empty(quantization), empty(quantization)
    with caplog.at_level("INFO"):
        load_frozen(model, stored, device=CPU)
    memory = Fills(PlainBackend(), is_filled_elsewhere=True)
    blocks = HostBlocks(lambda model: [model[1]], CPU, min_bytes=0, memory=memory)
    load_frozen(elsewhere, stored, device=CPU, host_blocks=blocks)

    numbers = stored.numbers("1.weight", slice(0, 520))
    is_kept = group == 1 or isinstance(kept_as, Int8ConvRot)
    assert ("1 weights are kept in 8 bits as their file has them." in caplog.messages) == is_kept
    expected = [torch.cat(part.chunk(2)[::-1]) for part in (values, scales)]
    if not is_kept:  # plain rows of the same numbers
        Int8().write(numbers, 0, *expected)
    assert torch.equal(model[1].weight, expected[0])
    assert torch.equal(model[1].weight_scale, expected[1])
    if is_kept:
        assert torch.equal(model[1].dense(torch.float32), numbers)
    for one in (model, elsewhere):
        assert one[1].format.group_of(300) == (group if is_kept else 1)


def test_weights_in_8_bits_without_scales_are_numbers_as_they_are(
    tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    tensors["1.weight"] = tensors["1.weight"].to(torch.float8_e5m2)
    stored = StoredTensors.in_files(files_of(tensors, tmp_path))
    model = empty(INT8)
    load_frozen(model, stored, device=CPU)
    values, scales = Int8().empty(520, 300, CPU)
    Int8().write(tensors["1.weight"].float(), 0, values, scales)
    assert torch.equal(model[1].weight, values)


def test_a_scale_that_no_weight_of_the_model_takes_is_named(tensors: dict[str, Tensor]) -> None:
    stored = StoredTensors(tensors=tensors, per_row=dict.fromkeys(("7.weight", "0.weight"), torch.ones(3, 1)))
    assert stored.scales_left_over(Model()) == ["7.weight"]


@pytest.mark.parametrize(
    "convert",
    [
        lambda tensors: {name: tensor.T for name, tensor in tensors.items()},
        lambda tensors: {"a" if tensor.shape[1] > 1 else "b": tensor for tensor in tensors.values()},
        lambda tensors: {name: tensor for name, tensor in tensors.items() if tensor.shape[1] > 1},
        lambda tensors: {"a": torch.cat([tensors["a"], tensors["b"].to(tensors["a"].dtype)])},
    ],
    ids=["turned", "named otherwise", "left out", "joined to a weight without one"],
)
def test_a_scale_that_does_not_follow_its_weight_to_another_layout_is_refused(convert: Any) -> None:
    tensors = {"b": torch.ones(2, 3), "a": torch.ones(2, 3).to(torch.float8_e4m3fn)}
    stored = StoredTensors(tensors=tensors, per_row={"a": torch.tensor([[2.0], [3.0]])})
    with pytest.raises(StoredFormatError, match="the scale of a would be lost"):
        stored.converted(convert)


def test_a_tensor_that_is_turned_is_copied_to_have_the_strides_of_any_other(
    tensors: dict[str, Tensor],
) -> None:
    turned = tensors["2.weight"].transpose(0, 1).contiguous().transpose(0, 1)
    model = empty(INT8)
    load_frozen(model, StoredTensors(tensors=tensors | {"2.weight": turned}), device=CPU)
    assert model[2].weight.is_contiguous()
    assert torch.equal(model[2].weight, tensors["2.weight"])
