"""What the plan makes of the images that an edit starts from."""

import dataclasses

import pytest

from diffsynth_lite.data.buckets import BucketRule
from diffsynth_lite.data.media_index import FileMemory, MediaIndex
from diffsynth_lite.data.plan import PlanRules, plan_items
from diffsynth_lite.data.records import Record
from diffsynth_lite.errors import UserError


@pytest.fixture
def index(tmp_path):
    with FileMemory(tmp_path / "index.sqlite") as memory:
        yield MediaIndex(memory)


def record(target, inputs, name=None):
    return Record(name=name or target.name, source=0, target=target, captions=("x",), inputs=inputs)


def plan(records, index, *, resolutions=(8,), **rules):
    buckets = BucketRule(divisor=4, step=4, resolutions=resolutions)
    return plan_items(records, index=index, rules=PlanRules(buckets=buckets, **rules))


def test_items_that_start_from_images_of_other_sizes_are_of_other_buckets(index, write_image):
    wide, tall = write_image("wide.png", size=(32, 8)), write_image("tall.png", size=(8, 16))
    target = write_image("a.png")
    records = [
        record(target, inputs, name)
        for name, inputs in {"a": (wide,), "b": (tall,), "c": (wide, tall), "d": (tall, wide)}.items()
    ]

    def inputs(**rules):
        return [item.bucket.inputs for item in plan(records, index, **rules).items]

    wide_size, tall_size = (32, 8), (8, 16)
    assert inputs() == [(wide_size,), (tall_size,), (wide_size, tall_size), (tall_size, wide_size)]
    one_size = inputs(input_size=lambda width, height: (width * height, 1))
    assert one_size == [((256, 1),), ((128, 1),), ((256, 1), (128, 1)), ((128, 1), (256, 1))]
    both_resolutions = plan(records[:1], index, resolutions=(8, 4)).items
    assert [(item.bucket.width, item.bucket.inputs) for item in both_resolutions] == [
        (8, (wide_size,)),
        (4, (wide_size,)),
    ]


def test_more_input_images_than_the_family_takes_are_a_bad_item(index, write_image):
    given = (write_image("one.png"), write_image("two.png"))
    records = [record(write_image("a.png"), given), record(write_image("b.png"), given[:1])]
    planned = plan(records, index, max_inputs=1)
    assert [item.name for item in planned.items] == ["b.png"]
    assert list(planned.bad) == ["a.png"]
    assert "a.png: has 2 input images, and this family takes 1" in planned.bad["a.png"]
    assert not plan(records, index, max_inputs=2).bad


def test_a_caption_that_the_model_does_not_take_is_a_bad_item(index, write_image):
    def refuse(text, where):
        if "<|image_pad|>" in text:
            raise UserError(f"{where} holds a token")

    records = [record(write_image("a.png"), ()), record(write_image("b.png"), ())]
    records[1] = dataclasses.replace(records[1], captions=("a ring", "a <|image_pad|>"))
    planned = plan(records, index, check_caption=refuse)
    assert [item.name for item in planned.items] == ["a.png"]
    assert planned.bad == {"b.png": f"{records[1].target}: its caption holds a token"}


def test_an_input_image_that_cannot_be_encoded_is_a_bad_item(index, write_image):
    def refuse(width, height):
        raise UserError(f"{width}x{height} is too narrow")

    narrow = write_image("one.png", size=(32, 8))
    planned = plan([record(write_image("a.png"), (narrow,))], index, input_size=refuse)
    assert planned.bad == {"a.png": f"{narrow}: 32x8 is too narrow"}
