"""Which step is recommended: the figures behind it against closed formulas, and each reason for none."""

import math

import numpy as np
import pytest
from scipy.stats import t, ttest_ind, ttest_rel

from diffsynth_lite.scores.recommendation import Recommendation, recommend, sum_of_means
from diffsynth_lite.scores.record import ScoredColumn, ScoreRecord

NEW, PLAIN, TAUGHT = 16, 12, 10


def column(
    step: int, rng: np.random.Generator, *, new: float, kept: float, memory: float = 0.0
) -> ScoredColumn:
    """Scores around the given means, of which the prompts differ by 0.02."""
    around = {
        name: tuple(map(float, mean + 0.02 * rng.standard_normal(count)))
        for name, mean, count in (
            *(("likeness", new, NEW), ("contrast", new, NEW), ("prompt", 0.2, NEW), ("kept", kept, PLAIN)),
            *(("plain_prompt", 0.2, PLAIN), ("memory", new + memory, TAUGHT)),
        )
    }
    return ScoredColumn(column=ScoredColumn.name(step), step=step, **around)


def record(*columns: ScoredColumn, are_trained: bool = True) -> ScoreRecord:
    return ScoreRecord(
        measure="of this test",
        models=("images", "prompts"),
        are_trained=are_trained,
        held_out_contrast=1.0,
        new_prompts=tuple(map(str, range(len(columns[0].contrast)))),
        plain_prompts=tuple(map(str, range(len(columns[0].kept)))),
        taught_prompts=tuple(map(str, range(len(columns[0].memory)))),
        num_seeds=1,
        columns=columns,
    )


def run(*steps: tuple[float, float], memory: float = 0.0, seed: int = 0) -> ScoreRecord:
    """A base, and steps 10, 20, ... of such N and K."""
    rng = np.random.default_rng(seed)
    rows = [(0.0, 1.0), *steps]
    return record(
        *(
            column(10 * place, rng, new=new, kept=kept, memory=memory if place else 0.0)
            for place, (new, kept) in enumerate(rows)
        )
    )


def steps(found: Recommendation) -> tuple[int | None, list[int | None]]:
    return found.best.step if found.best else None, [one.step for one in found.same]


def test_the_highest_z_is_best_with_the_steps_that_are_not_distinguished() -> None:
    found = recommend(run((0.1, 0.99), (0.6, 0.9), (0.605, 0.9), (0.7, 0.3)))
    assert found.reason is None
    assert found.best is not None
    assert {found.best.step, *(one.step for one in found.same)} == {20, 30}
    assert [one.step for one in found.columns] == [10, 20, 30, 40]


def test_only_saved_steps_are_recommended_and_unsaved_ones_are_judged() -> None:
    of = run((0.1, 0.99), (0.6, 0.9), (0.3, 0.9))
    assert steps(recommend(of, [10, 30])) == (30, [])
    assert len(recommend(of, [10]).columns) == 3
    nothing = recommend(of, [])
    assert (nothing.best, nothing.reason) == (None, "no saved step")


def test_one_interval_is_that_of_student() -> None:
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((2, 11))
    low, high = ttest_rel(a, b).confidence_interval()
    found = sum_of_means([a - b])
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-12)
    wide = sum_of_means([a - b], comparisons=7)
    assert wide.high is not None
    error = (a - b).std(ddof=1) / math.sqrt(11)
    assert wide.high - wide.value == pytest.approx(t.ppf(1 - 0.025 / 7, 10) * error, rel=1e-12)


def test_two_groups_of_prompts_are_added_by_welch_and_satterthwaite() -> None:
    rng = np.random.default_rng(4)
    a, b = rng.standard_normal(9), 3 + 5 * rng.standard_normal(14)
    low, high = ttest_ind(a, b, equal_var=False).confidence_interval()
    found = sum_of_means([a, -b])
    assert (found.value, found.low, found.high) == pytest.approx((a.mean() - b.mean(), low, high), rel=1e-12)


def test_one_prompt_has_a_value_and_no_interval_and_equal_ones_have_no_width() -> None:
    one = sum_of_means([np.array([0.5]), np.array([0.1, 0.3])])
    assert (one.value, one.low, one.high) == (pytest.approx(0.7), None, None)
    assert not one.is_above_zero
    equal = sum_of_means([np.full(8, 0.25)])
    assert (equal.low, equal.value, equal.high) == (0.25, 0.25, 0.25)


@pytest.mark.parametrize("num_prompts", [8, 16])
def test_intervals_cover_the_mean_of_a_skewed_population(num_prompts: int) -> None:
    rng = np.random.default_rng(5)
    population = rng.gamma(4.0, size=1000)
    hits = 0
    for _ in range(1000):
        found = sum_of_means([rng.choice(population, num_prompts)])
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= population.mean() <= found.high
    assert 0.92 <= hits / 1000 <= 0.97  # 95 % is promised; the skew costs a little


def test_of_equal_steps_seldom_one_is_shown_to_be_worse() -> None:
    trials = [recommend(run(*[(0.5, 0.9)] * 7, seed=seed)) for seed in range(100)]
    assert np.mean([len(trial.same) < 6 for trial in trials]) <= 0.1


def test_a_run_that_taught_nothing_is_not_shown_to_be_better_than_the_base() -> None:
    trials = [recommend(run(*[(0.0, 0.99)] * 4, seed=seed)) for seed in range(100)]
    reasons = [trial.reason for trial in trials]
    assert reasons.count("not shown to be better than the base") >= 95
    assert all("not shown to be better than the base" in one.marks for one in trials[0].columns)
    exact = run((0.0, 1.0))
    same = exact.base.model_copy(update={"column": "10", "step": 10})
    assert recommend(exact.with_column(same)).reason == "not shown to be better than the base"
