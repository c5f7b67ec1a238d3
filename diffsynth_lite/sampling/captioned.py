"""This file lists the items of training data that are to be generated from captions."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from diffsynth_lite.data.captions import CAPTION_SUFFIXES, clean_caption, read_caption, read_text
from diffsynth_lite.data.folder import list_folder
from diffsynth_lite.data.records import Source, stem
from diffsynth_lite.data.sources import find_records
from diffsynth_lite.errors import UserError

_NAME_LETTERS = 40
_MEDIA_SUFFIXES = (".png", ".mp4")


@dataclass(frozen=True, kw_only=True)
class CaptionedItem:
    """An item to generate.

    Attributes:
        name: its path below the folder of the items, without a suffix.
    """

    name: str
    caption: str

    def seed(self, first: int) -> int:
        """Of its noise: by its name, and so independent of what else is generated."""
        digest = hashlib.blake2b(f"{first}/{self.name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1  # torch takes 63 bits


def missing_items(place: Path, out: Path) -> tuple[list[CaptionedItem], int]:
    """The items that a folder does not hold yet, and how many it holds.

    Args:
        place: a text file with a caption a line, or a folder of text files, or a data set.
        out: folder of the items; may not be there yet.
    """
    try:
        captions = _lines(place) if place.is_file() else _of_folder(place)
    except OSError as error:
        raise UserError(f"--from-captions {place}: cannot be read: {error.strerror}") from error
    if not captions or out.resolve() == place.resolve():
        problem = "is also --out; name another folder" if captions else "holds no caption"
        raise UserError(f"--from-captions {place}: {problem}")
    missing = []
    for name, caption in captions.items():
        if not any((out / f"{name}{suffix}").exists() for suffix in _MEDIA_SUFFIXES):
            missing.append(CaptionedItem(name=name, caption=caption))
        elif (out / f"{name}.txt").is_file() and read_text(out / f"{name}.txt").strip() != caption:
            raise UserError(f"--out {out}: {name} was generated from another caption; remove it")
    return missing, len(captions) - len(missing)


def _lines(file: Path) -> Mapping[str, str]:
    """The lines of a file, equal ones once, each by a name that depends on nothing else."""
    try:
        text = read_text(file)
    except UserError as error:
        raise UserError(f"--from-captions {file}: {error}") from error
    captions = [clean_caption(line) for line in text.splitlines() if line.strip()]
    return {_name_of(caption): caption for caption in captions}


def _name_of(caption: str) -> str:
    words = re.sub(r"[^a-z0-9]+", "-", caption.lower())[:_NAME_LETTERS].strip("-")
    digest = hashlib.blake2b(caption.encode(), digest_size=4).hexdigest()
    return "-".join(filter(None, [words, digest]))


def _of_folder(place: Path) -> Mapping[str, str]:
    folder = list_folder(place, allow_outside=False)
    texts = [name for name in folder.files if name.endswith(CAPTION_SUFFIXES)]
    if not texts:
        found = find_records([Source(path=str(place))], media_store=place, logs_skipped=False)
        return {stem(record.name): record.captions[0] for record in found.require_all()}
    captions = {stem(name): read_caption(folder, name) for name in texts}
    return {name: caption for name, caption in captions.items() if caption}
