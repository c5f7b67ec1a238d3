"""What the page says of a run at its top: a sentence for each kind of series, and none too early."""

import pytest

from diffsynth_lite.report.judgement import judge, judge_items

NAME = "The loss on fixed noise"
HELD_OUT = "The loss on held-out data"


def points(losses: list[float]) -> list[tuple[int, float]]:
    return [(200 * place, loss) for place, loss in enumerate(losses)]


@pytest.mark.parametrize(
    ("losses", "rule", "sentence"),
    [
        ([1.0, 0.6, 0.4, 0.2], None, None),
        ([1.0, 0.6, 0.4, 0.2, 0.15], "falls", "fell by 85 % and still falls."),
        ([0.9, 0.8, 0.7, 0.69, 0.5], "falls", "fell by 44 % and still falls."),
        (
            [1.0, 0.6, 0.4, 0.396, 0.393],
            "levels off",
            "fell by 61 %, but by less than 2 % since step 400. Little is left to learn.",
        ),
        (
            [1.0, 0.6, 0.5, 0.4, 0.404, 0.403],
            "stalled",
            "fell by 60 % and has not improved since step 600. Little is left to learn.",
        ),
        (
            [1.0, 0.6, 0.5, 0.4, 0.42, 0.44],
            "rebounds",
            "fell by 60 % until step 600, has not improved since, and is 10 % higher now.",
        ),
        ([1.0, 0.6, 0.5, 0.45, 0.4, 0.5], "rebounds", "fell by 60 % until step 800 and is 25 % higher now."),
        (
            [1.0, 0.99, 1.01, 0.985, 1.0],
            "unchanged",
            "has not fallen since step 0. The learning rate may be too low.",
        ),
        (
            [1.0, 0.99, 1.05, 1.0, 1.1],
            "rises",
            "is 10 % higher than at step 0. The learning rate may be too high.",
        ),
        (
            [1.0, 0.5, 0.7, 1.0, 1.1],
            "rebounds",
            "fell by 50 % until step 200, has not improved since, and is 120 % higher now.",
        ),
        # A quarter of twelve is three: what was lowest before them decides.
        (
            [1.0, *[0.5] * 7, 0.4, 0.6, 0.5, 0.405],
            "stalled",
            "fell by 60 % and has not improved since step 1600. Little is left to learn.",
        ),
        ([0.0] * 6, None, None),
    ],
)
def test_a_series_has_its_sentence(losses: list[float], rule: str | None, sentence: str | None) -> None:
    found = judge([], points(losses), has_finished=False)
    assert (found and found.rule, found and found.text) == (rule, sentence and f"{NAME} {sentence}")


def test_held_out_data_are_judged_first_once_there_are_five_evaluations() -> None:
    falls, overfitted = points([1.0, 0.6, 0.4, 0.2, 0.15]), points([1.0, 0.7, 0.6, 0.7, 0.75])
    found = judge(overfitted, falls, has_finished=True)
    assert (found.kind, found.step) == ("warn", 400)
    assert found.text == (
        f"{HELD_OUT} fell by 40 % until step 400, has not improved since, and is 25 % higher now. "
        "The LoRA overfits from there on."
    )
    found = judge(overfitted[:4], falls, has_finished=True)
    assert found.text == f"{NAME} fell by 85 % and was still falling at the end. More steps may help."


@pytest.mark.parametrize(
    ("worse", "sentence"),
    [
        (0, None),
        (1, "1 of 8 images is worse than at the start."),
        (3, "3 of 8 images are worse than at the start."),
    ],
)
def test_items_are_counted_whose_loss_rose(worse: int, sentence: str | None) -> None:
    # The last two are not worse: one by too little, one after too few evaluations.
    courses = [[1.0, 0.5, 0.5, 0.5, last] for last in (*[1.1] * worse, *[0.4] * (7 - worse), 1.01)]
    found = judge_items([*courses, [1.0, 2.0]], noun="images")
    assert (found and found.text) == sentence
