"""This file prepares the images and clips of a folder into another one, and goes on where it was stopped.

The other folder has a hidden file, ``.prepared.jsonl``: the command, and a line for each image or clip with
what becomes of it, written before its results are. Results appear whole or not at all, and those that are
there stay as they are. Results of a file that has changed since are made again.
"""

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from diffsynth_lite.data.captions import CaptionFiles, json_object
from diffsynth_lite.data.folder import Folder, list_folder, usable_file
from diffsynth_lite.data.images import load_upright
from diffsynth_lite.data.records import is_image, is_video, stem
from diffsynth_lite.data.sources import METADATA_FILES
from diffsynth_lite.errors import RunStoppedError, UserError
from diffsynth_lite.files import DISK_FULL, is_unfinished, replacing, write_text
from diffsynth_lite.preparing.bars import black_bars
from diffsynth_lite.preparing.clips import ClipPlan, plan_clip, write_scenes
from diffsynth_lite.preparing.images import Fit, Steps, prepare_image, result_suffix
from diffsynth_lite.progress_log import ProgressLog
from diffsynth_lite.run_folder.lock import open_lock

logger = logging.getLogger(__name__)

RECORDS = ".prepared.jsonl"
_VERSION = 1
"""Of the rules by which results are made and named; a folder of another version is not continued."""
_DERIVED = re.compile(r"(.+?)(?:-\d{4,}){1,2}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """What becomes of an image or clip.

    Attributes:
        file: name below the folder, with forward slashes.
        width: as it is shown, in pixels, before; ``new_width`` is that of the results.
        duration_s: of a clip.
        num_scenes: of a clip that is looked through for cuts; else 1.
        num_short: those of them that are left out.
        results: names below the other folder.
        is_copy: whether the result is the file, bit for bit.
    """

    file: str
    width: int
    height: int
    duration_s: float | None = None
    num_scenes: int = 1
    num_short: int = 0
    new_width: int
    new_height: int
    results: Sequence[str]
    is_copy: bool


@dataclass(kw_only=True, slots=True)
class Preparation:
    """What became of a folder, or would.

    Attributes:
        num_kept: items all of whose results were there.
        spread_captions: items with a caption that went to several results.
        problems: name of a file that could not be prepared to the reason.
        not_taken: files that are neither image, clip nor the caption of one.
    """

    items: list[Prepared] = field(default_factory=list)
    num_kept: int = 0
    spread_captions: list[str] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    not_taken: Sequence[str] = ()


def prepare_folder(folder: Path, out: Path, steps: Steps, *, is_dry_run: bool = False) -> Preparation:
    """Prepare each image and clip below a folder; a bad one is named in the result, and the rest goes on.

    Args:
        out: new, empty, or with results of the same command.
        is_dry_run: everything is looked at, and nothing written.

    Raises:
        UserError: a folder cannot be used.
        RunStoppedError: the disk is full.
    """
    listing = list_folder(folder, allow_outside=False)
    media = [name for name in listing.files if is_image(name) or is_video(name)]
    if not media:
        raise UserError(f"{folder}: holds no image or clip")
    if not any(map(is_video, media)) and (steps.split_scenes or steps.extract_frames):
        reason = "holds no clips, so that --split-scenes and --extract-frames do nothing"
        if not (steps.max_side or steps.strip_bars):
            raise UserError(f"{folder}: {reason}")
        logger.warning("%s: %s", folder, reason)
    texts = CaptionFiles(listing, media)
    if not texts and (table := next((name for name in METADATA_FILES if name in listing.files), None)):
        raise UserError(
            f"{folder}: the captions are in {table}, which names the files as they are now; write each to a "
            f"text file, such as {stem(media[0])}.txt, or move {table} out of the folder to go on without"
        )
    used = {*media, *(text for name in media for text in texts.names_of(name))}
    not_taken = [name for name in listing.files if name not in used]
    found = Preparation(problems=_clashes(media, steps), not_taken=not_taken)
    rows = _Rows(folder, out, steps)
    names = [name for name in media if name not in found.problems]
    progress = ProgressLog("prepared %d of %d files", len(names), phase="reading")
    with nullcontext() if is_dry_run else rows.begun():
        for name in names:
            try:
                _prepare(name, listing, texts, rows, found, is_dry_run=is_dry_run)
            except UserError as error:
                found.problems[name] = str(error).removeprefix(f"{listing.path / name}: ")
            progress.advance()
    return found


def _prepare(
    name: str, listing: Folder, texts: CaptionFiles, rows: "_Rows", found: Preparation, *, is_dry_run: bool
) -> None:
    """Prepare an image or clip, unless that is done, and copy its captions."""
    source = listing.use(name)
    captions = {text.removeprefix(stem(name)): listing.use(text) for text in texts.names_of(name)}
    known = rows.known(name, source)
    is_done = known is not None and all((rows.out / result).exists() for result in known.results)
    item, write = (known, None) if known and is_done else _looked_at(name, source, rows)
    found.items.append(item)
    found.num_kept += is_done
    if captions and len(item.results) > 1:
        found.spread_captions.append(name)
    if is_dry_run:
        return
    if known is None:
        rows.add(item, source)
    if write is not None:
        (rows.out / name).parent.mkdir(parents=True, exist_ok=True)
        write()
    for ending, text in captions.items():
        for result in item.results:
            _copy(text, rows.out / f"{stem(result)}{ending}")


def _looked_at(name: str, source: Path, rows: "_Rows") -> tuple[Prepared, Callable[[], None]]:
    """What becomes of an image or clip, and what writes those results that are not there."""
    steps, num_scenes, num_short, duration_s = rows.steps, 1, 0, None
    write: Callable[[], None]
    if is_video(name):
        plan = plan_clip(source, steps)
        fit, is_copy, duration_s = plan.fit, plan.is_whole and not steps.extract_frames, plan.facts.duration_s
        num_scenes, num_short = len(plan.scenes), len(plan.scenes) - len(plan.kept)
        of_scenes = _results_of_clip(name, plan, steps)
        results = list(chain.from_iterable(of_scenes))
        write = partial(
            write_scenes, source, plan, [[rows.out / one for one in names] for names in of_scenes]
        )
    else:
        image = load_upright(source)  # decoded, so a damaged one is an error
        fit = Fit.of(image.size, black_bars(image) if steps.strip_bars else None, steps.max_side)
        is_copy, results = fit.is_whole, [f"{stem(name)}{result_suffix(source)}"]
        write = partial(prepare_image, source, rows.out / results[0], fit)
    item = Prepared(
        file=name,
        width=fit.before[0],
        height=fit.before[1],
        duration_s=duration_s,
        num_scenes=num_scenes,
        num_short=num_short,
        new_width=fit.size[0],
        new_height=fit.size[1],
        results=(name,) if is_copy else tuple(results),
        is_copy=is_copy,
    )
    return item, partial(_copy, source, rows.out / name) if is_copy else write


def _results_of_clip(name: str, plan: ClipPlan, steps: Steps) -> list[list[str]]:
    """Names of the results of each scene that is kept."""
    several = len(plan.kept) > 1
    starts = [f"{stem(name)}{f'-{number:04d}' if several else ''}" for number in range(1, len(plan.kept) + 1)]
    if not steps.extract_frames:
        return [[f"{start}.mp4"] for start in starts]
    return [
        [f"{start}-{number:04d}.png" for number in range(1, min(steps.extract_frames, scene.num_frames) + 1)]
        for start, scene in zip(starts, plan.kept, strict=True)
    ]


def _copy(source: Path, result: Path) -> None:
    """Copy a file, unless it is there."""
    if not result.exists():
        with replacing(result) as temporary:
            shutil.copyfile(source, temporary)


def _clashes(media: Sequence[str], steps: Steps) -> dict[str, str]:
    """Files whose results may get the name of another one's, with the reason."""
    owners: dict[str, str] = {}
    problems = {}
    clips = {stem(name): name for name in media if is_video(name)}
    for name in media:
        result = stem(name) + (".mp4" if is_video(name) else result_suffix(Path(name)))
        owner = owners.setdefault(result, name)
        derived = _DERIVED.fullmatch(stem(name))
        if owner != name:
            problems[name] = f"would become {result}, as {owner} may; rename one of them"
        elif derived and derived[1] in clips and (steps.split_scenes or steps.extract_frames):
            problems[name] = f"has a name as results of {clips[derived[1]]} get; rename one of them"
    return problems


class _Rows:
    """The file of records in the folder of the results.

    Attributes:
        out: the folder.
    """

    def __init__(self, folder: Path, out: Path, steps: Steps) -> None:
        self.out, self.steps = out, steps
        self._command = {"version": _VERSION, "folder": str(folder.resolve()), **asdict(steps)}
        self._path = out / RECORDS
        self._known: dict[str, dict[str, Any]] = {}
        if out.resolve().is_relative_to(folder.resolve()):
            raise UserError(
                f"--out {out}: is in {folder}, where it would become data; choose a folder elsewhere"
            )
        if out.exists() and not out.is_dir():
            raise UserError(f"--out {out}: is a file; give a folder that is new or empty")
        if self._path.exists():
            self._read()
        elif out.exists() and any(not path.name.startswith(".") for path in out.iterdir()):
            raise UserError(f"--out {out}: holds other files; give a folder that is new or empty")

    def _read(self) -> None:
        """Read the rows; one that a kill has torn does not count."""
        first, *rows = self._path.read_text(encoding="utf-8", errors="replace").splitlines() or [""]
        if (command := json_object(first) or {}) not in (self._command, {}):
            flags = (
                f" --{key.replace('_', '-')}{'' if value is True else f' {value}'}"
                for key, value in command.items()
                if value and key not in ("version", "folder")
            )
            raise UserError(
                f"--out {self.out}: holds what another command made: prepare {command.get('folder')}"
                f"{''.join(flags)}; choose another folder, or delete it"
            )
        self._known = {str(row["file"]): row for row in filter(None, map(json_object, rows)) if "file" in row}

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Scope in which no other process prepares the folder, which is made, or made ready to go on."""
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            lock = open_lock(self.out / ".lock", place=f"--out {self.out}")
        except OSError as error:
            raise UserError(f"--out {self.out}: cannot be written to: {error.strerror}") from None
        with lock.file:
            for path in self.out.rglob(".tmp-*"):
                if is_unfinished(path.name):
                    path.unlink()
            try:
                write_text(self._path, "".join(map(_line, [self._command, *self._known.values()])))
                yield
            except OSError as error:
                if error.errno in DISK_FULL:
                    reason = "the disk is full; make room, and the same command goes on"
                    raise RunStoppedError(f"{self.out}: {reason}") from error
                raise

    def known(self, name: str, source: Path) -> Prepared | None:
        """What was to become of a file, if that is the one that there was."""
        row = self._known.get(name)
        if row is None or row.get("source") != _identity(source):
            return None
        return Prepared(**{key: value for key, value in row.items() if key != "source"})

    def add(self, item: Prepared, source: Path) -> None:
        """Record what is to become of a file; results of what it was before are deleted."""
        for name in self._known.get(item.file, {}).get("results", ()):
            if (path := usable_file(self.out, name)) is not None:
                path.unlink()
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_line({**asdict(item), "source": _identity(source)}))


def _identity(source: Path) -> list[int]:
    status = source.stat()
    return [status.st_size, status.st_mtime_ns]


def _line(value: dict[str, Any]) -> str:
    return f"{json.dumps(value, ensure_ascii=False)}\n"
