"""A frozen adapter beside the one that trains: what is computed with it, without it, and what trains."""

import pytest
import torch
from test_linear import FP32, LAYERS, adapted, model_of, output_of

from diffsynth_lite.lora import (
    UpdateSizes,
    adapter_digest,
    adapter_settings,
    adapter_tensors,
    add_training_adapter,
    without_adapter,
    without_training_adapter,
)
from diffsynth_lite.lora.linear import LoraLinear

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
    alone = adapted(model_of(is_quantised=is_quantised), layers=layers)
    both = adapted(model_of(is_quantised=is_quantised), layers=layers)
    add_training_adapter(both, frozen(), SETTINGS)
    own = [name for name, weight in both.named_parameters() if weight.requires_grad]
    assert own == [name for name, weight in alone.named_parameters() if weight.requires_grad]
    for autocast in (False, True):
        with without_training_adapter(both):
            assert torch.equal(output_of(both, autocast=autocast), output_of(alone, autocast=autocast))
        assert not torch.equal(output_of(both, autocast=autocast), output_of(alone, autocast=autocast))
    # What is saved, exported and measured is of the one that trains.
    assert adapter_tensors(both).keys() == adapter_tensors(alone).keys()
    assert adapter_settings(both) == adapter_settings(alone)
    cpu = torch.device("cpu")
    assert UpdateSizes(both, cpu).measure() == UpdateSizes(alone, cpu).measure()
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
