"""This file writes the doctor's findings as one HTML page that needs nothing else: no network, no scripts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from PIL import Image

from diffsynth_lite.doctor.findings import Findings, SheetEntry
from diffsynth_lite.media import jpeg_url, opaque
from diffsynth_lite.redaction import redacted

_THUMBNAIL_PX = 208
_STRIP_PX = 4 * _THUMBNAIL_PX
_STRIP_ASPECT = 2.5
_GAP_PX = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class _InlineImage:
    """An image as text that is in the page, and its size there in pixels."""

    kind: str
    source: str
    width: int
    height: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Figure:
    """A sheet entry with its images as texts that are in the page."""

    name: str
    bucket: str
    captions: Sequence[str]
    images: Sequence[_InlineImage]
    remarks: Sequence[str]

    @property
    def width(self) -> int:
        """Pixels that its images take side by side; captions are broken there."""
        gaps = _GAP_PX * (len(self.images) - 1)
        return max(_THUMBNAIL_PX, gaps + sum(image.width for image in self.images))

    @property
    def is_wide(self) -> bool:
        """Whether it needs the room of two images where a window is narrow."""
        return self.width > _THUMBNAIL_PX


def write_page(path: Path, findings: Findings, *, title: str, lead: str) -> None:
    """Write the page; what is in captions and file names is shown as text, never run, with secrets masked.

    Args:
        title: the heading.
        lead: the line below it.
    """
    environment = Environment(
        # The style sheet is the one of all pages.
        loader=ChoiceLoader(
            [PackageLoader("diffsynth_lite.doctor", ""), PackageLoader("diffsynth_lite.report", "")]
        ),
        autoescape=True,
        undefined=StrictUndefined,
    )
    text = environment.get_template("page.html").render(
        findings=findings, figure_of=_figure, title=title, lead=lead
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(redacted(text), encoding="utf-8")


def _figure(entry: SheetEntry) -> _Figure:
    return _Figure(
        name=entry.name,
        bucket=entry.bucket,
        captions=entry.captions,
        images=[_inline(kind, image) for kind, image in entry.images.items()],
        remarks=entry.remarks,
    )


def _inline(kind: str, image: Image.Image) -> _InlineImage:
    """A small JPEG of an image as a data URL; a strip of frames is wider."""
    small = opaque(image)
    is_strip = small.width > _STRIP_ASPECT * small.height
    small.thumbnail((_STRIP_PX if is_strip else _THUMBNAIL_PX, _THUMBNAIL_PX))
    return _InlineImage(kind=kind, source=jpeg_url(small), width=small.width, height=small.height)
