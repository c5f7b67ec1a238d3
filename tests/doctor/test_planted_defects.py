"""One data set with every defect of captions and images that the doctor looks for, and a good one."""

from dataclasses import fields

import pytest
from caption_sets import PROSE
from messy_data import Workplace, add_images, advice_with, blurred, photo, scene
from PIL import Image

from diffsynth_lite.doctor.examination import examine
from diffsynth_lite.doctor.findings import Findings, ItemCrop

SIZE = (320, 256)
PLANTED = {
    "misspelt": "An ohxw woman on a bridge.",
    "one word": "bridge",
    "refusal": "I'm sorry, but I can't help with that.",
    "boilerplate": "The image shows ohwx woman on a bridge.",
    "json": '{"high_level_description": "ohwx woman',
    "script": "木の下で本を読む女性",
    "long": "ohwx woman " + "on a bridge " * 300,
    "same 1": "ohwx woman waves from a window.",
    "same 2": "ohwx woman waves from a window.",
}


def good_set(workplace: Workplace) -> list[str]:
    for number, text in enumerate(PROSE):
        workplace.add(f"data/{number}.png", photo(number, SIZE), text)
    return [f"data.path={workplace.root}/data", "data.resolutions=[256]", "data.trigger=ohwx woman"]


def test_a_good_set_has_neither_advice_nor_remarks(workplace: Workplace) -> None:
    found = examine(workplace.config(*good_set(workplace)), sheet_size=3, goal="likeness").findings
    assert found.advice == []
    assert found.items.keys() == {f"{number}.png" for number in range(12)}
    assert [item.remarks for item in found.items.values()] == [[]] * 12


def test_every_planted_defect_is_found_at_its_item_and_advised_on(workplace: Workplace) -> None:
    settings = good_set(workplace)
    for number, (name, text) in enumerate(PLANTED.items(), start=20):
        workplace.add(f"data/{name}.png", photo(number, SIZE), text)
    workplace.add("data/soft.png", blurred(photo(40, SIZE), 5), "ohwx woman in a boat.")
    barred = Image.new("RGB", SIZE)
    barred.paste(photo(41, SIZE).crop((0, 40, 320, 216)), (0, 40))
    workplace.add("data/barred.png", barred, "ohwx woman on a ladder.")
    workplace.add("data/speck.png", photo(42, (9, 9)), "ohwx woman in a tunnel.")
    workplace.add("data/copy.png", photo(0, SIZE), "ohwx woman among oranges.")
    found = examine(
        workplace.config(*settings, "data.on_bad_item=skip", "data.max_bad_ratio=0.5"), sheet_size=0
    ).findings
    remarked = {name.removesuffix(".png"): item.remarks for name, item in found.items.items() if item.remarks}
    assert {name: remarks[0].partition(":")[0] for name, remarks in remarked.items()} == {
        "misspelt": "another spelling of the trigger",
        "one word": "no trigger in the caption",
        "refusal": "no trigger in the caption",
        "boilerplate": "a phrase of captioners",
        "json": "JSON that cannot be parsed",
        "script": "no trigger in the caption",
        "long": f"a caption of {found.items['long.png'].tokens[0]} tokens, of which the model sees 512",
        "same 1": "the same caption as 1 other item",
        "same 2": "the same caption as 1 other item",
        "soft": "blurred",
        "barred": "black bars are 29% of it",
        "speck": "cannot be used",
        "0": "the same file as copy.png",
        "copy": "the same file as 0.png",
    }
    assert remarked["one word"][1:] == ["a caption of one word: 'bridge'"]
    assert remarked["script"][1:] == ["a caption in another script than the others"]
    assert remarked["refusal"][1].startswith("a refusal in place of a caption: ")
    for words, names in {
        "spelt in another way": "misspelt.png ('ohxw woman')",
        "of one word": "one word.png ('bridge')",
        "refusal as caption": "data --model Qwen/Qwen3-VL-4B-Instruct --replace all --only refusal.png",
        "phrase of captioners": "boilerplate.png ('The image shows')",
        "not the JSON": "json.png",
        "another script": "script.png",
        "more than 512 tokens": "long.png",
        "the same caption": "2 items",
        "without sharp edges": "soft.png",
        "--strip-bars": "barred.png",
        "without the trigger": "3 items",
    }.items():
        assert names in advice_with(found, words)


def test_phrases_of_most_captions_are_advised_on_with_the_goal(workplace: Workplace) -> None:
    for number, text in enumerate(PROSE[:8]):
        trait = text.replace("ohwx woman", "ohwx woman with blond hair")
        workplace.add(f"data/{number}.png", scene(number), trait)
    config = workplace.config(f"data.path={workplace.root}/data", "data.trigger=ohwx woman")
    found = examine(config, sheet_size=0, goal="likeness").findings
    line = (
        "Most captions have 'blond hair' (8 of 8): the likeness binds to these words and not to the trigger."
    )
    assert advice_with(found, "blond hair").startswith(line)
    assert "8 items, and 10 to 60 are usual for --goal likeness; with few," in advice_with(found, "usual")
    instructed = examine(config, sheet_size=0, goal="edit").findings
    assert [line for line in instructed.advice if "usual" not in line] == []


@pytest.mark.parametrize(("goal", "is_few"), [(None, False), ("style", True), ("motion", True)])
def test_a_number_of_items_is_compared_only_with_what_its_goal_usually_has(
    workplace: Workplace, goal: str | None, is_few: bool
) -> None:
    path = add_images(workplace, "data", 3)
    found = examine(workplace.config(f"data.path={path}"), sheet_size=0, goal=goal).findings
    assert any("are usual for" in line for line in found.advice) == is_few


def test_items_have_their_size_crop_and_tokens(workplace: Workplace) -> None:
    path = add_images(workplace, "data", 1, (300, 60))
    crops = ("data.resolutions=[32,64]", "data.tag_shuffles=1")
    found = examine(workplace.config(f"data.path={path}", *crops), sheet_size=0).findings
    [item] = found.items.values()
    assert item.crops == [
        ItemCrop(bucket="32x32", box=(120, 0, 180, 60)),
        ItemCrop(bucket="80x48", box=(100, 0, 200, 60)),
    ]
    assert item.limit == 512
    assert len(item.tokens) == 1
    assert item.tokens[0] > 0


def test_all_but_images_is_json(workplace: Workplace) -> None:
    path = add_images(workplace, "data", 2)
    found = examine(workplace.config(f"data.path={path}", f"validation.data={path}2"), sheet_size=0).findings
    as_json = found.as_json()
    assert as_json.keys() == {field.name for field in fields(Findings)} - {"small", "sheet"}
    assert as_json["items"]["0.png"]["crops"] == [{"bucket": "80x48", "box": (0, 3, 96, 61)}]
    assert as_json["buckets"][0]["name"] == "80x48"
