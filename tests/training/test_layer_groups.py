"""Groups of layers: which layers an entry has, and what is refused before weights load."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from diffsynth_lite.config.model import LoraSettings
from diffsynth_lite.config.train import TrainSettings
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora import LoraSize
from diffsynth_lite.training.layer_groups import (
    LayerGroup,
    find_targets,
    layer_groups,
    rank_overrides,
    rate_groups,
    rates_without_effect,
    require_kind,
)
from diffsynth_lite.training.optimization.optimizers import build_group_rates

LAYERS = ["blocks.0.to_q", "blocks.0.to_k", "blocks.1.to_q", "blocks.1.to_k"]
EXPERTS = ["transformer.blocks.0.to_q", "transformer_2.blocks.0.to_q"]


def config_of(**lora: Any) -> Any:
    return SimpleNamespace(lora=LoraSettings(**lora), train=TrainSettings(weight_decay=0.5))


def groups_of(*entries: dict[str, Any], layers: list[str] = LAYERS, **lora: Any) -> list[LayerGroup]:
    trained = ["transformer"] if layers is LAYERS else ["transformer", "transformer_2"]
    config = config_of(groups=list(entries), **lora)
    return layer_groups(config, SimpleNamespace(trained=trained), layers)


def test_without_groups_all_layers_are_trained_alike() -> None:
    (group,) = groups_of()
    assert group == LayerGroup(
        name=None, layers=tuple(LAYERS), size=LoraSize(32, 32.0), learning_rate=1e-4, weight_decay=0.5
    )
    assert rank_overrides([group]) == {}


def test_the_first_entry_that_matches_a_layer_has_it() -> None:
    rest, second, queries = groups_of(
        {"match": "blocks.1", "rank": 8, "weight_decay": 0.0},
        {"match": "to_q", "learning_rate": 3e-5, "alpha": 2.0},
        alpha=4.0,
    )
    assert (rest.name, rest.layers) == (None, ("blocks.0.to_k",))
    assert second.layers == ("blocks.1.to_q", "blocks.1.to_k")
    assert (second.size, second.learning_rate, second.weight_decay) == (LoraSize(8, 4.0), 1e-4, 0.0)
    assert queries.layers == ("blocks.0.to_q",)
    assert (queries.size, queries.learning_rate, queries.weight_decay) == (LoraSize(32, 2.0), 3e-5, 0.5)
    assert rank_overrides([rest, second, queries]).keys() == {*second.layers, *queries.layers}


def test_alpha_follows_the_rank_of_an_entry_unless_one_is_given() -> None:
    _, group = groups_of({"match": "to_q", "rank": 8})
    assert group.size == LoraSize(8, 8.0)


def test_a_component_is_matched_by_its_name_also_where_it_is_the_only_one() -> None:
    high, low = groups_of(
        {"match": "transformer", "learning_rate": 3e-5},
        {"match": "transformer_2", "rank": 16},
        layers=EXPERTS,
    )
    assert (high.layers, low.layers) == (tuple(EXPERTS[:1]), tuple(EXPERTS[1:]))
    (all_layers,) = groups_of({"match": "transformer", "learning_rate": 3e-5})
    assert all_layers.layers == tuple(LAYERS)


def test_an_entry_without_layers_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"lora.groups\[0\].match: to_v is in the name of no layer .* are .*to_q"
    ):
        groups_of({"match": "to_v", "rank": 8})
    with pytest.raises(
        UserError, match=r"lora.groups\[1\].match: entries before it have all layers that to_q"
    ):
        groups_of({"match": "blocks.0-1", "rank": 8}, {"match": "to_q", "rank": 4})


def test_an_entry_that_says_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="to_q is trained as the rest; give it a learning_rate or a rank"):
        groups_of({"match": "to_q"})


def test_each_group_has_its_rate_also_where_it_is_the_only_one() -> None:
    family = SimpleNamespace(trained=["transformer"])

    def rates_of(*entries: dict[str, Any]) -> dict[str, float]:
        config = config_of(groups=list(entries))
        rates = build_group_rates(config, layer_groups(config, family, LAYERS))
        return {label: rate(0) for label, rate in rates.items()}

    assert rates_of() == {}
    assert rates_of({"match": "transformer", "learning_rate": 3e-5}) == {"transformer": 3e-5}
    assert rates_of({"match": "to_q", "learning_rate": 3e-5}) == {"others": 1e-4, "to_q": 3e-5}


@pytest.mark.parametrize(
    ("entries", "warned"),
    [
        ([{"match": "transformer", "learning_rate": 3e-5}], ""),
        ([{"match": "transformer", "weight_decay": 0.1}], "train.weight_decay has no effect"),
        ([{"match": "to_q", "weight_decay": 0.1}], ""),
        ([{"match": "to_q", "weight_decay": 0.1}, {"match": "to_k", "rank": 2}], ""),
        ([{"match": name, "weight_decay": 0.1} for name in ("to_q", "to_k")], "train.weight_decay has no"),
    ],
)
def test_a_given_rate_that_no_layer_has_is_reported(entries: list[dict[str, Any]], warned: str) -> None:
    groups = groups_of(*entries)
    assert (rates_without_effect(config_of(groups=entries), groups) or "").startswith(warned)
    assert bool(rates_without_effect(config_of(groups=entries), groups)) == bool(warned)


def test_with_loraplus_the_second_matrices_have_a_rate_of_their_own() -> None:
    config = config_of(loraplus_ratio=4.0, groups=[{"match": "to_q", "learning_rate": 0.5}])
    groups = layer_groups(config, SimpleNamespace(trained=["transformer"]), LAYERS)
    rated = {group.label: (group.learning_rate, group.matrices) for group in rate_groups(config, groups)}
    assert rated == {
        "others.lora_A": (1e-4, (".lora_A",)),
        "others.lora_B": (4e-4, (".lora_B",)),
        "to_q.lora_A": (0.5, (".lora_A",)),
        "to_q.lora_B": (2.0, (".lora_B",)),
    }


def test_a_dora_is_on_no_sharded_base() -> None:
    config = config_of(kind="dora")
    config.memory = SimpleNamespace(shard_base="node")
    with pytest.raises(UserError, match=r"memory\.shard_base: node does not go with lora\.kind dora"):
        require_kind(config)


def test_magnitudes_of_a_dora_are_not_pulled_to_zero() -> None:
    config = config_of(kind="dora", groups=[{"match": "to_q", "learning_rate": 0.5}])
    groups = layer_groups(config, SimpleNamespace(trained=["transformer"]), LAYERS)
    assert {
        group.label: (group.learning_rate, group.weight_decay) for group in rate_groups(config, groups)
    } == {
        "others": (1e-4, 0.5),
        "others.lora_magnitude_vector": (1e-4, 0.0),
        "to_q": (0.5, 0.5),
        "to_q.lora_magnitude_vector": (0.5, 0.0),
    }


def expert() -> nn.Module:
    blocks = [nn.ModuleDict({"to_q": nn.Linear(2, 2), "to_k": nn.Linear(2, 2)}) for _ in range(12)]
    return nn.ModuleDict({"blocks": nn.ModuleList(blocks)})


def test_layers_of_some_blocks_get_a_lora_and_each_component_has_one() -> None:
    model = nn.ModuleDict({"transformer": expert(), "transformer_2": expert()})
    family: Any = SimpleNamespace(
        trained=["transformer", "transformer_2"],
        default_target_modules=("to_q",),
        target_sets={},
        unused_modules=lambda _: (),
        parts_of=lambda model: dict(model.items()),
    )

    def targets_of(**lora: Any) -> list[str]:
        return find_targets(family, model, config_of(**lora))

    assert len(targets_of()) == 24
    assert targets_of(target_blocks=["transformer.blocks.9-10", "transformer_2.blocks.11"]) == [
        *("transformer.blocks.9.to_q", "transformer.blocks.10.to_q"),
        "transformer_2.blocks.11.to_q",
    ]
    refused = {
        "target_blocks: blocks.12 is in the name of no layer": {"target_blocks": ["blocks.0", "blocks.12"]},
        r"target_blocks: none of transformer\.blocks is in transformer_2, which lora\.components": {
            "target_blocks": ["transformer.blocks"]
        },
        r"target_modules: none of transformer\.\*\.\*\.to_k is in transformer_2": {
            "target_modules": ["transformer.*.*.to_k"]
        },
    }
    for message, lora in refused.items():
        with pytest.raises(UserError, match=rf"lora\.{message}"):
            targets_of(**lora)
