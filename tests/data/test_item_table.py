"""The item table gives back what it was built from, and is small."""

import multiprocessing.reduction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffsynth_lite.data.buckets import Bucket
from diffsynth_lite.data.item_table import ItemRow, ItemTable

BUCKETS = (Bucket(width=32, height=16), Bucket(width=832, height=480, num_frames=81))
keys = st.binary(min_size=32, max_size=32).map(bytes.hex)
rows = st.builds(
    ItemRow,
    name=st.text(st.characters(codec="utf-8"), max_size=12),
    bucket=st.sampled_from(BUCKETS),
    source=st.integers(0, 65535),
    media_key=keys,
    caption_keys=st.lists(keys, min_size=1, max_size=3).map(tuple),
)


def row(**changes):
    values = {"bucket": BUCKETS[0], "media_key": "0" * 64, "caption_keys": ("1" * 64,)}
    return ItemRow(**({"name": "a.png", "source": 0} | values | changes))


@given(given_rows=st.lists(rows, max_size=6))
def test_rows_come_back_as_they_were_also_from_another_process(given_rows):
    table = ItemTable.build(iter(given_rows))
    sent = multiprocessing.reduction.ForkingPickler.loads(
        multiprocessing.reduction.ForkingPickler.dumps(table)
    )
    for one in (table, sent):
        assert [one.row(index) for index in range(len(one))] == given_rows
        assert one.buckets == tuple(sorted({row.bucket for row in given_rows}))
        grouped = [(group, item) for group in one.groups for item in group.members().tolist()]
        kinds = [(one.buckets[group.bucket], group.source) for group, _ in grouped]
        assert kinds == sorted((row.bucket, row.source) for row in given_rows)
        assert kinds == [(given_rows[item].bucket, given_rows[item].source) for _, item in grouped]
        assert all(group.members().tolist() == sorted(group.members().tolist()) for group in one.groups)
        of_few = {row.source for row in given_rows[:2]}
        assert list(one.places(of_few)) == [i for i, row in enumerate(given_rows) if row.source in of_few]
        assert sum(one.items_by_bucket.values()) == sum(one.items_by_source.values()) == len(given_rows)


@pytest.mark.parametrize("index", [-1, 1])
def test_an_index_out_of_range_is_refused(index):
    with pytest.raises(IndexError, match=f"item {index} of 1"):
        ItemTable.build([row()]).row(index)


def test_an_item_takes_some_hundred_bytes():
    table = ItemTable.build(row(name=f"folder/{index:012}.png") for index in range(1000))
    assert table.num_bytes <= 130 * 1000


def test_the_unconditional_entry_is_kept_apart_from_the_captions():
    given = row(caption_keys=("1" * 64, "2" * 64), unconditional_key="3" * 64)
    table = ItemTable.build([given, row(unconditional_key="4" * 64)])
    assert table.row(0) == given
    assert table.row(1).unconditional_key == "4" * 64
