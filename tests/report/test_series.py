"""Lines of charts: what was logged, smoothed without a slow start, and thinned without losing its peaks."""

import math

import pytest

from diffsynth_lite.report.charts import charts_of, read_series
from diffsynth_lite.report.series import Series, as_number


def test_learning_rates_of_groups_stand_in_place_of_the_one_that_they_have_or_hide() -> None:
    plain = {"step": 1, "learning_rate": 1e-4}
    assert list(read_series([plain])) == ["learning_rate"]
    groups = {"learning_rate/others": 1e-4, "learning_rate/to_q": 1e-3}
    found = read_series([plain | groups])
    assert list(found) == list(groups)
    shown = next(chart for chart in charts_of(found) if chart.name == "learning_rate")
    assert shown.summary(found).startswith("others: 0.0001 at step 1, ")


def series(*values: float | None) -> Series:
    return Series.of([{"step": step, "loss": value} for step, value in enumerate(values)], "loss")


def test_a_series_has_one_point_a_step_in_order_and_none_where_there_is_no_number() -> None:
    rows = [
        {"step": 5, "loss": 1.0},
        {"step": 2, "loss": None},
        {"step": 3, "other": 1.0},
        {"step": "4", "loss": 1.0},
        {"step": 5, "loss": 2.0},
        {"loss": 3.0},
    ]
    found = Series.of(rows, "loss")
    assert (found.steps, found.values, found.points) == ([2, 5], [None, 2.0], [(5, 2.0)])


def test_a_constant_is_smoothed_to_itself_from_the_first_point_on() -> None:
    assert series(*[3.0] * 50).smoothed().values == pytest.approx([3.0] * 50)


def test_a_smoothed_line_forgets_over_a_twentieth_of_the_rows() -> None:
    smoothed = series(*[0.0] * 1000, *[1.0] * 1000).smoothed().values
    # The mean forgets over 100 rows: after as many, what was before weighs 0.99 ** 100.
    assert smoothed[1099] == pytest.approx(1 - 0.99**100, abs=1e-4)


def test_values_that_are_no_numbers_do_not_disturb_the_smoothed_line() -> None:
    assert series(1.0, None, 1.0).smoothed().points == [(0, 1.0), (2, 1.0)]


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
    thinned = series(*[1.0] * 2000, *[None] * 2000, *[1.0] * 2000).thinned()
    assert None in thinned.values


@pytest.mark.parametrize("value", [True, "1", None, math.nan, math.inf, -math.inf, 10**400, [1]])
def test_what_is_no_number_counts_as_none(value: object) -> None:
    assert as_number(value) is None
