"""This file reads the captions of an item from text files or rows, and counts tags in them."""

import codecs
import json
import logging
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from diffsynth_lite.data.folder import Folder, is_unicode
from diffsynth_lite.data.records import Record, Source, is_video, stem
from diffsynth_lite.errors import UserError, join_names
from diffsynth_lite.files import parse_json

logger = logging.getLogger(__name__)

CAPTION_SUFFIXES = (".txt", ".caption")

MAX_CAPTION_BYTES = 1 << 20
"""In UTF-8: far more than any text encoder reads; keeps files that are not captions out of memory."""
_SAVE_AS_UTF_8 = "not UTF-8 text; save it as UTF-8"
_UTF_16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
"""Characters of scripts without spaces between words, for the brackets of a pattern."""
_NUMBERED = re.compile(r"(.*)\.(\d+)")

EXAMPLE_MODEL = "Qwen/Qwen3-VL-4B-Instruct"
"""A model that writes captions, for messages."""

MAX_TAGS = 500
"""Most frequent tags of a source that are reported."""
_MAX_TAG_LETTERS = 128
"""A longer one is a sentence."""
_MAX_COUNTED = 50_000
"""Distinct tags of a source that are counted at once, which takes some 10 MB."""


def caption_command(source: Source, *words: str) -> str:
    """The command that has a model write the captions of a folder, with further words."""
    inputs = (word for folder in source.input_dirs for word in ("--inputs", folder))
    folder = str(source.folder or "FOLDER")
    return shlex.join(["diffsynth-lite", "caption", folder, *inputs, "--model", EXAMPLE_MODEL, *words])


class MissingCaption(UserError):
    """Nothing was written about an item."""


def clean_caption(text: str) -> str:
    """``text`` without white space around it; its inner lines stay."""
    size = len(text.encode(errors="surrogatepass"))
    if size > MAX_CAPTION_BYTES:
        raise _too_long(size)
    caption = text.strip()
    if not caption:
        raise UserError("empty")
    if "\0" in caption or not is_unicode(caption):
        raise UserError("not UTF-8 text")
    return caption


def read_text(path: Path) -> str:
    """The text of a caption file, with all its white space; it may be empty.

    Raises:
        UserError: it is too long, or not UTF-8.
        OSError: it is not there, or cannot be read.
    """
    if (size := path.stat().st_size) > MAX_CAPTION_BYTES:
        raise _too_long(size)
    with path.open("rb") as file:  # Windows' editors write UTF-16 with a byte order mark
        encoding = "utf-16" if file.read(2) in _UTF_16_MARKS else "utf-8-sig"
    try:
        text = path.read_text(encoding=encoding)
    except UnicodeDecodeError:
        raise UserError(_SAVE_AS_UTF_8) from None
    if "\0" in text:  # as in most UTF-16 without a byte order mark
        raise UserError(_SAVE_AS_UTF_8)
    return text


def read_caption(folder: Folder, name: str) -> str:
    """The text of a caption file without white space around it; empty where it does not exist.

    Raises:
        UserError: it cannot be read.
    """
    if name not in folder.files:
        return ""
    path = folder.use(name)
    try:
        return read_text(path).strip()
    except FileNotFoundError:
        return ""
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    except OSError as error:
        raise UserError(f"{name}: cannot be read: {error.strerror}") from error


def _too_long(size: int) -> UserError:
    return UserError(f"too long for a caption: {size:,} bytes, and {MAX_CAPTION_BYTES:,} are the most")


def captions_in(cells: Mapping[str, object]) -> tuple[str, ...]:
    """Captions in the cells of one row: each holds a text, a list of texts, or nothing.

    Raises:
        MissingCaption: no column holds a text.
    """
    captions: list[str] = []
    for column, cell in cells.items():
        if cell is None or (isinstance(cell, str) and not cell.strip()):
            continue
        for text in cell if isinstance(cell, list) else [cell]:
            if not isinstance(text, str) or not text.strip():
                raise UserError(f"no text in {column!r} but {text!r}")
            captions.append(clean_caption(text))
    if not captions:
        found = ", ".join(map(repr, cells.values()))
        raise MissingCaption(f"no text in {' and '.join(map(repr, cells))} but {found}")
    return tuple(captions)


def trigger_pattern(trigger: str) -> str:
    """The words of ``trigger``, whole; Chinese and Japanese have no spaces between words."""
    letter = f"[^\\W{CJK}]"
    return f"(?<!{letter}){re.escape(trigger)}(?!{letter})"


def has_trigger(caption: str, trigger: str) -> bool:
    """Whether the caption has the words of ``trigger``, whole, in small or large letters."""
    return re.search(trigger_pattern(trigger), caption, re.IGNORECASE) is not None


def with_trigger(caption: str, trigger: str) -> str:
    """The caption with the trigger in front, ``trigger, caption``, unless it has the trigger already.

    In the JSON of Ideogram 4 it is in front of the first sentence, so that it stays JSON.
    """
    if has_trigger(caption, trigger):
        return caption
    value = json_object(caption)
    if value is not None and isinstance(value.get("compositional_deconstruction"), dict):
        described = {"high_level_description": "", **value}
        described["high_level_description"] = f"{trigger}, {described['high_level_description']}".rstrip(" ,")
        with suppress(ValueError):  # of numbers and letters that Python's JSON has, and no file
            text = compact_json(described)
            text.encode()
            return text
    return f"{trigger}, {caption}"


def json_object(text: str) -> dict[str, Any] | None:
    """The JSON object that a caption is; None where it is something else."""
    if not text.startswith("{"):
        return None
    try:
        value = parse_json(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def compact_json(value: Any) -> str:
    """The JSON of a value as captions have it, on one line.

    Raises:
        ValueError: it holds a number that json has no way to write (NaN, infinity).
    """
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def tag_variants(caption: str, *, count: int, separator: str, keep: int) -> tuple[str, ...]:
    """The caption as it is written, and then with its tags in other orders.

    They depend only on the arguments, so that all runs share their cache entries.

    Args:
        count: captions to make, >= 1; there are fewer when orders that were drawn are the same.
        separator: between tags, such as ``,``; white space around tags is not theirs. It is written as it is
            given, and with a space after it if it has none.
        keep: number of tags at the start, >= 0, that stay where they are, such as a trigger.
    """
    # Imported here, because it imports torch, and captions are read without.
    from diffsynth_lite.core.randomness import counter_generator

    mark = separator.strip() or separator
    tags = [tag.strip() for tag in caption.split(mark) if tag.strip()]
    first, rest = tags[:keep], tags[keep:]
    joint = f"{separator} " if separator == separator.strip() else separator
    variants = [caption]
    for number in range(1, count):
        order = counter_generator(0, f"tag-shuffle:{caption}", number).permutation(len(rest))
        variants.append(joint.join([*first, *(rest[index] for index in order)]))
    return tuple(dict.fromkeys(variants))


@dataclass(frozen=True, slots=True)
class TagCounts:
    """The tags of a source.

    Attributes:
        by_tag: tag to the number of records with it in any of their captions, the most frequent first.
    """

    num_records: int
    by_tag: Mapping[str, int]

    @property
    def in_all(self) -> list[str]:
        """The tags that all records hold, where there are several."""
        return [tag for tag, count in self.by_tag.items() if count == self.num_records > 1]


def count_tags(records: Iterable[Record], separator: str) -> dict[int, TagCounts]:
    """The 500 most frequent tags of each source, by its index.

    Of a source with more than 50,000 different tags rare ones are dropped on the way, and counted from zero
    if they come again.
    """
    mark = separator.strip() or separator
    counts: dict[int, Counter[str]] = {}
    num_records: Counter[int] = Counter()
    for record in records:
        num_records[record.source] += 1
        tags = {tag.strip() for caption in record.captions for tag in caption.split(mark)}
        of_source = counts.setdefault(record.source, Counter())
        of_source.update(tag for tag in tags if 0 < len(tag) <= _MAX_TAG_LETTERS)
        if len(of_source) > _MAX_COUNTED:
            counts[record.source] = Counter(_most_frequent(of_source, _MAX_COUNTED // 2))
    return {
        source: TagCounts(num_records[source], _most_frequent(counted, MAX_TAGS))
        for source, counted in counts.items()
    }


def _most_frequent(counts: Mapping[str, int], number: int) -> dict[str, int]:
    """The most frequent tags; ties do not depend on the order of counting."""
    return dict(sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))[:number])


class CaptionFiles:
    """Text files of a folder by the files that they describe.

    A whole file is one caption, in UTF-8, or in UTF-16 with a byte order mark. ``cat.txt`` or ``cat.caption``
    belongs to ``cat.png``, and so do further captions in ``cat.1.txt``, ``cat.2.txt``, unless there is a
    ``cat.1.png`` for them to belong to.

    Attributes:
        orphans: text files that belong to nothing.
        shared: such as ``cat.png and cat.jpg``, for those that have one name and so share their captions.
    """

    def __init__(self, folder: Folder, targets: Sequence[str]) -> None:
        self._folder = folder
        stems: dict[str, list[str]] = {}
        for name in targets:
            stems.setdefault(stem(name), []).append(name)
        self.shared = [" and ".join(names) for names in stems.values() if len(names) > 1]
        self._texts: dict[str, list[tuple[int, str]]] = {}
        orphans = []
        for name in folder.files:
            if not name.lower().endswith(CAPTION_SUFFIXES):
                continue
            owner, number = stem(name), -1
            if owner not in stems and (numbered := _NUMBERED.fullmatch(owner)):
                owner, number = numbered[1], int(numbered[2])
            if owner in stems:
                self._texts.setdefault(owner, []).append((number, name))
            else:
                orphans.append(name)
        self.orphans: Sequence[str] = orphans

    def __bool__(self) -> bool:
        return bool(self._texts)

    def names_of(self, target: str) -> list[str]:
        """Files with the captions of a target, in the order of :meth:`of`."""
        return [name for _, name in sorted(self._texts.get(stem(target), ()))]

    def of(self, target: str) -> tuple[str, ...]:
        """Captions of a target: that of its own name first, then the numbered ones in order.

        Raises:
            MissingCaption: there is none.
        """
        texts = sorted(self._texts.get(stem(target), ()))
        if not texts:
            only_images = ", or move it away if only images are learned" if is_video(target) else ""
            raise MissingCaption(f"no caption: write {stem(target)}.txt{only_images}")
        for (number, name), (next_number, next_name) in pairwise(texts):
            if number == next_number:
                raise UserError(f"{name} and {next_name}; keep one")
        captions = {name: read_caption(self._folder, name) for _, name in texts}
        if empty := [name for name, caption in captions.items() if not caption]:
            raise UserError(f"{empty[0]}: empty")
        return tuple(captions.values())

    def warn(self) -> None:
        """Name the text files that belong to nothing, or to several items."""
        if self.shared:
            logger.warning(
                "%s: share their captions, as their names differ in the ending only; rename one of each: %s",
                *(self._folder.path, join_names(self.shared)),
            )
        if self.orphans:
            logger.warning(
                "%s: %d caption files belong to no image or clip: %s",
                self._folder.path,
                len(self.orphans),
                join_names(self.orphans),
            )
