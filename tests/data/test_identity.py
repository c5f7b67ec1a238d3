"""The identity of data changes with whatever changes a number, and with nothing else."""

import dataclasses
from pathlib import Path

import pytest

from diffsynth_lite.data.buckets import Bucket
from diffsynth_lite.data.items import DataIdentity, TrainingItem
from diffsynth_lite.data.records import Record

RECORD = Record(
    name="a.mp4", source=0, target=Path("a.mp4"), captions=("a circle", "round"), mask=Path("a.png")
)
ITEM = TrainingItem(
    name="a.mp4",
    record=RECORD,
    content=("c1", "c2"),
    bucket=Bucket(width=32, height=16, num_frames=5),
    crop_x=0.5,
    crop_y=0.25,
    clip_start_s=0.5,
    fps=16.0,
    background="white",
)


def identity(*items: TrainingItem, media_encoder: str = "vae/1 x", prompt_encoder: str = "text/1 x"):
    return DataIdentity.of(items, media_encoder=media_encoder, prompt_encoder=prompt_encoder)


def of_record(**changes) -> TrainingItem:
    return dataclasses.replace(ITEM, record=dataclasses.replace(RECORD, **changes))


def of_bucket(**changes) -> TrainingItem:
    return dataclasses.replace(ITEM, bucket=dataclasses.replace(ITEM.bucket, **changes))


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(ITEM, content=("c3", "c2")),
        dataclasses.replace(ITEM, content=("c1", "c3")),
        dataclasses.replace(ITEM, content=("c2", "c1")),
        dataclasses.replace(ITEM, crop_x=0.4),
        dataclasses.replace(ITEM, crop_y=0.5),
        dataclasses.replace(ITEM, clip_start_s=0.25),
        dataclasses.replace(ITEM, fps=8.0),
        of_bucket(width=16),
        of_bucket(height=32),
        of_bucket(num_frames=9),
        of_bucket(inputs=((32, 16),)),
        of_record(source=1),
        of_record(captions=("a circle",)),
        of_record(captions=("round", "a circle")),
        of_record(captions=("a circle", "rounds")),
        of_record(mask=None, last_frame=Path("a.png")),
        of_record(mask=None, first_frame=Path("a.png")),
        of_record(mask=None, inputs=(Path("a.png"),)),
    ],
)
def test_each_part_of_an_item_that_decides_a_number_is_in_it(other: TrainingItem) -> None:
    assert identity(ITEM, other).items not in (identity(ITEM, ITEM).items, identity(other, ITEM).items)


def test_it_counts_the_buckets() -> None:
    assert identity(ITEM, ITEM, of_bucket(width=16)).num_buckets == 2


def test_names_and_places_are_not_in_it() -> None:
    moved = dataclasses.replace(
        of_record(name="b.mp4", target=Path("elsewhere/b.mp4"), mask=Path("b.jpg")), name="b.mp4"
    )
    assert identity(moved) == identity(ITEM)


def test_it_is_pinned_for_a_run_that_goes_on_must_find_the_same_data() -> None:
    assert identity(ITEM).items == "1 items, f5650e5310ad417c31919fa32eeeacc3"
    content = ("c1", "c2", "c3", "c4")
    edit = of_record(target=Path("a.png"), inputs=(Path("i.png"), Path("j.png")))
    edit = dataclasses.replace(edit, content=content, clip_start_s=None, fps=None)
    assert identity(edit).items == "1 items, 724f1cebf8cfe4e032ebf221fdcdc691"
    clip = dataclasses.replace(of_record(first_frame=Path("f"), last_frame=Path("l")), content=content)
    assert identity(clip).items == "1 items, 11d564435fbecdb02cdf5fe675313912"


def test_the_decoder_and_each_encoder_have_an_entry_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity(ITEM)
    for change in ({"media_encoder": "vae/1 y"}, {"prompt_encoder": "text/1 y"}):
        after = identity(ITEM, **change)
        ((name, value),) = change.items()
        assert getattr(after, name) != getattr(before, name)
        assert getattr(after, name).startswith(value.split()[0] + " ")
        assert dataclasses.replace(after, **{name: getattr(before, name)}) == before
    image = dataclasses.replace(of_record(target=Path("a.png")), fps=None, clip_start_s=None)
    assert "libavcodec" in before.decoder
    assert "libavcodec" not in identity(image).decoder
    # Only AVI files are read in another way since their times are those of the index.
    assert identity(of_record(target=Path("a.AVI"))).decoder == f"{before.decoder} avi 2"
    monkeypatch.setattr("diffsynth_lite.data.items.VIDEO_DECODER_ID", "v2 libavcodec")
    after = identity(ITEM)
    assert after.decoder.endswith("v2 libavcodec")
    assert dataclasses.replace(after, decoder=before.decoder) == before
