"""Losses of single items: the highest come first, and only those that compare."""

from dataclasses import replace

import pytest

from diffsynth_lite.report.noise import noise_levels
from diffsynth_lite.report.teaching import read_teaching
from diffsynth_lite.run_folder.items import MeasuredItem


def items(number: int) -> list[MeasuredItem]:
    return [
        MeasuredItem(
            name=str(place), caption="", size="8x8", noise_levels=[0.2, 0.8], measured_by="", thumbnail=None
        )
        for place in range(number)
    ]


def test_items_are_sorted_by_their_last_loss_and_compared_with_their_first() -> None:
    rows = [
        {"step": 0, "losses": [1.0, 2.0, None], "by_level": [[1.0, 1.0], [1.0, 3.0], [None, None]]},
        {"step": 5, "losses": [9.0, 9.0, 4.0]},
        {"step": 9, "losses": [0.5, 3.0, 5.0], "by_level": [[0.2, 0.8], [1.5, None], [1.0, 9.0]]},
    ]
    teaching = read_teaching(items(3), rows)
    assert teaching is not None
    assert (teaching.first_step, teaching.last_step, teaching.noise_levels) == (0, 9, [0.2, 0.8])
    assert [(each.item.name, each.change, each.losses) for each in teaching.shown] == [
        ("2", 0.25, [4.0, 5.0]),
        ("1", 0.5, [2.0, 9.0, 3.0]),
        ("0", -0.5, [1.0, 9.0, 0.5]),
    ]
    assert [each.by_level for each in teaching.shown] == [[1.0, 9.0], [1.5, None], [0.2, 0.8]]
    assert (teaching.median, teaching.median_change) == (3.0, 0.25)
    assert (teaching.num_measured, teaching.num_better) == (3, 1)


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
def test_one_measurement_is_no_change(rows: list[dict[str, object]]) -> None:
    assert read_teaching(items(1), rows) is None


def test_the_mean_of_the_items_at_each_noise_level_is_told_for_the_start_half_way_and_now() -> None:
    def row(*by_level: list[float | None]) -> dict[str, object]:
        return {"step": 0, "by_level": [list(levels) for levels in by_level]}

    rows = [row([1.0, 2.0], [3.0, 4.0]), row([1.0, 2.0], [None, 1.0]), row([1.0, 1.0])]
    assert noise_levels(items(2), rows) == []  # the others have not all items
    rows += [row([0.5, 2.0], [0.5, 2.0]), row([0.25, 1.0], [0.25, 3.0]), {"step": 9, "losses": [1.0, 1.0]}]
    low, high = noise_levels(items(2), rows)
    assert (low.name, low.before, low.middle, low.after) == ("0.2", 2.0, 0.5, 0.25)
    assert (low.change, low.late_change) == (-0.875, -0.5)
    assert (high.before, high.middle, high.after, high.late_change) == (3.0, 2.0, 2.0, 0.0)
    assert noise_levels(items(2), rows[:1] + rows[3:4])[0].middle is None
    damaged = replace(items(1)[0], noise_levels=["low", 0.8])
    assert noise_levels([damaged], [row([1.0, 2.0])] * 2) == []


def test_of_many_items_the_highest_and_the_lowest_are_shown() -> None:
    losses = [1.0 + place for place in range(500)]
    teaching = read_teaching(items(500), [{"step": 0, "losses": [1.0] * 500}, {"step": 1, "losses": losses}])
    assert teaching is not None
    assert [each.item.name for each in teaching.shown] == [
        str(place) for place in (*range(499, 399, -1), *range(99, -1, -1))
    ]
    assert teaching.num_measured == 500


def test_the_course_of_a_loss_has_few_points_the_first_and_the_last_among_them() -> None:
    rows = [{"step": step, "losses": [float(step)]} for step in range(1, 1001)]
    teaching = read_teaching(items(1), rows)
    assert teaching is not None
    (shown,) = teaching.shown
    assert len(shown.losses) <= 42
    assert (shown.losses[0], shown.losses[-1]) == (1.0, 1000.0)
