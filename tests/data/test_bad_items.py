import logging

import pytest

from diffsynth_lite.data.bad_items import without_bad_items
from diffsynth_lite.errors import UserError


class Quarantine(dict):
    def __call__(self, record, reason):
        self[record.name] = reason


def test_without_bad_items_all_records_pass(make_records):
    records, quarantine = make_records(3), Quarantine()
    assert without_bad_items(records, {}, on_bad_item="error", quarantine=quarantine) == records
    assert not quarantine


def test_error_lists_every_bad_item_and_the_way_out(make_records):
    bad = {"0.png": "0.png: damaged", "2.png": "2.png: animated"}
    with pytest.raises(UserError, match=r"2 of 3 .*0\.png: damaged; 2\.png: animated.*on_bad_item=skip"):
        without_bad_items(make_records(3), bad, on_bad_item="error", quarantine=Quarantine())


def test_skip_leaves_bad_items_out_and_hands_them_to_the_quarantine(make_records, caplog):
    quarantine = Quarantine()
    with caplog.at_level(logging.WARNING):
        left = without_bad_items(
            make_records(4), {"1.png": "why", "2.png": "why not"}, on_bad_item="skip", quarantine=quarantine
        )
    assert [record.name for record in left] == ["0.png", "3.png"]
    assert quarantine == {"1.png": "why", "2.png": "why not"}
    assert "2 of 4" in caplog.text


@pytest.mark.parametrize("num_bad", [2, 3])
def test_skip_refuses_a_data_set_that_is_mostly_bad(make_records, num_bad):
    quarantine = Quarantine()
    bad = {f"{index}.png": "damaged" for index in range(num_bad)}
    with pytest.raises(UserError, match="at least half must be good"):
        without_bad_items(make_records(3), bad, on_bad_item="skip", quarantine=quarantine)
    assert not quarantine
