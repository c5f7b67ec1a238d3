"""The bucket rule's guarantees, on items and rules of any kind."""

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from diffsynth_lite.data.buckets import Bucket, BucketRule, kept_ratio
from diffsynth_lite.errors import UserError

sides = st.integers(1, 3000)


@st.composite
def rules(draw, **changes):
    divisor = draw(st.sampled_from([1, 8, 16, 32]))
    step = divisor * draw(st.integers(1, 4))
    options = {
        "divisor": divisor,
        "step": step,
        "resolutions": (draw(st.integers(step, 1100)),),
        "max_aspect_ratio": draw(st.sampled_from([1.0, 1.5, 2.0, 4.0])),
    }
    assume(step > 4)  # a step of some pixels makes thousands of sizes
    return BucketRule(**(options | changes))


@given(rule=rules(), width=sides, height=sides)
def test_a_bucket_is_divisible_in_budget_within_the_aspect_ratio_and_enlarges_nothing(rule, width, height):
    if min(width, height) < rule.step:
        with pytest.raises(
            UserError, match=f"{width}x{height} pixels are too few: .*{rule.step}x{rule.step}"
        ):
            rule.bucket(0, width, height, None)
        return
    bucket = rule.bucket(0, width, height, None)
    assert bucket.width % rule.step == bucket.height % rule.step == 0
    assert rule.step % rule.divisor == 0
    assert bucket.width * bucket.height <= rule.resolutions[0] ** 2
    longer, shorter = max(bucket.width, bucket.height), min(bucket.width, bucket.height)
    assert longer <= rule.max_aspect_ratio * shorter
    assert bucket.width <= width
    assert bucket.height <= height


@given(
    rule=rules(resolutions=(700,), max_aspect_ratio=2.0),
    width=st.integers(150, 3000),
    turn=st.floats(0.6, 1.6),
)
def test_little_is_cropped_of_an_item_whose_aspect_ratio_is_allowed(rule, width, turn):
    height = round(width * turn)
    scale = min(1.0, rule.resolutions[0] / math.sqrt(width * height))
    lost = rule.step / (scale * min(width, height))
    assume(lost < 1)
    assume(max(width, height) <= rule.max_aspect_ratio * (1 - lost) * min(width, height))
    bucket = rule.bucket(0, width, height, None)
    # Rounding of the floats in this test only.
    assert kept_ratio((width, height), (bucket.width, bucket.height)) >= (1 - lost) ** 2 - 1e-9


@given(rule=rules(upscale=True), width=sides, height=sides, factor=st.integers(2, 5))
def test_with_upscaling_the_size_depends_only_on_the_aspect_ratio(rule, width, height, factor):
    bucket = rule.bucket(0, width, height, None)
    assert rule.bucket(0, factor * width, factor * height, None) == bucket
    assert bucket.width * bucket.height <= rule.resolutions[0] ** 2


@given(rule=rules(), width=sides, height=sides)
def test_a_turned_item_keeps_as_much_in_its_bucket(rule, width, height):
    assume(min(width, height) >= rule.step)
    bucket, turned = rule.bucket(0, width, height, None), rule.bucket(0, height, width, None)
    assert kept_ratio((width, height), (bucket.width, bucket.height)) == kept_ratio(
        (height, width), (turned.width, turned.height)
    )


MEGAPIXEL = {"step": 64, "resolutions": (1024,)}
NEAR = {"step": 16, "sizes": ((512, 512), (1024, 1008), (1024, 512), (512, 256), (1024, 976))}


@pytest.mark.parametrize(
    ("options", "item", "expected"),
    [
        (MEGAPIXEL, (4000, 4000), (1024, 1024)),
        (MEGAPIXEL, (1920, 1080), (1344, 768)),
        (MEGAPIXEL, (1080, 1920), (768, 1344)),
        (MEGAPIXEL, (640, 480), (640, 448)),  # smaller than the budget: its own size, rounded down
        (MEGAPIXEL, (10000, 1000), (1408, 704)),
        # Explicit sizes of nearly one shape count as equals, so that the largest is taken.
        (NEAR, (1024, 1024), (1024, 1008)),  # keeps 98 %
        (NEAR, (2000, 2000), (1024, 1008)),
        (NEAR, (1023, 1023), (512, 512)),  # the larger one does not fit
        (NEAR, (2048, 1024), (1024, 512)),
        (NEAR, (1100, 1000), (1024, 1008 - 32)),  # keeps more than the others
        # One that crops more than a little more is not taken for being larger: 95.3 % of a square.
        ({"step": 16, "sizes": ((512, 512), (1024, 976))}, (2000, 2000), (512, 512)),
    ],
)
def test_sizes_are_pinned(options, item, expected):
    bucket = BucketRule(divisor=16, **options).bucket(0, *item, None)
    assert bucket == Bucket(width=expected[0], height=expected[1])


def test_each_resolution_has_a_bucket_of_its_own():
    rule = BucketRule(divisor=16, step=16, resolutions=(256, 512))
    assert rule.num_resolutions == 2
    assert [rule.bucket(index, 900, 900, None).width for index in range(2)] == [256, 512]


def test_of_explicit_sizes_the_one_that_crops_least_is_taken_and_the_larger_of_equals():
    rule = BucketRule(divisor=16, step=16, sizes=((512, 512), (1024, 1024), (832, 480)))
    assert rule.num_resolutions == 1
    assert rule.bucket(0, 2000, 2000, None) == Bucket(width=1024, height=1024)
    assert rule.bucket(0, 1000, 1000, None) == Bucket(width=512, height=512)
    assert rule.bucket(0, 1920, 1080, None) == Bucket(width=832, height=480)
    with pytest.raises(UserError, match="100x600 pixels are too few: the least is 512x512 or 832x480"):
        rule.bucket(0, 100, 600, None)


def test_a_clip_gets_the_longest_frame_count_that_it_covers_and_an_image_one():
    rule = BucketRule(divisor=16, step=16, resolutions=(256,), frame_counts=(17, 33, 81))
    frames = {count: rule.bucket(0, 256, 256, count).num_frames for count in (None, 17, 32, 33, 80, 500)}
    assert frames == {None: 1, 17: 17, 32: 17, 33: 33, 80: 33, 500: 81}
    with pytest.raises(UserError, match="16 frames are too few: the least is 17"):
        rule.bucket(0, 256, 256, 16)
    for count in (0, 1):  # a clip of one frame is not an image
        with pytest.raises(UserError, match=f"^{count} frames are too few"):
            rule.bucket(0, 256, 256, count)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": 24}, "step 24 must be a multiple of 16"),
        ({"resolutions": (8,)}, "resolution 8 is less than the bucket step 16"),
        ({"resolutions": ()}, "either resolutions or sizes"),
        ({"sizes": ((16, 16),)}, "either resolutions or sizes"),
        (
            {"resolutions": (), "sizes": ((100, 64),)},
            "bucket size 100x64: both sides must be multiples of 16",
        ),
        ({"max_aspect_ratio": 0.5}, "max_aspect_ratio 0.5 must be at least 1"),
        ({"frame_counts": ()}, "frame counts"),
        ({"frame_counts": (0, 17)}, "frame counts"),
    ],
)
def test_values_that_allow_no_size_are_refused(changes, message):
    options = {"divisor": 16, "step": 16, "resolutions": (64,)}
    with pytest.raises(UserError, match=message):
        BucketRule(**(options | changes))


def test_buckets_are_ordered_and_named():
    small, clip = Bucket(width=480, height=832), Bucket(width=832, height=480, num_frames=81)
    assert sorted([clip, small]) == [small, clip]
    assert (small.name, clip.name) == ("480x832", "832x480x81")
    edit = Bucket(width=480, height=832, inputs=((1024, 1024), (1248, 832)))
    assert edit.name == "480x832 from 1024x1024+1248x832"
    assert sorted([edit, clip, small]) == [small, edit, clip]
    layered = Bucket(width=480, height=832, num_layers=4)
    assert (layered.name, replace(layered, num_layers=1).name) == (
        "480x832 in 4 layers",
        "480x832 in 1 layer",
    )
    assert [bucket.num_images for bucket in (small, clip, layered)] == [1, 81, 5]


def test_a_checkpoint_knows_buckets_by_what_they_were_called_before_there_were_layers():
    bucket = Bucket(width=480, height=832, inputs=((8, 16),))
    assert repr(bucket) == "Bucket(width=480, height=832, num_frames=1, inputs=((8, 16),))"
    assert repr(replace(bucket, num_layers=2)) == f"{repr(bucket)[:-1]}, num_layers=2)"
