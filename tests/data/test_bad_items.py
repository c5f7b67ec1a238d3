"""Items that cannot be used stop the run, or are left out as far as that is allowed."""

import pytest

from diffsynth_lite.data.plan import BadItemsError, refuse_bad_items, summary_of_bad
from diffsynth_lite.errors import UserError


def names_of(count: int) -> list[str]:
    return [f"{index}.png" for index in range(count)]


def test_without_bad_items_nothing_is_refused():
    refuse_bad_items(names_of(3), {}, on_bad_item="error", max_bad_ratio=0.5)


def test_error_lists_every_bad_item_and_the_way_out():
    bad = {"0.png": "damaged", "2.png": "animated"}
    with pytest.raises(UserError, match=r"2 of 3 .*0\.png: damaged; 2\.png: animated.*on_bad_item=skip"):
        refuse_bad_items(names_of(3), bad, on_bad_item="error", max_bad_ratio=1.0)


def test_as_many_bad_items_as_the_limit_says_are_left_out():
    bad = {"1.png": "why", "2.png": "why not"}
    refuse_bad_items(names_of(4), bad, on_bad_item="skip", max_bad_ratio=0.5)
    told = "2 of 4 items cannot be used: 1.png: why; 2.png: why not"
    assert summary_of_bad(names_of(4), bad) == told


def test_those_past_the_twentieth_are_counted():
    bad = {f"{index}.png": "damaged" for index in range(25)}
    for on_bad_item in ("error", "skip"):
        with pytest.raises(BadItemsError, match="and 5 more"):
            refuse_bad_items(names_of(26), bad, on_bad_item=on_bad_item, max_bad_ratio=0.1)


@pytest.mark.parametrize(("num_bad", "max_bad_ratio"), [(1, 0.25), (2, 0.5), (3, 0.7), (3, 1.0)])
def test_skip_refuses_a_data_set_of_which_too_much_is_bad_or_nothing_is_good(num_bad, max_bad_ratio):
    bad = {f"{index}.png": "damaged" for index in range(num_bad)}
    with pytest.raises(UserError, match=rf"Too many to skip: data.max_bad_ratio is {max_bad_ratio}"):
        refuse_bad_items(names_of(3), bad, on_bad_item="skip", max_bad_ratio=max_bad_ratio)
