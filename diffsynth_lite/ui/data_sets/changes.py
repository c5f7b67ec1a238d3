"""This file changes captions, moves files to the trash, and takes the last of these changes back.

A change is written down before it is made, so that one that a crash cut short can be taken back, too. Taking
back goes by content: only what is still as the change left it becomes what it was.
"""

import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from diffsynth_lite.captioning.contents import Item, table_of
from diffsynth_lite.captioning.report import CaptionReport, CaptionRow, caption_hash, is_by_model
from diffsynth_lite.data.captions import CaptionFiles, clean_caption, read_caption
from diffsynth_lite.data.folder import Folder, list_folder
from diffsynth_lite.data.records import is_image, is_video, stem
from diffsynth_lite.errors import UserError
from diffsynth_lite.files import write_text
from diffsynth_lite.ui.data_sets.items import home_of
from diffsynth_lite.ui.jobs import captions_in
from diffsynth_lite.workspace import Workspace

_MOST_KEPT = 100
"""Changes of a data set that can be taken back."""
_WRITERS = 8
_PAUSE_S = 60.0
"""The longest between two edits of a caption that are taken back as one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionChange:
    """A new caption for an item.

    Attributes:
        file: name of the item.
        before: its caption as it was shown; where it is another one by now, nothing is written.
        after: the new one; an empty one removes the file. None is what a model writes.
    """

    file: str
    before: str
    after: str | None


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """A change that can be taken back: captions, or ``count`` items in ``trash/NAME/TIME/``."""

    captions: Sequence[CaptionChange] = ()
    trash: Annotated[str, Field(pattern=r"^(\d{8}-\d{6}(-\d+)?)?$")] = ""
    count: int = 0


_AS_JSON = TypeAdapter(_Kept)


class DataSetEditor:
    """Changes one data set.

    What is removed goes to ``trash/NAME/TIME/`` of the workspace; each change is kept in a file, the newest
    with the highest number.
    """

    def __init__(self, name: str, workspace: Workspace) -> None:
        self._folders = {each: path.resolve() for each, path in workspace.data_sets.items()}
        self._name = name
        self._folder = self._folders[name]
        self._trash = workspace.trash_folder
        self._history = workspace.settings_file.parent / "undo" / name

    def write(self, changes: Sequence[CaptionChange]) -> dict[str, str]:
        """Write captions.

        Returns:
            Items whose caption is another one by now to this caption; of these nothing is written.

        Raises:
            UserError: a caption cannot be written as it is asked for; then none is.
        """
        folder, texts = self._listed()
        stale: dict[str, str] = {}
        wanted: dict[str, CaptionChange] = {}
        for change in changes:
            name, given = _caption_file(folder, texts, change.file), change.after or ""
            caption = clean_caption(given) if given.strip() else ""
            if (now := read_caption(folder, name)) != change.before.strip():
                stale[change.file] = now
            elif caption != now:
                wanted[name] = CaptionChange(file=change.file, before=now, after=caption)
        if wanted:
            self._remember_captions(list(wanted.values()))
        _put({folder.path / name: change.after or "" for name, change in wanted.items()})
        return stale

    def move_to_trash(self, items: Sequence[Item]) -> str:
        """Move items to the trash, with their captions and with companions that are in a data set.

        Returns:
            What was done.
        """
        folder, texts = self._listed()
        names = {item.file for item in items}
        kept = {stem(name) for name in folder.files if _is_media(name) and name not in names}
        paths = []
        for item in items:
            paths.append(self._folder / item.file)
            if stem(item.file) not in kept:  # else an image and a clip of one name share all else
                paths += [self._folder / name for name in texts.names_of(item.file)]
                paths += [path for _, path in item.companions]
        place = self._new_place()
        self._remember(_Kept(trash=place, count=len(names)))
        for path in dict.fromkeys(paths):
            home = home_of(path, self._folders)
            if home is not None and (path.exists() or path.is_symlink()):
                target = self._trash / home[0] / place / home[1]
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(path, target)
        return f"{_count(len(names), 'item')} moved to trash/{self._name}/{place}."

    @contextmanager
    def replaced_by_model(self, captions: Mapping[str, str]) -> Iterator[None]:
        """Scope that starts a command which writes over captions; they are kept if it starts."""
        kept = [CaptionChange(file=file, before=caption, after=None) for file, caption in captions.items()]
        path = self._remember(_Kept(captions=kept)) if kept else None
        try:
            yield
        except (UserError, OSError):
            if path is not None:
                path.unlink(missing_ok=True)
            raise

    def undo(self) -> str:
        """Take the last change back, as far as nobody has changed the same since; returns what was done."""
        readable = ((path, entry) for path in self._kept() if (entry := _entry(path)) is not None)
        path, entry = next(readable, (None, None))
        if path is None or entry is None:
            return "Nothing to undo."
        if captions_in(self._folder) is not None and any(each.after is None for each in entry.captions):
            raise UserError("These captions are being written now; stop that first, or wait for its end")
        message = self._restore(entry) if entry.trash else self._rewrite(entry.captions)
        path.unlink(missing_ok=True)
        return message

    def _rewrite(self, changes: Sequence[CaptionChange]) -> str:
        folder, texts = self._listed()
        report = CaptionReport(self._folder)
        rows, wrote = report.rows(), {(row.file, row.hash): row for row in report.all_rows()}
        old: dict[Path, str] = {}
        again: list[CaptionRow] = []
        for change in changes:
            # One that was removed meanwhile has no caption to take back.
            if change.file not in folder.files or len(texts.names_of(change.file)) > 1:
                continue
            name = _caption_file(folder, texts, change.file)
            now = read_caption(folder, name)
            if now == change.after or (change.after is None and is_by_model(rows.get(change.file), now)):
                old[folder.path / name] = change.before
                row = wrote.get((change.file, caption_hash(change.before)))
                again += [row] if row is not None and change.after is None else []
        _put(old)
        for row in again:  # A model wrote that one, too.
            report.add(row)
        later = len(changes) - len(old)
        kept = f" {_count(later, 'caption')} changed since and left alone." if later else ""
        return f"{_count(len(old), 'caption')} as before.{kept}"

    def _restore(self, entry: _Kept) -> str:
        in_the_way = 0
        for name, home in self._folders.items():
            root = self._trash / name / entry.trash
            for path in sorted(each for each in root.rglob("*") if each.is_symlink() or each.is_file()):
                target = home / path.relative_to(root)
                if target.exists():
                    in_the_way += 1
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(path, target)
            if not in_the_way:
                shutil.rmtree(root, ignore_errors=True)
        kept = f" {_count(in_the_way, 'file')} left in the trash: there are new ones of these names."
        return f"{_count(entry.count, 'item')} back from the trash.{kept if in_the_way else ''}"

    def _listed(self) -> tuple[Folder, CaptionFiles]:
        folder = list_folder(self._folder, allow_outside=False)
        if (table := table_of(folder)) is not None:
            raise UserError(f"{table} has the captions of this data set; change it there")
        return folder, CaptionFiles(folder, [name for name in folder.files if _is_media(name)])

    def _new_place(self) -> str:
        now = time.strftime("%Y%m%d-%H%M%S")
        names = (now if number == 1 else f"{now}-{number}" for number in count(1))
        return next(name for name in names if not any(self._trash.glob(f"*/{name}")))

    def _remember_captions(self, changes: Sequence[CaptionChange]) -> None:
        """Keep a change; typing on in one caption makes one change of all its pauses."""
        newest = next(self._kept(), None)
        # A clock may have been set back.
        if newest is not None and len(changes) == 1 and abs(time.time() - newest.stat().st_mtime) < _PAUSE_S:
            last, (change,) = (_entry(newest) or _Kept()).captions, changes
            if [(each.file, each.after) for each in last] == [(change.file, change.before)]:
                _write_entry(newest, _Kept(captions=[replace(change, before=last[0].before)]))
                return
        self._remember(_Kept(captions=changes))

    def _remember(self, entry: _Kept) -> Path:
        self._history.mkdir(parents=True, exist_ok=True)
        kept = list(self._kept())
        number = int(kept[0].stem) + 1 if kept else 1
        for path in kept[_MOST_KEPT - 1 :]:
            path.unlink(missing_ok=True)
        newest = self._history / f"{number:08}.json"
        _write_entry(newest, entry)
        return newest

    def _kept(self) -> Iterator[Path]:
        """Files of the changes that can be taken back, the newest first."""
        found = [path for path in self._history.glob("*.json") if re.fullmatch("[0-9]+", path.stem)]
        return iter(sorted(found, reverse=True))


def _caption_file(folder: Folder, texts: CaptionFiles, item: str) -> str:
    """Name of the file with the caption of an item, or of the one to write."""
    if item not in folder.files or not _is_media(item):
        raise UserError(f"{item} is not there any more")
    names = texts.names_of(item)
    if len(names) > 1:
        raise UserError(f"{item} has several captions: {', '.join(names)}; change them there")
    return names[0] if names else f"{stem(item)}.txt"


def _entry(path: Path) -> _Kept | None:
    """A change that was kept; None where its file is damaged, which must not be in the way of the others."""
    try:
        entry = _AS_JSON.validate_json(path.read_bytes())
    except (OSError, ValueError):
        return None
    return entry if entry.captions or (entry.trash and entry.count) else None


def _write_entry(path: Path, entry: _Kept) -> None:
    # Not `write_json`: it masks what looks like a secret, and a caption must come back as it was.
    write_text(path, _AS_JSON.dump_json(entry).decode())


def _put(captions: Mapping[Path, str]) -> None:
    """Write captions, each durably, and remove the files of empty ones."""

    def put(path: Path) -> None:
        if captions[path]:
            write_text(path, f"{captions[path]}\n")
        else:
            path.unlink(missing_ok=True)

    # Each waits for the disk: 500 take 0.3 s with 8 threads and 6 s with one.
    with ThreadPoolExecutor(_WRITERS) as writers:
        list(writers.map(put, captions))


def _is_media(name: str) -> bool:
    return is_image(name) or is_video(name)


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
