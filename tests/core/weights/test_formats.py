"""The formats of frozen weights, and the layer that computes with them."""

import copy
import sys
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from diffsynth_lite.core.weights.formats import (
    Int8,
    Int8ConvRot,
    MissingKernelsError,
    NotFiniteError,
    WeightFormat,
    is_finite,
    weight_format,
)
from diffsynth_lite.core.weights.frozen_linear import FrozenLinear, Quantization, QuantizationReport

CPU = torch.device("cpu")
# The 16 numbers of NF4, appendix E of arXiv:2305.14314.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)


@pytest.fixture(params=["int8", "int8_convrot", "nf4"])
def weights(request: pytest.FixtureRequest) -> WeightFormat:
    if request.param == "nf4":
        pytest.importorskip("bitsandbytes")
    return weight_format(request.param)


def random_weight(num_rows: int, num_columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num_rows, num_columns, generator=generator)


def stored(weights: WeightFormat, weight: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Values and scales of a weight that was written so many rows at a time."""
    values, scales = weights.empty(*weight.shape, CPU)
    for first in range(0, len(weight), num_rows):
        weights.write(weight[first : first + num_rows], first, values, scales)
    return values, scales


@pytest.mark.parametrize("shape", [(300, 100), (7, 48), (130, 64)])
def test_a_weight_written_in_parts_is_that_written_at_once(
    weights: WeightFormat, shape: tuple[int, int]
) -> None:
    weight = random_weight(*shape)
    whole = stored(weights, weight, len(weight))
    assert all(map(torch.equal, whole, stored(weights, weight, weights.row_step)))
    assert sum(tensor.nbytes for tensor in whole) < weight.nbytes / 2


def test_a_dense_weight_is_rounded_once(weights: WeightFormat) -> None:
    weight = random_weight(40, 48)
    values, scales = stored(weights, weight, 40)
    exact = weights.dense(values, scales, weight.shape, torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(weights.dense(values, scales, weight.shape, dtype), exact.to(dtype))


def test_a_weight_in_half_precision_is_stored_as_the_numbers_that_it_holds(weights: WeightFormat) -> None:
    half = random_weight(40, 48).bfloat16()
    assert all(map(torch.equal, stored(weights, half, 40), stored(weights, half.float(), 40)))


def test_a_format_is_copied_with_the_model_that_has_it(weights: WeightFormat) -> None:
    assert type(copy.deepcopy(weights)) is type(weights)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(weights: WeightFormat, number: float) -> None:
    weight = random_weight(4, 48)
    weight[2, 3] = number
    with pytest.raises(NotFiniteError):
        stored(weights, weight, 4)


def test_numbers_that_are_expanded_are_looked_at_once() -> None:
    row = torch.tensor([0.0, float("inf")])
    assert not is_finite(row.expand(2**50, 2))
    assert is_finite(row[0].expand(2**50, 2))


def test_int8_is_off_by_half_a_step_at_most_and_keeps_what_is_largest_and_what_is_zero() -> None:
    weight = random_weight(50, 33) * torch.logspace(-30, 30, 50)[:, None]
    weight[7] = 0
    values, scales = stored(Int8(), weight, 8)
    largest = weight.abs().amax(1, keepdim=True)
    assert torch.equal(values.abs().amax(1), torch.where(largest.squeeze(1) > 0, 127, 0))
    assert (scales > 0).all()  # a row of zeros is not divided by 0, which has no whole number
    dense = Int8().dense(values, scales, weight.shape, torch.float32)
    # Half a step, and what fp32 rounds on the way there and back.
    assert ((dense - weight).abs() <= largest / 127 * (0.5 + 1e-4)).all()
    assert not dense[7].any()


def test_rotated_rows_keep_what_a_column_of_large_numbers_takes_from_plain_ones() -> None:
    weight = random_weight(64, 1024)
    errors = {}
    for columns in ("gaussian", "outliers"):
        if columns == "outliers":
            weight[:, ::200] *= 30
        for name in ("int8", "int8_convrot"):
            kept = weight_format(name)
            dense = kept.dense(*stored(kept, weight, 64), weight.shape, torch.float32)
            # The gradient of a layer's input, for one of its output.
            grad = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
            exact = grad @ weight
            errors[name, columns] = float((grad @ dense - exact).norm() / exact.norm())
    assert errors["int8_convrot", "outliers"] < errors["int8", "outliers"] / 5
    assert errors["int8_convrot", "gaussian"] < errors["int8", "gaussian"] * 1.2


@pytest.mark.parametrize(("num_columns", "group"), [(512, 256), (192, 64), (48, 16), (40, 1), (24, 1)])
def test_a_group_of_columns_is_the_largest_that_divides_them(num_columns: int, group: int) -> None:
    kept, weight = Int8ConvRot(), random_weight(6, num_columns)
    assert kept.group_of(num_columns) == group
    # A rotation leaves the norm of each group as it was.
    values, scales = stored(kept, weight, 6)
    rotated = values.float() * scales
    norms = [one.reshape(6, -1, group).norm(dim=2) for one in (rotated, weight)]
    torch.testing.assert_close(*norms, rtol=0.05, atol=0.02)
    assert ((rotated - weight).norm() / weight.norm() > 0.5) == (group > 1)


def test_nf4_takes_the_nearest_of_16_numbers_in_blocks_that_run_on_from_row_to_row() -> None:
    pytest.importorskip("bitsandbytes")
    weight, weights = random_weight(6, 80), weight_format("nf4")  # 7.5 blocks
    values, scales = stored(weights, weight, 6)
    blocks = torch.nn.functional.pad(weight.flatten(), (0, 32)).view(-1, 64)
    assert torch.equal(scales, blocks.abs().amax(1))
    table = torch.tensor(NF4)
    nearest = ((blocks / scales[:, None])[..., None] - table).abs().argmin(-1)
    expected = (table[nearest] * scales[:, None]).flatten()[: weight.numel()].view(6, 80)
    torch.testing.assert_close(weights.dense(values, scales, weight.shape, torch.float32), expected)


def test_a_format_without_its_kernels_says_which_package_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MissingKernelsError, match="bitsandbytes"):
        weight_format("nf4")


def test_rows_of_a_weight_are_dense_as_in_the_whole(weights: WeightFormat) -> None:
    weight = random_weight(200, 48)
    kept = stored(weights, weight, 200)
    whole = weights.dense(*kept, weight.shape, torch.float32)
    for rows in (range(64, 128), range(128, 200)):
        part = weights.rows(*kept, rows, 48)
        assert torch.equal(
            weights.dense(*part, (len(rows), 48), torch.float32), whole[rows.start : rows.stop]
        )


@pytest.mark.parametrize("num_shares", [1, 2, 5])
@pytest.mark.parametrize("shape", [(300, 48), (16, 48), (7, 48)])
def test_a_share_of_a_weight_is_written_by_the_rows_that_it_needs(
    weights: WeightFormat, shape: tuple[int, int], num_shares: int
) -> None:
    weight = random_weight(*shape)
    whole = [part.flatten() for part in stored(weights, weight, len(weight))]
    for share in range(num_shares):
        own = [share_of(len(part), share, num_shares) for part in whole]
        parts = [part[numbers.start : numbers.stop] for part, numbers in zip(whole, own, strict=True)]
        written = [torch.zeros_like(part) for part in parts]
        rows = weights.rows_of(*own, shape[1])
        for first in range(rows.start, rows.stop, weights.row_step):
            some = weight[first : min(first + weights.row_step, rows.stop)]
            weights.write(some, first, *written, starts=[numbers.start for numbers in own])
        assert all(map(torch.equal, written, parts))


def share_of(num_numbers: int, share: int, num_shares: int) -> range:
    """As ``torch.chunk`` cuts them: some of the last may have fewer or none."""
    size = -(-num_numbers // num_shares)
    return range(min(share * size, num_numbers), min((share + 1) * size, num_numbers))


def layer_of(num_inputs: int, num_outputs: int, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(num_inputs, num_outputs, bias=bias)


def frozen_and_plain(
    *, bias: bool = True, dtype: torch.dtype = torch.float32, kept_as: str = "int8"
) -> tuple[FrozenLinear, nn.Linear]:
    """A frozen layer, and a plain one with the numbers that it computes with."""
    plain = layer_of(48, 40, bias=bias).to(dtype)
    frozen = FrozenLinear(plain, weight_format(kept_as), CPU)
    frozen.write(plain.weight.detach(), 0)
    plain.weight = nn.Parameter(frozen.dense(dtype))
    return frozen, plain.requires_grad_(False)


def output_and_gradient(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_(True)
    output = layer(x)
    output.float().square().sum().backward()
    assert x.grad is not None
    return output.detach(), x.grad


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(48,), (3, 48), (2, 5, 48)])
@pytest.mark.parametrize("kept_as", ["int8", "int8_convrot"])
def test_values_and_gradients_are_those_of_a_plain_layer(
    bias: bool, dtype: torch.dtype, shape: tuple[int, ...], kept_as: str
) -> None:
    frozen, plain = frozen_and_plain(bias=bias, dtype=dtype, kept_as=kept_as)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    for ours, theirs in zip(output_and_gradient(frozen, x), output_and_gradient(plain, x), strict=True):
        assert torch.equal(ours, theirs)
    with torch.no_grad():
        assert torch.equal(frozen(x), plain(x))


def test_under_autocast_it_computes_as_a_plain_layer_does() -> None:
    frozen, plain = frozen_and_plain()
    x = torch.randn(3, 48)
    with torch.autocast("cpu", torch.bfloat16):
        pairs = list(zip(output_and_gradient(frozen, x), output_and_gradient(plain, x), strict=True))
    assert pairs[0][0].dtype == torch.bfloat16
    assert all(torch.equal(*pair) for pair in pairs)


def test_nothing_is_kept_for_backward_but_what_the_layer_has_itself() -> None:
    frozen, plain = frozen_and_plain()
    saved: list[Tensor] = []

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        frozen(torch.randn(3, 48, requires_grad=True))
        assert [id(tensor) for tensor in saved] == [id(frozen.weight), id(frozen.weight_scale)]
        plain(torch.randn(3, 48, requires_grad=True))
        assert len(saved) == 3


def test_its_numbers_are_moved_and_never_cast() -> None:
    frozen, _ = frozen_and_plain()
    before = frozen.weight.clone(), frozen.weight_scale.clone()
    frozen.to(torch.bfloat16)
    assert frozen.weight_scale.dtype == torch.float32
    assert all(map(torch.equal, before, (frozen.weight, frozen.weight_scale)))
    frozen.to("meta", torch.bfloat16)
    assert all(parameter.is_meta for parameter in frozen.parameters())
    assert frozen.weight_scale.dtype == torch.float32


def adapted(model: nn.Module) -> nn.Module:
    config = LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    return inject_adapter_in_model(config, model)


def test_peft_adapts_it_as_any_linear_layer_and_cannot_merge_into_it() -> None:
    frozen, plain = frozen_and_plain()
    torch.manual_seed(1)
    ours = adapted(nn.Sequential(frozen))
    torch.manual_seed(1)
    theirs = adapted(nn.Sequential(plain))
    assert type(ours[0]) is type(theirs[0])
    x = torch.randn(3, 48)
    assert torch.equal(ours(x), theirs(x))
    ours(x).square().sum().backward()
    theirs(x).square().sum().backward()
    gradients: list[dict[str, Any]] = [
        {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
        for model in (ours, theirs)
    ]
    assert len(gradients[0]) == 2
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[1])
    with pytest.raises(RuntimeError, match="can't be cast"):
        ours[0].merge()


def test_a_quantization_replaces_the_layers_that_it_names_and_the_report_counts_them() -> None:
    model = nn.Sequential(layer_of(24, 40), nn.ReLU(), layer_of(40, 24)).to(torch.bfloat16)
    assert QuantizationReport.of(model).lines() == []
    assert QuantizationReport.of(model).metrics() == {}
    Quantization(format=Int8(), layers=("0",), device=CPU).apply_to(model)
    assert [type(module) for module in model] == [FrozenLinear, nn.ReLU, nn.Linear]
    adapted(model)
    report = QuantizationReport.of(model)
    assert report == QuantizationReport(num_layers=1, num_bytes=40 * (24 + 4), plain_bytes=40 * 24 * 2)
    assert report.lines() == ["quantised       1 layers, 1.1 KiB in place of 1.9 KiB"]
    assert set(report.metrics().values()) == {1, 1120, 1920}
