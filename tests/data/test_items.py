"""Items and prompts: their keys, their identity, and the table that holds them."""

import dataclasses
import multiprocessing.reduction
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import ExifTags, Image

from diffsynth_lite.data.buckets import Bucket
from diffsynth_lite.data.cache import TensorCache
from diffsynth_lite.data.item_table import ItemRow, ItemTable
from diffsynth_lite.data.items import DataIdentity, PromptItem, TrainingItem, latents_mask
from diffsynth_lite.data.records import Record
from diffsynth_lite.media import Crop, Media


def key(prompt, encoder="encoder"):
    return prompt.key(TensorCache(None), encoder)


def test_each_input_of_a_prompt_key_changes_it(tmp_path):
    prompt = PromptItem(text="a", images=(tmp_path / "a.png",), content=("c",))
    changes = (
        {"text": "b"},
        {"is_negative": True},
        {"content": ("d",)},
        {"background": "black"},
        {"images": (), "content": ()},
        {"images": (), "content": (), "is_negative": True},
    )
    keys = {key(prompt), key(prompt, "other")}
    keys |= {key(dataclasses.replace(prompt, **change)) for change in changes}
    assert len(keys) == 8
    assert key(dataclasses.replace(prompt, images=(tmp_path / "moved.png",))) == key(prompt)


def test_a_prompt_is_loaded_with_its_image(write_image):
    path = write_image("a.png", size=(32, 16))
    prompt = PromptItem(text="a", images=(path,), content=("c",)).load()
    assert (prompt.text, [image.size for image in prompt.images]) == ("a", [(32, 16)])
    assert not prompt.is_negative


def test_a_negative_prompt_is_loaded_as_one():
    assert PromptItem(text="blurred", is_negative=True).load().is_negative


def test_an_image_is_loaded_with_its_size_upright_and_its_crop(tmp_path):
    path, sideways = tmp_path / "a.png", Image.Exif()
    sideways[ExifTags.Base.Orientation] = 6
    Image.new("RGB", (40, 100)).save(path, exif=sideways)
    item = TrainingItem(
        name="a",
        record=Record(name="a", source=0, target=path, captions=("a",)),
        content=("c",),
        bucket=Bucket(width=32, height=32),
        crop_x=0.25,
        crop_y=0.5,
        clip_start_s=None,
        fps=None,
        background="white",
    )
    media = item.load()
    assert media.frames[0].size == (32, 32)
    assert media.crop == Crop(original_width=100, original_height=40, left=12)
    keys = {each.key(TensorCache(None), "e") for each in (item, dataclasses.replace(item, crop_x=0.75))}
    assert len(keys) == 2


@pytest.mark.parametrize(("shape", "expected"), [((16, 1, 2), (1, 1, 2)), ((16, 5, 1, 2), (1, 1, 1, 2))])
def test_the_mask_of_latents_is_the_covered_part_of_their_area(shape, expected):
    mask = Image.new("L", (8, 4), 0)
    mask.paste(255, (0, 0, 3, 4))
    averaged = latents_mask(mask, shape)
    assert tuple(averaged.shape) == expected
    assert averaged.flatten().tolist() == [0.75, 0.0]


def test_where_the_encoder_has_a_mask_too_only_what_both_count_is_counted():
    frames = torch.tensor([0.0, 1.0, 1.0]).view(1, 3, 1, 1).expand(1, 3, 1, 2)
    mask = Image.new("L", (8, 4), 0)
    mask.paste(255, (0, 0, 4, 4))
    image = Image.new("RGB", (8, 4))
    media = Media(frames=(image,) * 3, mask=mask)
    item = TrainingItem(**dict.fromkeys(field.name for field in dataclasses.fields(TrainingItem)))
    latents = torch.zeros(16, 3, 1, 2)
    alone, both = (
        item.complete({"latents": latents, **masks}, media)["loss_mask"]
        for masks in ({}, {"loss_mask": frames})
    )
    assert alone.tolist() == [[[[1.0, 0.0]]]]
    assert both.tolist() == [[[[0.0, 0.0]], [[1.0, 0.0]], [[1.0, 0.0]]]]


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


def test_the_unconditional_entry_is_separate_from_the_captions():
    given = row(caption_keys=("1" * 64, "2" * 64), unconditional_key="3" * 64)
    table = ItemTable.build([given, row(unconditional_key="4" * 64)])
    assert table.row(0) == given
    assert table.row(1).unconditional_key == "4" * 64
