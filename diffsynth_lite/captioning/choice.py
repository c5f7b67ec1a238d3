"""This file defines what a command that writes captions is to do, and chooses the items of the folder."""

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from diffsynth_lite.captioning.cleaning import Cleaned
from diffsynth_lite.captioning.contents import Contents, Item
from diffsynth_lite.captioning.instructions import CaptionRequest
from diffsynth_lite.captioning.limit import Fits
from diffsynth_lite.captioning.report import CaptionReport, CaptionRow, is_by_model
from diffsynth_lite.config.files import did_you_mean
from diffsynth_lite.data.captions import CAPTION_SUFFIXES, read_text
from diffsynth_lite.data.folder import list_folder
from diffsynth_lite.data.records import WHOLE, Part, Source, stem
from diffsynth_lite.data.sources import METADATA_FILES
from diffsynth_lite.errors import UserError, join_names
from diffsynth_lite.media import evenly_spread


@dataclass(frozen=True, kw_only=True)
class CaptionJob:
    """What a command is to write.

    Attributes:
        folder: with the images and clips.
        inputs: folders with the images that those in ``folder`` are edits of.
        limit: finds what a text encoder reads of a caption; None for any length.
        replaced: which captions are written again: those that a model wrote and nobody changed, or all.
        only: names of the items, or their paths; empty takes all.
        kept_rules: names of the rules of cleaning that are not applied.
        num_frames: of a clip.
        num_shown: of a dry run, items whose captions are shown and not written; 0 writes them.
        part: of the items; other processes write those of the others, at the same time.
        arguments: words of the command after ``caption``.
    """

    folder: Path
    request: CaptionRequest
    inputs: Sequence[Path] = ()
    limit: Callable[[], Fits] | None = None
    replaced: Literal["none", "model", "all"] = "none"
    only: Sequence[str] = ()
    kept_rules: Collection[str] = ()
    num_frames: int = 8
    num_shown: int = 0
    part: Part = WHOLE
    arguments: tuple[str, ...] = ()

    @property
    def source(self) -> Source:
        """Its data set."""
        return Source(path=str(self.folder), input_dirs=[str(path) for path in self.inputs])


@dataclass(kw_only=True)
class Outcome:
    """What a command does with the items of a folder, and what it did.

    Attributes:
        items: that get a caption.
        started_at: when the job was started, in seconds since 1970; at first if it was interrupted since.
        made: the captions, written or only shown, by item.
        failed: items without a caption, by the reason.
        model: what was asked; empty where nothing was.
        kept: number of captions that stay.
        locked: items that were to be replaced, and have several captions or one that cannot be read.
        sharing: items whose caption file is that of another item, which is named, too.
        appeared: items whose caption was written or changed by somebody while the model answered; it stays.
        seconds: that all answers took.
    """

    items: Sequence[Item]
    started_at: float
    made: dict[str, Cleaned] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    model: str = ""
    kept: int = 0
    locked: list[str] = field(default_factory=list)
    sharing: list[str] = field(default_factory=list)
    appeared: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def summary(self) -> str:
        """All numbers in a line; of what went otherwise only those that are not 0."""
        counts = {
            "failed": len(self.failed),
            "cut": sum(bool(made.cut) for made in self.made.values()),
            "cleaned": sum(bool(made.removed) for made in self.made.values()),
        }
        parts = [f"{len(self.made)} written", f"{self.kept + len(self.appeared)} kept"]
        parts += [f"{count} {what}" for what, count in counts.items() if count]
        if self.seconds:
            parts.append(f"in {self.seconds:,.1f} s ({self.items_per_minute:,.1f} items a minute)")
        return ", ".join(parts)

    @property
    def items_per_minute(self) -> float:
        """Of the items that were answered; 0 where there is none."""
        num_answered = len(self.made) + len(self.appeared) + len(self.failed)
        return 60 * num_answered / self.seconds if self.seconds else 0.0


def joined_outcome(results: Sequence[Mapping[str, Any]]) -> Outcome:
    """The outcome of all parts, from what the command of each prints as JSON."""
    joined = Outcome(items=[], started_at=0.0)
    for result in results:
        joined.model = joined.model or result["model"]
        joined.kept += result["kept"]
        joined.locked += result["locked"]
        joined.appeared += result["appeared"]
        joined.failed |= result["failed"]
        joined.made |= {
            name: Cleaned(
                text=text, cut=result["cut"].get(name, ""), removed=tuple(result["cleaned"].get(name, ()))
            )
            for name, text in result["written"].items()
        }
    return joined


def choose(job: CaptionJob, contents: Contents, report: CaptionReport) -> Outcome:
    """What a job will do. Nothing is opened but the report."""
    _require_items(job, contents)
    names = _names_of(job, [item.file for item in contents.items])
    asked_for = [item for item in contents.items if item.file in names and job.part.owns(item.file)]
    status = report.status()
    goes_on = status and status.state != "finished" and status.arguments == job.arguments
    since = status.started_at if status and goes_on and not job.num_shown else time.time()
    rows, items, claimed = report.rows(), list[Item](), dict[str, str]()
    outcome = Outcome(items=items, started_at=since)
    for item in asked_for:
        if item.is_locked:
            outcome.locked += [item.file] * (job.replaced != "none")
        elif item.captions and not _is_replaced(job, item, rows.get(item.file), since):
            continue
        elif item.path is None or item.problem:
            outcome.failed[item.file] = item.problem or "cannot be used"
        elif (first := claimed.setdefault(item.caption_file, item.file)) == item.file:
            items.append(item)
        else:  # cat.png and cat.jpg share cat.txt
            outcome.sharing.append(f"{item.file} ({first})")
    outcome.kept = len(asked_for) - len(items) - len(outcome.failed)
    if job.num_shown:
        outcome.items = evenly_spread(items, job.num_shown)
    return outcome


def is_as_seen(folder: Path, item: Item) -> bool:
    """Whether the caption of an item is still the one that was read when the job began, or missing."""
    if not item.caption_files:
        return not any(os.path.lexists(folder / f"{stem(item.file)}{suffix}") for suffix in CAPTION_SUFFIXES)
    try:
        return read_text(folder / item.caption_file).strip() == "".join(item.captions)
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
        return (job.folder / item.caption_file).stat().st_mtime < since
    return True
