"""Updates of layers: the map has each layer in the row of its kind and the column of its block."""

import pytest

from diffsynth_lite.report.layers import read_layers, update_series

NAMES = (
    *(
        "transformer_blocks.0.attn.to_q",
        "transformer_blocks.1.attn.to_q",
        "transformer_blocks.1.ff.net.0.proj",
    ),
    *("transformer_blocks.0.attn.to_out.0", "single_transformer_blocks.0.attn.to_q", "proj_out"),
)


def row(step: int, *updates: object) -> dict[str, object]:
    return {"step": step, "updates": dict(zip(NAMES, updates, strict=False))}


def test_layers_stand_in_the_row_of_their_kind_and_the_column_of_their_block() -> None:
    layers = read_layers([row(5, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)])
    assert layers is not None
    shown = {kind: [cell and cell.update for cell in cells] for kind, cells in layers.cells.items()}
    assert layers.blocks == [
        "transformer_blocks.0",
        "transformer_blocks.1",
        "single_transformer_blocks.0",
        "",
    ]
    assert shown == {
        "attn.to_q": [0.1, 0.2, 0.5, None],
        "ff.net.0.proj": [None, 0.3, None, None],
        "attn.to_out.0": [0.4, None, None, None],
        "proj_out": [None, None, None, 0.6],
    }


def test_the_shade_is_logarithmic_and_0_has_none() -> None:
    layers = read_layers([row(5, 0.01, 0.1, 1.0, 0.0)])
    assert layers is not None
    shades = {cell.name: cell.shade for cells in layers.cells.values() for cell in cells if cell}
    assert [shades[name] for name in NAMES[:3]] == pytest.approx([0.0, 0.5, 1.0])
    assert shades[NAMES[3]] is None
    assert layers.unchanged == [NAMES[3]]
    assert [layer.name for layer in layers.largest] == [NAMES[2], NAMES[1], NAMES[0], NAMES[3]]
    assert [layer.name for layer in layers.smallest] == [NAMES[3], NAMES[0], NAMES[1], NAMES[2]]


def test_the_latest_row_of_a_step_that_was_taken_is_shown() -> None:
    rows = [row(0, 0.0), row(5, 0.1), row(10, 0.2), {"step": 15, "updates": {}}, {"step": 20}]
    layers = read_layers(rows)
    assert layers is not None
    assert (layers.step, layers.median, layers.num_layers) == (10, 0.2, 1)
    assert read_layers(rows[:1]) is None


def test_the_lines_by_step_leave_out_layers_at_0() -> None:
    series = update_series([row(0, 0.0, 0.0), row(5, 0.01, 0.02, 0.06, 0.0), {"step": 6, "updates": [1]}])
    assert {name: each.points for name, each in series.items()} == {
        "update_largest": [(5, 6.0)],
        "update_median": [(5, 2.0)],
        "update_smallest": [(5, 1.0)],
    }
    assert update_series([row(0, 0.0)]) == {}


def test_too_many_layers_are_named_at_their_ends_alone() -> None:
    layers = read_layers(
        [{"step": 1, "updates": {f"blocks.{place}.to_q": 0.1 + place for place in range(5000)}}]
    )
    assert layers is not None
    assert (layers.num_layers, layers.cells, len(layers.largest)) == (5000, {}, 5)
