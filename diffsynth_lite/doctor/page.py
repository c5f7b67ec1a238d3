"""This file writes the doctor's findings as one HTML page that needs nothing else: no network, no scripts."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image

from diffsynth_lite.doctor.findings import Findings, SheetEntry

_THUMBNAIL_PX = 256
_WIDE_ASPECT = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Figure:
    """A sheet entry with its pictures as texts that stand in the page."""

    name: str
    bucket: str
    captions: Sequence[str]
    pictures: dict[str, str]
    remarks: Sequence[str]
    wide: bool


def write_page(path: Path, findings: Findings, *, title: str, lead: str) -> None:
    """Write the page; what is in captions and file names is shown as text, never run.

    Args:
        path: of the page, which is replaced.
        findings: what it shows.
        title: its heading.
        lead: the line below it.
    """
    environment = Environment(
        loader=PackageLoader("diffsynth_lite.doctor", ""), autoescape=True, undefined=StrictUndefined
    )
    figures = [_figure(entry) for entry in findings.sheet]
    text = environment.get_template("page.html").render(
        findings=findings, figures=figures, title=title, lead=lead
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _figure(entry: SheetEntry) -> _Figure:
    return _Figure(
        name=entry.name,
        bucket=entry.bucket,
        captions=entry.captions,
        pictures={kind: _inline(picture) for kind, picture in entry.pictures.items()},
        remarks=entry.remarks,
        wide=any(picture.width > _WIDE_ASPECT * picture.height for picture in entry.pictures.values()),
    )


def _inline(picture: Image.Image) -> str:
    """A small JPEG of a picture as a data URL; a strip of frames keeps the height of a frame."""
    small = picture.convert("RGB")
    small.thumbnail((_THUMBNAIL_PX * max(1, round(small.width / small.height)), _THUMBNAIL_PX))
    file = io.BytesIO()
    small.save(file, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
