"""The layers with a LoRA against peft's own: the same bits, with less kept for backward; a frozen one."""

from collections.abc import Callable, Sequence
from unittest.mock import patch

import pytest
import torch
from diffusers.loaders import PeftAdapterMixin
from peft import LoraConfig
from peft.tuners.lora import Linear
from torch import Tensor, nn

from diffsynth_lite.core.autocast import shared_cast
from diffsynth_lite.core.gradient import gradient_checkpoint_forward
from diffsynth_lite.core.planning.meters import CountingMeter
from diffsynth_lite.core.weights.formats import Int8
from diffsynth_lite.core.weights.frozen_linear import Quantization
from diffsynth_lite.lora import (
    UpdateSizes,
    adapter_digest,
    adapter_settings,
    adapter_tensors,
    add_adapter,
    add_training_adapter,
    without_adapter,
    without_training_adapter,
)
from diffsynth_lite.lora.kinds import LORA, AdapterKind, Dora, Lokr
from diffsynth_lite.lora.layers import LoraLinear

FP32, BF16 = torch.float32, torch.bfloat16
LAYERS = ("first", "query", "key", "value", "out")
NUM_TOKENS, WIDTH = 5, 12


class Attending(nn.Module, PeftAdapterMixin):  # type: ignore[misc]
    """Query, key and value of one tensor, and a layer whose input is in autocast's dtype already."""

    dtype: torch.dtype

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, 16) for _ in range(3))
        self.out = nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x).float()).to(x.dtype)
        return self.out(self.query(x).sigmoid() * self.key(x) + self.value(x)) + x


def model_of(dtype: torch.dtype = FP32, *, is_quantised: bool = False) -> Attending:
    torch.manual_seed(0)
    model = Attending().to(dtype)
    model.dtype = dtype
    model.norm.float()
    if is_quantised:
        weights = {name: model.get_submodule(name).weight.detach() for name in LAYERS}
        Quantization(format=Int8(), layers=LAYERS, device=torch.device("cpu")).apply_to(model)
        for name, weight in weights.items():
            model.get_submodule(name).write(weight, 0)  # type: ignore[operator]
    return model


def adapted(
    model: Attending,
    *,
    alpha: float = 2,
    dropout: float = 0,
    layers: Sequence[str] = LAYERS,
    kind: AdapterKind = LORA,
) -> Attending:
    add_adapter(model, layers, rank=2, alpha=alpha, dropout=dropout, seed=0, kind=kind)
    return filled(model)


def filled(model: Attending) -> Attending:
    """With an adapter that changes the output."""
    for weight in trained(model):
        nn.init.normal_(weight)
    return model


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [weight for weight in model.parameters() if weight.requires_grad]


def step(model: Attending, *, autocast: bool = False) -> list[Tensor]:
    """The output, and all gradients."""
    torch.manual_seed(1)
    dtype = FP32 if autocast else model.dtype
    x = torch.randn(2, NUM_TOKENS, WIDTH).to(dtype).requires_grad_()
    with torch.autocast("cpu", BF16, enabled=autocast):
        output = model(x)
    output.float().square().sum().backward()
    gradients = [x.grad, *(weight.grad for weight in trained(model))]
    model.zero_grad()
    return [output.detach(), *(gradient for gradient in gradients if gradient is not None)]


def as_peft(call: Callable[[], list[Tensor]]) -> list[Tensor]:
    with patch.object(LoraLinear, "forward", Linear.forward):
        return call()


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert all(one.dtype == other.dtype for one, other in zip(ours, theirs, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("alpha", [2, 3])
@pytest.mark.parametrize("is_quantised", [False, True])
@pytest.mark.parametrize(("weights", "autocast"), [(FP32, False), (BF16, False), (FP32, True), (BF16, True)])
def test_values_and_gradients_are_those_of_peft(
    weights: torch.dtype, autocast: bool, is_quantised: bool, alpha: float
) -> None:
    model = adapted(model_of(weights, is_quantised=is_quantised), alpha=alpha)
    assert all(type(model.get_submodule(name)) is LoraLinear for name in LAYERS)
    assert_equal(step(model, autocast=autocast), as_peft(lambda: step(model, autocast=autocast)))


def kept_bytes(model: Attending) -> int:
    """What autograd keeps of a forward pass under autocast, each memory once, without weights."""
    kept: dict[int, Tensor] = {}
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    x = torch.randn(2, NUM_TOKENS, WIDTH)
    with torch.autocast("cpu", BF16), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(x).sum()
    del loss
    return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in weights)


def test_query_key_and_value_keep_one_cast_of_what_they_read() -> None:
    model = adapted(model_of())
    ours = kept_bytes(model)
    with patch.object(LoraLinear, "forward", Linear.forward):
        theirs = kept_bytes(model)
    assert theirs - ours == 2 * (2 * NUM_TOKENS * WIDTH * BF16.itemsize)


def test_of_a_block_that_runs_again_no_cast_is_kept() -> None:
    model = adapted(model_of())
    x = torch.randn(2, NUM_TOKENS, WIDTH, requires_grad=True) + 1  # which a layer of the block reads
    with CountingMeter() as meter, torch.autocast("cpu", BF16, cache_enabled=False):
        meter.start()
        output = gradient_checkpoint_forward(model, True, False, x)
        assert meter.num_bytes == output.nbytes


def test_a_tensor_that_was_changed_or_is_wanted_in_another_dtype_is_cast_again() -> None:
    x = torch.zeros(3, requires_grad=True) + 1
    first, second = shared_cast(x, BF16), shared_cast(x, BF16)
    assert first.data_ptr() == second.data_ptr()
    assert shared_cast(x, torch.float16).dtype == torch.float16
    x.add_(1)
    assert torch.equal(shared_cast(x, BF16), torch.full((3,), 2, dtype=BF16))


def with_two_adapters(model: Attending) -> Attending:
    adapted(model).add_adapter(LoraConfig(r=3, target_modules=["query", "out"]), adapter_name="other")
    model.set_adapter(["default", "other"])
    return filled(model)


def merged(model: Attending) -> Attending:
    for layer in adapted(model).modules():
        if isinstance(layer, LoraLinear):
            layer.merge()
    return model


def disabled(model: Attending) -> Attending:
    adapted(model).disable_adapters()
    return model


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
@pytest.mark.parametrize(
    "change",
    [with_two_adapters, merged, disabled, lambda model: adapted(model, dropout=0.5)],
    ids=["two adapters", "merged", "disabled", "dropout"],
)
def test_layers_that_are_not_a_plain_lora_are_left_to_peft(change: Callable[[Attending], Attending]) -> None:
    model = change(model_of())
    with patch.object(Linear, "forward", autospec=True, side_effect=Linear.forward) as left:
        ours = step(model, autocast=True)
    assert left.call_count
    assert_equal(ours, as_peft(lambda: step(model, autocast=True)))


def test_layers_of_other_classes_get_pefts_own() -> None:
    class Special(nn.Linear): ...

    model = model_of()
    model.out = Special(16, WIDTH)
    adapted(model)
    assert type(model.query) is LoraLinear
    assert type(model.out) is Linear


def output_of(model: nn.Module, *, autocast: bool) -> Tensor:
    x = torch.randn(2, NUM_TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), torch.autocast("cpu", BF16, enabled=autocast):
        output: Tensor = model(x)
    return output


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("is_quantised", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        adapted,
        lambda model: adapted(model, kind=Dora()),
        lambda model: adapted(model, kind=Lokr()),
        disabled,
        lambda model: adapted(model, dropout=0.5),
    ],
)
def test_without_its_adapter_a_model_has_the_bits_from_before_it_and_trains_on_as_it_was(
    change: Callable[[Attending], Attending], is_quantised: bool, autocast: bool
) -> None:
    before = output_of(model_of(is_quantised=is_quantised), autocast=autocast)
    model = change(model_of(is_quantised=is_quantised))
    trains = [weight.requires_grad for weight in model.parameters()]
    torch.manual_seed(2)
    with_it = output_of(model, autocast=autocast)
    with without_adapter(nn.Sequential(model)):
        assert [weight.requires_grad for weight in model.parameters()] == trains
        assert torch.equal(output_of(model, autocast=autocast), before)
    torch.manual_seed(2)
    assert torch.equal(output_of(model, autocast=autocast), with_it)
    assert [weight.requires_grad for weight in model.parameters()] == trains


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_without_its_adapter_a_model_keeps_a_frozen_one_also_where_the_scope_ends_by_an_error() -> None:
    other = LoraConfig(r=3, target_modules=["query", "out"])
    other_only = model_of()
    other_only.requires_grad_(False).add_adapter(other, adapter_name="other")
    filled(other_only)
    both = model_of()
    add_adapter(both, LAYERS, rank=2, alpha=2, dropout=0, seed=0)
    filled(both).add_adapter(other, adapter_name="other")
    both.set_adapter(["default", "other"])
    both.load_state_dict(other_only.state_dict(), strict=False)
    for name, weight in both.named_parameters():
        weight.requires_grad_(".default." in name)
    with without_adapter(both):
        assert torch.equal(output_of(both, autocast=True), output_of(other_only, autocast=True))
    with pytest.raises(RuntimeError, match="shapes"), without_adapter(both):
        both(torch.zeros(1))
    assert not torch.equal(output_of(both, autocast=True), output_of(other_only, autocast=True))
    assert both.active_adapters() == ["default", "other"]
    assert all(".default." in name for name, weight in both.named_parameters() if weight.requires_grad)


SETTINGS = {"lora_alpha": 1.5}


def frozen() -> dict[str, torch.Tensor]:
    """On one layer of those that train, and on the norm's neighbour that does not."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"query": ((3, 12), (16, 3)), "out": ((3, 16), (12, 3))}
    return {
        f"{layer}.lora_{half}.weight": torch.randn(shape, generator=generator)
        for layer, both in shapes.items()
        for half, shape in zip("AB", both, strict=True)
    }


@pytest.mark.parametrize("is_quantised", [False, True])
def test_both_take_part_one_trains_and_either_can_be_left_out(is_quantised: bool) -> None:
    layers = LAYERS[:-1]  # all but "out", which the frozen one is on
    other_only = adapted(model_of(is_quantised=is_quantised), layers=layers)
    both = adapted(model_of(is_quantised=is_quantised), layers=layers)
    add_training_adapter(both, frozen(), SETTINGS)
    own = [name for name, weight in both.named_parameters() if weight.requires_grad]
    assert own == [name for name, weight in other_only.named_parameters() if weight.requires_grad]
    for autocast in (False, True):
        with without_training_adapter(both):
            assert torch.equal(output_of(both, autocast=autocast), output_of(other_only, autocast=autocast))
        assert not torch.equal(output_of(both, autocast=autocast), output_of(other_only, autocast=autocast))
    # Only the one that trains is saved, exported and measured.
    assert adapter_tensors(both).keys() == adapter_tensors(other_only).keys()
    assert adapter_settings(both) == adapter_settings(other_only)
    cpu = torch.device("cpu")
    assert UpdateSizes(both, cpu).measure() == UpdateSizes(other_only, cpu).measure()
    assert [name for name, weight in both.named_parameters() if weight.requires_grad] == own


def test_with_both_a_layer_adds_both_updates_to_its_own() -> None:
    model, plain, tensors = adapted(model_of()), model_of(), frozen()
    add_training_adapter(model, tensors, SETTINGS)
    x = torch.randn(2, 12, generator=torch.Generator().manual_seed(4))
    layer = model.query
    assert isinstance(layer, LoraLinear)
    updates = [
        layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight,
        1.5 / 3 * tensors["query.lora_B.weight"] @ tensors["query.lora_A.weight"],
    ]
    expected = plain.query(x) + x @ (updates[0] + updates[1]).T
    torch.testing.assert_close(layer(x), expected)
    with without_adapter(model):
        torch.testing.assert_close(layer(x), plain.query(x) + x @ updates[1].T)
    assert layer.lora_A["training_adapter"].weight.dtype == FP32


def test_a_digest_is_of_the_numbers_and_not_of_their_order() -> None:
    tensors = frozen()
    digest = adapter_digest(tensors, SETTINGS)
    assert adapter_digest(dict(reversed(tensors.items())), SETTINGS) == digest
    tensors["out.lora_B.weight"][0, 0] += 1
    others = [adapter_digest(tensors, SETTINGS), adapter_digest(frozen(), {"lora_alpha": 3.0})]
    assert len({digest, *others}) == 3
