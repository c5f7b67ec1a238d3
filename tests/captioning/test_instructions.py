"""Tests for what a model is asked to write."""

import itertools
import json
from typing import get_args

import pytest

from diffsynth_lite.captioning.cleaning import CaptionFormat, clean, refusal_in
from diffsynth_lite.captioning.instructions import (
    CaptionLength,
    CaptionRequest,
    fill,
    instruction_for,
    max_tokens,
    plainer,
)
from diffsynth_lite.errors import UserError

VALUES = {"trigger": "ohwx", "language": "French", "goal": ""}
KINDS = ({}, {"is_clip": True}, {"num_inputs": 1}, {"num_inputs": 2})


def test_each_request_has_an_instruction_of_its_own():
    goals = (None, "likeness", "style", "motion")
    instructions = [
        instruction_for(CaptionRequest(goal=goal, format=format, length=length), is_clip=True)
        for goal, format, length in itertools.product(goals, get_args(CaptionFormat), get_args(CaptionLength))
    ]
    assert len(set(instructions)) == len(instructions)
    for instruction in instructions:
        assert instruction.startswith("The images are frames of one video clip, in their order. Write a ")
        assert instruction.endswith("Answer with the caption only.")
        assert "  " not in instruction
        assert "Write in English." in instruction
        assert ("{" in instruction) == ("high_level_description" in instruction)


@pytest.mark.parametrize(
    ("settings", "kind", "words", "absent"),
    [
        ({"goal": "likeness"}, {}, ['"a woman"', "Never mention", "hair", "pose", "light"], ["ohwx"]),
        ({"goal": "likeness", "trigger": "ohwx {x}"}, {}, ['"ohwx {x}"', "Never mention"], ['"a woman"']),
        ({"trigger": "ohwx"}, {}, ["the medium"], ["ohwx"]),
        ({"goal": "style", "trigger": "ohwx"}, {}, ["no medium"], ["ohwx", "the medium"]),
        ({"goal": "motion"}, {"is_clip": True}, ["camera", "frames of one video"], ["the medium"]),
        ({"goal": "motion"}, {}, ["the medium"], ["camera"]),
        (
            {"goal": "edit", "trigger": "ohwx"},
            {"num_inputs": 1},
            ["The second image", "Replace", "Use at most 60 words"],
            ["ohwx", "Begin with what is shown", "sentences"],
        ),
        ({"goal": "edit"}, {"num_inputs": 2}, ["first 2 images", "image 1, image 2"], []),
        ({"format": "json", "trigger": "ohwx"}, {}, ['Begin the high_level_description with "ohwx".'], []),
        ({"language": "German", "length": "long"}, {}, ["Write in German.", "150 words"], []),
    ],
)
def test_an_instruction_fits_its_goal_and_its_item(settings, kind, words, absent):
    instruction = instruction_for(CaptionRequest(**settings), **kind)
    assert [word for word in words if word not in instruction] == []
    assert [word for word in absent if word in instruction] == []


def test_the_json_that_is_asked_for_is_the_json_that_cleaning_takes():
    instruction = instruction_for(CaptionRequest(format="json"))
    example = instruction[instruction.index("{") : instruction.rindex("}") + 1]
    assert clean(example, format="json").text == json.dumps(json.loads(example), separators=(",", ":"))


@pytest.mark.parametrize("kind", KINDS)
def test_an_instruction_of_ones_own_replaces_all_of_ours(kind):
    own = fill("Name {trigger} in {language} as {{json}}.\n", VALUES, where="")
    assert own == "Name ohwx in French as {json}."
    assert instruction_for(CaptionRequest(goal="style", instruction=own), **kind) == own


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "Name {subject}.",
            "{subject} is not known; it may have {trigger}, {language}, {goal}, and {{ and }}",
        ),
        ("Name {}.", "{} is not known"),
        ("Name {trigger:>9}.", "not known"),
        ('Write {"a": 1}.', "not known"),
        ("Write {.", "braces"),
        ("Name {a} and {b}.", "{a} is not known; {b} is not known; it may"),
        ("For {goal}.", "--goal was not given"),
        ("", "is empty"),
    ],
)
def test_braces_that_are_not_known_are_an_error_in_one_line(text, words):
    with pytest.raises(UserError, match=r"^--instruction my\.txt: ") as caught:
        fill(text, VALUES, where="--instruction my.txt")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_second_try_asks_for_the_same_in_other_words():
    assert plainer("Describe it.") != "Describe it."
    assert plainer("Describe it.").endswith("Describe it.")
    assert not refusal_in(plainer("Describe it."))


def test_a_longer_caption_may_have_more_tokens():
    by_length = [max_tokens(CaptionRequest(length=length)) for length in get_args(CaptionLength)]
    assert by_length == sorted(set(by_length))
    assert max_tokens(CaptionRequest(length="short", instruction="Write a poem.")) == by_length[-1]
    assert max_tokens(CaptionRequest(format="json", length="short")) > by_length[-1]
