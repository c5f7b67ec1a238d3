"""This file changes captions, moves files to the trash, and takes the last of these changes back.

A change is written down before it is made, so that one that a crash cut short can be taken back, too. Taking
back goes by content: only what is still as the change left it becomes what it was.
"""

import json
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from diffsynth_lite.captioning.contents import Item, read_caption, table_of
from diffsynth_lite.captioning.report import CaptionReport, is_by_model
from diffsynth_lite.data.captions import CaptionFiles, clean_caption
from diffsynth_lite.data.folder import Folder, list_folder
from diffsynth_lite.data.records import is_image, is_video, stem
from diffsynth_lite.errors import UserError
from diffsynth_lite.files import parse_json, write_text
from diffsynth_lite.ui.data_sets.items import home_of

_MOST_KEPT = 100
"""Changes of a data set that can be taken back."""
_WRITERS = 8
_TRASH_NAME = re.compile(r"\d{8}-\d{6}(-\d+)?")
_LONGEST_PAUSE_S = 60.0
"""Between two edits of a caption that are taken back as one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionChange:
    """A new caption for an item.

    Attributes:
        file: name of the item.
        was: its caption as it was shown; where it is another one by now, nothing is written.
        caption: the new one; an empty one removes the file.
    """

    file: str
    was: str
    caption: str


class DataSetEditor:
    """Changes one data set.

    Args:
        name: of the data set.
        folders: folders of all data sets, by name.
        trash: folder that gets ``NAME/TIME/`` for what is removed from a data set.
        history: folder in which the changes are kept, a file each, the newest with the highest number.
    """

    def __init__(self, name: str, folders: Mapping[str, Path], *, trash: Path, history: Path) -> None:
        self._folders = {each: path.resolve() for each, path in folders.items()}
        self._name = name
        self._folder = self._folders[name]
        self._trash = trash
        self._history = history

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
            name = _caption_file(folder, texts, change.file)
            caption = clean_caption(change.caption) if change.caption.strip() else ""
            if (now := read_caption(folder, name)) != change.was.strip():
                stale[change.file] = now
            elif caption != now:
                wanted[name] = CaptionChange(file=change.file, was=now, caption=caption)
        if wanted:
            self._remember_captions(list(wanted.values()))
        _put({folder.path / name: change.caption for name, change in wanted.items()})
        return stale

    def move_to_trash(self, items: Sequence[Item]) -> str:
        """Move items to the trash, with their captions and with companions that are in a data set.

        Returns:
            What was done.

        Raises:
            UserError: a metadata file names the items, so that a run would miss them.
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
        self._remember({"trash": place, "count": len(names)})
        for path in dict.fromkeys(paths):
            home = home_of(path, self._folders)
            if home is not None and (path.exists() or path.is_symlink()):
                target = self._trash / home[0] / place / home[1]
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(path, target)
        return f"{_count(len(names), 'item')} moved to trash/{self._name}/{place}."

    @contextmanager
    def replaced_by_model(self, captions: Mapping[str, str]) -> Iterator[None]:
        """Scope that starts a command which writes over captions; they are kept if it starts.

        Args:
            captions: by item.
        """
        kept = [{"file": file, "before": caption, "after": None} for file, caption in captions.items()]
        path = self._remember({"captions": kept}) if kept else None
        try:
            yield
        except (UserError, OSError):
            if path is not None:
                path.unlink(missing_ok=True)
            raise

    def undo(self) -> str:
        """Take the last change back, as far as nobody has changed the same since; returns what was done."""
        readable = ((path, entry) for path in self._kept() if (entry := _entry(path)) is not None)
        if (newest := next(readable, None)) is None:
            return "Nothing to undo."
        path, entry = newest
        said = self._restore(entry) if "trash" in entry else self._rewrite(entry["captions"])
        path.unlink(missing_ok=True)
        return said

    def _rewrite(self, changes: Sequence[Mapping[str, Any]]) -> str:
        folder, texts = self._listed()
        rows = CaptionReport(self._folder).rows()
        old: dict[Path, str] = {}
        for change in changes:
            # One that was removed meanwhile has no caption to take back.
            if change["file"] not in folder.files or len(texts.names_of(change["file"])) > 1:
                continue
            name = _caption_file(folder, texts, change["file"])
            now, after = read_caption(folder, name), change["after"]
            if now == after or (after is None and is_by_model(rows.get(change["file"]), now)):
                old[folder.path / name] = change["before"]
        _put(old)
        later = len(changes) - len(old)
        kept = f" {_count(later, 'caption')} changed since and left alone." if later else ""
        return f"{_count(len(old), 'caption')} as before.{kept}"

    def _restore(self, entry: Mapping[str, Any]) -> str:
        place = entry["trash"]
        in_the_way = 0
        for name, home in self._folders.items():
            root = self._trash / name / place
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
        return f"{_count(entry['count'], 'item')} back from the trash.{kept if in_the_way else ''}"

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
        kept = [{"file": each.file, "before": each.was, "after": each.caption} for each in changes]
        newest = next(self._kept(), None)
        if newest is not None and len(kept) == 1 and _age(newest) < _LONGEST_PAUSE_S:
            last = (_entry(newest) or {}).get("captions", ())
            if len(last) == 1 and (last[0]["file"], last[0]["after"]) == (kept[0]["file"], kept[0]["before"]):
                kept[0]["before"] = last[0]["before"]
                _write_entry(newest, {"captions": kept})
                return
        self._remember({"captions": kept})

    def _remember(self, entry: Mapping[str, Any]) -> Path:
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


def _entry(path: Path) -> dict[str, Any] | None:
    """A change that was kept; None where its file is damaged, which must not be in the way of the others."""
    try:
        entry = parse_json(path.read_bytes())
        if "trash" in entry:
            is_whole = bool(_TRASH_NAME.fullmatch(entry["trash"])) and isinstance(entry["count"], int)
        else:
            changes = entry["captions"]
            texts = [change[key] for change in changes for key in ("file", "before")]
            texts += [change["after"] for change in changes if change["after"] is not None]
            is_whole = isinstance(changes, list) and all(isinstance(text, str) for text in texts)
    except (OSError, ValueError, TypeError, LookupError):
        return None
    return entry if is_whole and isinstance(entry, dict) else None


def _age(path: Path) -> float:
    """Seconds since a file was written, or until then where the clock was set back."""
    return abs(time.time() - path.stat().st_mtime)


def _write_entry(path: Path, entry: Mapping[str, Any]) -> None:
    # Not `write_json`: it masks what looks like a secret, and a caption must come back as it was.
    write_text(path, json.dumps(entry, ensure_ascii=False))


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
