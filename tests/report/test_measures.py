"""Numbers of the page: lines of charts, updates of layers, and losses by item and by noise level."""

import math
from dataclasses import replace

import pytest

from diffsynth_lite.report.charts import Series, as_number, charts_of, read_series, time_shares, update_series
from diffsynth_lite.report.layers import read_layers
from diffsynth_lite.report.losses import hard_items, item_progress, noise_levels
from diffsynth_lite.run_folder.metrics import MeasuredItem

NAMES = (
    "transformer_blocks.0.attn.to_q",
    "transformer_blocks.1.attn.to_q",
    "transformer_blocks.1.ff.net.0.proj",
    "transformer_blocks.0.attn.to_out.0",
    "single_transformer_blocks.0.attn.to_q",
    "proj_out",
)


def series(*values: float | None) -> Series:
    return Series.of([{"step": step, "loss": value} for step, value in enumerate(values)], "loss")


def updates(step: int, *values: object) -> dict[str, object]:
    return {"step": step, "updates": dict(zip(NAMES, values, strict=False))}


def items(number: int) -> list[MeasuredItem]:
    own = {"caption": "", "size": "8x8", "noise_levels": [0.2, 0.8], "measured_by": "", "thumbnail": None}
    return [MeasuredItem(name=str(place), **own) for place in range(number)]


def test_learning_rates_of_groups_replace_the_one_that_they_have_or_hide() -> None:
    plain = {"step": 1, "learning_rate": 1e-4}
    assert list(read_series([plain])) == ["learning_rate"]
    groups = {"learning_rate/others": 1e-4, "learning_rate/to_q": 1e-3}
    found = read_series([plain | groups])
    assert list(found) == list(groups)
    shown = next(chart for chart in charts_of(found) if chart.name == "learning_rate")
    assert shown.summary(found).startswith("others: 0.0001 at step 1, ")


def test_shares_of_time_count_all_steps_of_a_row_and_leave_out_the_first() -> None:
    times = [(1, 99.0, 0.0), (10, 1.0, 2.0), (12, 3.0, 1.0)]
    rows = [
        {"step": step, "step_seconds/forward": forward, "step_seconds/data": data}
        for step, forward, data in times
    ]
    shares = "waiting for data 57 %, forward pass and loss 43 %, backward pass 0 %"  # 20 s and 15 s
    assert time_shares([{"step": 5, "loss": 1.0}, *rows]).startswith(shares)
    assert time_shares(rows[:1]) == ""


def test_a_series_has_one_point_a_step_in_order_and_none_where_there_is_no_number() -> None:
    rows = [
        {"step": 5, "loss": 1.0},
        {"step": 2, "loss": None},
        {"step": 3, "other": 1.0},
        {"step": "4", "loss": 1.0},
        {"step": True, "loss": 1.0},
        {"step": 5, "loss": 2.0},
        {"loss": 3.0},
    ]
    found = Series.of(rows, "loss")
    assert (found.steps, found.values, found.points) == ([2, 5], [None, 2.0], [(5, 2.0)])


def test_a_smoothed_line_keeps_constants_skips_gaps_and_forgets_over_a_twentieth_of_the_rows() -> None:
    assert series(*[3.0] * 50).smoothed().values == pytest.approx([3.0] * 50)
    assert series(1.0, None, 1.0).smoothed().points == [(0, 1.0), (2, 1.0)]
    smoothed = series(*[0.0] * 1000, *[1.0] * 1000).smoothed().values
    # The mean forgets over 100 rows: after as many, the values before weigh 0.99 ** 100.
    assert smoothed[1099] == pytest.approx(1 - 0.99**100, abs=1e-4)


@pytest.mark.parametrize("length", [1, 1199, 1200, 1201, 50_000])
def test_a_thinned_line_is_short_and_keeps_its_ends_of_each_stretch(length: int) -> None:
    values = [math.sin(step) for step in range(length)]
    peak = length // 3
    values[peak] = 5.0
    thinned = series(*values).thinned()
    assert len(thinned.steps) <= 1200
    assert list(thinned.steps) == sorted(set(thinned.steps))
    assert (peak, 5.0) in thinned.points
    assert min(value for _, value in thinned.points) == min(values)


def test_a_stretch_without_numbers_stays_a_gap() -> None:
    assert None in series(*[1.0] * 2000, *[None] * 2000, *[1.0] * 2000).thinned().values


@pytest.mark.parametrize("value", [True, "1", None, math.nan, math.inf, -math.inf, 10**400, [1]])
def test_anything_but_a_finite_number_counts_as_none(value: object) -> None:
    assert as_number(value) is None


def test_layers_are_in_the_row_of_their_kind_and_the_column_of_their_block() -> None:
    layers = read_layers([updates(5, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)])
    shown = {kind: [cell and cell.update for cell in cells] for kind, cells in layers.cells.items()}
    blocks = ["transformer_blocks.0", "transformer_blocks.1", "single_transformer_blocks.0", ""]
    assert layers.blocks == blocks
    assert shown == {
        "attn.to_q": [0.1, 0.2, 0.5, None],
        "ff.net.0.proj": [None, 0.3, None, None],
        "attn.to_out.0": [0.4, None, None, None],
        "proj_out": [None, None, None, 0.6],
    }


def test_the_shade_is_logarithmic_and_0_has_none() -> None:
    layers = read_layers([updates(5, 0.01, 0.1, 1.0, 0.0)])
    shades = {cell.name: cell.shade for cells in layers.cells.values() for cell in cells if cell}
    assert [shades[name] for name in NAMES[:3]] == pytest.approx([0.0, 0.5, 1.0])
    assert shades[NAMES[3]] is None
    assert layers.unchanged == [NAMES[3]]
    assert [name for name, _ in layers.largest.rows] == [NAMES[2], NAMES[1], NAMES[0], NAMES[3]]
    assert [name for name, _ in layers.smallest.rows] == [NAMES[3], NAMES[0], NAMES[1], NAMES[2]]


def test_the_latest_row_of_a_step_that_was_taken_is_shown() -> None:
    rows = [updates(0, 0.0), updates(5, 0.1), updates(10, 0.2), {"step": 15, "updates": {}}, {"step": 20}]
    layers = read_layers(rows)
    assert (layers.step, layers.median, layers.num_layers) == (10, 0.2, 1)
    assert read_layers(rows[:1]) is None


def test_the_lines_by_step_leave_out_layers_at_0() -> None:
    rows = [updates(0, 0.0, 0.0), updates(5, 0.01, 0.02, 0.06, 0.0), {"step": 6, "updates": [1]}]
    assert {name: each.points for name, each in update_series(rows).items()} == {
        "update_largest": [(5, 6.0)],
        "update_median": [(5, 2.0)],
        "update_smallest": [(5, 1.0)],
    }
    assert update_series(rows[:1]) == {}


def test_too_many_layers_are_named_at_their_ends_only() -> None:
    many = {f"blocks.{place}.to_q": 0.1 + place for place in range(5000)}
    layers = read_layers([{"step": 1, "updates": many}])
    assert (layers.num_layers, layers.cells, len(layers.largest.rows)) == (5000, {}, 5)


def test_items_are_sorted_by_their_last_loss_and_compared_with_their_first() -> None:
    rows = [
        {"step": 0, "losses": [1.0, 2.0, None], "by_level": [[1.0, 1.0], [1.0, 3.0], [None, None]]},
        {"step": 5, "losses": [9.0, 9.0, 4.0]},
        {"step": 9, "losses": [0.5, 3.0, 5.0], "by_level": [[0.2, 0.8], [1.5, None], [1.0, 9.0]]},
    ]
    found = item_progress(items(3), rows)
    assert [column.title for column in found.columns[2:]] == [
        *("at the start", "now", "change", "now at 0.2", "now at 0.8", "course")
    ]
    assert found.rows == [
        (None, ("2", "8x8", ""), 4.0, 5.0, 0.25, 1.0, 9.0, [4.0, 5.0]),
        (None, ("1", "8x8", ""), 2.0, 3.0, 0.5, 1.5, None, [2.0, 9.0, 3.0]),
        (None, ("0", "8x8", ""), 1.0, 0.5, -0.5, 0.2, 0.8, [1.0, 9.0, 0.5]),
    ]
    assert found.summary == (
        "From step 0 to step 9. Half of the items are above 3 now. 1 of 3 got better, the median by +25.0 %."
    )
    without = [{name: row[name] for name in ("step", "losses")} for row in rows]
    assert len(item_progress(items(3), without).columns) == len(found.columns) - 2


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"step": 0, "losses": [1.0]}],
        [{"step": 0, "losses": [1.0]}, {"step": 5, "losses": [1.0, 2.0]}],
        [{"step": 0, "losses": [1.0]}, {"step": 5, "losses": ["x"]}],
        [{"step": "x", "losses": [1.0]}, {"step": 5, "losses": [1.0]}],
    ],
)
def test_one_measurement_shows_no_progress(rows: list[dict[str, object]]) -> None:
    assert not item_progress(items(1), rows)


def test_of_many_items_the_highest_and_the_lowest_are_shown() -> None:
    losses = [1.0 + place for place in range(500)]
    found = item_progress(items(500), [{"step": 0, "losses": [1.0] * 500}, {"step": 1, "losses": losses}])
    highest_first = (*range(499, 399, -1), *range(99, -1, -1))
    assert [item[0] for _, item, *_ in found.rows] == [str(place) for place in highest_first]
    assert "of 500 got better" in found.summary
    assert found.summary.endswith("The 200 with the highest and the lowest losses are shown.")


def test_the_course_of_a_loss_has_few_points_the_first_and_the_last_among_them() -> None:
    rows = [{"step": each, "losses": [each]} for each in range(1, 1001)]
    [(*_, course)] = item_progress(items(1), rows).rows
    assert len(course) <= 42
    assert (course[0], course[-1]) == (1.0, 1000.0)


def test_the_mean_of_the_items_at_each_noise_level_is_shown_for_the_start_half_way_and_now() -> None:
    def row(*by_level: list[float | None]) -> dict[str, object]:
        return {"step": 0, "by_level": [list(levels) for levels in by_level]}

    rows = [row([1.0, 2.0], [3.0, 4.0]), row([1.0, 2.0], [None, 1.0]), row([1.0, 1.0])]
    assert not noise_levels(items(2), rows)  # the others have not all items
    rows += [row([0.5, 2.0], [0.5, 2.0]), row([0.25, 1.0], [0.25, 3.0]), {"step": 9, "losses": [1.0, 1.0]}]
    assert noise_levels(items(2), rows).rows == [
        ("0.2", 2.0, 0.5, 0.25, -0.875, -0.5),
        ("0.8", 3.0, 2.0, 2.0, pytest.approx(-1 / 3), 0.0),
    ]
    assert noise_levels(items(2), rows[:1] + rows[3:4]).rows[0][2] is None
    damaged = replace(items(1)[0], noise_levels=["low", 0.8])
    assert not noise_levels([damaged], [row([1.0, 2.0])] * 2)


def samples(num_items: int = 20, num_steps: int = 40) -> list[dict[str, object]]:
    """Each item once a step, at levels of its own; item 7 is twice as hard. Losses fall by half in the run.

    Item 3 has only levels at which all losses are high.
    """

    def sample(item: int, step: int) -> list[float]:
        level = 0.9 + item / 1000 if item == 3 else (item * 0.31 + step * 0.17) % 1
        return [level, (0.1 + level**2) * (1 - 0.5 * step / num_steps) * (2 if item == 7 else 1)]

    return [
        {"step": step, "samples": {f"{item}.png": [sample(item, step)] for item in range(num_items)}}
        for step in range(num_steps)
    ]


def test_an_item_is_hard_that_has_higher_losses_than_others_at_its_levels() -> None:
    found = hard_items(samples())
    assert found.summary == "20 items with four samples and more; 800 samples."
    (_, name, ratio, error, num_samples), *others = found.rows
    assert (name, num_samples) == ("7.png", 40)
    assert ratio == pytest.approx(2, rel=0.1)
    assert all(0.9 < row[2] < 1.1 for row in others)
    assert ratio - 2 * error > max(row[2] for row in others)


def test_hard_items_have_the_thumbnails_of_those_that_are_measured() -> None:
    measured = [
        replace(item, name=f"{item.name}.png", thumbnail=thumbnail)
        for item, thumbnail in zip(items(3), ("data:image/gif;base64,", "javascript:1", None), strict=True)
    ]
    found = {name: thumbnail for thumbnail, name, *_ in hard_items(samples(), measured).rows}
    assert {name: each for name, each in found.items() if each} == {"0.png": "data:image/gif;base64,"}


def test_an_item_with_few_samples_must_be_harder_to_come_first() -> None:
    few = {"step": 40, "samples": {"few.png": [[0.5, 0.6]] * 4, "one.png": [[0.5, 9.0]]}}
    found = {name: ratio for _, name, ratio, *_ in hard_items([*samples(), few]).rows}
    assert next(iter(found)) == "7.png"
    assert found["few.png"] > found["7.png"]
    assert "one.png" not in found


@pytest.mark.parametrize(
    "given",
    [
        [],
        [{"step": 1, "samples": {"a.png": [[0.5, 0.1]] * 100}}],
        [
            {"step": 1, "samples": {"a.png": [[0.5, None], [None, 1.0], [0.5], "x"], "b.png": "x"}},
            {"step": 2, "samples": 3},
        ],
        samples(num_items=4, num_steps=3),
    ],
)
def test_too_few_samples_show_no_hard_item_and_other_content_is_left_out(
    given: list[dict[str, object]],
) -> None:
    assert not hard_items(given)
