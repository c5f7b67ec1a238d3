"""This file finds the phrases that most captions of a data set have in common."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from diffsynth_lite.data.captions import CJK, trigger_pattern
from diffsynth_lite.media import evenly_spread

CONSTANT = 0.8
"""Part of the captions that a constant phrase is in more of."""
MIN_CAPTIONS = 8
"""Different captions that have something in common by more than chance."""
_FEW_WORDS = 30
"""In captions of fewer words one constant word is a trait; longer ones share words of any language."""
_MOST_CAPTIONS, _MOST_WORDS = 1000, 300
"""Captions that are compared, evenly spread, and their words, which is more than most encoders read."""
_LONGEST_RUN = 8
_Run = tuple[str, ...]
_IS_CJK = re.compile(f"[{CJK}]")
_BETWEEN_CJK = re.compile(f"(?<=[{CJK}]) (?=[{CJK}])")
_TOKEN = re.compile(rf"[{CJK}]|[^\W{CJK}]+(?:['\u2019-][^\W{CJK}]+)*|[^\w\s]+|\n")
_TAG_WORD = re.compile(r"[^\s.(){}\[\]:]+")
_COMMA = re.compile("[,\u3001\uff0c]")
_SUBJECT_WORDS = """
woman man girl boy person people lady guy male female child kid baby human character dog cat object subject
1girl 1boy 1other solo frau mann femme homme mujer hombre donna uomo mulher homem
"""
_SENTENCE_WORDS = """
a an the this that these those it its it's there here he she his her hers him they their them who which
whose is are was be been being has have having and or but with without of in on at to into onto from by for
as over under above below behind between near next while against around across along through up down
out off towards toward about very some one two no not also more most appears appear seen visible shown
showing shows depicts depicting featuring features wearing wears standing stands sitting sits looking looks
look viewer camera background foreground front back side left right middle center centre top bottom scene
view shot close closeup close-up image photo photograph picture portrait photography painting drawing
illustration artwork video clip frame
der die das den dem des ein eine einer einem einen und oder mit ohne von vom im am auf aus bei zu zum zur vor
hinter neben unter über ist sind sie er es ihr ihre sein seine foto bild hintergrund
un une le la les et ou avec sans de du dans sur sous est sont il elle au aux
el los las una y o con sin en son que se su imagen fondo uno gli lo della del di nel nella e è sfondo
um uma com sem da do na no ao fundo
"""
"""What sentences are made of, and what any captioner writes about any image, in some languages."""
_QUALITY_WORDS = """
masterpiece best amazing good great high normal quality score highres absurdres newest recent safe sensitive
general rating focus
"""
_SUBJECTS = frozenset(_SUBJECT_WORDS.split())
_STOPS = _SUBJECTS.union(_SENTENCE_WORDS.split(), _QUALITY_WORDS.split())
_CJK_STOPS = re.compile(
    "[\u3040-\u309f]+|女性|男性|女人|男人|女孩|男孩|女子|男子|少女|少年|人物|照片|写真|画像|图片|圖片|背景|一个|一個|一位|一名|"
    "一张|一張|一只|一隻|カメラ|这|這|图|圖|穿着|穿著|站在|坐在|看着|看著|正在|[她他它的在和与與着著了是有一中上下里裡]"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConstantPhrase:
    """Words that most captions have in common besides the trigger.

    Attributes:
        num_captions: different captions that have it, of ``num_all``.
    """

    text: str
    num_captions: int
    num_all: int


def constant_phrases(texts: Sequence[str], *, trigger: str = "") -> list[ConstantPhrase]:
    """Phrases in more than 80 % of the different texts, the longest ones and not their parts.

    A phrase has two words at least that mean something on their own, so not "of the woman in": articles,
    prepositions, and words for the subject and the image do not count. Where texts are short, or are lists of
    tags, one such word or tag is enough. Words that follow the trigger directly are its class.
    """
    distinct = list(dict.fromkeys(texts))
    if len(distinct) < MIN_CAPTIONS:
        return []
    distinct = evenly_spread(distinct, _MOST_CAPTIONS)
    are_tags = sum(map(_is_tags, distinct)) > len(distinct) / 2
    lines = [(_tags if are_tags else _words)(text, trigger)[:_MOST_WORDS] for text in distinct]
    least_weight = 1.0 if are_tags or median(map(_weight, lines)) <= _FEW_WORDS else 2.0
    common = _common_runs(lines, CONSTANT * len(distinct))
    kept: dict[str, int] = {}
    for run, number in _chained(common):
        places = [place for place, word in enumerate(run) if not _means_nothing(word)]
        phrase = run[places[0] : places[-1] + 1] if places else ()
        text = f"|{'|'.join(phrase)}|"
        if _weight(phrase) >= least_weight and not any(text in longer for longer in kept):
            kept[text] = common.get(phrase, number)
    return [
        ConstantPhrase(
            text=_BETWEEN_CJK.sub("", text.strip("|").replace("|", " ")),
            num_captions=number,
            num_all=len(distinct),
        )
        for text, number in kept.items()
    ]


def _common_runs(lines: Sequence[Sequence[str]], most: float) -> dict[_Run, int]:
    """Runs of up to 8 words in more than ``most`` of the lines, with the number of lines, in their order.

    None spans a break (""). A run is only looked for where its parts are common.
    """
    found: dict[_Run, int] = {}
    starts = [[place for place, word in enumerate(words) if word] for words in lines]
    for size in range(1, _LONGEST_RUN + 1):
        runs = [
            {place: tuple(words[place : place + size]) for place in places}
            for words, places in zip(lines, starts, strict=True)
        ]
        counts = Counter(run for of_line in runs for run in dict.fromkeys(of_line.values()))
        common = {run: number for run, number in counts.items() if number > most}
        found |= common
        going = [{place for place, run in of_line.items() if run in common} for of_line in runs]
        starts = [sorted(place for place in places if place + 1 in places) for places in going]
    return found


def _chained(common: Mapping[_Run, int]) -> list[tuple[_Run, int]]:
    """The runs, the longest first; of the longest those that go on from one another are one."""
    chained: list[tuple[_Run, int]] = []
    for run, number in sorted(common.items(), key=lambda entry: -len(entry[0])):
        before, least = chained[-1] if chained else ((), 0)
        if len(run) == _LONGEST_RUN and before[1 - len(run) :] == run[:-1]:
            chained[-1] = ((*before, run[-1]), min(number, least))
        else:
            chained.append((run, number))
    return chained


def _words(text: str, trigger: str) -> list[str]:
    """Words in small letters, one a character where no spaces are between words; "" where a clause ends."""
    text = _without_trigger(text, trigger).lower().replace("_", " ")
    if _IS_CJK.search(text):
        text = _CJK_STOPS.sub(" . ", text)
    return [token if token[0].isalnum() else "" for token in _TOKEN.findall(text)]


def _is_tags(text: str) -> bool:
    """Whether a text is a list of tags and not sentences."""
    parts = [part for part in _COMMA.split(text) if part.strip()]
    return len(parts) > 3 and len(text.split()) <= 2.5 * len(parts) and not text.rstrip().endswith(".")


def _tags(text: str, trigger: str) -> list[str]:
    """The tags, with a break after each."""
    parts = _COMMA.split(_without_trigger(text, trigger).lower().replace("_", " "))
    return [word for part in parts for word in (" ".join(_TAG_WORD.findall(part)), "")]


def _without_trigger(text: str, trigger: str) -> str:
    """The text with breaks in place of the trigger and of its class: two words at most that follow directly.

    If one of them is a known word for the subject, as in "ohwx blond woman", the others do not belong to it.
    """
    if not trigger:
        return text

    def rest(found: re.Match[str]) -> str:
        words = found[1].lower().split()
        ends = next((place for place, word in enumerate(words) if word in _STOPS), len(words))
        stays = ends < len(words) and words[ends] in _SUBJECTS
        return f" . {' '.join(words if stays else words[ends:])}"

    following = rf"((?:[ \t]+[^\W\d_{CJK}]+){{0,3}})"
    return re.sub(trigger_pattern(trigger) + following, rest, text, flags=re.IGNORECASE)


def _weight(words: Sequence[str]) -> float:
    """Words that mean something; two characters of a script without spaces are about a word."""
    meaning = [word for word in words if not _means_nothing(word)]
    return sum(0.5 if _IS_CJK.fullmatch(word) else 1 for word in meaning)


def _means_nothing(word: str) -> bool:
    word = word if word.isascii() else _CJK_STOPS.sub(" ", word)
    return all(part in _STOPS or part.isdigit() for part in word.split())
