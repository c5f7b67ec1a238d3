"""This file writes the captions of a folder as one HTML page that needs no network and has no scripts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from PIL import Image

from diffsynth_lite.captioning.choice import CaptionJob, inputs_of, source_of
from diffsynth_lite.captioning.cleaning import Cleaned
from diffsynth_lite.captioning.contents import Item, read_contents
from diffsynth_lite.captioning.report import CaptionReport, Outcome, is_by_model
from diffsynth_lite.data.images import load_thumbnail
from diffsynth_lite.data.records import is_video
from diffsynth_lite.data.video import read_frames
from diffsynth_lite.errors import UserError
from diffsynth_lite.files import write_text
from diffsynth_lite.media import evenly_spread, jpeg_url
from diffsynth_lite.redaction import redacted

MAX_SHOWN = 500
"""Items on a page."""
_THUMBNAIL_PX = 208
_ONE_OF_SEVERAL_PX = 102
_MAX_THUMBNAILS = 4


@dataclass(frozen=True, kw_only=True)
class _Shown:
    """An item of the page."""

    item: Item
    made: Cleaned
    remark: str


def write_page(job: CaptionJob, report: CaptionReport, outcome: Outcome) -> None:
    """Write the page; what is in captions and file names is shown as text, never run, with secrets masked.

    Raises:
        OSError: it cannot be written.
    """
    environment = Environment(
        # The style sheet is the one of all pages.
        loader=ChoiceLoader(
            [PackageLoader("diffsynth_lite.captioning", ""), PackageLoader("diffsynth_lite.report", "")]
        ),
        autoescape=True,
        undefined=StrictUndefined,
    )
    sections = _sections(job, report, outcome)
    text = environment.get_template("page.html").render(
        title=job.folder.resolve().name,
        summary=outcome.summary,
        model=outcome.model,
        counts={name: len(shown) for name, shown in sections.items()},
        sections=_limited(sections),
        max_shown=MAX_SHOWN,
        thumbnails_of=lambda item: outcome.thumbnails.get(item.file) or _read_thumbnails(item),
    )
    write_text(report.page_file, redacted(text))


def thumbnails(images: Sequence[Image.Image]) -> list[str]:
    """Small JPEGs as data URLs, at most four; of several images each is half as wide."""
    side = _THUMBNAIL_PX if len(images) == 1 else _ONE_OF_SEVERAL_PX
    small = [image.copy() for image in evenly_spread(images, _MAX_THUMBNAILS)]
    for image in small:
        image.thumbnail((side, side))
    return [jpeg_url(image) for image in small]


def _sections(job: CaptionJob, report: CaptionReport, outcome: Outcome) -> dict[str, list[_Shown]]:
    """The items by who wrote their captions, those of this command first."""
    rows = report.rows()
    sections: dict[str, list[_Shown]] = {
        "Without a caption": [],
        "Written now": [],
        "Written by a model before": [],
        "Yours": [],
    }
    for item in read_contents(source_of(job)).items:
        row, texts = rows.get(item.file), "\n".join(item.captions)
        made, remark = Cleaned(text=texts), item.problem
        if item.file in outcome.refused:
            name, remark = "Without a caption", outcome.refused[item.file]
        elif item.file in outcome.made:
            name, made = "Written now", outcome.made[item.file]
        elif texts and row is not None and is_by_model(row, texts):
            name, remark = "Written by a model before", f"by {row.model}"
            made = Cleaned(text=texts, removed=row.removed, cut=row.cut)
        else:
            name = "Yours" if texts or item.is_locked else "Without a caption"
        sections[name].append(_Shown(item=item, made=made, remark=remark))
    return {name: shown for name, shown in sections.items() if shown}


def _limited(sections: dict[str, list[_Shown]]) -> Iterator[tuple[str, list[_Shown]]]:
    left = MAX_SHOWN
    for name, shown in sections.items():
        yield name, shown[:left]
        left -= len(shown[:left])


def _read_thumbnails(item: Item) -> list[str]:
    """Of an item that nobody was asked about; none where it cannot be read."""
    if item.path is None:
        return []
    try:
        if is_video(item.file):
            return thumbnails(read_frames(item.path, [0.0]))
        paths = (*inputs_of(item), item.path)
        return thumbnails([load_thumbnail(path, side=_THUMBNAIL_PX, background="white") for path in paths])
    except (UserError, OSError):
        return []
