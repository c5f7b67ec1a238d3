"""What is decoded, what is shown of it, and what is remembered for the next time."""

from collections.abc import Iterator
from typing import get_args

import numpy as np
import pytest
from messy_data import Workplace, scene
from PIL import Image

from diffsynth_lite.data import (
    BucketRule,
    FileMemory,
    MediaIndex,
    PlanRules,
    Record,
    TensorCache,
    TrainingItem,
    plan_items,
)
from diffsynth_lite.doctor import images
from diffsynth_lite.doctor.findings import SourceFindings
from diffsynth_lite.doctor.images import Decoded, decode, evenly_spaced, perceptual_hash
from diffsynth_lite.media import RecordKind

RULES = PlanRules(buckets=BucketRule(divisor=16, step=16, resolutions=(64,)))


@pytest.fixture
def memory(workplace: Workplace) -> Iterator[FileMemory]:
    with FileMemory(workplace.root / "index.sqlite") as memory:
        yield memory


def planned(workplace: Workplace, memory: FileMemory, count: int, **companions: object) -> list[TrainingItem]:
    records = [
        Record(
            name=f"{number}.png",
            source=0,
            target=workplace.add(f"{number}.png", scene(number)),
            captions=("one", "two"),
            **companions,
        )
        for number in range(count)
    ]
    return list(plan_items(records, index=MediaIndex(memory), rules=RULES).items)


def looked(workplace: Workplace, memory: FileMemory, items: list[TrainingItem], sheet_size: int) -> Decoded:
    return decode(items, cache=TensorCache(workplace.root), memory=memory, sheet_size=sheet_size)


def test_an_item_is_shown_exactly_as_it_is_encoded(workplace: Workplace, memory: FileMemory) -> None:
    mask = workplace.add("masks/mask.png", Image.new("L", (96, 64), 255))
    [item] = planned(workplace, memory, 1, mask=mask)
    [entry] = looked(workplace, memory, [item], 1).entries
    media = item.load()
    assert entry.captions == ("one", "two")
    assert entry.bucket == item.bucket.name == "80x48"
    assert list(entry.images) == ["target", "mask"]
    for shown, used in zip(entry.images.values(), (media.frames[0], media.mask), strict=True):
        assert np.array_equal(np.asarray(shown), np.asarray(used))


def test_what_guides_an_item_and_what_is_painted_anew_are_shown_beside_it(
    workplace: Workplace, memory: FileMemory
) -> None:
    guide = workplace.add("guides/0.png", scene(1))
    [item] = planned(workplace, memory, 1, control=guide, random_masks=1)
    [entry] = looked(workplace, memory, [item], 1).entries
    media = item.load()
    assert list(entry.images) == ["target", "control", "inpaint mask"]
    used = (media.frames[0], media.control[0], media.inpaint_mask[0])
    for shown, image in zip(entry.images.values(), used, strict=True):
        assert np.array_equal(np.asarray(shown), np.asarray(image))


def test_items_of_each_kind_are_counted_by_a_name_of_their_own() -> None:
    kinds = get_args(RecordKind)
    told = SourceFindings(
        place="data", num_records=dict.fromkeys(kinds, 2), num_captions=0, num_dropped=0, passes=1.0
    ).contents
    assert len(set(told.split(", "))) == len(kinds)


def test_all_are_looked_at_and_the_sheet_is_spread_over_them(
    workplace: Workplace, memory: FileMemory
) -> None:
    decoded = looked(workplace, memory, planned(workplace, memory, 6), 3)
    assert [entry.name for entry in decoded.entries] == ["0.png", "2.png", "4.png"]
    assert decoded.hashes.keys() == {f"{number}.png" for number in range(6)}
    assert (decoded.num_seen, decoded.num_items) == (6, 6)
    assert looked(workplace, memory, [], 3).entries == []


def test_a_remembered_look_is_the_look(workplace: Workplace, memory: FileMemory) -> None:
    items = planned(workplace, memory, 2)
    looked(workplace, memory, items, 0)
    again = looked(workplace, memory, items, 0)
    for item in items:
        look = perceptual_hash(item.load().frames[0])
        assert again.hashes[item.record.name].bits == look.bits
        assert np.array_equal(again.hashes[item.record.name].thumbnail, look.thumbnail)


def test_of_too_many_only_some_are_decoded_evenly_spread(
    workplace: Workplace, memory: FileMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = planned(workplace, memory, 6)
    monkeypatch.setattr(images, "_MAX_PICTURES", 2)
    decoded = looked(workplace, memory, items, 6)
    assert list(decoded.hashes) == ["0.png", "3.png"]
    assert (decoded.num_seen, decoded.num_items) == (2, 6)
    monkeypatch.setattr(images, "_MAX_PICTURES", 9)
    monkeypatch.setattr(images, "_MAX_FRAMES", 3)
    assert list(looked(workplace, memory, items, 6).hashes) == ["0.png", "2.png", "4.png"]


def test_what_cannot_be_decoded_is_named_each_time(workplace: Workplace, memory: FileMemory) -> None:
    items = planned(workplace, memory, 2)
    content = (workplace.root / "1.png").read_bytes()
    (workplace.root / "1.png").write_bytes(content[: len(content) // 2])
    for _ in range(2):
        decoded = looked(workplace, memory, items, 2)
        assert decoded.bad.keys() == {"1.png"}
        assert [entry.name for entry in decoded.entries] == ["0.png"]


def test_evenly_keeps_the_order_and_never_repeats() -> None:
    assert evenly_spaced("abcdefghij", 4) == ["a", "c", "f", "h"]
    assert evenly_spaced("abc", 5) == "abc"
    assert evenly_spaced("abc", 0) == []
