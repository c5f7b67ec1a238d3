"""This file makes several runs of one config: a run for each combination of the values that settings list."""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from diffsynth_lite.config.schema import (
    Schema,
    section_of_entries,
    section_types,
    setting_schemas,
    without_null,
)
from diffsynth_lite.errors import UserError

MOST_VARIANTS = 100

_SHORT = {"train.learning_rate": "lr", "train.global_batch_size": "batch"}
"""What settings are called in names; others by their last word."""
_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")
_LONGEST_NAME = 200
"""Of a folder, in bytes; file systems allow 255."""


@dataclass(frozen=True)
class Variant:
    """Settings of one run.

    Attributes:
        settings: all that were given, each with one value.
        differs: those that have another value in other runs, by key.
    """

    settings: tuple[str, ...]
    differs: dict[str, str]


def variants(settings: Sequence[str]) -> list[Variant]:
    """The combinations of the values in settings, the first setting changing last.

    Args:
        settings: ``section.key=value``, with values separated by commas; lists as ``[..],[..]``, and a text
            that has a comma in quotes.

    Raises:
        UserError: a value cannot be split, or there are too many runs.
    """
    split = [(key, _values(key, value)) for key, _, value in (text.partition("=") for text in settings)]
    number = math.prod(len(values) for _, values in split)
    if number > MOST_VARIANTS:
        counts = " x ".join(str(len(values)) for _, values in split if len(values) > 1)
        raise UserError(f"{counts} values are {number} runs, and {MOST_VARIANTS} are the most at once")
    varied = [key for key, values in split if len(values) > 1]
    if "output.dir" in varied:
        raise UserError("output.dir: each run gets a folder by what differs; give one value for all of them")
    found = []
    for values in product(*(values for _, values in split)):
        chosen = list(zip((key for key, _ in split), values, strict=True))
        given = (
            text if len(each[1]) == 1 and "=" not in text else f"{key}={value}"
            for text, each, (key, value) in zip(settings, split, chosen, strict=True)
        )
        found.append(Variant(tuple(given), {key: value for key, value in chosen if key in varied}))
    return found


def names(base: str, several: Sequence[Variant]) -> list[str]:
    """A name for each run, by what differs, such as ``mine-rank4-lr1e-4``."""
    found = ["-".join([base, *_parts(variant.differs)]) for variant in several]
    counts = Counter(name.casefold() for name in found)
    return [
        _shortened(name if counts[name.casefold()] == 1 else f"{name}-{_digest(repr(variant.differs))}")
        for name, variant in zip(found, several, strict=True)
    ]


def _parts(differs: dict[str, str]) -> Iterator[str]:
    labels = {key: _SHORT.get(key, key.rpartition(".")[2]) for key in differs}
    counts = Counter(labels.values())
    for key, value in differs.items():
        label = labels[key] if counts[labels[key]] == 1 else key.replace(".", "-")
        written = _UNSAFE.sub("-", value).strip(".-") or "empty"
        yield f"{label}-{written}" if label[-1].isdigit() else f"{label}{written}"


def _shortened(name: str) -> str:
    written = name.encode()
    if len(written) <= _LONGEST_NAME:
        return name
    digest = _digest(name)
    return f"{written[: _LONGEST_NAME - len(digest) - 1].decode(errors='ignore')}-{digest}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _values(key: str, text: str) -> list[str]:
    """The values that a setting lists, each once."""
    schema = _schema(key)
    kind = without_null(schema).get("type")
    if "," not in text or not schema or kind == "object":
        return [text]
    pieces = list(_split(key, text, knows_brackets=kind == "array"))
    if (
        kind == "string"
        and "enum" not in without_null(schema)
        and any(each != each.strip() for each in pieces)
    ):
        raise UserError(
            f"{key}: {text!r} lists values, as it has a comma; put quotes around a text that has one, as in "
            f"{key + '=' + chr(34) + text + chr(34)!r}, and no spaces next to a comma between texts"
        )
    return list(dict.fromkeys(_unquoted(each.strip()) for each in pieces))


def _split(key: str, text: str, *, knows_brackets: bool) -> Iterator[str]:
    """The pieces between commas that are in neither quotes nor brackets; a quote begins a word."""
    start, depth, quote, before = 0, 0, "", ","
    for place, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"" and before in ",[{:":
            quote = character
        elif knows_brackets and character in "[]{}":
            depth += 1 if character in "[{" else -1
        elif character == "," and not depth:
            yield text[start:place]
            start = place + 1
        before = before if character == " " else character
    if quote or depth:
        raise UserError(f"{key}: {text!r} has a {'quote' if quote else 'bracket'} that is not closed")
    yield text[start:]


def _unquoted(piece: str) -> str:
    is_quoted = len(piece) > 1 and piece[0] in "'\"" and piece[-1] == piece[0]
    return piece[1:-1] if is_quoted else piece


def _schema(key: str) -> Schema:
    section, *names = key.split(".")
    model = section_types()[section].__name__ if section in section_types() else None
    schema: Schema = {}
    for name in names:
        own: dict[str, Schema] = setting_schemas()[model]["properties"] if model else {}
        schema = own.get(name, {})
        model = section_of_entries(schema)
    return schema
