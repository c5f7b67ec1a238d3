"""What is decoded, shown and remembered for the next time; which images count as alike."""

import io
from collections.abc import Iterator
from typing import get_args

import numpy as np
import pytest
from messy_data import Workplace, scene
from PIL import Image, ImageEnhance

from diffsynth_lite.data.buckets import BucketRule
from diffsynth_lite.data.cache import TensorCache
from diffsynth_lite.data.items import TrainingItem
from diffsynth_lite.data.media_index import FileMemory, MediaIndex
from diffsynth_lite.data.plan import PlanRules, plan_items
from diffsynth_lite.data.records import Record
from diffsynth_lite.doctor import images
from diffsynth_lite.doctor.findings import SourceFindings
from diffsynth_lite.doctor.images import (
    Decoded,
    decode,
    equal_files,
    evenly_spaced,
    near_duplicates,
    perceptual_hash,
)
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


def test_control_inputs_and_masked_images_are_shown_next_to_their_item(
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
    contents = SourceFindings(
        place="data", num_records=dict.fromkeys(kinds, 2), num_captions=0, num_dropped=0, passes=1.0
    ).contents
    assert len(set(contents.split(", "))) == len(kinds)
    assert all(name.startswith("2 ") for name in contents.split(", "))


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
    monkeypatch.setattr(images, "_MAX_IMAGES", 2)
    decoded = looked(workplace, memory, items, 6)
    assert list(decoded.hashes) == ["0.png", "3.png"]
    assert (decoded.num_seen, decoded.num_items) == (2, 6)
    monkeypatch.setattr(images, "_MAX_IMAGES", 9)
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


def as_jpeg(image: Image.Image) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=60)
    return Image.open(file).convert("RGB")


def test_copies_that_were_scaled_compressed_or_brightened_are_alike() -> None:
    original = scene(0, (120, 90))
    images = {
        "original": original,
        "other": scene(1),
        "smaller": original.resize((60, 45), Image.Resampling.LANCZOS),
        "jpeg": as_jpeg(original),
        "brighter": ImageEnhance.Brightness(original).enhance(1.02),
    }
    looks = {name: perceptual_hash(image) for name, image in images.items()}
    assert near_duplicates(looks) == [["original", "smaller", "jpeg", "brighter"]]


def test_of_two_hundred_scenes_no_two_are_alike() -> None:
    assert near_duplicates({str(seed): perceptual_hash(scene(seed)) for seed in range(200)}) == []


def test_drawings_that_differ_only_in_colour_are_not_alike() -> None:
    shapes = {colour: Image.new("RGB", (64, 64), "black") for colour in ("red", "blue", "maroon")}
    for colour, image in shapes.items():
        image.paste(Image.new("RGB", (32, 32), colour), (16, 16))
    looks = {colour: perceptual_hash(image) for colour, image in shapes.items()}
    assert looks["red"].bits == looks["maroon"].bits
    assert near_duplicates(looks) == []


def test_many_copies_of_one_image_are_one_group() -> None:
    look = perceptual_hash(scene(3))
    assert near_duplicates({str(number): look for number in range(1000)}) == [[str(n) for n in range(1000)]]


def test_equal_files_are_grouped_by_their_content() -> None:
    assert equal_files({"a": "1", "b": "2", "c": "1", "d": "3"}) == [["a", "c"]]
