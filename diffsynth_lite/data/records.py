"""This file defines a record of the training data, a source of records, and a part of all records."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from diffsynth_lite.config import SourceSettings
from diffsynth_lite.data.images import IMAGE_SUFFIXES
from diffsynth_lite.media import RecordKind

OnBadItem = Literal["error", "skip"]

VIDEO_SUFFIXES = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v")


@dataclass(frozen=True, slots=True)
class Part:
    """One of several parts of all records, or of all entries; only a name or key decides which part it is in.

    So parts may be processed in any order and at any time, and miss nothing in a folder that grows.

    Attributes:
        count: number of parts, >= 1.
    """

    index: int
    count: int

    @property
    def is_whole(self) -> bool:
        """Whether this is the only part."""
        return self.count == 1

    def owns(self, name: str) -> bool:
        """Whether the item of this name, or the entry of this key, is in the part."""
        return part_index(name, self.count) == self.index

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


WHOLE = Part(0, 1)
"""All records."""


def part_index(name: str, count: int) -> int:
    """Index of the part that a name is in."""
    # Names in tables may hold anything; bad ones are refused later.
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) % count


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """The role of a file that belongs to a target.

    Attributes:
        name: of its field in `Companions` and in `Media`.
        setting: start of the names of its settings, as in ``mask_column`` and ``mask_dir``.
        mark: its name in the identity of the data and in cache keys.
        kind: kind of a record with such a file; None where it does not decide the kind.
        is_several: whether a target may have more than one; the names of its settings then end in s.
        follows_crop: whether it has the shape of its target and is cropped with it; other files have their
            own shape.
        of_clips: its medium where the target is a clip; the file of an image is an image.
        only: whether a target of some name may have it; None if all may.
        misfit: error message for other targets.
    """

    name: str
    setting: str
    mark: str
    kind: RecordKind | None = None
    is_several: bool = False
    follows_crop: bool = True
    of_clips: Literal["image", "clip", "either"] = "image"
    only: Callable[[str], bool] | None = None
    misfit: str = ""

    @property
    def column(self) -> str:
        """Name of the setting with its column or columns."""
        return f"{self.setting}_columns" if self.is_several else f"{self.setting}_column"

    @property
    def folder(self) -> str:
        """Name of the setting with its folder or folders."""
        return f"{self.setting}_dirs" if self.is_several else f"{self.setting}_dir"

    def suffixes(self, target: str) -> tuple[str, ...]:
        """Suffixes of the files that may belong to a target of this name."""
        if self.of_clips == "image" or not is_video(target):
            return IMAGE_SUFFIXES
        return VIDEO_SUFFIXES if self.of_clips == "clip" else (*IMAGE_SUFFIXES, *VIDEO_SUFFIXES)

    def packed(self, values: Sequence[Any]) -> Any:
        """The value of a field: a tuple, or for a role with one file this file or None."""
        return tuple(values) if self.is_several else next(iter(values), None)


def unpacked(value: Any) -> tuple[Any, ...]:
    """The values in a field as :meth:`Role.packed` fills it, or in a setting."""
    return tuple(value) if isinstance(value, tuple | list) else () if value is None else (value,)


def is_video(name: str) -> bool:
    """Whether a file name is that of a clip."""
    return name.lower().endswith(VIDEO_SUFFIXES)


def is_image(name: str) -> bool:
    """Whether a file name is that of an image."""
    return name.lower().endswith(IMAGE_SUFFIXES)


_IS_NOT_A_CLIP = "is an image, and only clips have first and last frames; make two sources of them"
ROLES = (
    Role(
        name="inputs",
        setting="input",
        mark="input",
        kind="edit",
        is_several=True,
        follows_crop=False,
        only=is_image,
        misfit="is a clip, and only images have inputs; put clips and edits into two sources",
    ),
    Role(
        name="first_frame",
        setting="first_frame",
        mark="first",
        kind="image_to_video",
        only=is_video,
        misfit=_IS_NOT_A_CLIP,
    ),
    Role(
        name="last_frame",
        setting="last_frame",
        mark="last",
        kind="image_to_video",
        only=is_video,
        misfit=_IS_NOT_A_CLIP,
    ),
    Role(name="mask", setting="mask", mark="mask"),
    Role(name="control", setting="control", mark="control", kind="control", of_clips="clip"),
    Role(name="inpaint_mask", setting="inpaint_mask", mark="inpaint", kind="inpaint", of_clips="either"),
    Role(
        name="face",
        setting="face",
        mark="face",
        follows_crop=False,
        of_clips="clip",
        only=is_video,
        misfit="is an image, and only clips have faces; put clips and images into two sources",
    ),
    Role(
        name="layers",
        setting="layer",
        mark="layer",
        kind="layers",
        is_several=True,
        only=is_image,
        misfit="is a clip, and only images have layers; put clips and images into two sources",
    ),
)
"""All roles, in the order of a record's files; the first one with a kind decides the kind of a record."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Companions:
    """The files that belong to a target, by their roles; None where there is no file of a role.

    Attributes:
        inputs: images that an edit starts from, in their order.
        first_frame: image that a clip starts with.
        last_frame: image that a clip ends with.
        mask: image whose white part counts in the loss.
        control: control image of an image, or control clip of a clip.
        inpaint_mask: inpainting mask, of a clip also a clip; white is regenerated.
        face: clip of the face in a clip.
        layers: images that the target is split into, the bottom layer first.
    """

    inputs: tuple[Path, ...] = ()
    first_frame: Path | None = None
    last_frame: Path | None = None
    mask: Path | None = None
    control: Path | None = None
    inpaint_mask: Path | None = None
    face: Path | None = None
    layers: tuple[Path, ...] = ()

    @classmethod
    def of(cls, paths: Mapping[Role, Sequence[Path]]) -> "Companions":
        """The files of each role."""
        return cls(**{role.name: role.packed(found) for role, found in paths.items()})

    @property
    def by_role(self) -> dict[Role, tuple[Path, ...]]:
        """The files of each role that has any."""
        return {role: paths for role in ROLES if (paths := unpacked(getattr(self, role.name)))}


@dataclass(frozen=True, kw_only=True, slots=True)
class Record(Companions):
    """One item to learn: an image or a clip, its captions, and the files that belong to it.

    Attributes:
        name: unique in the run: path of the target below its source with forward slashes, and the index of
            the source in front where there are several, as in "0/cat.png".
        captions: at least one, with the trigger; it may be empty.
        random_masks: number of random inpainting masks.
    """

    name: str
    source: int
    target: Path
    captions: tuple[str, ...]
    random_masks: int = 0

    @property
    def kind(self) -> RecordKind:
        """The first of its kinds."""
        return self.kinds[0]

    @property
    def kinds(self) -> tuple[RecordKind, ...]:
        """Its kinds, by the files that belong to it; the model must take all of them."""
        drawn: tuple[RecordKind, ...] = ("inpaint",) if self.random_masks else ()
        named = (role.kind for role in self.by_role if role.kind)
        own: RecordKind = "video" if is_video(self.target.name) else "image"
        return tuple(dict.fromkeys((*named, *drawn))) or (own,)

    @property
    def files(self) -> tuple[Path, ...]:
        """All files of the record, the target first."""
        return (self.target, *chain(*self.by_role.values()))


class Source(SourceSettings):
    """A source of records: a folder of files, or a dataset that `datasets` reads."""

    @property
    def folder(self) -> Path | None:
        """Folder of the media; None for a dataset."""
        return None if self.path is None else Path(self.path).expanduser()

    @property
    def metadata_file(self) -> Path | None:
        """The file with one row an item; None takes the folder's own, or captions in text files."""
        if self.folder is None or self.metadata is None:
            return None
        inside = self.folder / self.metadata
        return inside if inside.is_file() else Path(self.metadata).expanduser()

    @property
    def passes(self) -> Fraction:
        """How often each item occurs in a pass: ``repeats`` x ``weight`` without rounding."""
        return self.repeats * Fraction(str(self.weight))

    def columns_of(self, role: Role) -> tuple[str, ...]:
        """Columns with the files of a role."""
        return unpacked(getattr(self, role.column))

    def dirs_of(self, role: Role) -> tuple[Path, ...]:
        """Folders with the files of a role."""
        return tuple(Path(folder).expanduser() for folder in unpacked(getattr(self, role.folder)))

    @property
    def where(self) -> str:
        """The source, for messages."""
        return str(self.folder) if self.folder is not None else f"dataset {self.dataset!r}"

    @property
    def pair_columns(self) -> tuple[str, ...]:
        """Columns with files that belong to the targets."""
        return tuple(chain(*map(self.columns_of, ROLES)))

    @property
    def pair_dirs(self) -> tuple[Path, ...]:
        """Folders with files that belong to the targets."""
        return tuple(chain(*map(self.dirs_of, ROLES)))

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that a metadata file or dataset must have."""
        captions = () if self.captions == "none" else tuple(self.caption_columns)
        return tuple(dict.fromkeys((self.media_column, *captions, *self.pair_columns)))


def stem(name: str) -> str:
    """Relative name of a file, folders included, without its suffix."""
    head, _, tail = name.rpartition(".")
    return head if head and "/" not in tail else name
