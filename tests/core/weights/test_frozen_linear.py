"""The linear layer of frozen models against torch's own with the same numbers."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from diffsynth_lite.core.weights import FrozenLinear, Int8, Quantization, QuantizationReport

CPU = torch.device("cpu")


def layer_of(num_inputs: int, num_outputs: int, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(num_inputs, num_outputs, bias=bias)


def frozen_and_plain(
    *, bias: bool = True, dtype: torch.dtype = torch.float32
) -> tuple[FrozenLinear, nn.Linear]:
    """A frozen layer, and a plain one with the numbers that it computes with."""
    plain = layer_of(24, 40, bias=bias).to(dtype)
    frozen = FrozenLinear(plain, Int8(), CPU)
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
@pytest.mark.parametrize("shape", [(24,), (3, 24), (2, 5, 24)])
def test_values_and_gradients_are_those_of_a_plain_layer(
    bias: bool, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    frozen, plain = frozen_and_plain(bias=bias, dtype=dtype)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    for ours, theirs in zip(output_and_gradient(frozen, x), output_and_gradient(plain, x), strict=True):
        assert torch.equal(ours, theirs)
    with torch.no_grad():
        assert torch.equal(frozen(x), plain(x))


def test_under_autocast_it_computes_as_a_plain_layer_does() -> None:
    frozen, plain = frozen_and_plain()
    x = torch.randn(3, 24)
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
        frozen(torch.randn(3, 24, requires_grad=True))
        assert [id(tensor) for tensor in saved] == [id(frozen.weight), id(frozen.weight_scale)]
        plain(torch.randn(3, 24, requires_grad=True))
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
    x = torch.randn(3, 24)
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
