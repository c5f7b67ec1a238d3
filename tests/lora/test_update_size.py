"""The size of a LoRA's update against the norms of dense matrices."""

import math

import pytest
import torch
from diffusers.loaders import PeftAdapterMixin
from torch import Tensor, nn

from diffsynth_lite.core.weights import FrozenLinear, Quantization, WeightStream, frozen_linear, weight_format
from diffsynth_lite.lora import UpdateSize, UpdateSizes, add_adapter

CPU = torch.device("cpu")
LAYERS = ("blocks.0", "blocks.1", "out")


class Chain(nn.Module, PeftAdapterMixin):  # type: ignore[misc]
    """Two blocks and a layer behind them, of different shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(24, 200), nn.Linear(200, 24)])
        self.out = nn.Linear(24, 7)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def chain(kept_as: str) -> Chain:
    torch.manual_seed(0)
    model = Chain().to(torch.bfloat16 if kept_as == "bfloat16" else torch.float32)
    if kept_as == "nf4":
        pytest.importorskip("bitsandbytes")
    if kept_as in ("int8", "nf4"):
        weights = {name: model.get_submodule(name).weight.detach() for name in LAYERS}
        Quantization(format=weight_format(kept_as), layers=LAYERS, device=CPU).apply_to(model)
        for name, weight in weights.items():
            model.get_submodule(name).write(weight, 0)  # type: ignore[operator]
    add_adapter(model, LAYERS, rank=3, alpha=6, dropout=0, seed=0)
    return model


def dense_sizes(model: Chain) -> dict[str, float]:
    sizes = {}
    for name in LAYERS:
        layer = model.get_submodule(name)
        base = layer.base_layer
        weight = base.dense(torch.float32) if isinstance(base, FrozenLinear) else base.weight
        update = 2 * layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
        sizes[name] = (update.norm() / weight.double().norm()).item()
    return sizes


@pytest.mark.parametrize("kept_as", ["float32", "bfloat16", "int8", "nf4", "streamed"])
def test_each_update_is_measured_as_if_it_and_the_weight_were_dense(
    kept_as: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen_linear, "_ROWS_NUMBERS", 24 * 64)  # several parts of a weight
    model = chain(kept_as)
    if kept_as == "streamed":
        stream = WeightStream([list(model.blocks)], CPU, num_slots=1, min_bytes=0)
        model(torch.randn(2, 24))
        assert stream.report().weight_copies > 1
    # Apple's GPUs have no fp64: nothing is computed there.
    sizes = UpdateSizes(model, torch.device("mps") if kept_as == "float32" else CPU)
    assert [size.ratio for size in sizes.measure().values()] == [0, 0, 0]  # B starts at zero
    with torch.no_grad():
        for name in LAYERS:
            model.get_submodule(name).lora_B["default"].weight.normal_()
    found = sizes.measure()
    assert {name: size.num_inputs for name, size in found.items()} == dict(
        zip(LAYERS, (24, 200, 24), strict=True)
    )
    ratios = {name: size.ratio for name, size in found.items()}
    assert ratios == pytest.approx(dense_sizes(model), rel=1e-12)


def test_an_update_is_lost_in_rounding_where_no_output_can_change_by_as_much_as_bfloat16_rounds() -> None:
    half_a_step = 2**-9
    assert UpdateSize(0.0, 64).is_lost_in_rounding
    assert UpdateSize(half_a_step / 8 * 0.99, 64).is_lost_in_rounding
    assert not UpdateSize(half_a_step / 8, 64).is_lost_in_rounding
    assert not UpdateSize(math.inf, 64).is_lost_in_rounding
