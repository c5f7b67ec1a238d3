"""This file finds what is wrong with captions, by their texts."""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from diffsynth_lite.captioning.cleaning import boilerplate_in, refusal_in
from diffsynth_lite.data.captions import CJK, json_object, trigger_pattern
from diffsynth_lite.training.encoding.phrases import CONSTANT, MIN_CAPTIONS, ConstantPhrase, constant_phrases

_WORD = re.compile(rf"[{CJK}]|[^\W{CJK}]+")
_IS_CJK = re.compile(f"[{CJK}]")
_JAPANESE = ("HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "CJK")
"""First words of the names of characters that Chinese and Japanese mix."""
_NUM_LOOKED_AT = 300
"""Characters of a caption that its script is known by."""
_FOREIGN = 0.1
"""Part of the letters of a text that a script of it has at least."""
_MOST_CHARACTERS = 8192
"""More than any text encoder reads."""
_MIN_EDITED = 4
"""Letters of a trigger that is recognized with one of them wrong: a shorter one is like many words."""


@dataclass(frozen=True, kw_only=True)
class CaptionLint:
    """What is odd about the captions of a source.

    Attributes:
        constant: the longest phrases first.
        remarks: kind of the oddity, to name of an item, to what it is.
    """

    constant: Sequence[ConstantPhrase] = ()
    remarks: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def lint(
    captions: Mapping[str, Sequence[str]], *, trigger: str = "", may_repeat: bool = False
) -> CaptionLint:
    """Read the captions of one source as they are written.

    Args:
        captions: of each item, by its name, with the trigger where they have it.
        trigger: where it is not given, the only constant word is taken for it.
        may_repeat: constant phrases are as they should be, as in instructions of one edit.
    """
    values = {text: json_object(text) for of_item in captions.values() for text in of_item}
    are_json = len(values) >= MIN_CAPTIONS // 2 and sum(map(bool, values.values())) > len(values) / 2
    texts = {text: (_texts_in(value) if value else text)[:_MOST_CHARACTERS] for text, value in values.items()}
    start = re.compile(rf"\A\s*{re.escape(trigger)}[\s,.:-]+" if trigger else r"\A", re.IGNORECASE)
    answers = {text: start.sub("", words) for text, words in texts.items()}
    phrases = [] if may_repeat else constant_phrases(list(texts.values()), trigger=trigger)
    misspelt = partial(_misspelt, trigger=trigger)
    if not trigger and len(phrases) == 1 and " " not in phrases[0].text:
        misspelt = partial(_like_the_constant_word, word=phrases[0].text)
        phrases = []
    usual = usual_script(list(answers.values()))
    kinds: dict[str, Callable[[str], str]] = {
        "misspelt_trigger": misspelt,
        "one_word": lambda text: "" if text.casefold() == trigger.casefold() else _one_word(text),
        "other_script": lambda text: _other_script(answers[text], usual=usual),
        "refusal": lambda text: _quoted("a refusal in place of a caption", refusal_in(answers[text])),
        "boilerplate": lambda text: _quoted("a phrase of captioners", boilerplate_in(answers[text])),
        "not_json": lambda text: "" if values[text] else _no_json(text, others_are=are_json),
    }
    remarks: dict[str, dict[str, str]] = {kind: {} for kind in kinds}
    for name, of_item in captions.items():
        for kind, examine in kinds.items():
            if remark := next(filter(None, map(examine, of_item)), ""):
                remarks[kind][name] = remark
    for name in remarks["refusal"]:
        remarks["boilerplate"].pop(name, None)
    return CaptionLint(constant=phrases, remarks=remarks)


def usual_script(texts: Sequence[str]) -> str:
    """The script that is in nearly all texts, Latin last: names are in it anywhere; empty where none is."""
    if len(texts) < MIN_CAPTIONS:
        return ""
    counts = Counter(
        script
        for letters in map(_scripts, texts)
        for script, number in letters.items()
        if number >= _FOREIGN * letters.total()
    )
    usual = [script for script, number in counts.items() if number > CONSTANT * len(texts)]
    return min(usual, key=lambda script: script == "LATIN", default="")


def _scripts(text: str) -> Counter[str]:
    """Letters of each script, by the first word of their names; of Latin where a text is ASCII."""
    if text.isascii():
        return Counter(LATIN=sum(map(str.isalpha, text[:_NUM_LOOKED_AT])))
    names = (unicodedata.name(one, "").partition(" ")[0] for one in text[:_NUM_LOOKED_AT] if one.isalpha())
    return Counter("CJK" if name in _JAPANESE else name for name in names)


def _other_script(text: str, *, usual: str) -> str:
    letters = _scripts(text)
    is_foreign = letters.total() > 2 and letters[usual] < _FOREIGN * letters.total()
    return "a caption in another script than the others" if usual and is_foreign else ""


def _one_word(text: str) -> str:
    words = _WORD.findall(text)
    is_one = len(words) == 1 or (len(words) < 4 and all(map(_IS_CJK.match, words)))
    # JSON that is cut off is remarked on as such.
    return f"a caption of one word: {text.strip()!r}" if is_one and text[0] != "{" else ""


def _misspelt(text: str, *, trigger: str) -> str:
    spelling = other_spelling(text[:_MOST_CHARACTERS], trigger) if trigger else ""
    return _quoted("another spelling of the trigger", spelling)


def _like_the_constant_word(text: str, *, word: str) -> str:
    """As for a trigger, but that the word may be one with other endings."""
    spelling = other_spelling(text[:_MOST_CHARACTERS].lower(), word)
    if not spelling or spelling.startswith(word[:-1]):
        return ""
    return f"{word!r}, which is in the other captions, is spelt {spelling!r}"


def other_spelling(text: str, trigger: str) -> str:
    """How a text spells the trigger where it does so only in another way; else empty.

    That is with other capitals (but for the first letter of a sentence), a hyphen or space more or less, or
    one letter wrong, missing, too many or swapped with the next where the trigger has at least four.
    """
    exact = [*re.finditer(trigger_pattern(trigger), text, re.IGNORECASE)]
    if exact:
        return "" if any(_is_as_usual(found, trigger) for found in exact) else exact[0].group()
    wanted, words = "".join(_letters(trigger)), [*_WORD.finditer(text)]
    letters, most = _letters(text), len(trigger.split()) + 2
    like, edited = [], []
    for start in range(len(words)):
        for end in range(start + 1, min(start + most, len(words)) + 1):
            run = "".join(letters[start:end])
            if run == wanted:
                like.append(text[words[start].start() : words[end - 1].end()])
            elif len(wanted) >= _MIN_EDITED and _is_edited(run, wanted):
                edited.append(text[words[start].start() : words[end - 1].end()])
    return next(iter([*like, *edited]), "")


def _is_as_usual(found: re.Match[str], trigger: str) -> bool:
    before, written = found.string[: found.start()].rstrip(), found.group()
    begins = not before or before[-1] in '.!?:\n"(-'
    return written == trigger or (begins and written[1:] == trigger[1:])


def _letters(text: str) -> list[str]:
    """The words of a text, which may be in either case and joined by underscores."""
    return [word.casefold().replace("_", "") for word in _WORD.findall(text)]


def _is_edited(one: str, other: str) -> bool:
    """Whether two words differ by one letter, or by two that are swapped."""
    if abs(len(one) - len(other)) > 1 or one == other:
        return False
    start = next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(min(one, other))
    )
    left, right = one[start:], other[start:]
    return (
        left[1:] == right[1:]
        or left[1:] == right
        or left == right[1:]
        or (left[:2] == right[1::-1] and left[2:] == right[2:])
    )


def _no_json(text: str, *, others_are: bool) -> str:
    """Why a text that is not a JSON object should be one; braces that weigh tags are as they should be."""
    if re.match(r"\{\s*[\"'}]|\{[^}]*$", text):
        return "JSON that cannot be parsed"
    return "not JSON, as the others are" if others_are else ""


def _texts_in(value: Any) -> str:
    """The texts in a JSON value, without its keys and what "type" an element is of."""
    if isinstance(value, dict):
        value = [part for key, part in value.items() if key != "type"]
    if isinstance(value, list):
        return "\n".join(filter(None, map(_texts_in, value)))
    return value if isinstance(value, str) else ""


def _quoted(what: str, phrase: str) -> str:
    return f"{what}: {phrase!r}" if phrase else ""
