"""This file defines what a command that writes captions is to do, and chooses the items of the folder."""

import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from diffsynth_lite.captioning.contents import Contents, Item
from diffsynth_lite.captioning.instructions import CaptionRequest, ItemKind, instruction_for
from diffsynth_lite.captioning.limit import TokenLimit
from diffsynth_lite.captioning.report import CaptionReport, CaptionRow, is_by_model
from diffsynth_lite.config.files import did_you_mean
from diffsynth_lite.data.captions import CAPTION_SUFFIXES, read_text
from diffsynth_lite.data.folder import list_folder
from diffsynth_lite.data.records import Source, is_video, stem
from diffsynth_lite.data.sources import METADATA_FILES
from diffsynth_lite.errors import UserError, join_names
from diffsynth_lite.media import evenly_spread

Replaced = Literal["none", "model", "all"]


@dataclass(frozen=True, kw_only=True)
class CaptionJob:
    """What a command is to write.

    Attributes:
        folder: with the images and clips.
        inputs: folders with the images that those in ``folder`` are edits of.
        limit: of a caption; None for any length.
        replaced: which captions are written again: those that a model wrote and nobody changed, or all.
        only: names of the items, or their paths; empty takes all.
        kept_rules: names of the rules of cleaning that are not applied.
        num_frames: of a clip.
        num_shown: of a dry run, items whose captions are shown and not written; 0 writes them.
        arguments: words of the command after ``caption``.
    """

    folder: Path
    request: CaptionRequest
    inputs: Sequence[Path] = ()
    limit: TokenLimit | None = None
    replaced: Replaced = "none"
    only: Sequence[str] = ()
    kept_rules: Collection[str] = ()
    num_frames: int = 8
    num_shown: int = 0
    arguments: tuple[str, ...] = ()

    def instruction_of(self, item: Item) -> str:
        """What a captioner is asked to write about an item."""
        num_inputs = len(inputs_of(item))
        kind: ItemKind = "clip" if is_video(item.file) else "edit" if num_inputs else "image"
        return instruction_for(self.request, kind=kind, num_inputs=num_inputs)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a command does with the items of a folder.

    Attributes:
        items: that get a caption.
        unusable: the others without a caption, with the reasons.
        num_kept: items whose captions stay.
        locked: names of those of them that were to be replaced, and are several or cannot be read.
        sharing: items whose caption file is that of another item, which is named, too.
        started_at: when the job was started, in seconds since 1970; at first if it was interrupted since.
    """

    items: Sequence[Item]
    unusable: Mapping[str, str]
    num_kept: int
    locked: Sequence[str]
    sharing: Sequence[str]
    started_at: float


def source_of(job: CaptionJob) -> Source:
    """The data set of a job."""
    return Source(path=str(job.folder), input_dirs=[str(path) for path in job.inputs])


def choose(job: CaptionJob, contents: Contents, report: CaptionReport) -> Choice:
    """The items that a job is to write captions for. Nothing is opened but the report.

    Raises:
        UserError: an item that is asked for is not there, or the captions are in a table.
    """
    _require_items(job, contents)
    names = _names_of(job, [item.file for item in contents.items])
    asked_for = [item for item in contents.items if item.file in names]
    rows, since = report.rows(), _first_start(job, report)
    items, locked, unusable = [], [], {}
    sharing: list[str] = []
    claimed: dict[Path, str] = {}
    for item in asked_for:
        if item.is_locked:
            locked += [item.file] * (job.replaced != "none")
        elif item.captions and not _is_replaced(job, item, rows.get(item.file), since):
            continue
        elif item.path is None or item.problem:
            unusable[item.file] = item.problem or "cannot be used"
        elif (first := claimed.setdefault(caption_path(job.folder, item), item.file)) == item.file:
            items.append(item)
        else:  # cat.png and cat.jpg share cat.txt
            sharing.append(f"{item.file} ({first})")
    num_kept = len(asked_for) - len(items) - len(unusable)
    if job.num_shown:
        items = evenly_spread(items, job.num_shown)
    return Choice(
        items=items,
        unusable=unusable,
        num_kept=num_kept,
        locked=locked,
        sharing=sharing,
        started_at=since,
    )


def caption_path(folder: Path, item: Item) -> Path:
    """The file that the caption of an item is written to."""
    return folder / (item.caption_files[0] if item.caption_files else f"{stem(item.file)}.txt")


def is_as_seen(folder: Path, item: Item) -> bool:
    """Whether the caption of an item is still the one that was read when the job began, or missing."""
    place = caption_path(folder, item)
    if not item.caption_files:
        return not any(os.path.lexists(folder / f"{stem(item.file)}{suffix}") for suffix in CAPTION_SUFFIXES)
    try:
        return read_text(place).strip() == "".join(item.captions)
    except FileNotFoundError:
        return True
    except (OSError, UserError):
        return False


def _require_items(job: CaptionJob, contents: Contents) -> None:
    tables = {name for item in contents.items for name in item.caption_files if name in METADATA_FILES}
    if tables:
        raise UserError(
            f"{job.folder}: its captions are in {tables.pop()}, which is never written; move it out of the "
            "folder to have them in text files"
        )
    for path in job.inputs:
        list_folder(path, allow_outside=False)
        if path.samefile(job.folder):
            raise UserError(f"--inputs {path}: is the folder itself; name that of the images before the edit")
    if not contents.items:
        raise UserError("\n".join(contents.problems) or f"{job.folder}: holds no image or clip")


def _names_of(job: CaptionJob, known: Sequence[str]) -> set[str]:
    """Names of the items that are asked for, which may be given as paths."""
    if not job.only:
        return set(known)
    names = set()
    for given in job.only:
        below = Path(os.path.relpath(given, job.folder)).as_posix()
        if (name := next((name for name in (given, below) if name in known), None)) is None:
            same = [name for name in known if PurePosixPath(name).name == Path(given).name]
            near = f"did you mean '{same[0]}'?" if len(same) == 1 else did_you_mean(given, known).strip()
            hint = near or f"there are {join_names(known[:3])}, ..."
            raise UserError(f"--only {given}: is not an item of {job.folder}; {hint}")
        names.add(name)
    return names


def _first_start(job: CaptionJob, report: CaptionReport) -> float:
    status = report.status()
    if status is None or status.state == "finished" or status.arguments != job.arguments or job.num_shown:
        return time.time()
    return status.started_at


def _is_replaced(job: CaptionJob, item: Item, row: CaptionRow | None, since: float) -> bool:
    """Whether the caption of an item is written again.

    What this job wrote before an interruption stays, and what somebody made of that; not what was there
    before, where it was stopped between the row and the caption.
    """
    is_answered = row is not None and row.written_at >= since
    if is_by_model(row, item.captions[0]):
        return job.replaced != "none" and not is_answered
    if job.replaced != "all" or not is_answered:
        return job.replaced == "all"
    with suppress(OSError):
        return caption_path(job.folder, item).stat().st_mtime < since
    return True


def inputs_of(item: Item) -> list[Path]:
    """The images that an item is an edit of, in their order."""
    return [path for setting, path in item.companions if setting == "input"]
