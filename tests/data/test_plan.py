"""The plan of a data set: sizes, crops and clips of its items, and the items that cannot be used."""

import dataclasses
import os
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from diffsynth_lite.data.buckets import Bucket, BucketRule
from diffsynth_lite.data.cache import TensorCache
from diffsynth_lite.data.media_index import FileMemory, MediaIndex
from diffsynth_lite.data.plan import (
    BadItemsError,
    PlanRules,
    plan_items,
    refuse_bad_items,
    refuse_other_kinds,
    summary_of_bad,
)
from diffsynth_lite.data.records import Record
from diffsynth_lite.data.video import read_frames, write_video
from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Media


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A bucket rule of two resolutions that takes clips of at most three frames."""

    sizes: tuple = ((8, 8),)

    @property
    def num_resolutions(self):
        return len(self.sizes)

    def bucket(self, resolution_index, width, height, num_frames):
        if num_frames == 0 or min(width, height) < 4:
            raise UserError(f"{width}x{height}, {num_frames} frames: too small")
        bucket_width, bucket_height = self.sizes[resolution_index]
        return Bucket(width=bucket_width, height=bucket_height, num_frames=min(num_frames or 1, 3))


@pytest.fixture
def memory(tmp_path):
    with FileMemory(tmp_path / "index.sqlite") as memory:
        yield memory


@pytest.fixture
def index(memory):
    return MediaIndex(memory)


@pytest.fixture
def gradient(tmp_path):
    """Write an image whose red grows to the right and whose green grows downwards."""

    def write(name="a.png", *, size=(32, 16), blue=0):
        red, green = np.meshgrid(np.arange(size[0]) * 8, np.arange(size[1]) * 16)
        path = tmp_path / name
        Image.fromarray(np.stack([red, green, np.full_like(red, blue)], -1).astype(np.uint8)).save(path)
        return path

    return write


@pytest.fixture
def clip(tmp_path):
    def write(name="a.mp4", *, num_frames=8, size=(32, 16), base=0):
        frames = [Image.new("RGB", size, (base + 30 * number, 0, 0)) for number in range(num_frames)]
        write_video(tmp_path / name, frames, fps=4)
        return tmp_path / name

    return write


def record(target, **values):
    return Record(**({"name": target.name, "source": 0, "target": target, "captions": ("x",)} | values))


def plan(records, index, **changes):
    return plan_items(records, index=index, rules=PlanRules(**({"buckets": Sizes()} | changes)))


def key_of(item, encoder="vae"):
    return item.key(TensorCache(None), encoder)


def pixels(image):
    return np.asarray(image).tolist()


def test_an_image_is_one_item_of_its_bucket(index, gradient):
    planned = plan([record(gradient())], index)
    [item] = planned.items
    assert item.name == "a.png"
    assert item.bucket == Bucket(width=8, height=8, num_frames=1)
    assert (item.crop_x, item.crop_y, item.clip_start_s, item.fps) == (0.5, 0.5, None, None)
    assert (planned.facts["a.png"].width, planned.facts["a.png"].height) == (32, 16)
    media = item.load()
    assert media == Media(frames=media.frames, crop=media.crop)
    assert [frame.size for frame in media.frames] == [(8, 8)]


def test_each_resolution_and_crop_is_an_item_of_its_own(index, gradient):
    planned = plan(
        [record(gradient())], index, buckets=Sizes(((8, 8), (4, 4))), crop="random", crops_per_item=3
    )
    assert [item.name for item in planned.items] == [f"a.png#{number}" for number in range(6)]
    assert [item.bucket.width for item in planned.items] == [8, 8, 8, 4, 4, 4]
    crops = [(item.crop_x, item.crop_y) for item in planned.items]
    assert crops[:3] == crops[3:]
    assert len(set(crops)) == 3
    assert len({key_of(item) for item in planned.items}) == 6


def test_random_crops_belong_to_the_content_and_not_to_the_name(index, gradient):
    random = {"crop": "random", "crops_per_item": 2}
    first = plan([record(gradient())], index, **random).items
    copied = plan([record(gradient("copy.png"))], index, **random).items
    other = plan([record(gradient("other.png", blue=1))], index, **random).items
    assert [key_of(item) for item in first] == [key_of(item) for item in copied]
    assert first[0].crop_x != other[0].crop_x


def test_a_clip_is_read_at_its_times_from_its_start(index, clip):
    path = clip()
    [item] = plan([record(path)], index, clip="start", fps=2.0).items
    assert item.bucket.num_frames == 3
    media = item.load()
    assert media.fps == 2.0
    expected = [frame.getpixel((0, 0)) for frame in read_frames(path, [0.0, 0.5, 1.0])]
    assert [frame.getpixel((0, 0)) for frame in media.frames] == expected
    assert len(set(expected)) == 3


def test_a_clip_of_one_frame_is_too_short_and_not_taken_for_an_image(index, clip, gradient):
    rule = BucketRule(divisor=8, step=8, resolutions=(16,), frame_counts=(5,))
    planned = plan([record(clip(num_frames=1)), record(gradient())], index, buckets=rule)
    assert list(planned.bad) == ["a.mp4"]
    assert "1 frames are too few: the least is 5" in planned.bad["a.mp4"]
    assert [item.bucket.num_frames for item in planned.items] == [1]


def test_without_a_rate_a_clip_keeps_its_own(index, clip):
    [item] = plan([record(clip())], index).items
    assert item.fps == 4.0


def test_several_clips_of_a_file_are_items_with_starts_and_crops_of_their_own(index, clip):
    rules = {"clip": "uniform", "clips_per_video": 3, "crop": "random", "crops_per_item": 2}
    items = plan([record(clip(num_frames=12))], index, **rules).items
    starts = [item.clip_start_s for item in items]
    assert starts[::2] == starts[1::2] == sorted(set(starts))
    assert len(items) == 6
    assert len({item.crop_x for item in items}) == 6


def test_random_clips_are_keyed_by_content(index, clip):
    rules = {"clip": "random", "clips_per_video": 2}
    first = plan([record(clip(num_frames=40))], index, **rules).items
    same = plan([record(clip("b.mp4", num_frames=40))], index, **rules).items
    other = plan([record(clip("c.mp4", num_frames=40, base=1))], index, **rules).items
    assert [item.clip_start_s for item in first] == [item.clip_start_s for item in same]
    assert [item.clip_start_s for item in first] != [item.clip_start_s for item in other]


def test_mask_and_first_frame_get_the_crop_of_the_target_also_from_another_size(index, gradient, tmp_path):
    target, larger = gradient(), tmp_path / "mask.png"
    mask = Image.new("L", (64, 32), 0)
    mask.paste(255, (0, 0, 16, 32))
    mask.save(larger)
    [item] = plan([record(target, mask=larger, first_frame=gradient("f.png"))], index).items
    for crop_x in (0.0, 0.125, 0.25):
        media = dataclasses.replace(item, crop_x=crop_x).load()
        [frame] = media.frames
        assert pixels(media.first_frame) == pixels(frame)
        left_of_edge = np.asarray(frame)[0, :, 0] < 60  # 8 of 32 columns, at 8 a column
        counts = np.asarray(media.mask)[0] > 127
        assert left_of_edge.sum() == 4 - 8 * crop_x
        assert counts.tolist() == left_of_edge.tolist()


def test_a_mask_of_which_the_crop_leaves_nothing_is_bad(index, gradient, tmp_path):
    mask = Image.new("L", (32, 16), 0)
    mask.putpixel((0, 0), 255)
    mask.save(tmp_path / "mask.png")
    [item] = plan([record(gradient(), mask=tmp_path / "mask.png")], index).items
    dataclasses.replace(item, crop_x=0.0, crop_y=0.0).load()
    with pytest.raises(UserError, match=r"mask\.png: its crop is black"):
        dataclasses.replace(item, crop_x=1.0).load()


def test_inputs_keep_their_own_size_and_lie_over_the_background(index, gradient, tmp_path):
    Image.new("RGBA", (5, 9), (0, 0, 0, 0)).save(tmp_path / "in.png")
    [item] = plan([record(gradient(), inputs=(tmp_path / "in.png",))], index, background="#102030").items
    [given] = item.load().inputs
    assert (given.size, given.getpixel((0, 0))) == ((5, 9), (16, 32, 48))


def test_layers_get_the_crop_of_their_image_and_make_buckets_of_their_own(index, gradient, tmp_path):
    target = gradient()
    half = Image.new("RGBA", (64, 32), (0, 0, 0, 0))
    half.paste((90, 0, 0, 255), (0, 0, 16, 32))
    half.save(tmp_path / "half.png")
    layers = (gradient("behind.png"), tmp_path / "half.png")
    [item], [plain] = (plan([record(target, **files)], index).items for files in ({"layers": layers}, {}))
    assert item.record.kind == "layers"
    assert item.bucket == dataclasses.replace(plain.bucket, num_layers=2)
    for crop_x in (0.0, 0.25):
        media = dataclasses.replace(item, crop_x=crop_x).load()
        behind, above = media.layers
        assert pixels(behind.convert("RGB")) == pixels(media.frames[0])
        seen = np.asarray(above)[0, :, 3] > 127
        assert seen.tolist() == (np.asarray(media.frames[0])[0, :, 0] < 60).tolist()
    swapped, fewer = (
        plan([record(target, layers=files)], index).items[0] for files in (layers[::-1], layers[:1])
    )
    assert len({key_of(one) for one in (item, swapped, fewer, plain)}) == 4


@pytest.mark.parametrize("part", ["mask", "first_frame", "last_frame", "control", "inpaint_mask"])
def test_a_companion_of_another_shape_is_a_bad_item(index, gradient, part):
    bad = plan([record(gradient(), **{part: gradient("b.png", size=(16, 16))})], index).bad
    assert "16x16 has another aspect ratio than its target of 32x16" in bad["a.png"]


def test_bad_records_are_all_named_and_the_rest_is_planned(index, gradient, tmp_path):
    (tmp_path / "page.png").write_text("<html>")
    records = [
        record(gradient()),
        record(tmp_path / "gone.png"),
        record(tmp_path / "page.png"),
        record(gradient("small.png", size=(32, 2))),
        record(gradient("e.png"), inputs=(tmp_path / "gone.png",)),
    ]
    planned = plan(records, index)
    assert [item.name for item in planned.items] == ["a.png"]
    assert list(planned.bad) == ["gone.png", "page.png", "small.png", "e.png"]
    assert "cannot be read: No such file" in planned.bad["gone.png"]
    assert "too small" in planned.bad["small.png"]


def test_unchanged_media_is_not_read_again(index, memory, gradient, clip, monkeypatch):
    records = [record(gradient()), record(clip())]
    first = plan(records, index)

    def refuse(path):
        raise AssertionError(f"{path} is read")

    for reader in ("check_image", "check_video", "file_fingerprint"):
        monkeypatch.setattr(f"diffsynth_lite.data.media_index.{reader}", refuse)
    again = plan(records, MediaIndex(memory))
    assert again.items == first.items
    assert again.facts == first.facts
    os.utime(records[0].target, ns=(0, 1))
    with pytest.raises(AssertionError, match=r"a\.png is read"):
        plan(records, MediaIndex(memory))


IMAGE, CLIP = ({"target": Path(name)} for name in ("a.png", "a.mp4"))
GUIDED = CLIP | {"control": Path("b.png"), "random_masks": 1}
NAMED = r"name the files that belong to them \("


@pytest.mark.parametrize(
    ("records", "kinds", "message"),
    [
        (
            [IMAGE, CLIP, CLIP],
            "image",
            r"2 of kind video, such as a\.mp4; this family trains on the kinds image",
        ),
        ([GUIDED], "inpaint", r"1 of kind control, such as a\.mp4"),
        ([IMAGE], "inpaint", NAMED + r"inpaint_mask_dir, inpaint_mask_column, random_masks\), choose"),
        ([IMAGE], "image_to_video", "image_to_video: choose another"),
        ([CLIP], "image_to_video", NAMED + "first_frame_dir, first_frame_column, last_frame_dir"),
    ],
)
def test_kinds_that_a_family_does_not_train_are_refused_with_the_settings_that_would_do(
    records, kinds, message
):
    with pytest.raises(UserError, match=message):
        refuse_other_kinds([record(**each) for each in records], (kinds,))


def test_kinds_that_a_family_trains_are_not_refused():
    refuse_other_kinds([record(**IMAGE), record(**CLIP)], ("image", "video"))


def test_each_input_of_a_media_key_changes_it(index, gradient, clip):
    """What the key names: content, part of each file, size, crop, times, rate, background, encoder, kind."""
    image = record(gradient(), mask=gradient("m.png", blue=1))
    [item] = plan([image], index).items
    [video] = plan([record(clip())], index).items
    bucket = item.bucket
    changed = [
        key_of(item, "other weights or dtype"),
        *(
            key_of(dataclasses.replace(item, **change))
            for change in (
                {"content": ("other", item.content[1])},
                {"content": (item.content[0], "other")},
                {"content": item.content[::-1]},
                {"record": record(image.target, inputs=(image.mask,))},
                {"record": record(image.target, first_frame=image.mask)},
                {"record": record(image.target, last_frame=image.mask)},
                {"bucket": dataclasses.replace(bucket, width=16)},
                {"bucket": dataclasses.replace(bucket, height=16)},
                {"record": record(image.target, control=image.mask)},
                {"record": record(image.target, inpaint_mask=image.mask)},
                {"random_mask": 0},
                {"random_mask": 1},
                {"crop_x": 0.25},
                {"crop_y": 0.25},
                {"background": "black"},
            )
        ),
        *(
            key_of(dataclasses.replace(video, **change))
            for change in (
                {},
                {"clip_start_s": 0.25},
                {"fps": 3.0},
                {"bucket": dataclasses.replace(video.bucket, num_frames=2)},
            )
        ),
    ]
    assert len({key_of(item), *changed}) == 1 + len(changed)
    assert key_of(dataclasses.replace(item, name="other")) == key_of(item)
    assert key_of(dataclasses.replace(item, record=dataclasses.replace(image, captions=("y",)))) == key_of(
        item
    )


@pytest.mark.parametrize("name", ["IMAGE_DECODER_ID", "VIDEO_DECODER_ID"])
def test_another_decoder_has_other_keys(index, clip, monkeypatch, name):
    [item] = plan([record(clip())], index).items
    key = key_of(item)
    monkeypatch.setattr(f"diffsynth_lite.data.items.{name}", "another version")
    assert key_of(item) != key


def edit_record(target, inputs, name=None):
    return Record(name=name or target.name, source=0, target=target, captions=("x",), inputs=inputs)


def plan_of(records, index, *, resolutions=(8,), **rules):
    buckets = BucketRule(divisor=4, step=4, resolutions=resolutions)
    return plan_items(records, index=index, rules=PlanRules(buckets=buckets, **rules))


def test_items_that_start_from_images_of_other_sizes_are_of_other_buckets(index, write_image):
    wide, tall = write_image("wide.png", size=(32, 8)), write_image("tall.png", size=(8, 16))
    target = write_image("a.png")
    records = [
        edit_record(target, inputs, name)
        for name, inputs in {"a": (wide,), "b": (tall,), "c": (wide, tall), "d": (tall, wide)}.items()
    ]

    def inputs(**rules):
        return [item.bucket.inputs for item in plan_of(records, index, **rules).items]

    wide_size, tall_size = (32, 8), (8, 16)
    assert inputs() == [(wide_size,), (tall_size,), (wide_size, tall_size), (tall_size, wide_size)]
    one_size = inputs(input_size=lambda width, height, _: (width * height, 1))
    assert one_size == [((256, 1),), ((128, 1),), ((256, 1), (128, 1)), ((128, 1), (256, 1))]
    both_resolutions = plan_of(records[:1], index, resolutions=(8, 4)).items
    assert [(item.bucket.width, item.bucket.inputs) for item in both_resolutions] == [
        (8, (wide_size,)),
        (4, (wide_size,)),
    ]


def test_more_input_images_than_the_family_takes_are_a_bad_item(index, write_image):
    given = (write_image("one.png"), write_image("two.png"))
    records = [edit_record(write_image("a.png"), given), edit_record(write_image("b.png"), given[:1])]
    planned = plan_of(records, index, max_inputs=1)
    assert [item.name for item in planned.items] == ["b.png"]
    assert list(planned.bad) == ["a.png"]
    assert "a.png: has 2 input images, and this family takes 1" in planned.bad["a.png"]
    assert not plan_of(records, index, max_inputs=2).bad


def test_a_caption_that_the_model_does_not_take_is_a_bad_item(index, write_image):
    def refuse(text, where):
        if "<|image_pad|>" in text:
            raise UserError(f"{where} holds a token")

    records = [edit_record(write_image("a.png"), ()), edit_record(write_image("b.png"), ())]
    records[1] = dataclasses.replace(records[1], captions=("a ring", "a <|image_pad|>"))
    planned = plan_of(records, index, check_caption=refuse)
    assert [item.name for item in planned.items] == ["a.png"]
    assert planned.bad == {"b.png": f"{records[1].target}: its caption holds a token"}


def test_an_input_image_that_cannot_be_encoded_is_a_bad_item(index, write_image):
    def refuse(width, height, _):
        raise UserError(f"{width}x{height} is too narrow")

    narrow = write_image("one.png", size=(32, 8))
    planned = plan_of([edit_record(write_image("a.png"), (narrow,))], index, input_size=refuse)
    assert planned.bad == {"a.png": f"{narrow}: 32x8 is too narrow"}


def names_of(count: int) -> list[str]:
    return [f"{index}.png" for index in range(count)]


FEW = {"0.png": "damaged", "2.png": "animated"}
MANY = {f"{index}.png": "damaged" for index in range(25)}


@pytest.mark.parametrize(
    ("count", "bad", "on_bad_item", "max_bad_ratio", "message"),
    [
        (3, {}, "error", 0.5, None),
        (3, FEW, "error", 1.0, r"2 of 3 .*0\.png: damaged; 2\.png: animated.*on_bad_item=skip$"),
        (12, FEW, "error", 0.1, r"on_bad_item=skip data\.max_bad_ratio=0\.17$"),
        (26, MANY, "error", 0.1, "and 5 more"),
        (26, MANY, "skip", 0.1, "and 5 more"),
        (4, {}, "skip", 0.5, None),
        (4, FEW, "skip", 0.5, None),
        (4, FEW, "skip", 0.2, r"data\.max_bad_ratio is 0\.2: .* set data\.max_bad_ratio=0\.5$"),
        (26, MANY, "skip", 0.9, "set data.max_bad_ratio=0.97$"),
        (25, MANY, "skip", 1.0, "there is none to train on"),
    ],
)
def test_bad_items_are_refused_by_name_or_left_out_as_far_as_the_limit_says(
    count, bad, on_bad_item, max_bad_ratio, message
):
    with pytest.raises(BadItemsError, match=message) if message else nullcontext():
        refuse_bad_items(names_of(count), bad, on_bad_item=on_bad_item, max_bad_ratio=max_bad_ratio)


def test_a_summary_counts_and_names_the_bad_items():
    bad = {"1.png": "why", "2.png": "why not"}
    message = "2 of 4 items cannot be used: 1.png: why; 2.png: why not"
    assert summary_of_bad(names_of(4), bad) == message
