import logging

import pytest

from diffsynth_lite.data.plan import BadItemsError, without_bad_items
from diffsynth_lite.errors import UserError


class Quarantine(dict):
    def __call__(self, record, reason):
        self[record.name] = reason


def test_without_bad_items_all_records_pass(make_records):
    records, quarantine = make_records(3), Quarantine()
    assert (
        without_bad_items(records, {}, on_bad_item="error", max_bad_ratio=0.5, quarantine=quarantine)
        == records
    )
    assert not quarantine


def test_error_lists_every_bad_item_and_the_way_out(make_records):
    bad = {"0.png": "damaged", "2.png": "animated"}
    with pytest.raises(UserError, match=r"2 of 3 .*0\.png: damaged; 2\.png: animated.*on_bad_item=skip"):
        without_bad_items(
            make_records(3), bad, on_bad_item="error", max_bad_ratio=1.0, quarantine=Quarantine()
        )


def test_skip_leaves_bad_items_out_and_hands_them_to_the_quarantine(make_records, caplog):
    quarantine = Quarantine()
    with caplog.at_level(logging.WARNING):
        left = without_bad_items(
            make_records(4),
            {"1.png": "why", "2.png": "why not"},
            on_bad_item="skip",
            max_bad_ratio=0.5,
            quarantine=quarantine,
        )
    assert [record.name for record in left] == ["0.png", "3.png"]
    assert quarantine == {"1.png": "why", "2.png": "why not"}
    assert "2 of 4" in caplog.text


def test_what_is_refused_is_handed_to_the_quarantine_to_the_last_item(make_records):
    quarantine = Quarantine()
    bad = {f"{index}.png": "damaged" for index in range(25)}
    for on_bad_item in ("error", "skip"):
        with pytest.raises(BadItemsError, match="and 5 more"):
            without_bad_items(
                make_records(26), bad, on_bad_item=on_bad_item, max_bad_ratio=0.1, quarantine=quarantine
            )
        assert quarantine == bad
        quarantine.clear()


@pytest.mark.parametrize(("num_bad", "max_bad_ratio"), [(1, 0.25), (2, 0.5), (3, 0.7), (3, 1.0)])
def test_skip_refuses_a_data_set_of_which_too_much_is_bad_or_nothing_is_good(
    make_records, num_bad, max_bad_ratio
):
    bad = {f"{index}.png": "damaged" for index in range(num_bad)}
    with pytest.raises(UserError, match=rf"Too many to skip: data.max_bad_ratio is {max_bad_ratio}"):
        without_bad_items(
            make_records(3), bad, on_bad_item="skip", max_bad_ratio=max_bad_ratio, quarantine=Quarantine()
        )


def test_as_many_bad_items_as_the_limit_says_are_skipped(make_records):
    left = without_bad_items(
        make_records(4), {"1.png": "x"}, on_bad_item="skip", max_bad_ratio=0.25, quarantine=Quarantine()
    )
    assert len(left) == 3
