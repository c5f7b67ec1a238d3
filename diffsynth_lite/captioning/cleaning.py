"""This file turns the answer of a model into a caption, by named rules that can be switched off.

The phrases are English, with the most common ones of some other languages.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationError

from diffsynth_lite.data.captions import compact_json, has_trigger, trigger_pattern, with_trigger
from diffsynth_lite.files import parse_json

CaptionFormat = Literal["prose", "tags", "json"]

RULES: Mapping[str, str] = {
    "thinking": "what a model thinks before it answers, such as between <think> and </think>",
    "tokens": "special tokens, such as <|im_end|>, and what follows the end of the answer",
    "markdown": "the marks of bold text, headings, lists, code and tables",
    "labels": "what announces the caption, such as 'Sure! Here is a caption:'",
    "quotes": "quotation marks around all of it",
    "openings": "openings such as 'The image shows' and 'In this image, we see'",
    "closings": "offers, apologies and judgements at the end, such as 'Overall, the image feels calm.'",
    "repetition": "an end that repeats itself over and over, and tags that were named before",
    "unfinished": "the last sentence or tag where the limit of tokens ended it",
    "lines": "line breaks and repeated spaces",
}
"""What each rule removes, in their order. Control characters are always removed."""

_MOST_CHARACTERS = 32_768
_MOST_ROUNDS = 20
_LONGEST_PERIOD = 150  # words
_RUN = re.compile(r"\b((?:\S{1,40}\s{1,8}){1,8}?)\1{5,}")
_LONGEST_PHRASE = 80  # characters that are named as boilerplate


@dataclass(frozen=True, kw_only=True, slots=True)
class Cleaned:
    """What is left of an answer.

    Attributes:
        text: the caption; empty where there is a problem.
        removed: names of the rules that changed it, in the order of ``RULES``.
        cut: what was cut from its end, as a text encoder would not read it.
        problem: why it is not a caption; empty where it is one.
    """

    text: str = ""
    removed: tuple[str, ...] = ()
    cut: str = ""
    problem: str = ""


def clean(
    text: str, *, format: CaptionFormat = "prose", kept: Collection[str] = (), is_unfinished: bool = False
) -> Cleaned:
    """The caption in an answer. It is never longer, and what is clean stays as it is.

    A refusal is cleaned like any other answer; :func:`refusal_in` finds it.

    Args:
        text: of any length; what is past 32,768 characters after the thinking is not read.
        kept: names of rules that are not applied.
        is_unfinished: whether the limit of tokens ended the answer.
    """
    removed: set[str] = set()

    def apply(text: str, *names: str) -> str:
        for name in names:
            if name not in kept and (changed := _RULES[name](text, format)) != text:
                removed.add(name)
                text = changed
        return text.strip()

    def result(text: str, problem: str = "") -> Cleaned:
        return Cleaned(text=text, removed=tuple(filter(removed.__contains__, RULES)), problem=problem)

    text = _without_control(apply(text, "thinking")[: 2 * _MOST_CHARACTERS])[:_MOST_CHARACTERS].strip()
    for is_last in (False, True):
        for _round in range(_MOST_ROUNDS):
            if (changed := apply(text, *_REPEATED[format])) == text:
                break
            text = changed
        else:
            return result("", "the answer is not a caption")
        if is_unfinished and not is_last and format != "json":
            text = apply(text, "unfinished")
    if text and format == "json":
        return result(*_compact(text, is_unfinished))
    return result(text, "" if text else "nothing of the answer is a caption")


def refusal_in(text: str) -> str:
    """The words by which an answer refuses to be a caption; empty where it does not.

    Only the beginning counts: a caption may name a sign that reads "I cannot".
    """
    text = _without_thinking(text)[:_MOST_CHARACTERS]
    start = _without_quotes(_without_labels(_without_tokens(text).lstrip("*#>_ \n\t")))
    return _phrase(_REFUSAL.match(start))


def with_exact_trigger(caption: str, trigger: str) -> str:
    """The caption with the trigger as it is given: it replaces one in other capitals, or is put in front.

    What is then no longer the beginning has no capital letter any more, if it is an article or a number.
    """
    if has_trigger(caption, trigger):
        return re.sub(trigger_pattern(trigger), lambda _: trigger, caption, flags=re.IGNORECASE)
    continued = caption[:1].lower() + caption[1:]
    return with_trigger(continued if _ARTICLE.match(continued) else caption, trigger)


def boilerplate_in(text: str) -> str:
    """Words that a captioner, and not a person, writes around a caption; empty where there are none."""
    text = _without_control(text[:_MOST_CHARACTERS]).strip()
    if refusal := refusal_in(text):
        return refusal
    for pattern in (_THINKING, _TOKEN):
        if found := pattern.search(text):
            return _phrase(found)
    for pattern in (_LABELS, _OPENING):
        if found := pattern.match(text):
            return _phrase(found)
    last = text[_sentence_starts(text)[-1] :] if text else ""
    return _phrase(_CLOSING.match(last))


def _phrase(found: re.Match[str] | None) -> str:
    if not found:
        return ""
    text, is_cut = found.group(), found.string[found.end() : found.end() + 1].isalnum()
    return shortened(text.rpartition(" ")[0] or text if is_cut else text, _LONGEST_PHRASE)


def shortened(text: str, most: int) -> str:
    """Text on one line of up to so many characters, cut between words where it has some."""
    text = _one_line(text)
    return text if len(text) <= most else text[:most].rpartition(" ")[0] or text[:most]


def _pattern(*alternatives: str, after: str = "") -> re.Pattern[str]:
    """Any of them, in either case and with either apostrophe."""
    alternatives_of_both = "|".join(alternatives).replace("'", "['\u2019]")
    return re.compile(f"(?:{alternatives_of_both}){after}", re.IGNORECASE)


# All are bounded, or stop at the first character that cannot continue them: an answer may be hostile.
_THINKING = re.compile(r"</?(?:think|thinking|thought|reasoning)>|\[/?THINK\]", re.IGNORECASE)
_TOKEN = re.compile(
    r"<[|\uff5c][^<>|\uff5c\n]{1,40}[|\uff5c]?>|<[^<>|\uff5c\n]{1,40}[|\uff5c]>|</?s>|\[/?INST\]"
    r"|</?(?:eos|bos|pad|unk|image|video|unused\d{1,3}|start_of_turn|end_of_turn|end_of_utterance)>"
)
_END_TOKEN = re.compile(
    r"<[|\uff5c](?:im_end|endoftext|eot_id|end|end[_▁]of[_▁](?:text|sentence))[|\uff5c]>|</s>|<eos>|<end_of_\w{4,9}>"
)

_IMAGE = r"(?:image|picture|photo|photograph|video clip|video|clip|footage|scene|frame|shot|screenshot)"
_GIVEN = (
    r"(?:(?:provided|given|attached|uploaded|entire|overall|beautiful|captivating|charming|dramatic|dynamic"
    r"|evocative|intimate|serene|striking|stunning|vibrant|whimsical) )?"
)
_SHOWS = (
    r"(?:clearly |also |prominently |primarily )?(?:shows|depicts|displays|features|captures|portrays"
    r"|presents|illustrates|showcases|is (?:of|showing|depicting)|is(?= an? ))(?! that | how | what )"
)
_SEE = r"(?:we|you|one|i) (?:can |could )?(?:clearly )?see"
_THERE = r"there (?:is|are)(?= (?:an?|one|two|three|several) )"
_PICTURED = rf"(?:{_IMAGE}|painting|drawing|illustration|rendering|render|portrait|selfie|close-up)"
_OPENING = _pattern(
    rf"(?:in|within) (?:this|the) {_GIVEN}{_IMAGE}(?:[,:] ?(?:(?:{_SEE}|{_THERE}) )?| {_SEE} | {_THERE} "
    r"| (?=(?:an?|the|there) ))",
    rf"(?:the|this) {_GIVEN}{_IMAGE} {_SHOWS} ",
    rf"{_SEE} ",
    rf"this is an? (?:close-up )?{_IMAGE} (?:of|showing|depicting|that shows) ",
    rf"this is (?=an? (?:[\w-]{{1,20}} ){{0,5}}{_PICTURED}\b)",
    r"das (?:bild|foto|video) zeigt ",
    r"(?:l'image|cette image|la photo|cette photo|la vidéo) (?:montre|représente) ",
    r"(?:la|esta) (?:imagen|foto) muestra ",
    r"l'immagine (?:mostra|raffigura) ",
    r"(?:a|esta) imagem mostra ",
    r"(?:这|這)(?:张|張|幅)(?:图片|圖片|照片|图像|图)(?:展示了|显示了|描绘了)",
)
_ARTICLE = re.compile(
    r"(?:an?|the|one|two|three|four|five|several|some|many|people|there"
    r"|eine?|eine[mnr]|der|die|das|den|une?|une|des|les?|la|una|uno|el|los|las|um|uma|il|lo) "
)
_KIND = r"(?:caption|description|tags?|prompt|instruction|answer|output|response|summary|json)"
_QUALITY = r"(?:(?:image|video|detailed|short|brief|final|training|motion|edit|suggested|concise) ){0,2}"
_KIND_ELSEWHERE = (
    r"(?:描述|标题|標題|说明|キャプション|beschreibung|bildbeschreibung|bildunterschrift|légende|descripción|leyenda"
    r"|descrizione|didascalia|descrição|legenda)"
)
_LABELS = _pattern(
    r"(?:sure(?: thing)?|certainly|of course|absolutely|okay|ok|got it)[!.,]+\s*",
    rf"(?:here(?:'s| is| are)|below is|this is)\b[^\n:.]{{0,60}}\b{_KIND}\b[^\n:.]{{0,60}}:\s*",
    rf"(?:the )?{_QUALITY}{_KIND}(?: \d)?\s{{0,3}}[:\uff1a]\s*",
    r"(?:assistant\s{0,3}[:\n]|model\n)\s*",
    rf"{_KIND_ELSEWHERE}\s{{0,3}}[:\uff1a]\s*",
    r"¡?(?:natürlich|selbstverständlich|gern|gerne|bien sûr|certainement|claro|por supuesto|certo|certamente"
    r"|com certeza|当然|當然|好的)\s?[!.,\uff01\uff0c。]+\s*",
    rf"(?:hier (?:ist|sind|kommt)|voici|voilà|aquí (?:está|tienes|tiene)|ecco|aqui está|这是|以下是)"
    rf"[^\n:\uff1a.]{{0,60}}(?:{_KIND_ELSEWHERE}|description)[^\n:\uff1a.]{{0,60}}[:\uff1a]\s*",
    after="+",
)
_MOOD = r"(?:mood|atmosphere|style|tone|composition|effect|impression|aesthetic|feeling|vibe|ambiance)"
_CLOSING = _pattern(
    r"(?:please )?(?:let me know|feel free to)\b",
    r"if you(?:'d like|'d prefer| need| want| would like| have any)\b[^\n]{0,100}\b(?:i|me|let|ask)\b",
    r"(?:i hope (?:this|that|it) (?:helps|is|meets|works)|hope (?:this|that|it) helps)\b",
    r"(?:would you like|do you want|is there anything)\b",
    r"(?:overall|in summary|in conclusion|in essence|all in all|altogether),? (?:the|this|it)\b",
    r"overall [a-z]{4,12}:",
    rf"(?:the|its) overall {_MOOD}\b",
    rf"(?:the|this) (?:{_IMAGE}|{_MOOD})[^\n]{{0,60}}? (?:evok|convey|exud|creat|suggest)\w{{1,3}} "
    rf"[^\n]{{0,40}}?\b(?:sense|{_MOOD})\b",
    r"(?:i(?:'m| am) (?:sorry|unable)|i (?:cannot|can't|can not)|(?:please )?note that i)\b",
)
_REMARK = re.compile(r"\n\(?(?:note|explanation|reasoning|disclaimer)s? ?:", re.IGNORECASE)
_REFUSAL = _pattern(
    r"(?:i(?:'m| am) (?:(?:very|really|so|truly|terribly) )?sorry|sorry)(?=[,.!:;]| but| i)[^\n]{0,40}",
    r"(?:my apologies|i apologi[sz]e)\b[^\n]{0,40}",
    r"(?:unfortunately,? )?(?:i|we) (?:cannot|can't|can not|could not|couldn't|won't|will not"
    r"|am (?:not able|unable|not comfortable)|must decline|have to decline|decline to"
    r"|do(?: not|n't) (?:feel comfortable|have (?:the ability|access)|see (?:an|any)))\b[^\n]{0,40}",
    r"i'm (?:unable|not able|not comfortable)\b[^\n]{0,40}",
    r"[^\n\"“„«]{0,150}?(?<!')\bi(?:'m| am)? (?:will not|won't|cannot|can't|can not|unable to|not able to"
    r"|decline to|must decline to) (?:describe|caption|comply|assist|help)\b[^\n]{0,40}",
    r"it(?:'s| is) (?:not possible|impossible) (?:for me )?to (?:describe|caption)\b[^\n]{0,40}",
    r"as an? (?:ai|artificial intelligence|language model|large language model)\b[^\n]{0,40}",
    r"(?:no image (?:was|is|has been)|there is no image|you (?:have not|haven't|did not|didn't))"
    r" (?:provided|attached|uploaded|included|provide|attach|upload|include)\b",
    r"please (?:provide|upload|attach|share) (?:the|an|your) image\b",
    r"es tut mir leid|ich kann (?:leider|nicht|keine|das bild|dieses bild)\b",
    r"(?:je suis désolé|désolé|je ne peux pas|lo siento|no puedo|desculpe|não posso|mi dispiace|non posso)\b",
    r"抱歉|很抱歉|对不起|我无法|我不能|申し訳|すみませんが",
)
_SENTENCE_END = re.compile(r"[.!?…]['\"”\u2019»)\]*]{0,4}(?=\s)|[。\uff01\uff1f]['\"”\u2019」』]{0,4}")
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\s\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")
_UNSEEN = "\u200b\u2060\ufeff\ufffe\uffff\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
_PRINTABLE: dict[int, str | None] = {
    **dict.fromkeys([*range(32), *range(127, 160)], " "),
    **dict.fromkeys([*range(0xD800, 0xE000), *map(ord, _UNSEEN)]),
    **dict.fromkeys(map(ord, "\n\r\x85\u2028\u2029"), "\n"),
    ord("\t"): "\t",
}
_EDGE = ".,;:!?\"'()*。\uff0c"
_QUOTES = ('""', "''", "“”", "\u2018\u2019", "«»", "»«", "„“", "「」", "『』", "``")


def _without_control(text: str) -> str:
    """Control characters become spaces; marks that turn the direction of text, and halves of pairs, go."""
    return text.replace("\r\n", "\n").translate(_PRINTABLE)


def _without_thinking(text: str) -> str:
    """What follows the last end of thinking; what precedes a thought that was not finished."""
    marks = list(_THINKING.finditer(text))
    ends = [mark for mark in marks if "/" in mark.group()]
    start = ends[-1].end() if ends else 0
    unfinished = [mark.start() for mark in marks if mark.start() >= start]
    return text[start : unfinished[0] if unfinished else None]


def _without_tokens(text: str) -> str:
    text = text.lstrip()
    while (found := _TOKEN.match(text)) is not None:
        text = text[found.end() :].lstrip()
    if (end := _END_TOKEN.search(text)) is not None:
        text = text[: end.start()]
    return _TOKEN.sub(" ", text)


_LINE_MARKS = re.compile(r"^[ \t]{0,20}(?:>[ \t]?|(?:[-*+•]|\d{1,2}[.)])[ \t]+)", re.MULTILINE)
_RULERS = re.compile(r"^[ \t]*(?:```[\w-]{0,20}|[-*_]{3,}|\|?[ \t]*:?-{2,}[-:| \t]*)[ \t]*$\n?", re.MULTILINE)
_HEADINGS = re.compile(r"^#{1,6}[ \t]+[^\n]*$\n?", re.MULTILINE)
_ROWS = re.compile(r"^[ \t]*\|(.*)\|[ \t]*$", re.MULTILINE)
_INLINE = (
    re.compile(r"\*\*([^*\n]+)\*\*"),
    re.compile(r"(?<!\w)__([^_\n]+)__(?!\w)"),
    re.compile(r"`([^`\n]+)`"),
    re.compile(r"!?\[([^\]\[\n]+)\]\([^()\s]+\)"),
)
_ITALICS = re.compile(r"(?<![\w*])\*(?![\s*])([^*\n]*[^*\s])\*(?![\w*])")


def _without_markdown(text: str, format: CaptionFormat) -> str:
    for pattern in _INLINE if format == "tags" else (*_INLINE, _ITALICS):
        text = pattern.sub(r"\1", text)
    text = _HEADINGS.sub("", text).strip() or re.sub(r"^#{1,6}[ \t]+", "", text)
    text = _ROWS.sub(lambda row: ", ".join(row[1].replace("|", " ").split("  ")), _RULERS.sub("", text))
    lines: list[str] = []
    for line in text.split("\n"):
        item = _LINE_MARKS.sub("", line)
        if item != line and lines and lines[-1].strip() and lines[-1].rstrip()[-1] not in _EDGE:
            lines[-1] += ","
        lines.append(item)
    return "\n".join(lines)


def _without_labels(text: str) -> str:
    found = _LABELS.match(text)
    return text[found.end() :] if found else text


def _without_quotes(text: str) -> str:
    text = text.strip()
    inner = text[1:-1]
    is_quoted = len(text) > 1 and text[0] + text[-1] in _QUOTES
    return inner if is_quoted and text[0] not in inner and text[-1] not in inner else text


def _without_opening(text: str, format: CaptionFormat) -> str:
    found = _OPENING.match(text)
    rest = text[found.end() :] if found else ""
    if not rest.strip():
        return text
    # Nothing else gets a capital letter: it may be the trigger.
    begins_sentence = format != "tags" and _ARTICLE.match(rest)
    return (rest[0].upper() if begins_sentence else rest[0]) + rest[1:]


def _sentence_starts(text: str) -> list[int]:
    rests = (text[end.end() :].lstrip() for end in _SENTENCE_END.finditer(text))
    return [0, *(len(text) - len(rest) for rest in rests if rest)]


def _without_closings(text: str) -> str:
    if (remark := _REMARK.search(text)) is not None:
        text = text[: remark.start()].rstrip()
    starts = _sentence_starts(text)
    while len(starts) > 1 and _CLOSING.match(text, starts[-1]):
        text = text[: starts.pop()].rstrip()
    return text


def _without_periodic_end(text: str) -> str:
    """One period of the end; the last of its words may be a part of a word."""
    words = list(_WORD.finditer(text))
    names = [word.group().casefold().strip(_EDGE) for word in words]
    for period in range(1, min(_LONGEST_PERIOD, len(words) // 2) + 1):
        enough = 3 if period == 1 else 2 * period if period < 5 else period
        equal = _num_equal(names, period)
        if equal < enough:
            continue
        first, second = words[-equal - 1].end(), words[min(period - equal, 0) - 1].end()
        ends = [end.end() for end in _SENTENCE_END.finditer(text[:second] + " ")]
        # What precedes it may end in the same words, so that the first sentence ends a little later.
        later = [end for end in ends if end >= first]
        return text[: later[0] if later else ends[-1]] if ends else text[:first].rstrip(",;、 ")
    return text


def _num_equal(names: list[str], period: int) -> int:
    """Words at the end, each of which is that of one period before."""
    last = len(names) - 1
    if not names[last - period].startswith(names[last]):
        return 0
    equal = 1
    while equal < len(names) - period and names[last - equal] == names[last - equal - period]:
        equal += 1
    return equal


def _distinct_tags(text: str) -> str:
    tags = filter(None, map(str.strip, re.split(r"[,\uff0c、;\n]", text.rstrip(" ."))))
    distinct = {tag.casefold(): tag for tag in reversed([*tags])}
    joined = ", ".join(reversed(distinct.values()))
    return joined if len(joined) <= len(text) else joined.replace(", ", ",")


def _without_last(text: str, format: CaptionFormat) -> str:
    """The text up to its last complete sentence or tag; without one, up to its last comma or word."""
    if format == "tags":
        return text[: max(text.rfind(","), 0)] or text
    if ends := list(_SENTENCE_END.finditer(text + " ")):
        return text[: ends[-1].end()]
    for pause in (",", " "):
        if pause in text.strip():
            return text[: text.rstrip().rindex(pause)]
    return text


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _outermost_braces(text: str) -> str:
    start, end = text.find("{"), text.rfind("}")
    return text[start : end + 1] if 0 <= start < end else text


_RULES: Mapping[str, Callable[[str, CaptionFormat], str]] = {
    "thinking": lambda text, _: _without_thinking(text),
    "tokens": lambda text, _: _without_tokens(text),
    "markdown": _without_markdown,
    "labels": lambda text, format: (_outermost_braces if format == "json" else _without_labels)(text),
    "quotes": lambda text, _: _without_quotes(text),
    "openings": _without_opening,
    "closings": lambda text, _: _without_closings(text),
    # One period of an end that is periodic in its words, and of what is there six times before the end.
    "repetition": lambda text, format: (
        _distinct_tags(text) if format == "tags" else _RUN.sub(r"\1", _without_periodic_end(text))
    ),
    "unfinished": _without_last,
    "lines": lambda text, _: _one_line(text),
}
_OF_WORDS = [name for name in RULES if name not in ("thinking", "unfinished")]
_REPEATED: Mapping[CaptionFormat, Sequence[str]] = {
    "prose": _OF_WORDS,
    "tags": _OF_WORDS,
    "json": ("tokens", "labels", "lines"),
}
"""Rules that are applied until nothing changes."""


class _Thing(BaseModel):
    type: Literal["obj"]
    desc: str


class _Letters(BaseModel):
    type: Literal["text"]
    text: str
    desc: str


class _Parts(BaseModel):
    background: str
    elements: list[Annotated[_Thing | _Letters, Field(discriminator="type")]]


class _IdeogramCaption(BaseModel):
    high_level_description: str = ""
    compositional_deconstruction: _Parts


def _compact(text: str, is_unfinished: bool) -> tuple[str, str]:
    """The JSON of a caption without white space, and why it is none."""
    try:
        value = parse_json(text)
        _IdeogramCaption.model_validate(value)
        compact = compact_json(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        return "", f"the JSON is not one of Ideogram 4: {place or 'all of it'}: {first['msg']}"
    except ValueError:
        return "", "not JSON: the limit of tokens ended it" if is_unfinished else "the answer is not JSON"
    return min(_one_line(_without_control(compact)), text, key=len), ""
