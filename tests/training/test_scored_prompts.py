"""The prompts that a run is scored by: by caption or by item, and plain ones without what is taught."""

from pathlib import Path

import pytest
from PIL import Image

from diffsynth_lite.config import Config, load_config
from diffsynth_lite.data.buckets import Bucket
from diffsynth_lite.data.items import TrainingItem
from diffsynth_lite.data.records import Record
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines.base.release_folder import PipelineFolder
from diffsynth_lite.pipelines.longcat_image_edit import LongCatImageEdit
from diffsynth_lite.pipelines.qwen_image import QwenImage
from diffsynth_lite.training.encoding.scored_prompts import choose_prompts, request_of, without_taught

FAMILY = QwenImage(PipelineFolder(path=Path()))
COLOURS = ("red", "blue", "teal", "pink", "gold", "gray", "lime", "navy", "cyan", "plum")


@pytest.mark.parametrize(
    ("captions", "trigger", "left"),
    [
        (["ohwx, a woman, smiling", "a dog and OHWX", "a cat"], "ohwx", ["a woman, smiling", "a dog and"]),
        (["ohwx", "ohwxes run"], "ohwx", []),
        ([f"a {colour} zumbo, flat art" for colour in COLOURS], "", [f"a {colour}" for colour in COLOURS]),
        ([f"{colour}, flat_art, a, b, c" for colour in COLOURS[:1]], "", []),
        ([f"蓝色围巾 {colour} 帽" for colour in COLOURS], "围巾", [f"{colour} 帽" for colour in COLOURS]),
    ],
)
def test_captions_lose_the_trigger_and_what_most_have_in_common(
    captions: list[str], trigger: str, left: list[str]
) -> None:
    assert list(without_taught(captions, trigger)) == left


@pytest.fixture
def config(tmp_path: Path):
    def load(*settings: str) -> Config:
        file = tmp_path / "a.yaml"
        file.write_text("model: {family: qwen_image, path: a}\ndata: {path: a}\noutput: {dir: b}\n")
        on = ("validation.scores=true", "validation.every_steps=250", "data.hold_out=0.1", "data.width=64")
        return load_config(file, [*on, "data.height=32", *settings]).config

    return load


def item(caption: str, content: str, *inputs: Path, source: int = 0, **companions: Path) -> TrainingItem:
    record = Record(
        name=f"{source}/{content}",
        source=source,
        target=Path(f"{content}.png"),
        captions=(caption, "another"),
        inputs=inputs,
        **companions,
    )
    return TrainingItem(
        name=record.name,
        record=record,
        content=(content, *map(str, inputs)),
        bucket=Bucket(width=64, height=32, num_frames=1),
        crop_x=0.5,
        crop_y=0.5,
        clip_start_s=None,
        fps=None,
        background="white",
    )


def test_a_caption_of_several_items_is_one_prompt_that_is_compared_with_four_of_them(config) -> None:
    held_out = [item("ohwx, a dog", f"d{place}") for place in range(9)]
    held_out += [item(f"ohwx, {place}", str(place)) for place in range(20)]
    found = choose_prompts(config("data.trigger=ohwx"), FAMILY, held_out[9:11], held_out)
    assert [prompt.text for prompt in found.new][:3] == ["ohwx, a dog", "ohwx, 0", "ohwx, 2"]
    assert [len(found.new), len(found.plain), len(found.taught)] == [16, 2, 2]
    assert [one.record.name for one in found.new[0].items] == ["0/d0", "0/d3", "0/d5", "0/d8"]
    assert [prompt.text for prompt in found.plain] == ["0", "1"]
    edits = [item("make it red", f"e{place}", Path(f"{place}.png")) for place in range(3)]
    given = config("validation.plain_prompts=[a cat, a hat]")
    found = choose_prompts(given, FAMILY, edits, edits)
    assert [prompt.text for prompt in found.new] == ["make it red"] * 3
    assert [prompt.text for prompt in found.plain] == ["a cat", "a hat"]
    assert [prompt.items[0].record.inputs[0].name for prompt in found.all] == [
        *("0.png", "1.png", "2.png"),
        *("0.png", "1.png"),
        *("0.png", "1.png", "2.png"),
    ]


def test_captions_of_preserved_sources_are_plain_prompts_and_are_not_taught(config) -> None:
    sources = config("data.path=null", "data.sources=[{path: a, trigger: ohwx}, {path: c, preserve: true}]")
    trained = [item("ohwx, one", "1"), item("a cat", "2", source=1), item("a hat", "3", source=1)]
    found = choose_prompts(sources, FAMILY, trained, [item("x", "x"), item("y", "y")])
    assert [[prompt.text for prompt in kind] for kind in (found.plain, found.taught)] == [
        ["a cat", "a hat"],
        ["ohwx, one"],
    ]


@pytest.mark.parametrize(
    ("trained", "message"),
    [
        ({"control": Path("edges.png")}, "0/1 is of kind control, whose files decide most of what scores"),
        ({"layers": (Path("layer.png"),)}, "0/1 is of kind layers"),
        ({}, "validation.plain_prompts: 0 can be written from the captions"),
    ],
)
def test_items_that_cannot_be_scored_are_refused(config, trained: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        choose_prompts(config(), FAMILY, [item("a", "1", **trained)], [item("x", "x"), item("y", "y")])


def test_an_edit_starts_from_the_images_of_its_item_in_their_shape_and_each_prompt_has_its_own_noise(
    config, tmp_path: Path
) -> None:
    Image.new("RGB", (96, 48), "red").save(tmp_path / "before.png")
    edits = [
        item("make it red", "1", tmp_path / "before.png"),
        item("make it blue", "2", tmp_path / "before.png"),
    ]
    scored = config("validation.plain_prompts=[a cat, a hat]", "validation.seed=7")
    family = LongCatImageEdit(PipelineFolder(path=Path()))
    prompts = choose_prompts(scored, family, edits, edits).all
    requests = [request_of(scored, family, prompt, place, {}, {}) for place, prompt in enumerate(prompts)]
    assert [request.seed for request in requests[:3]] == [7, 8, 9]
    assert {request.inputs[0].getpixel((0, 0)) for request in requests} == {(255, 0, 0)}
    assert {(request.width, request.height) for request in requests} == {family.edits.input_size(96, 48)}
    assert requests[-1].prompt == "make it blue"
