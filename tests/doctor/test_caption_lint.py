"""What is found in captions: each defect that was planted, and nothing in good sets of several styles."""

from collections.abc import Sequence

import pytest
from caption_sets import CHINESE, CLEAN, GERMAN, JAPANESE, JSON, PROSE, TAGS

from diffsynth_lite.doctor.captions import CaptionLint, lint, other_spelling, usual_script


def linted(texts: Sequence[str], trigger: str = "", **settings: bool) -> CaptionLint:
    return lint({f"{place}.png": [text] for place, text in enumerate(texts)}, trigger=trigger, **settings)


def remarks(texts: Sequence[str], trigger: str = "") -> dict[str, dict[str, str]]:
    return {kind: dict(found) for kind, found in linted(texts, trigger).remarks.items() if found}


@pytest.mark.parametrize("name", CLEAN)
def test_good_captions_have_no_remark(name: str) -> None:
    texts, trigger = CLEAN[name]
    assert remarks(texts, trigger) == {}
    assert linted(texts, trigger).constant == []


@pytest.mark.parametrize(
    ("kind", "planted", "remark"),
    [
        ("misspelt_trigger", "An ohwx-woman on a bridge.", "another spelling of the trigger: 'ohwx-woman'"),
        ("misspelt_trigger", "ohxw woman on a bridge.", "another spelling of the trigger: 'ohxw woman'"),
        ("misspelt_trigger", "the OHWX Woman waves", "another spelling of the trigger: 'OHWX Woman'"),
        ("one_word", "woman", "a caption of one word: 'woman'"),
        ("one_word", "portrait.", "a caption of one word: 'portrait.'"),
        ("other_script", "木の下で本を読む女性", "a caption in another script than the others"),
        ("other_script", "Женщина на мосту", "a caption in another script than the others"),
        ("refusal", "I'm sorry, but I can't help with that.", None),
        (
            "boilerplate",
            "The image shows ohwx woman on a bridge.",
            "a phrase of captioners: 'The image shows'",
        ),
        ("boilerplate", "ohwx woman, The image shows her on a bridge.", None),
        ("not_json", '{"high_level_description": "ohwx woman', "JSON that cannot be parsed"),
        ("not_json", '{"a": ', "JSON that cannot be parsed"),
        ("not_json", "{'description': 'ohwx woman'}", "JSON that cannot be parsed"),
    ],
)
def test_what_is_wrong_with_a_caption_is_named(kind: str, planted: str, remark: str | None) -> None:
    found = remarks([*PROSE, planted], "ohwx woman")
    assert found.keys() == {kind}
    assert found[kind].keys() == {"12.png"}
    assert remark is None or found[kind]["12.png"] == remark


def test_a_caption_of_latin_letters_among_japanese_ones_is_in_another_script() -> None:
    assert remarks([*JAPANESE, "mirabel on a bridge"], "mirabel").keys() == {"other_script"}


def test_a_caption_that_is_not_json_among_others_that_are_is_named() -> None:
    planted = [*JSON, "ohwx woman drives a car", JSON[2][:-3]]
    assert remarks(planted, "ohwx woman") == {
        "not_json": {"8.png": "not JSON, as the others are", "9.png": "JSON that cannot be parsed"}
    }


def test_the_trigger_itself_is_a_caption_and_not_one_word() -> None:
    assert remarks([*PROSE, "ohwx"], "ohwx") == {}


def test_any_of_the_captions_of_an_item_is_remarked() -> None:
    found = lint({"a.png": ["a house by a lake", "house"], "b.png": ["a mill by a river"]})
    assert found.remarks["one_word"] == {"a.png": "a caption of one word: 'house'"}


def test_a_trigger_that_is_not_set_is_the_only_constant_word() -> None:
    misspelt = [PROSE[0].replace("ohwx", "ohxw"), *PROSE[1:]]
    assert remarks(misspelt) == {
        "misspelt_trigger": {"0.png": "'ohwx', which is in the other captions, is spelt 'ohxw'"}
    }


@pytest.mark.parametrize(
    ("trigger", "text", "spelling"),
    [
        ("ohwx woman", "a ohwxwoman walks", "ohwxwoman"),
        ("ohwx_woman", "an ohwx woman", "ohwx woman"),
        ("ohwxwoman", "an ohwx woman", "ohwx woman"),
        ("ohwx", "ohw runs", "ohw"),
        ("ohwx", "the ohwxx runs", "ohwxx"),
        ("ohwx", "Ohwx runs. Ohwx rests", ""),
        ("Mira", "mira runs", ""),
        ("sks", "the sky is blue", ""),
        ("ohwx", "there are oxen", ""),
        ("mirabel", "雪の中のmirabelさん", ""),
        ("mirabel", "雪の中のmirabell", "mirabell"),
    ],
)
def test_other_spellings_of_a_trigger(trigger: str, text: str, spelling: str) -> None:
    assert other_spelling(text, trigger) == spelling


def constant(texts: Sequence[str], trigger: str = "", **settings: bool) -> list[str]:
    return [phrase.text for phrase in linted(texts, trigger, **settings).constant]


@pytest.mark.parametrize("trigger", ["ohwx woman", "ohwx"])
def test_a_trait_in_most_captions_is_reported_once_and_as_a_whole(trigger: str) -> None:
    texts = [text.replace("ohwx woman", "ohwx woman with long blond hair and blue eyes") for text in PROSE]
    [phrase] = linted([*texts, *PROSE[:2]], trigger).constant
    assert (phrase.text, phrase.num_captions, phrase.num_all) == ("long blond hair and blue eyes", 12, 14)


def test_a_trait_before_the_subject_is_not_part_of_the_trigger() -> None:
    texts = [text.replace("ohwx woman", "ohwx freckled woman") for text in PROSE]
    assert constant(texts, "ohwx") == ["freckled"]


def test_traits_in_tags_and_other_scripts_are_found() -> None:
    tags = [f"{text}, brown_hair" for text in TAGS]
    assert constant(tags, "mirabel") == ["brown hair"]
    japanese = [text.replace("mirabel", "金髪のmirabel") for text in JAPANESE]
    assert constant(japanese, "mirabel") == ["金髪"]


def test_a_phrase_in_four_of_five_captions_is_not_constant() -> None:
    marked = [f"{text} Red shoes." for text in PROSE[:8]]
    assert constant([*marked, *PROSE[10:], "a cup"], "ohwx woman") == []
    assert constant([*marked, *PROSE[11:]], "ohwx woman") == ["red shoes"]


def test_the_parts_of_a_phrase_in_more_captions_are_not_reported() -> None:
    texts = [f"{text} Her hair is long and blond." for text in PROSE]
    assert constant([*texts, "ohwx woman, her hair in the wind"], "ohwx woman") == ["hair is long and blond"]


def test_seven_captions_are_too_few_and_equal_ones_count_once() -> None:
    assert constant([f"{text} Red shoes." for text in PROSE[:7]], "ohwx woman") == []
    assert constant(["ohwx woman in red shoes"] * 20, "ohwx woman") == []


def test_the_instruction_of_an_edit_may_be_the_same() -> None:
    edits = [f"make it a pencil drawing of {text}" for text in PROSE]
    assert constant(edits) == ["make it a pencil", "ohwx"]
    assert constant(edits, may_repeat=True) == []


def test_a_long_text_in_most_captions_is_one_phrase() -> None:
    ending = " ".join(f"word{number}" for number in range(60))
    assert constant([f"{text} {ending}" for text in PROSE], "ohwx woman") == [ending]


def test_a_set_in_two_scripts_has_no_usual_one() -> None:
    assert remarks([*CHINESE, *GERMAN]) == {}
    assert usual_script([*CHINESE, *GERMAN]) == usual_script(GERMAN[:7]) == ""
    assert (usual_script(JAPANESE), usual_script(GERMAN)) == ("CJK", "LATIN")
