"""This file reads the items of a folder as a run does, with their captions as they are in their files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diffsynth_lite.data.captions import CaptionFiles, read_caption
from diffsynth_lite.data.folder import Folder, list_folder
from diffsynth_lite.data.records import Source, stem
from diffsynth_lite.data.sources import METADATA_FILES, FoundRecords, find_records
from diffsynth_lite.errors import UserError, join_names


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

    @property
    def inputs(self) -> list[Path]:
        """The images that it is an edit of, in their order."""
        return [path for setting, path in self.companions if setting == "input"]

    @property
    def caption_file(self) -> str:
        """The file that its caption is written to."""
        return self.caption_files[0] if self.caption_files else f"{stem(self.file)}.txt"


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """The items of a data set, in the order of their names, and what is wrong with the folder as a whole.

    Attributes:
        skipped: the files that were skipped, counted by kind, with how to save images and clips among them.
    """

    items: Sequence[Item]
    problems: Sequence[str] = ()
    skipped: Sequence[str] = ()


def read_contents(source: Source, *, logs_skipped: bool = False) -> Contents:
    """The items of a folder. Images and clips are not opened.

    Args:
        logs_skipped: the kinds of files that are skipped, and the media without a row, are logged.

    Raises:
        UserError: the folder cannot be listed.
    """

    def find(captions: str, *, logs_skipped: bool = False) -> FoundRecords:
        as_written = source.model_copy(update={"trigger": None, "captions": captions})
        return find_records(
            [as_written], media_store=folder.path, on_bad_item="skip", logs_skipped=logs_skipped
        )

    assert source.folder is not None
    folder = list_folder(source.folder, allow_outside=source.allow_outside)
    found = find("none", logs_skipped=logs_skipped)
    records = {record.name: record for record in found.records}
    media: dict[str, Path | None] = {name: record.target for name, record in records.items()}
    if (table := source.metadata or table_of(folder)) is not None:
        written = find("required")
        rows = [f"{row}: {reason}" for row, reason in written.unread.items()]
        problems = [*written.problems, *([join_names(rows)] if rows else [])]
        of_rows = {record.name: record.captions for record in written.records}
        texts = {name: (of_rows.get(name, ()), [table], "") for name in media}
    else:
        media |= {name: None if folder.files[name] else folder.path / name for name in found.unread}
        files = CaptionFiles(folder, list(media))
        texts = {name: _captions(folder, files, name) for name in media}
        problems = list(found.problems) if media else []
        if files.orphans:
            problems.append(f"caption files that belong to no image or clip: {join_names(files.orphans)}")
    items = []
    for name, path in sorted(media.items()):
        captions, names, problem = texts[name]
        by_role = records[name].by_role if name in records else {}
        items.append(
            Item(
                file=name,
                path=path,
                captions=captions,
                caption_files=tuple(names),
                is_locked=table is not None or len(names) > 1 or bool(problem),
                companions=[(role.setting, each) for role, paths in by_role.items() for each in paths],
                problem="; ".join(filter(None, (found.unread.get(name, ""), problem))),
            )
        )
    return Contents(items=items, problems=problems, skipped=found.skipped)


def table_of(folder: Folder) -> str | None:
    """Name of the metadata file in a folder, which then has the captions; None where text files have them."""
    return next((name for name in METADATA_FILES if name in folder.files), None)


def _captions(folder: Folder, files: CaptionFiles, name: str) -> tuple[tuple[str, ...], list[str], str]:
    """The captions of an item, the files that hold them, and why they cannot be read."""
    names = files.names_of(name)
    try:
        captions = files.of(name) if len(names) > 1 else (read_caption(folder, one) for one in names)
        return tuple(filter(None, captions)), names, ""
    except UserError as error:
        return (), names, str(error)
