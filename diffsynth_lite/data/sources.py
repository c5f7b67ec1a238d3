"""This file reads all sources of training data into one list of records, or reports all problems."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TypeVar

from diffsynth_lite.data.captions import (
    CAPTION_SUFFIXES,
    CaptionFiles,
    MissingCaption,
    caption_command,
    captions_in,
    has_trigger,
    with_trigger,
)
from diffsynth_lite.data.folder import Folder, PairFolders, companions_in_row, list_folder
from diffsynth_lite.data.images import IMAGE_SUFFIXES
from diffsynth_lite.data.metadata import Table, read_table
from diffsynth_lite.data.records import (
    ROLES,
    VIDEO_SUFFIXES,
    WHOLE,
    Companions,
    OnBadItem,
    Part,
    Record,
    Source,
    is_image,
    is_video,
)
from diffsynth_lite.errors import Problems, UserError, join_names

logger = logging.getLogger(__name__)

_Key = TypeVar("_Key")
METADATA_FILES = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
_TABLE_SUFFIXES = (".jsonl", ".csv", ".parquet")
_UNREAD_MEDIA = {
    "png or jpg": "heic heif jxl jp2 psd svg tga dng cr2 cr3 nef arw exr",
    "mp4": "wmv flv mpg mpeg ts m2ts 3gp ogv",
}
"""Suffixes of images and clips that cannot be read, by the format to save them as."""
_NOTHING = Companions()
_SUFFIXES = ", ".join((*IMAGE_SUFFIXES, *VIDEO_SUFFIXES))


@dataclass(kw_only=True, slots=True)
class FoundRecords:
    """The records of some sources, or a part of them, and the problems; nothing where nothing was read.

    Attributes:
        records: one source after the other.
        unread: name of an item that could not be read to the reason, such as a missing caption.
        problems: one line for each source that cannot be used as it is, with everything that is wrong in it.
        about_items: those of them that only name what is in ``unread``.
        skipped: files that are neither media nor captions, counted by kind; a line for each source with any.
        without_trigger: names of the records with a caption to which the trigger was added.
    """

    sources: Sequence[Source] = ()
    records: list[Record] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)
    problems: Problems = field(default_factory=Problems)
    about_items: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    without_trigger: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Names of all items: the records, and the items that could not be read."""
        return [*(record.name for record in self.records), *self.unread]

    def require_all(self) -> list[Record]:
        """The records; a UserError if there are problems."""
        self.problems.require_none()
        return self.records


def find_records(
    sources: Sequence[Source],
    *,
    media_store: Path,
    on_bad_item: OnBadItem = "error",
    part: Part = WHOLE,
    are_entries: bool = False,
    logs_skipped: bool = True,
) -> FoundRecords:
    """Records of all sources, and their problems. Images and clips are not decoded.

    In a folder the captions are in text files next to the media, or in one metadata file. Hidden files and
    folders are not read, and no URL in a row is fetched.

    Args:
        media_store: folder for the images and clips that datasets hold as bytes.
        on_bad_item: "skip" leaves out items that cannot be read, without a problem.
        part: part whose records are read; no file of other records is opened, not even a caption.
        are_entries: their settings are entries of ``data.sources``, for messages; several always are.
        logs_skipped: the kinds of files that are skipped, and the media without a row, are logged.
    """
    found = FoundRecords(sources=sources)
    for index, source in enumerate(sources):
        reader = _Reader(
            source,
            found,
            index=index,
            part=part,
            on_bad_item=on_bad_item,
            is_entry=are_entries or len(sources) > 1,
            logs_skipped=logs_skipped,
        )
        read = partial(reader.read_dataset, media_store) if source.dataset else reader.read_folder
        found.records += found.problems.attempt(read) or []
    return found


class _Reader:
    """Reads one source; what is to be reported besides its records goes to ``found``."""

    def __init__(
        self,
        source: Source,
        found: FoundRecords,
        *,
        index: int,
        part: Part,
        on_bad_item: OnBadItem,
        is_entry: bool,
        logs_skipped: bool,
    ) -> None:
        self._source, self._found = source, found
        self._index = index
        # The index and not the folder's name: a run can be resumed after its folders were moved.
        self._prefix = f"{index}/" if len(found.sources) > 1 else ""
        self._part = part
        self._on_bad_item = on_bad_item
        self._is_entry = is_entry
        self._logs_skipped = logs_skipped
        self._lacks_captions = False

    def read_dataset(self, media_store: Path) -> list[Record]:
        # Imported here, because `datasets` takes seconds to import and most runs need none of it.
        from diffsynth_lite.data.stored_dataset import find_stored, read_stored_dataset, rows_of

        table = read_stored_dataset(self._source, media_store, self._part)

        cells = table.columns[self._source.media_column]

        def read_row(row: int) -> Record:
            _, target = find_stored(cells[row])
            name = f"{row:08}{target.suffix}"
            return self._record_of_row(table, row, name, target, find=find_stored)

        rows = rows_of(self._part, len(cells))
        return self._collect(rows, read_row, where=table.where, label=_row_label(table))

    def read_folder(self) -> list[Record]:
        source = self._source
        assert source.folder is not None
        folder = list_folder(source.folder, allow_outside=source.allow_outside)
        pairs = PairFolders(source)
        media = [name for name in folder.files if (is_image(name) or is_video(name)) and not pairs.hold(name)]
        self._count_ignored_files(folder, pairs)
        if source.metadata_file is not None:
            return self._read_rows(folder, media, pairs, read_table(source.metadata_file, source.columns))
        texts, reads_texts = CaptionFiles(folder, media), source.captions != "none"
        if (metadata := self._metadata_in(folder, has_texts=reads_texts and bool(texts))) is not None:
            return self._read_rows(folder, media, pairs, read_table(metadata, source.columns))
        if source.pair_columns:
            raise UserError(f"{folder.path}: no metadata file for {', '.join(source.pair_columns)}")
        if unused := [key for key in ("media_column", "caption_columns") if not source.is_default(key)]:
            logger.warning(
                "%s: no metadata file, so nothing is read by %s", source.folder, " and ".join(unused)
            )
        if not media:
            raise UserError(
                f"{folder.path}: no images or clips among its {len(folder.files)} files; "
                f"{_SUFFIXES} are read, also in subfolders"
            )

        def read_name(name: str) -> Record:
            if problem := folder.files[name]:
                raise UserError(problem)
            return self._record(name, folder.path / name, lambda: texts.of(name), lambda: pairs.of(name))

        own = [name for name in media if self._owns(name)]
        records = self._collect(own, read_name, where=str(folder.path), label=lambda name: name)
        if reads_texts:
            texts.warn()
        return records

    def _metadata_in(self, folder: Folder, *, has_texts: bool) -> Path | None:
        """Metadata file of the folder, or None where the captions are in text files."""
        found = [name for name in METADATA_FILES if name in folder.files]
        places = [*found, *(["caption files next to the media"] if has_texts else [])]
        if found and len(places) > 1:
            raise UserError(
                f"{folder.path}: holds {' and '.join(places)}; name the metadata file that is meant, "
                "or keep only one"
            )
        return folder.use(found[0]) if found else None

    def _read_rows(
        self, folder: Folder, media: Sequence[str], pairs: PairFolders, table: Table
    ) -> list[Record]:
        row_of_name: dict[str, int] = {}
        cells = table.columns[self._source.media_column]

        def read_row(row: int) -> Record:
            name, target = folder.find(cells[row])
            first = row_of_name.setdefault(name, row)
            if first != row:
                raise UserError(f"{name} has row {first + table.first_row} already; list its captions there")
            return self._record_of_row(table, row, name, target, find=folder.find, pairs=pairs)

        rows = [row for row, cell in enumerate(cells) if self._owns(str(cell))]
        records = self._collect(rows, read_row, where=table.where, label=_row_label(table))
        if not self._part.is_whole:
            return records  # Only all rows together show the files that no row names.
        used = (
            {path for record in records for path in record.files[1:]} if self._source.pair_columns else set()
        )
        left_out = [name for name in media if name not in row_of_name and folder.path / name not in used]
        if left_out and self._logs_skipped:
            counts = (len(left_out), len(media), join_names(left_out))
            logger.warning("%s: %d of %d files have no row and are left out: %s", table.where, *counts)
        return records

    def _owns(self, name: str) -> bool:
        return self._part.owns(self._prefix + name)

    def _record_of_row(
        self,
        table: Table,
        row: int,
        name: str,
        target: Path,
        *,
        find: Callable[[object], tuple[str, Path]],
        pairs: PairFolders | None = None,
    ) -> Record:
        source = self._source

        def companions() -> Companions:
            named = companions_in_row(source, target.name, lambda column: table.columns[column][row], find)
            paired = pairs.of(name) if pairs else _NOTHING
            return Companions.of({**paired.by_role, **named.by_role})

        def captions() -> tuple[str, ...]:
            return captions_in({column: table.columns[column][row] for column in source.caption_columns})

        return self._record(name, target, captions, companions)

    def _record(
        self,
        name: str,
        target: Path,
        captions: Callable[[], tuple[str, ...]],
        companions: Callable[[], Companions],
    ) -> Record:
        """The record of a target, or one error with everything that is wrong with it."""
        if not is_image(target.name) and not is_video(target.name):
            raise UserError(f"{target.name} is neither image nor clip; {_SUFFIXES} are read")
        problems = Problems()
        texts = problems.attempt(lambda: self._captions(captions)) or ()
        paired = _NOTHING
        if self._source.pair_columns or self._source.pair_dirs:
            paired = problems.attempt(companions) or _NOTHING
            misfits = (role.misfit for role in paired.by_role if role.only and not role.only(target.name))
            problems += list(misfits)[:1]
        if problems:
            raise UserError(", and ".join(problems))
        if trigger := self._source.trigger:
            if not all(has_trigger(text, trigger) for text in texts):
                self._found.without_trigger.append(self._prefix + name)
            texts = tuple(with_trigger(text, trigger) for text in texts)
        return Record(
            name=self._prefix + name,
            source=self._index,
            target=target,
            captions=texts,
            random_masks=self._source.random_masks,
            **{role.name: getattr(paired, role.name) for role in ROLES},
        )

    def _captions(self, read: Callable[[], tuple[str, ...]]) -> tuple[str, ...]:
        """The captions of an item, or the trigger in place of missing ones."""
        trigger = (self._source.trigger,) if self._source.trigger else ()
        if self._source.captions == "none":
            return trigger or ("",)
        try:
            return read()
        except MissingCaption:
            if self._source.captions == "optional" and trigger:
                return trigger
            self._lacks_captions = True
            raise

    def _collect(
        self,
        keys: Sequence[_Key],
        read: Callable[[_Key], Record],
        *,
        where: str,
        label: Callable[[_Key], str],
    ) -> list[Record]:
        records: list[Record] = []
        bad: dict[str, str] = {}
        for key in keys:
            try:
                records.append(read(key))
            except UserError as error:
                bad[label(key)] = str(error)
        if bad:
            self._found.unread |= {f"{self._prefix}{name}": reason for name, reason in bad.items()}
        if bad and self._on_bad_item == "error":
            problems = [f"{name}: {reason}" for name, reason in bad.items()]
            only_captions = all(reason.startswith("no caption: ") for reason in bad.values())
            named = join_names(problems, 3) if only_captions else join_names(problems)
            hint = self._hint_at_captions(where) if self._lacks_captions else ""
            line = f"{where}: {len(problems)} of {len(keys)} items cannot be used: {named}{hint}"
            self._found.problems.append(line)
            self._found.about_items.append(line)
        return records

    def _count_ignored_files(self, folder: Folder, pairs: PairFolders) -> None:
        """Count and log the kinds of files that are neither image, clip, caption nor table."""
        known = (*IMAGE_SUFFIXES, *VIDEO_SUFFIXES, *CAPTION_SUFFIXES, *_TABLE_SUFFIXES)
        others = [
            PurePosixPath(name).suffix.lower().removeprefix(".") or "without suffix"
            for name in folder.files
            if not name.lower().endswith(known) and not pairs.hold(name)
        ]
        if not others:
            return
        counts = join_names([f"{count} {kind}" for kind, count in Counter(others).most_common()])
        remedies = [
            f"; save {' and '.join(media)} as {readable} to train on them"
            for readable, suffixes in _UNREAD_MEDIA.items()
            if (media := sorted(set(others).intersection(suffixes.split())))
        ]
        self._found.skipped.append(f"{self._prefix}{counts}{''.join(remedies)}")
        if self._logs_skipped:
            level = logging.WARNING if remedies else logging.INFO
            logger.log(level, "%s: skipped files: %s%s", folder.path, counts, "".join(remedies))

    def _hint_at_captions(self, where: str) -> str:
        """What writes captions next to the items, and how to train on those that lack one all the same."""
        write = ""
        if where == str(self._source.folder):
            write = f"; {caption_command(self._source)} writes captions"
        given, trigger = self._source.trigger, "" if self._source.trigger else " data.trigger=WORD"
        settings = f"data.captions=optional{trigger}"
        if self._is_entry:  # its settings are in a list, which the command line takes as a whole
            settings = (
                f"captions: optional{'' if given else ' and trigger: WORD'} in its entry of data.sources"
            )
        return f"{write}; or set {settings}: {given or 'the word'} is then the caption of those without one"


def _row_label(table: Table) -> Callable[[int], str]:
    return lambda row: f"row {row + table.first_row}"
