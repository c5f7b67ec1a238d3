"""Tests for what a model is asked to write."""

import itertools
import json
from typing import get_args

import pytest

from diffsynth_lite.captioning.cleaning import CaptionFormat, clean, refusal_in
from diffsynth_lite.captioning.instructions import (
    CaptionLength,
    CaptionRequest,
    Goal,
    ItemKind,
    fill,
    instruction_for,
    max_tokens,
    plainer,
)
from diffsynth_lite.errors import UserError

GOALS = (None, *get_args(Goal))
ALL = [
    (CaptionRequest(goal=goal, format=format, length=length), kind)
    for goal, format, length, kind in itertools.product(
        GOALS, get_args(CaptionFormat), get_args(CaptionLength), get_args(ItemKind)
    )
    if (format == "prose" if kind == "edit" else goal != "edit")
]


def test_each_request_has_an_instruction_of_its_own():
    instructions = [instruction_for(request, kind=kind) for request, kind in ALL if kind == "clip"]
    assert len(set(instructions)) == len(instructions)


@pytest.mark.parametrize(("request_", "kind"), ALL)
def test_an_instruction_ends_with_the_request_for_the_caption_only(request_, kind):
    instruction = instruction_for(request_, kind=kind)
    assert instruction.endswith("Answer with the caption only.")
    assert "  " not in instruction
    assert "Write in English." in instruction
    assert ("{" in instruction) == (request_.format == "json")


def test_the_likeness_is_called_by_its_trigger_or_by_its_class():
    by_class = instruction_for(CaptionRequest(goal="likeness"), kind="image")
    assert '"a woman"' in by_class
    by_trigger = instruction_for(CaptionRequest(goal="likeness", trigger="ohwx {x} woman"), kind="image")
    assert '"ohwx {x} woman"' in by_trigger
    assert '"a woman"' not in by_trigger
    for words in ("Never mention", "hair", "pose", "clothes", "light"):
        assert words in by_class
        assert words in by_trigger


@pytest.mark.parametrize("goal", [None, "style", "motion", "edit"])
def test_other_goals_do_not_ask_for_the_trigger(goal):
    request = CaptionRequest(goal=goal, trigger="ohwx woman")
    assert "ohwx" not in instruction_for(request, kind="edit" if goal == "edit" else "clip")


def test_style_is_left_out_for_it_and_motion_is_asked_of_clips_only():
    assert "no medium" in instruction_for(CaptionRequest(goal="style"), kind="image")
    assert "the medium" in instruction_for(CaptionRequest(), kind="image")
    motion = CaptionRequest(goal="motion")
    assert "camera" in instruction_for(motion, kind="clip")
    assert "frames of one video" in instruction_for(motion, kind="clip")
    assert "camera" not in instruction_for(motion, kind="image")


def test_the_instruction_for_an_edit_counts_its_inputs():
    one = instruction_for(CaptionRequest(goal="edit"), kind="edit", num_inputs=1)
    two = instruction_for(CaptionRequest(goal="edit"), kind="edit", num_inputs=2)
    assert "The second image" in one
    assert "first 2 images" in two
    assert "image 1, image 2" in two
    assert "Replace" in one
    assert "Use at most 60 words" in one
    assert "Begin with what is shown" not in one
    assert "sentences" not in one


def test_an_edit_has_inputs_and_is_described_as_prose():
    with pytest.raises(UserError, match="--inputs"):
        instruction_for(CaptionRequest(goal="edit"), kind="image")
    with pytest.raises(UserError, match="--format tags"):
        instruction_for(CaptionRequest(format="tags"), kind="edit")


def test_the_json_that_is_asked_for_is_the_json_that_cleaning_takes():
    request = CaptionRequest(trigger="ohwx", format="json", language="German", length="long")
    instruction = instruction_for(request, kind="image")
    for words in ('Begin the high_level_description with "ohwx".', "Write in German.", "150 words"):
        assert words in instruction
    example = instruction[instruction.index("{") : instruction.rindex("}") + 1]
    assert clean(example, format="json").text == json.dumps(json.loads(example), separators=(",", ":"))


def test_an_instruction_of_ones_own_replaces_all_of_ours():
    request = CaptionRequest(
        goal="style",
        trigger="ohwx",
        language="French",
        instruction="Name {trigger} in {language} for {goal} as {{json}}.\n",
    )
    assert instruction_for(request, kind="clip") == "Name ohwx in French for style as {json}."


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Name {subject}.", "{subject} is not known"),
        ("Name {}.", "{} is not known"),
        ("Name {trigger:>9}.", "not known"),
        ('Write {"a": 1}.', "not known"),
        ("Write {.", "braces"),
        ("Name {a} and {b}.", "{a} is not known; {b} is not known; it may"),
        ("Name {trigger}.", "--trigger was not given"),
        ("For {goal}.", "--goal was not given"),
        ("", "is empty"),
    ],
)
def test_braces_that_are_not_known_are_an_error_in_one_line(text, words):
    with pytest.raises(UserError, match="--instruction") as caught:
        fill(text, CaptionRequest())
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_second_try_asks_for_the_same_in_other_words():
    instruction = instruction_for(CaptionRequest(), kind="image")
    assert plainer(instruction) != instruction
    assert plainer(instruction).endswith(instruction)
    assert not refusal_in(plainer(instruction))


def test_a_longer_caption_may_have_more_tokens():
    by_length = [max_tokens(CaptionRequest(length=length)) for length in get_args(CaptionLength)]
    assert by_length == sorted(set(by_length))
    assert max_tokens(CaptionRequest(length="short", instruction="Write a poem.")) == by_length[-1]
    assert max_tokens(CaptionRequest(format="json", length="short")) > by_length[-1]
