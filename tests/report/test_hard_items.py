"""Which items are hard: by their losses beside what is to be expected at their noise levels."""

import pytest

from diffsynth_lite.report.hard_items import read_hard_items


def row(step: int, samples: dict[str, list[list[object]]]) -> dict[str, object]:
    return {"step": step, "samples": samples}


def rows(num_items: int = 20, num_steps: int = 40) -> list[dict[str, object]]:
    """Each item once a step, at levels of its own; item 7 is twice as hard. Losses fall by half in the run.

    Item 3 has only levels at which all losses are high.
    """
    found = []
    for step in range(num_steps):
        samples = {}
        for item in range(num_items):
            level = 0.9 + item / 1000 if item == 3 else (item * 0.31 + step * 0.17) % 1
            loss = (0.1 + level**2) * (1 - 0.5 * step / num_steps) * (2 if item == 7 else 1)
            samples[f"{item}.png"] = [[level, loss]]
        found.append(row(step, samples))
    return found


def test_an_item_is_hard_that_has_higher_losses_than_others_at_its_levels() -> None:
    found = read_hard_items(rows())
    assert found is not None
    assert (found.num_items, found.num_samples) == (20, 800)
    hardest, *others = found.shown
    assert (hardest.name, hardest.num_samples) == ("7.png", 40)
    assert hardest.ratio == pytest.approx(2, rel=0.1)
    assert all(0.9 < item.ratio < 1.1 for item in others)
    assert hardest.ratio - 2 * hardest.error > max(item.ratio for item in others)


def test_an_item_with_few_samples_must_be_harder_to_come_first() -> None:
    given = rows()
    given += [row(40, {"few.png": [[0.5, 0.6]] * 4, "one.png": [[0.5, 9.0]]})]
    found = read_hard_items(given)
    assert found is not None
    few = next(item for item in found.shown if item.name == "few.png")
    assert found.shown[0].name == "7.png"
    assert few.ratio > found.shown[0].ratio
    assert "one.png" not in {item.name for item in found.shown}


@pytest.mark.parametrize(
    "given",
    [
        [],
        [row(1, {"a.png": [[0.5, 0.1]] * 100})],
        [row(1, {"a.png": [[0.5, None], [None, 1.0], [0.5], "x"], "b.png": "x"}), {"step": 2, "samples": 3}],
        rows(num_items=4, num_steps=3),
    ],
)
def test_what_is_no_sample_counts_nothing_and_few_tell_nothing(given: list[dict[str, object]]) -> None:
    assert read_hard_items(given) is None
