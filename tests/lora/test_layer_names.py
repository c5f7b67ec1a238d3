"""What files call the layers of the released models, each name for one place only."""

import re

import pytest

from diffsynth_lite.lora import known_names
from diffsynth_lite.lora.layer_names import LayerNames, Original, renamed

TABLES = {name: value for name, value in vars(known_names).items() if isinstance(value, LayerNames)}
WAN, UNET = known_names.WAN["transformer"], known_names.SDXL["unet"]


def numbered(pattern: str) -> str:
    """The pattern with its stars as numbers that no layer has of itself."""
    numbers = iter(range(70, 80))
    return re.sub(r"\*", lambda _: str(next(numbers)), pattern)


def places(names: LayerNames) -> list[tuple[str, Original]]:
    plain = [(layer, renamed(layer)) for layer in names.layers]
    return [*plain, *names.kohya.items(), *names.others.items()]


@pytest.mark.parametrize("table", TABLES)
def test_each_name_is_found_with_dots_and_without_as_its_own_layers(table: str) -> None:
    names = TABLES[table]
    for name, place in places(names):
        layers = tuple(map(numbered, place.layers))
        assert [names.find(layer) for layer in layers] == [renamed(layer) for layer in layers]
        for spelled in (numbered(name), numbered(name).replace(".", "_")):
            found = names.find(spelled)
            assert found is not None
            assert (found.layers, found.rows, found.halves_swapped) == (
                layers,
                place.rows,
                place.halves_swapped,
            )
        assert names.find(f"{numbered(name)}.more") is None


@pytest.mark.parametrize("table", TABLES)
def test_what_kohya_calls_a_layer_is_found_as_that_layer_again(table: str) -> None:
    names = TABLES[table]
    for layer in map(numbered, names.layers):
        name, place = names.in_kohya(layer)
        assert layer in place.layers
        assert names.find(name) == place


def test_numbers_of_blocks_go_over_and_numbers_of_layers_are_told_apart() -> None:
    assert WAN.find("blocks_39_ffn_2") == renamed("blocks.39.ffn.net.2")
    assert WAN.find("blocks_39_ffn_1") is None
    assert UNET.find("input_blocks_4_1_transformer_blocks_1_attn1_to_out_0") == renamed(
        "down_blocks.1.attentions.0.transformer_blocks.1.attn1.to_out.0"
    )
    assert UNET.find("input_blocks_4_0_transformer_blocks_1_attn1_to_out_0") is None
