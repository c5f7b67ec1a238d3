"""This file writes the doctor's findings as one HTML page that needs nothing else: no network, no scripts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from PIL import Image

from diffsynth_lite.doctor.findings import Findings
from diffsynth_lite.media import jpeg_url, opaque
from diffsynth_lite.redaction import redacted

_THUMBNAIL_PX = 208
_STRIP_PX = 4 * _THUMBNAIL_PX
_STRIP_ASPECT = 2.5
_GAP_PX = 8


def write_page(path: Path, findings: Findings, *, title: str, lead: str) -> None:
    """Write the page; what is in captions and file names is shown as text, never run, with secrets masked."""
    environment = Environment(
        # The style sheet is the one of all pages.
        loader=ChoiceLoader(
            [PackageLoader("diffsynth_lite.doctor", ""), PackageLoader("diffsynth_lite.report", "")]
        ),
        autoescape=True,
        undefined=StrictUndefined,
    )
    text = environment.get_template("page.html").render(
        findings=findings,
        inlined=_inlined,
        # Of the images of an item side by side; captions are broken there.
        width_of=lambda images: max(
            _THUMBNAIL_PX, _GAP_PX * (len(images) - 1) + sum(image["width"] for image in images)
        ),
        thumbnail_px=_THUMBNAIL_PX,
        title=title,
        lead=lead,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(redacted(text), encoding="utf-8")


def _inlined(images: Mapping[str, Image.Image]) -> list[dict[str, Any]]:
    """Small JPEGs of the images of an item as data URLs; a strip of frames is wider."""
    inlined = []
    for kind, image in images.items():
        small = opaque(image)
        is_strip = small.width > _STRIP_ASPECT * small.height
        small.thumbnail((_STRIP_PX if is_strip else _THUMBNAIL_PX, _THUMBNAIL_PX))
        inlined.append(
            {"kind": kind, "source": jpeg_url(small), "width": small.width, "height": small.height}
        )
    return inlined
