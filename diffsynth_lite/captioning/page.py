"""This file writes the captions of a folder as one HTML page that needs no network and has no scripts."""

from collections.abc import Iterator
from typing import NamedTuple

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from diffsynth_lite.captioning.choice import CaptionJob, Outcome
from diffsynth_lite.captioning.cleaning import Cleaned
from diffsynth_lite.captioning.contents import Item, read_contents
from diffsynth_lite.captioning.report import CaptionReport, is_by_model
from diffsynth_lite.data.images import load_thumbnail
from diffsynth_lite.data.records import is_video
from diffsynth_lite.data.video import check_video, read_frames
from diffsynth_lite.errors import UserError
from diffsynth_lite.files import write_text
from diffsynth_lite.media import evenly_spread, jpeg_url
from diffsynth_lite.redaction import redacted

MAX_SHOWN = 500
"""Items on a page."""
_THUMBNAIL_PX = 208
_ONE_OF_SEVERAL_PX = 102
_MAX_THUMBNAILS = 4


class _Shown(NamedTuple):
    item: Item
    made: Cleaned
    remark: str


def write_page(job: CaptionJob, report: CaptionReport, outcome: Outcome) -> None:
    """Write the page; what is in captions and file names is shown as text, never run, with secrets masked."""
    # The style sheet is the one of all pages.
    folders = [PackageLoader(f"diffsynth_lite.{room}", "") for room in ("captioning", "report")]
    environment = Environment(loader=ChoiceLoader(folders), autoescape=True, undefined=StrictUndefined)
    sections = _sections(job, report, outcome)
    text = environment.get_template("page.html").render(
        title=job.folder.resolve().name,
        summary=outcome.summary,
        model=outcome.model,
        counts={name: len(shown) for name, shown in sections.items()},
        sections=_limited(sections),
        max_shown=MAX_SHOWN,
        thumbnails_of=_thumbnails,
    )
    write_text(report.page_file, redacted(text))


def _sections(job: CaptionJob, report: CaptionReport, outcome: Outcome) -> dict[str, list[_Shown]]:
    """The items by who wrote their captions, those of this command first."""
    rows = report.rows()
    names = ("Without a caption", "Written now", "Written by a model before", "Yours")
    sections: dict[str, list[_Shown]] = {name: [] for name in names}
    for item in read_contents(job.source).items:
        row, texts = rows.get(item.file), "\n".join(item.captions)
        made, remark = Cleaned(text=texts), item.problem
        if item.file in outcome.failed:
            name, remark = "Without a caption", outcome.failed[item.file]
        elif item.file in outcome.made:
            name, made = "Written now", outcome.made[item.file]
        elif texts and row is not None and is_by_model(row, texts):
            name, remark = "Written by a model before", f"by {row.model}"
            made = Cleaned(text=texts, removed=row.removed, cut=row.cut)
        else:
            name = "Yours" if texts or item.is_locked else "Without a caption"
        sections[name].append(_Shown(item, made, remark))
    return {name: shown for name, shown in sections.items() if shown}


def _limited(sections: dict[str, list[_Shown]]) -> Iterator[tuple[str, list[_Shown]]]:
    left = MAX_SHOWN
    for name, shown in sections.items():
        yield name, shown[:left]
        left -= len(shown[:left])


def _thumbnails(item: Item) -> list[str]:
    """Small JPEGs as data URLs: of a clip four frames, of an edit also its inputs; none of a damaged file."""
    if item.path is None:
        return []
    paths = evenly_spread([*item.inputs, item.path], _MAX_THUMBNAILS)
    side = _THUMBNAIL_PX if len(paths) == 1 and not is_video(item.file) else _ONE_OF_SEVERAL_PX
    try:
        if not is_video(item.file):
            return [jpeg_url(load_thumbnail(path, side=side)) for path in paths]
        frames = read_frames(item.path, check_video(item.path).spread_times(_MAX_THUMBNAILS))
    except (UserError, OSError):
        return []
    for frame in frames:
        frame.thumbnail((side, side))
    return [jpeg_url(frame) for frame in frames]
