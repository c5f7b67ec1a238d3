"""Kinds of adapters and the sizes of their updates: against dense weights in fp64."""

import math
from collections.abc import Callable

import pytest
import torch
from diffusers.loaders import PeftAdapterMixin
from peft import LoKrConfig, LoraConfig
from torch import Tensor, nn

from diffsynth_lite.core.weights import frozen_linear
from diffsynth_lite.core.weights.formats import Int8, weight_format
from diffsynth_lite.core.weights.frozen_linear import FrozenLinear, Quantization
from diffsynth_lite.core.weights.stream import WeightStream
from diffsynth_lite.lora import (
    LoraSize,
    UpdateSize,
    UpdateSizes,
    adapter_settings,
    adapter_size,
    adapter_tensors,
    add_adapter,
    add_training_adapter,
    by_peft_names,
    exported_tensors,
    load_adapter_tensors,
    set_lora_weights,
)
from diffsynth_lite.lora.finished import add_finished_lora, load_finished_lora
from diffsynth_lite.lora.kinds import AdapterKind, Dora, Lokr, Lora
from diffsynth_lite.lora.spelling import DIFFUSERS
from diffsynth_lite.lora.updates import adapter_of, updates_of

CPU = torch.device("cpu")
LAYERS = ("first", "second")
KINDS = (Lora(is_orthogonal=True), Dora(), Dora(is_orthogonal=True), Lokr(), Lokr(factor=2), Lokr(factor=4))
OWN = {"second": LoraSize(4, 2.0)}


class Model(nn.Module, PeftAdapterMixin):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 24), nn.Linear(24, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(torch.tanh(self.first(x)))
        return output


def frozen(*, is_quantised: bool = False) -> Model:
    torch.manual_seed(0)
    model = Model()
    if is_quantised:
        weights = {name: model.get_submodule(name).weight.detach() for name in LAYERS}
        Quantization(format=Int8(), layers=LAYERS, device=CPU).apply_to(model)
        for name, weight in weights.items():
            model.get_submodule(name).write(weight, 0)  # type: ignore[operator]
    return model


def adapted(kind: AdapterKind, *, is_quantised: bool = False, is_trained: bool = True) -> Model:
    model = frozen(is_quantised=is_quantised)
    add_adapter(model, LAYERS, rank=2, alpha=3, dropout=0, seed=0, own=OWN, kind=kind)
    for parameter in model.parameters():
        if parameter.requires_grad and is_trained:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def output_of(model: nn.Module) -> Tensor:
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    output: Tensor = model(x)
    return output


def weights_of(kind: AdapterKind, tensors: dict[str, Tensor], base: Model) -> dict[str, Tensor]:
    """What the layers' weights are with an adapter, in fp64, by its definition."""
    weights = {}
    for name in LAYERS:
        layer = base.get_submodule(name)
        dense: Callable[..., Tensor] | None = getattr(layer, "dense", None)
        weight = (dense(torch.float32) if dense else layer.weight).detach().double()
        parts = {
            key.removeprefix(f"{name}."): value.double() for key, value in tensors.items() if name in key
        }
        scale = 3 / 2 if name == "first" else 2 / 4
        if isinstance(kind, Lokr):
            right = parts["lokr_w2"] if "lokr_w2" in parts else parts["lokr_w2_a"] @ parts["lokr_w2_b"]
            weights[name] = weight + scale * torch.kron(parts["lokr_w1"], right)
            continue
        weights[name] = weight + scale * parts["lora_B.weight"] @ parts["lora_A.weight"]
        if isinstance(kind, Dora):
            norms = weights[name].norm(dim=1)
            weights[name] *= (parts["lora_magnitude_vector"] / norms)[:, None]
    return weights


def whole_model(weights: dict[str, Tensor]) -> Model:
    model = frozen().double()
    for name, weight in weights.items():
        model.get_submodule(name).weight.data = weight
    return model


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_adapter_changes_nothing_before_the_first_step_and_is_as_large_as_counted(
    kind: AdapterKind,
) -> None:
    before, model = output_of(frozen()), adapted(kind, is_trained=False)
    if getattr(kind, "is_orthogonal", False):
        torch.testing.assert_close(output_of(model), before, rtol=0, atol=1e-6)
        assert all(value.any() for value in adapter_tensors(model).values())
    else:
        assert torch.equal(output_of(model), before)
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    size = adapter_size(frozen(), LAYERS, rank=2, own=OWN, kind=kind)
    assert size == sum(weight.numel() for weight in trained.values())
    assert by_peft_names(trained).keys() == adapter_tensors(model).keys()


@pytest.mark.parametrize("is_quantised", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_layer_computes_with_the_weight_that_defines_its_kind(
    kind: AdapterKind, is_quantised: bool
) -> None:
    base, model = frozen(is_quantised=is_quantised), adapted(kind, is_quantised=is_quantised)
    tensors = adapter_tensors(model)
    weights = weights_of(kind, tensors, base)
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(output_of(model).double(), whole_model(weights)(x.double()), rtol=0, atol=5e-6)
    sizes = UpdateSizes(model, CPU).measure()
    for name, weight in weights.items():
        layer = base.get_submodule(name)
        dense = layer.dense(torch.float32) if is_quantised else layer.weight  # type: ignore[operator]
        change = (weight - dense.double()).norm().detach() / dense.double().norm().detach()
        assert sizes[name].ratio == pytest.approx(float(change), rel=1e-5)
    set_lora_weights(model, {"default": 0.0})
    torch.testing.assert_close(output_of(model), output_of(base), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (Dora(), LoraConfig(r=2, lora_alpha=3, target_modules=list(LAYERS), use_dora=True)),
        (Lokr(factor=2), LoKrConfig(r=2, alpha=3, target_modules=list(LAYERS), decompose_factor=2)),
    ],
    ids=["DoRA", "LoKr"],
)
def test_outputs_and_gradients_are_those_of_pefts_own_layers(kind: AdapterKind, config: object) -> None:
    model, peft = frozen(), frozen().requires_grad_(False)
    add_adapter(model, LAYERS, rank=2, alpha=3, dropout=0, seed=0, kind=kind)
    peft.add_adapter(config)
    for ours, theirs in zip(model.parameters(), peft.parameters(), strict=True):
        if ours.requires_grad:
            ours.data += 0.3 * torch.randn_like(ours)
            theirs.data.copy_(ours.data)
    outputs = [output_of(one) for one in (model, peft)]
    torch.testing.assert_close(*outputs)
    for output in outputs:
        output.square().sum().backward()
    for (name, ours), (_, theirs) in zip(model.named_parameters(), peft.named_parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, msg=name)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_written_adapter_does_the_same_when_it_is_read(kind: AdapterKind) -> None:
    model = adapted(kind)
    tensors = exported_tensors(model, adapter_tensors(model), CPU)
    updates = updates_of(tensors, adapter_settings(model), "model.")
    file = {
        name: tensor
        for layer, update in updates.items()
        for name, tensor in update.file_tensors(layer, DIFFUSERS, torch.float32).items()
    }
    read = updates_of(file, {})  # alpha is folded
    for layer, update in updates.items():
        assert update.norm > 0
        assert update.distance(read[layer]) <= update.rounding_bound(torch.float32)
    generating = frozen()
    finished, settings = adapter_of({layer.removeprefix("model."): one for layer, one in read.items()})
    add_finished_lora(generating, "finished", finished, settings)
    # Other values, and those again: as the LoRAs of a run's steps take each other's place.
    load_finished_lora(generating, "finished", {name: tensor / 2 for name, tensor in finished.items()})
    assert not torch.allclose(output_of(generating), output_of(model))
    load_finished_lora(generating, "finished", finished)
    torch.testing.assert_close(output_of(generating), output_of(model), rtol=0, atol=2e-6)
    resumed = adapted(kind, is_trained=False)
    load_adapter_tensors(resumed, adapter_tensors(model))
    assert torch.equal(output_of(resumed), output_of(model))
    if isinstance(kind, Dora):
        # What ComfyUI multiplies the rows with: these over the norms of only the frozen weight.
        for layer, weight in weights_of(kind, adapter_tensors(model), frozen()).items():
            plain = frozen().get_submodule(layer).weight.detach().double()
            changed = weights_of(Lora(), adapter_tensors(model), frozen())[layer]
            scale = file[f"model.{layer}.dora_scale"]
            assert scale.shape == (len(plain), 1)
            torch.testing.assert_close(
                changed * scale / plain.norm(dim=1, keepdim=True), weight, rtol=1e-6, atol=0
            )


def test_a_dora_is_on_a_model_with_a_frozen_lora_whose_update_its_norms_do_not_see() -> None:
    model = adapted(Dora())
    weights = weights_of(Dora(), adapter_tensors(model), frozen())
    frozen_lora = {}
    for name in LAYERS:
        layer = frozen().get_submodule(name)
        down, up = torch.randn(2, layer.in_features), torch.randn(layer.out_features, 2)
        frozen_lora |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
        weights[name] = weights[name] + (up @ down).double()
    add_training_adapter(model, frozen_lora, {"r": 2, "lora_alpha": 2})
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(output_of(model).double(), whole_model(weights)(x.double()), rtol=0, atol=1e-5)


def test_rounding_of_a_kronecker_product_is_within_its_bound() -> None:
    model = adapted(Lokr(factor=2))
    for layer, update in updates_of(adapter_tensors(model), adapter_settings(model)).items():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            (read,) = updates_of(update.file_tensors(f"model.{layer}", DIFFUSERS, dtype), {}).values()
            dense = [torch.kron(*(_whole(side) for side in one.folded)).double() for one in (update, read)]
            distance = float((dense[0] - dense[1]).norm())
            assert distance <= update.rounding_bound(dtype)
            assert update.distance(read) == pytest.approx(distance, rel=1e-3, abs=1e-6)
            assert update.norm == pytest.approx(float(dense[0].norm()), rel=1e-6)


def _whole(factors: tuple[Tensor, ...]) -> Tensor:
    return factors[0] if len(factors) == 1 else factors[0] @ factors[1]


CPU = torch.device("cpu")
CHAIN_LAYERS = ("blocks.0", "blocks.1", "out")


class Chain(nn.Module, PeftAdapterMixin):  # type: ignore[misc]
    """Two blocks and a layer after them, of different shapes."""

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
        weights = {name: model.get_submodule(name).weight.detach() for name in CHAIN_LAYERS}
        Quantization(format=weight_format(kept_as), layers=CHAIN_LAYERS, device=CPU).apply_to(model)
        for name, weight in weights.items():
            model.get_submodule(name).write(weight, 0)  # type: ignore[operator]
    add_adapter(model, CHAIN_LAYERS, rank=3, alpha=6, dropout=0, seed=0)
    return model


def dense_sizes(model: Chain) -> dict[str, float]:
    sizes = {}
    for name in CHAIN_LAYERS:
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
        for name in CHAIN_LAYERS:
            model.get_submodule(name).lora_B["default"].weight.normal_()
    found = sizes.measure()
    assert {name: size.num_inputs for name, size in found.items()} == dict(
        zip(CHAIN_LAYERS, (24, 200, 24), strict=True)
    )
    ratios = {name: size.ratio for name, size in found.items()}
    assert ratios == pytest.approx(dense_sizes(model), rel=1e-12)


def test_an_update_is_lost_in_rounding_where_no_output_can_change_by_as_much_as_bfloat16_rounds() -> None:
    half_a_step = 2**-9
    assert UpdateSize(0.0, 64).is_lost_in_rounding
    assert UpdateSize(half_a_step / 8 * 0.99, 64).is_lost_in_rounding
    assert not UpdateSize(half_a_step / 8, 64).is_lost_in_rounding
    assert not UpdateSize(math.inf, 64).is_lost_in_rounding
