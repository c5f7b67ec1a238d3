"""This file reads a data set as a run does: its items with their captions, and what is odd about them."""

import io
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from diffsynth_lite.config import Config
from diffsynth_lite.data.captions import CaptionFiles, read_text
from diffsynth_lite.data.folder import Folder, list_folder
from diffsynth_lite.data.images import check_image, load_thumbnail
from diffsynth_lite.data.records import Source, is_video
from diffsynth_lite.data.sources import METADATA_FILES, FoundRecords, find_records
from diffsynth_lite.errors import UserError, join_names
from diffsynth_lite.files import file_fingerprint, read_bytes

_FEWEST_PIXELS = 512 * 512
"""Of an image that is not small, where no config names a resolution."""
_JPEG_QUALITY = 82
_MOST_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """An image or clip, with its captions as they are in their files.

    Attributes:
        file: path below the folder, with forward slashes.
        path: of the file; None where a run does not open it, such as a link that leaves the folder.
        captions: without the trigger; empty texts are left out.
        caption_files: files that hold them; empty where the caption is still to be written.
        is_locked: whether the captions cannot be edited here: they are several, in a table, or not readable.
        companions: files that belong to it, by the names of their settings, such as "mask".
        problem: why a run cannot use it; empty for a missing caption.
    """

    file: str
    path: Path | None
    captions: tuple[str, ...] = ()
    caption_files: tuple[str, ...] = ()
    is_locked: bool = False
    companions: Sequence[tuple[str, Path]] = ()
    problem: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """The items of a data set, in the order of their names, and what is wrong with the folder as a whole."""

    items: Sequence[Item]
    problems: Sequence[str] = ()


def configs_with(folder: Path, configs: Mapping[str, Path]) -> list[str]:
    """Names of the configs that seem to train on a data set: their text has a path that ends in its name."""
    ends_in_name = re.compile(rf"(?<![\w.-]){re.escape(folder.name)}/?(?![\w.-])")
    return [name for name, path in configs.items() if ends_in_name.search(_text(path))]


def source_of(folder: Path, config: Config | None) -> Source:
    """The source of a config that is this folder; without a config all settings have their defaults.

    Raises:
        UserError: the config does not train on the folder, or no config can hold its path.
    """
    if config is None:
        try:
            return Source(path=str(folder))
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise UserError(f"no run can read this folder: its path {reason}") from None
    for settings in config.data.sources_by_key.values():
        source = Source(**dict(settings))
        if source.folder is not None and source.folder.resolve() == folder.resolve():
            return source
    raise UserError("this config does not train on this data set")


def read_contents(source: Source) -> Contents:
    """The items of a folder. Images and clips are not opened.

    Raises:
        UserError: the folder cannot be listed.
    """
    assert source.folder is not None
    as_written = source.model_copy(update={"trigger": None, "captions": "required"})
    found = _find(as_written.model_copy(update={"captions": "none"}))
    folder = list_folder(source.folder, allow_outside=source.allow_outside)
    media: dict[str, Path | None] = {record.name: record.target for record in found.records}
    companions = {
        record.name: [(role.setting, path) for role, paths in record.by_role.items() for path in paths]
        for record in found.records
    }
    if (table := source.metadata or table_of(folder)) is not None:
        return _items_of_table(as_written, table, media, companions)
    media |= {name: None if folder.files[name] else folder.path / name for name in found.unread}
    texts = CaptionFiles(folder, list(media))
    items = []
    for name, path in sorted(media.items()):
        captions, problem = _captions(folder, texts, name)
        names = texts.names_of(name)
        items.append(
            Item(
                file=name,
                path=path,
                captions=captions,
                caption_files=tuple(names),
                is_locked=len(names) > 1 or bool(problem),
                companions=companions.get(name, ()),
                problem="; ".join(filter(None, (found.unread.get(name, ""), problem))),
            )
        )
    problems = list(found.problems) if items else []
    if texts.orphans:
        problems.append(f"caption files that belong to no image or clip: {join_names(texts.orphans)}")
    return Contents(items=items, problems=problems)


def table_of(folder: Folder) -> str | None:
    """Name of the metadata file in a folder, which then has the captions; None where text files have them."""
    return next((name for name in METADATA_FILES if name in folder.files), None)


def findings(contents: Contents, *, fewest_pixels: int) -> dict[str, dict[str, Any]]:
    """What the files themselves show, by the names of the items; those that can be used are opened.

    Args:
        fewest_pixels: width x height below which an item is small.

    Returns:
        ``width``, ``height`` and ``bytes`` of each; with ``is_small``, with ``equal``, an item before it
        that has the same bytes, and with ``problem`` where it cannot be read.
    """
    found: dict[str, dict[str, Any]] = {}
    by_size: dict[int, list[str]] = defaultdict(list)
    paths = {item.file: item.path for item in contents.items if item.path is not None}
    for name, path in paths.items():
        facts = found[name] = {}
        try:
            width, height = _size(path)
            facts |= {"width": width, "height": height, "bytes": (size := path.stat().st_size)}
            facts |= {"is_small": True} if width * height < fewest_pixels else {}
            by_size[size].append(name)
        except (UserError, OSError) as error:
            facts["problem"] = str(error).removeprefix(f"{path}: ")
    for alike in by_size.values():
        first_with: dict[str, str] = {}
        for name in alike if len(alike) > 1 else ():
            first = first_with.setdefault(file_fingerprint(paths[name]), name)
            if first != name:
                found[name]["equal"] = first
    return found


def fewest_pixels_of(config: Config | None) -> int:
    """Pixels of the smallest resolution that a config trains at; 512 x 512 without one."""
    if config is None:
        return _FEWEST_PIXELS
    areas = [width * height for width, height in config.data.given_sizes]
    return min(areas or [side * side for side in config.data.resolutions])


def home_of(path: Path, folders: Mapping[str, Path]) -> tuple[str, str] | None:
    """Name of the data set that a file is in, and its name there; None where it is in none of them.

    Args:
        folders: resolved folders of the data sets, by name.
    """
    path = path.parent.resolve() / path.name
    homes = ((name, folder) for name, folder in folders.items() if folder in path.parents)
    return next(((name, path.relative_to(folder).as_posix()) for name, folder in homes), None)


def thumbnail(path: Path, *, side: int) -> bytes:
    """A JPEG of an image, or of the frame of a clip that is shown first, of at most ``side`` pixels a side.

    Raises:
        UserError: it cannot be read.
    """
    if is_video(path.name):
        # Imported here: FFmpeg takes 18 MB of memory, and most data sets need none of it.
        from diffsynth_lite.data.video_decoding import all_frames, rgb_image

        with closing(all_frames(path)) as frames:
            image = rgb_image(next(frames))
        image.thumbnail((side, side))
    else:
        image = load_thumbnail(path, side=side, background="white")
    file = io.BytesIO()
    image.save(file, "JPEG", quality=_JPEG_QUALITY)
    return file.getvalue()


def _find(source: Source) -> FoundRecords:
    assert source.folder is not None
    return find_records([source], media_store=source.folder, on_bad_item="skip", logs_skipped=False)


def _items_of_table(
    source: Source,
    table: str,
    media: Mapping[str, Path | None],
    companions: Mapping[str, Sequence[tuple[str, Path]]],
) -> Contents:
    found = _find(source)
    captions = {record.name: record.captions for record in found.records}
    items = [
        Item(
            file=name,
            path=path,
            captions=captions.get(name, ()),
            caption_files=(table,),
            is_locked=True,
            companions=companions[name],
        )
        for name, path in sorted(media.items())
    ]
    rows = [f"{row}: {reason}" for row, reason in found.unread.items()]
    return Contents(items=items, problems=[*found.problems, *([join_names(rows)] if rows else [])])


def _captions(folder: Folder, texts: CaptionFiles, name: str) -> tuple[tuple[str, ...], str]:
    """The captions of an item, and why they cannot be read."""
    names = texts.names_of(name)
    try:
        if len(names) > 1:
            return texts.of(name), ""
        found = [read_caption(folder, one) for one in names]
    except UserError as error:
        return (), str(error)
    return tuple(filter(None, found)), ""


def read_caption(folder: Folder, name: str) -> str:
    """The text of a caption file without white space around it; empty where it does not exist.

    Raises:
        UserError: it cannot be read.
    """
    if name not in folder.files:
        return ""
    try:
        return read_text(folder.use(name)).strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise UserError(f"{name}: cannot be read: {error.strerror}") from error
    except UserError as error:
        raise UserError(f"{name}: {error}" if name not in str(error) else str(error)) from None


def _size(path: Path) -> tuple[int, int]:
    """Width and height of an image or clip, from its header and, of a clip, its first frame."""
    if not is_video(path.name):
        facts = check_image(path)
        return facts.width, facts.height
    from diffsynth_lite.data.video_decoding import clip_start

    start = clip_start(path)
    return start.width, start.height


def _text(path: Path) -> str:
    try:
        return read_bytes(path, most_bytes=_MOST_CONFIG_BYTES).decode(errors="replace")
    except (UserError, OSError):  # No run reads it either.
        return ""
