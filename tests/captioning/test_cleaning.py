"""Tests for what is left of a model's answer."""

import json
import re
import unicodedata
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffsynth_lite.captioning.cleaning import (
    RULES,
    CaptionFormat,
    boilerplate_in,
    clean,
    refusal_in,
    with_exact_trigger,
)

FORMATS = get_args(CaptionFormat)
DIRTY = [
    # thinking
    ("<think>A cat? Yes.</think>A cat sleeps.", "A cat sleeps.", "thinking"),
    ("The user wants a caption.\n</think>\n\nA cat sleeps.", "A cat sleeps.", "thinking"),
    ("A cat sleeps.<think>Should I go on", "A cat sleeps.", "thinking"),
    # tokens
    ("A cat sleeps.<|im_end|>", "A cat sleeps.", "tokens"),
    ("A cat sleeps.<|im_end|>\n<|im_start|>user\nAnd now?", "A cat sleeps.", "tokens"),
    ("A cat sleeps.<end_of_turn>\n<eos>", "A cat sleeps.", "tokens"),
    ("A cat sleeps.<\uff5cend▁of▁sentence\uff5c>", "A cat sleeps.", "tokens"),
    # labels
    ("Here's a detailed caption for the image:\n\nA cat sleeps.", "A cat sleeps.", "labels"),
    ("Sure! Here is a caption for your image:\nA cat sleeps.", "A cat sleeps.", "labels"),
    ("Certainly! Below is the description you asked for: A cat sleeps.", "A cat sleeps.", "labels"),
    ("assistant\nA cat sleeps.", "A cat sleeps.", "labels"),
    ("<start_of_turn>model\nA cat sleeps.", "A cat sleeps.", "labels"),
    ("Beschreibung: Eine Katze schläft.", "Eine Katze schläft.", "labels"),
    ("描述\uff1a一只猫在睡觉。", "一只猫在睡觉。", "labels"),
    ('Natürlich! Hier ist die Beschreibung: "Eine Katze."', "Eine Katze.", "labels"),
    ("Bien sûr ! Voici une légende pour l'image : Un chat.", "Un chat.", "labels"),
    ("¡Claro! Aquí está la descripción: Un gato.", "Un gato.", "labels"),
    ("Ecco la descrizione: Un gatto.", "Un gatto.", "labels"),
    ("好的\uff0c这是图片的描述\uff1a一只猫。", "一只猫。", "labels"),
    # openings
    ("The image shows a cat on a sofa.", "A cat on a sofa.", "openings"),
    ("The provided photo clearly shows a cat.", "A cat.", "openings"),
    ("The image is a close-up of a cat.", "A close-up of a cat.", "openings"),
    ("In this image, we can see a cat.", "A cat.", "openings"),
    ("In the picture there is a cat on a sofa.", "A cat on a sofa.", "openings"),
    ("In the image, the cat sleeps.", "The cat sleeps.", "openings"),
    ("This is a photo of a cat.", "A cat.", "openings"),
    ("This is a black and white photo of a cat.", "A black and white photo of a cat.", "openings"),
    ("In this captivating image, a cat sleeps.", "A cat sleeps.", "openings"),
    ("This photo shows ohwx cat on a sofa.", "ohwx cat on a sofa.", "openings"),
    ("The video shows a cat that jumps.", "A cat that jumps.", "openings"),
    ("Das Bild zeigt eine Katze.", "Eine Katze.", "openings"),
    ("L\u2019image montre un chat.", "Un chat.", "openings"),
    ("La imagen muestra un gato.", "Un gato.", "openings"),
    ("这张图片展示了一只猫。", "一只猫。", "openings"),
    # markdown
    ("**A cat** sleeps on a *red* sofa.", "A cat sleeps on a red sofa.", "markdown"),
    ("```text\nA cat sleeps.\n```", "A cat sleeps.", "markdown"),
    ("# A sleepy cat\n\nA cat sleeps.", "A cat sleeps.", "markdown"),
    ("# A sleepy cat", "A sleepy cat", "markdown"),
    ("- a cat\n- a red sofa\n- soft light", "a cat, a red sofa, soft light", "markdown"),
    ("1. A cat sleeps.\n2. The sofa is red.", "A cat sleeps. The sofa is red.", "markdown"),
    ("A [cat](https://cats.example) sleeps.", "A cat sleeps.", "markdown"),
    ("| Subject | cat |\n|---|---|\n| Place | sofa |", "Subject, cat Place, sofa", "markdown"),
    ("A cat sleeps.\n\n---\n", "A cat sleeps.", "markdown"),
    # quotes
    ('"A cat sleeps."', "A cat sleeps.", "quotes"),
    ("「猫が寝ている。」", "猫が寝ている。", "quotes"),
    # closings
    ("A cat sleeps. Let me know if you need more!", "A cat sleeps.", "closings"),
    ("A cat sleeps. I hope this helps! Would you like another one?", "A cat sleeps.", "closings"),
    ("A cat sleeps. If you'd like, I can write a longer one.", "A cat sleeps.", "closings"),
    ("A cat sleeps. Overall, the image feels calm and cosy.", "A cat sleeps.", "closings"),
    ("A cat sleeps. The scene evokes a sense of peace.", "A cat sleeps.", "closings"),
    ("A cat sleeps. **Overall Impression:** Calm.", "A cat sleeps.", "closings"),
    ("A cat sleeps\n\n(Note: I left out its fur.)", "A cat sleeps", "closings"),
    ("Move the cat.\nExplanation: It moved.", "Move the cat.", "closings"),
    ("A woman reads. I'm sorry, but I can't identify her.", "A woman reads.", "closings"),
    # repetition
    (
        "A cat sleeps. The sofa is red. The sofa is red. The sofa is red.",
        "A cat sleeps. The sofa is red.",
        "repetition",
    ),
    ("A cat sleeps on a very very very very very very very", "A cat sleeps on a very", "repetition"),
    ("A cat sleeps. It is on and on and on and on and on and on", "A cat sleeps.", "repetition"),
    (
        "一只猫在睡觉。沙发是红色的。沙发是红色的。沙发是红色的。",
        "一只猫在睡觉。沙发是红色的。",
        "repetition",
    ),
    ("A cat sits sits sits sits sits sits sits a", "A cat sits a", "repetition"),
    (f"A cat {'sits on a mat ' * 9}under the", "A cat sits on a mat under the", "repetition"),
    # lines
    ("A cat sleeps.\n\nThe sofa is  red.", "A cat sleeps. The sofa is red.", "lines"),
]
SEVERAL = [
    (
        "<think>Hm.</think>Sure! Here is a caption:\n\n**Caption:** The image shows a cat.\n\n"
        "Let me know!<|im_end|>",
        "A cat.",
        ("thinking", "tokens", "markdown", "labels", "openings", "closings"),
    ),
    ('"The image shows a cat."', "A cat.", ("quotes", "openings")),
    ("The image shows a cat.\x00\x1b[31m Red.", "A cat. [31m Red.", ("openings", "lines")),
]
CLEAN = [
    "A cat sleeps on a red sofa.",
    "a photo of ohwx woman in a red dress, smiling, in front of a brick wall",
    'A sign that reads "I cannot" hangs over a door.',
    '"Open" is written on a sign over a door, and "Closed" below it.',
    "A woman's hat lies on a table. It is 3.5 metres wide, says Mr. Smith.",
    "An oil painting of a horse. The style is loose, and the light falls from the left.",
    "A man walks to the left, turns around and waves. The camera follows him and then tilts up.",
    "A very, very old house; ha ha ha is written on it.",
    "A scene of two dogs. One dog is brown. One dog is white.",
    "5 * 3 * 2 is written in chalk, and a_b_c below.",
    "<b>bold</b> & <script>alert(1)</script> is written on a screen.",
    "一只猫在红色沙发上睡觉。",
    "ผู้หญิงยิ้ม 👩‍👩‍👧 नमस्ते",
    "The image of a saint hangs over a bed.",
    "Model: a woman poses for a painter.",
    "Natürlich wirkendes Licht fällt auf eine Frau; hier ist es Abend.",
    "Voici un chat : il dort.",
]
TAGS = [
    "1girl, solo, long_hair, @_@, ^_^, smile, looking at viewer",
    "ohwx woman, red dress, brick wall, outdoors",
]
HOSTILE = (
    *("a", " ", "**", "*a", "`a", "[a", "](", "<think>", "<|a", "Caption: ", "\n- ", "a. ", "a b ", "的"),
    *("Let me know. ", "The image shows ", "\n|a|", "\n# a", "{", "\n", "a  b\t", "\x00"),
)
CAPTION = {
    "high_level_description": "A cat on a sofa.",
    "compositional_deconstruction": {
        "background": "A living room.",
        "elements": [
            {"type": "obj", "desc": "A grey cat."},
            {"type": "text", "text": "CAFÉ", "desc": "White letters."},
        ],
    },
}
COMPACT = json.dumps(CAPTION, ensure_ascii=False, separators=(",", ":"))


@pytest.mark.parametrize(("dirty", "expected", "rule"), DIRTY)
def test_an_answer_becomes_a_caption(dirty, expected, rule):
    cleaned = clean(dirty)
    assert cleaned.text == expected
    assert rule in cleaned.removed
    assert not cleaned.problem


@pytest.mark.parametrize(("dirty", "expected", "rules"), SEVERAL)
def test_several_rules_work_together(dirty, expected, rules):
    cleaned = clean(dirty)
    assert cleaned.text == expected
    assert set(rules) <= set(cleaned.removed)
    assert list(cleaned.removed) == [name for name in RULES if name in cleaned.removed]


@pytest.mark.parametrize(
    ("caption", "format"), [*((one, "prose") for one in CLEAN), *((one, "tags") for one in TAGS)]
)
def test_a_clean_caption_stays_as_it_is(caption, format):
    cleaned = clean(caption, format=format)
    assert (cleaned.text, cleaned.removed, cleaned.problem) == (caption, (), "")
    assert not boilerplate_in(caption)
    assert not refusal_in(caption)


@pytest.mark.parametrize(
    ("dirty", "expected"),
    [
        ("Tags: 1girl, solo, 1girl, Solo, smile.", "1girl, solo, smile"),
        ("- 1girl\n- solo\n- smile", "1girl, solo, smile"),
        ("1girl,solo,,\nsmile", "1girl, solo, smile"),
    ],
)
def test_tags_are_separated_by_commas_and_distinct(dirty, expected):
    assert clean(dirty, format="tags").text == expected
    assert clean(f"{expected}, smi", format="tags", is_unfinished=True).text == expected


@pytest.mark.parametrize(("dirty", "expected", "rule"), DIRTY)
def test_a_rule_that_is_kept_changes_nothing(dirty, expected, rule):
    cleaned = clean(dirty, kept=[rule])
    assert rule not in cleaned.removed
    assert clean(dirty, kept=list(RULES)).text == dirty.strip()


def test_each_rule_is_shown_by_an_answer():
    shown = {rule for _dirty, _expected, rule in DIRTY}
    assert shown == set(RULES) - {"unfinished"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A cat sleeps. The sofa is re", "A cat sleeps."),
        ("A cat sleeps. The sofa is red.", "A cat sleeps. The sofa is red."),
        ("A cat sleeps on a sofa, which is re", "A cat sleeps on a sofa"),
        ("一只猫在睡觉。沙发是", "一只猫在睡觉。"),
        ("A cat sleeps. Overall, the image is", "A cat sleeps."),
    ],
)
def test_an_unfinished_answer_loses_its_last_sentence(text, expected):
    assert clean(text, is_unfinished=True).text == expected
    assert clean(text, is_unfinished=True, kept=["unfinished", "closings"]).text == text


@pytest.mark.parametrize(
    ("caption", "expected"),
    [
        ("OHWX Woman stands, and ohwx woman smiles.", "ohwx woman stands, and ohwx woman smiles."),
        ("A woman sits.", "ohwx woman, a woman sits."),
        ("Anna sits.", "ohwx woman, Anna sits."),
        ("An ohwx womanly pose.", "ohwx woman, an ohwx womanly pose."),
    ],
)
def test_the_trigger_is_spelt_as_it_is_given_or_put_in_front(caption, expected):
    assert with_exact_trigger(caption, "ohwx woman") == expected


@pytest.mark.parametrize("text", ["", "  \n", "<think>I was still thinking", "<|im_end|>", "\x00"])
def test_an_answer_without_a_caption_has_a_reason(text):
    for format in FORMATS:
        cleaned = clean(text, format=format)
        assert cleaned.text == ""
        assert cleaned.problem


@pytest.mark.parametrize(
    "text",
    [
        "I cannot help with that.",
        "I can\u2019t describe people.",
        "I\u2019m sorry, but I cannot.",
        "I'm unable to describe this image.",
        "As an AI language model, I cannot see images.",
        "Unfortunately, I cannot view the image.",
        "I apologize, but this is not possible.",
        "There is no image attached.",
        "**I cannot help with that.**",
        '"I cannot help with that."',
        "Caption: I cannot help with that.",
        "<think>People.</think>I cannot help with that.",
        "Es tut mir leid, aber das geht nicht.",
        "抱歉, 我无法描述。",
        "The photo contains nudity, so I will not describe it.",
        "It is explicit: I'm unable to describe it.",
        "It is not possible for me to describe this.",
    ],
)
def test_a_refusal_is_found_before_and_after_cleaning(text):
    assert refusal_in(text)
    assert refusal_in(clean(text).text)
    assert boilerplate_in(text)


def test_a_refusal_in_a_second_sentence_is_found_before_cleaning_takes_it_away():
    assert refusal_in("This image is explicit. I can't describe it.")


@pytest.mark.parametrize(
    "text",
    [
        "A man holds a card with the words I'm sorry, but.",
        "I Can, a poster of two athletes.",
        "A poster reads 'I will not help you', in red.",
        "A woman reads. I'm sorry, but I can't identify her.",
    ],
)
def test_a_caption_with_the_words_of_a_refusal_is_none(text):
    assert refusal_in(text) == ""


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("The image shows a cat.", "The image shows"),
        ("Here is a caption: a cat.", "Here is a caption:"),
        ("A cat. Overall, the image is calm.", "Overall, the"),
        ("A cat.<|im_end|>", "<|im_end|>"),
        (f"I cannot {'describe ' * 9}", f"I cannot {'describe ' * 4}".strip()),
        ("<think>A cat.", "<think>"),
    ],
)
def test_the_words_of_a_captioner_are_named(text, phrase):
    assert boilerplate_in(text) == phrase


@pytest.mark.parametrize(
    "answer",
    [
        COMPACT,
        f"```json\n{json.dumps(CAPTION, indent=4)}\n```",
        f"Here is the JSON caption:\n{COMPACT}\nLet me know!",
        f"<think>{{}}</think>{COMPACT}<|im_end|>",
    ],
)
def test_json_is_written_without_white_space(answer):
    cleaned = clean(answer, format="json")
    assert cleaned.text == COMPACT
    assert json.loads(cleaned.text) == CAPTION
    assert not cleaned.problem


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("A cat sleeps.", "not JSON"),
        (COMPACT[:-1], "the answer is not JSON"),
        ("[" * 20_000 + "{}", "JSON"),
        ('{"a":' * 20_000 + "1" + "}" * 20_000, "not JSON"),
        ('{"a": ' + "1" * 9_000 + "}", "not JSON"),
        ("3", "the JSON is not one of Ideogram 4: all of it: "),
        ('{"high_level_description": 3}', "high_level_description"),
        (
            COMPACT.replace('"background"', '"back"'),
            "compositional_deconstruction.background: Field required",
        ),
        (COMPACT.replace('"elements"', '"parts"'), "elements"),
        (COMPACT.replace('"text":"CAFÉ",', ""), "elements.1.text.text: Field required"),
    ],
)
def test_json_that_is_no_caption_has_a_reason(answer, reason):
    cleaned = clean(answer, format="json")
    assert cleaned.text == ""
    assert reason in cleaned.problem
    assert "limit of tokens" in clean(COMPACT[:60], format="json", is_unfinished=True).problem


def test_escaped_control_characters_of_json_do_not_appear():
    answer = COMPACT.replace("CAFÉ", r"a\u0085b\u202ec\ud800d\u0007")
    text = clean(answer, format="json").text
    assert is_writable(text)
    assert json.loads(text)["compositional_deconstruction"]["elements"][1]["text"] == "a bcd\x07"


@pytest.mark.parametrize("unit", HOSTILE)
def test_ten_megabytes_become_no_more_than_a_long_caption(unit):
    answer = unit * (10_000_000 // len(unit))
    assert len(clean(answer, is_unfinished=True).text) <= 32_768
    assert all(len(clean(answer[:100_000], format=format).text) <= 32_768 for format in FORMATS)
    assert len(refusal_in(answer) + boilerplate_in(answer)) < 200


def is_writable(text):
    return not any(
        unicodedata.category(one) in ("Cc", "Cs") or one in "\u202e\u2066\ufeff\ufffe" for one in text
    ) and bool(text.encode("utf-8") or True)


PIECES = st.sampled_from(
    [piece for dirty, _expected, _rule in DIRTY for piece in re.findall(r"\s+|[\w']+|[^\w\s]+", dirty)]
    + [dirty for dirty, _expected, _rule in DIRTY]
)
TEXTS = st.one_of(
    st.text(st.characters(), max_size=200),
    st.lists(st.one_of(PIECES, st.text(max_size=3)), max_size=30).map("".join),
    st.lists(PIECES, max_size=30).map(" ".join),
)


@given(TEXTS, st.sampled_from(FORMATS), st.booleans())
def test_what_is_clean_is_cleaned_to_itself_and_never_longer_nor_with_control_characters(
    text, format, is_unfinished
):
    cleaned = clean(text, format=format, is_unfinished=is_unfinished)
    again = clean(cleaned.text, format=format)
    assert again.text == cleaned.text
    assert again.removed == ()
    assert len(cleaned.text) <= len(text)
    assert is_writable(cleaned.text)
    assert bool(cleaned.text) != bool(cleaned.problem)
    assert len(boilerplate_in(text)) <= 80


@given(TEXTS, st.sets(st.sampled_from(list(RULES))))
def test_whatever_is_kept_no_control_character_but_a_line_break_is_left(text, kept):
    cleaned = clean(text, kept=kept).text
    assert is_writable(cleaned.replace("\n", "").replace("\t", ""))
    assert len(cleaned) <= len(text)
