"""Several components in one model, and their parts of one adapter."""

import torch
from torch import nn

from diffsynth_lite.lora import adapter_settings, adapter_tensors, add_adapter
from diffsynth_lite.pipelines.base.composite import Composite, join_adapter, split_adapter

LAYERS = ("first.0", "second.0", "second.2")


def composite() -> Composite:
    def component() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 4))

    return Composite({"first": component(), "second": component()})


def test_one_forward_runs_what_it_is_given_on_the_components() -> None:
    model, values = composite(), torch.ones(1, 4)
    result = model(lambda parts: parts.second(parts.first(values)))
    assert torch.equal(result, model.second(model.first(values)))


def test_an_adapter_is_split_by_component_and_joined_again() -> None:
    model = composite()
    add_adapter(model, LAYERS, rank=2, alpha=4, dropout=0.0, seed=0)
    tensors, settings = adapter_tensors(model), adapter_settings(model)
    parts = split_adapter(tensors, settings, ("first", "second"))
    assert {name: part[1]["target_modules"] for name, part in parts.items()} == {
        "first": ["0"],
        "second": ["0", "2"],
    }
    assert set(parts["first"][0]) == {"0.lora_A.weight", "0.lora_B.weight"}
    assert all(part[1]["lora_alpha"] == 4 for part in parts.values())
    joined, joined_settings = join_adapter(parts)
    assert joined_settings == settings
    assert joined.keys() == tensors.keys()
    assert all(joined[name] is tensors[name] for name in tensors)


def test_a_single_component_has_no_prefix_in_either_direction() -> None:
    tensors, settings = {"0.lora_A.weight": torch.ones(2)}, {"r": 2, "target_modules": ["0"]}
    parts = split_adapter(tensors, settings, ("transformer",))
    assert parts == {"transformer": (tensors, settings)}
    assert join_adapter(parts) == (tensors, settings)
