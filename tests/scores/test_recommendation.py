"""Which step is recommended: the figures behind it against closed formulas, and each reason for none."""

import math

import numpy as np
import pytest
from run_folders import score_record
from scipy.stats import t, ttest_ind, ttest_rel

from diffsynth_lite.scores.recommendation import Recommendation, recommend, sum_of_means
from diffsynth_lite.scores.record import ScoreRecord

NEW, PLAIN, TAUGHT = 16, 12, 10


def run(*steps: tuple[float, float], seed: int = 0) -> ScoreRecord:
    """A base, and steps 10, 20, ... of such N and K, of which the prompts differ by 0.02."""
    rng, rows = np.random.default_rng(seed), [(0.0, 1.0), *steps]
    return score_record(
        {10 * place: each for place, each in enumerate(rows)},
        num_prompts=(NEW, PLAIN, TAUGHT),
        noise=lambda _, count: 0.02 * rng.standard_normal(count),
    )


def test_the_highest_z_is_best_with_the_steps_that_are_not_distinguished() -> None:
    found = recommend(run((0.1, 0.99), (0.6, 0.9), (0.605, 0.9), (0.7, 0.3)))
    assert found.reason is None
    assert found.best is not None
    assert {found.best.step, *(one.step for one in found.same)} == {20, 30}
    assert [one.step for one in found.columns] == [10, 20, 30, 40]


def test_only_saved_steps_are_recommended_and_unsaved_ones_are_judged() -> None:
    of = run((0.1, 0.99), (0.6, 0.9), (0.3, 0.9))
    saved, nothing = recommend(of, [10, 30]), recommend(of, [])
    assert (saved.best, saved.same) == (saved.columns[2], ())
    assert (nothing.best, nothing.reason, len(nothing.columns)) == (None, "no saved step", 3)
    other = run((0.8, 0.95), seed=9).columns[1]
    film = recommend(of.with_column(other.model_copy(update={"column": "film", "step": None})), [])
    assert film.best == film.columns[3]  # a LoRA of another run can always be taken


def test_intervals_are_those_of_student_and_of_welch_and_satterthwaite() -> None:
    rng = np.random.default_rng(3)
    a, b, more = rng.standard_normal(11), rng.standard_normal(11), 3 + 5 * rng.standard_normal(14)
    low, high = ttest_rel(a, b).confidence_interval()
    one = sum_of_means([a - b])
    assert (one.low, one.high) == pytest.approx((low, high), rel=1e-12)
    low, high = ttest_ind(a, more, equal_var=False).confidence_interval()
    two = sum_of_means([a, -more])
    assert (two.value, two.low, two.high) == pytest.approx((a.mean() - more.mean(), low, high), rel=1e-12)
    half = t.ppf(1 - 0.025 / 7, 10) * (a - b).std(ddof=1) / math.sqrt(11)
    seven = sum_of_means([a - b], comparisons=7)
    assert (seven.low, seven.high) == pytest.approx((seven.value - half, seven.value + half), rel=1e-12)


def test_one_prompt_has_a_value_and_no_interval_and_equal_ones_have_no_width() -> None:
    one = sum_of_means([np.array([0.5]), np.array([0.1, 0.3])])
    assert (one.value, one.low, one.high) == (pytest.approx(0.7), None, None)
    equal = sum_of_means([np.full(8, 0.25)])
    assert (equal.low, equal.value, equal.high) == (0.25, 0.25, 0.25)


@pytest.mark.parametrize("num_prompts", [8, 16])
def test_intervals_cover_the_mean_of_a_skewed_population(num_prompts: int) -> None:
    rng = np.random.default_rng(5)
    population = rng.gamma(4.0, size=1000) - 4.0
    samples = [sum_of_means([rng.choice(population, num_prompts) - population.mean()]) for _ in range(1000)]
    hits = [not (found.is_above_zero or found.is_below_zero) for found in samples]
    assert 0.92 <= np.mean(hits) <= 0.97  # 95 % is promised; the skew costs a little


def test_of_equal_steps_seldom_one_is_shown_to_be_worse() -> None:
    trials = [recommend(run(*[(0.5, 0.9)] * 7, seed=seed)) for seed in range(60)]
    assert np.mean([len(trial.same) < 6 for trial in trials]) <= 0.1


def test_a_run_that_taught_nothing_is_not_shown_to_be_better_than_the_base() -> None:
    trials = [recommend(run(*[(0.0, 0.99)] * 4, seed=seed)) for seed in range(60)]
    reasons = [trial.reason for trial in trials]
    assert reasons.count("not shown to be better than the base") >= 56
    assert all("not shown to be better than the base" in one.marks for one in trials[0].columns)
    exact = run()
    same = exact.base.model_copy(update={"column": "10", "step": 10})
    assert recommend(exact.with_column(same)).reason == "not shown to be better than the base"


def test_a_step_has_drifted_where_it_keeps_less_than_another_seed_does() -> None:
    of = run((0.6, 0.8), (0.6, 0.6)).model_copy(update={"other_seed": (0.7,) * PLAIN})
    found = recommend(of, [20])
    assert [one.marks for one in found.columns] == [(), ("drifted",)]
    assert found.best is not None  # it is a mark, and decides nothing
    assert recommend(of.model_copy(update={"other_seed": ()})).columns[1].marks == ()


def test_a_step_repeats_training_images_where_it_meets_them_better_than_held_out_ones() -> None:
    of = run((0.6, 0.9), (0.6, 0.9))
    base, free, copied = of.columns
    easy = base.model_copy(update={"memory": tuple(value + 0.3 for value in base.memory)})
    copied = copied.model_copy(update={"memory": tuple(value + 0.1 for value in copied.memory)})
    found = recommend(of.model_copy(update={"columns": (base, free, copied)}))
    assert [one.marks for one in found.columns] == [(), ("from memory",)]
    # That much likeness the base has, too: its training captions are the easier ones.
    found = recommend(of.model_copy(update={"columns": (easy, free, copied)}))
    assert [one.marks for one in found.columns] == [(), ()]


@pytest.mark.parametrize("kind", ["new_prompts", "plain_prompts"])
def test_fewer_than_8_prompts_give_values_and_no_recommendation(kind: str) -> None:
    of, names = run((0.6, 0.9)), {"new_prompts": ("likeness", "contrast", "prompt")}
    names["plain_prompts"] = ("kept",)

    def first(count: int) -> Recommendation:
        cut = [one.model_copy(update={n: getattr(one, n)[:count] for n in names[kind]}) for one in of.columns]
        return recommend(of.model_copy(update={kind: getattr(of, kind)[:count], "columns": tuple(cut)}))

    few, enough = first(7), first(8)
    assert (few.best, few.same, few.reason) == (None, (), "too few prompts")
    assert few.columns[0].new.low is not None
    assert enough.best is not None
    assert first(1).columns[0].total.low is None


def test_n_is_0_at_the_base_and_1_at_the_held_out_images_and_z_is_the_mean() -> None:
    of = run((0.6, 0.9)).model_copy(update={"held_out_contrast": 0.5})
    base, step = of.columns
    (found,) = recommend(of).columns
    new = (np.mean(step.contrast) - np.mean(base.contrast)) / (0.5 - np.mean(base.contrast))
    assert found.new.value == pytest.approx(new, rel=1e-12)
    assert found.kept.value == pytest.approx(np.mean(step.kept), rel=1e-12)
    assert found.total.value == pytest.approx((new + np.mean(step.kept)) / 2, rel=1e-12)
    assert found.prompt.value == pytest.approx(np.mean(step.prompt) - np.mean(base.prompt), abs=1e-12)
    # A base that makes such images itself leaves no room: the scale ends, and is not turned around.
    (found,) = recommend(of.model_copy(update={"held_out_contrast": -1.0})).columns
    assert found.new.value == pytest.approx(
        (np.mean(step.contrast) - np.mean(base.contrast)) / 0.01, rel=1e-9
    )
