"""This file writes the model card of a LoRA, with sample images, unless somebody edited it.

A card is ``README.md`` as the hub of Hugging Face reads it: a header in yaml, and Markdown.
"""

import hashlib
import logging
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from diffsynth_lite.errors import UserError
from diffsynth_lite.files import replacing, write_text
from diffsynth_lite.redaction import redacted
from diffsynth_lite.run_folder.reading import read_run_file

logger = logging.getLogger(__name__)

CARD = "README.md"
IMAGES = "pictures"
"""Folder of the card's images, next to it."""
LORA_FOLDER = "path/to/this/folder"
"""Path that the code in a card loads the LoRA from, until it is published."""

_MARK = re.compile(r"<!-- Written by diffsynth_lite, ([0-9a-f]{16})\.[^>]*-->\s*\Z")
# A backslash does not escape itself here: the hub takes one before a bracket, written twice, for mathematics.
_ESCAPES = str.maketrans(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;", "\\": "&#92;", "$": "&#36;"}
    | {character: f"\\{character}" for character in "`*_[]|~"}
)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A preview that the card shows.

    Attributes:
        before: image of the same prompt and noise before training; None if there is none.
        after: image with the LoRA. The image of a video shows some of its frames; the video, an MP4 of the
            same name, is next to it.
    """

    prompt: str
    negative_prompt: str | None
    before: Path | None
    after: Path


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """The content of a card. All texts are plain, and none holds a path.

    Attributes:
        header: keys and values of the hub's metadata, except ``widget``; None leaves a key out.
        summary: a sentence or two.
        code: Python that generates with it in diffusers; None where diffusers has no pipeline for it.
        comfy_files: files that ComfyUI loads, and the component of each; None where it cannot load them.
        settings: how it was trained, and its losses, by name.
        caveats: unknown or unexpected facts.
    """

    header: Mapping[str, Any]
    title: str
    summary: str
    triggers: Sequence[str]
    samples: Sequence[Sample]
    sample_caption: str
    code: str | None
    comfy_files: Mapping[str, str] | None
    settings: Mapping[str, str]
    caveats: Sequence[str]


def write_model_card(folder: Path, card: ModelCard) -> None:
    """Write the card and copies of its images, in place of an earlier card of a run.

    A card that somebody edited, or wrote, stays as it is, and so do its images.
    """
    if is_edited(folder):
        return
    images = _images(card.samples)
    for name, source in images.items():
        (folder / IMAGES).mkdir(exist_ok=True)
        with replacing(folder / IMAGES / name) as temporary:
            shutil.copyfile(source, temporary)
    write_text(folder / CARD, _rendered(card, set(images)))


def is_edited(folder: Path) -> bool:
    """Whether somebody edited, or wrote, the card in a folder, which is logged."""
    path = folder / CARD
    is_ours = not path.exists()
    with suppress(UserError):  # it is not a file that a run writes
        is_ours = is_ours or is_as_written(read_run_file(path).decode(errors="replace"))
    if not is_ours:
        logger.info("%s was edited; it and its images stay as they are.", path)
    return not is_ours


def is_as_written(text: str) -> bool:
    """Whether a card is as it was written here: the mark at its end fits the text above it."""
    mark = _MARK.search(text)
    return mark is not None and mark[1] == _digest(text[: mark.start()])


def marked(text: str) -> str:
    """A card with the mark at its end by which :func:`is_as_written` knows it; in place of an earlier one."""
    text = _MARK.sub("", text).rstrip() + "\n\n"
    return (
        f"{text}<!-- Written by diffsynth_lite, {_digest(text)}. Change anything above, or take this line "
        "out, and no run replaces the card. -->\n"
    )


def _digest(text: str) -> str:
    """Hash of the lines without their ends, which git and the hub's editor may change."""
    lines = "\n".join(line.rstrip() for line in text.splitlines()).rstrip()
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def _stems(place: int) -> tuple[str, str]:
    """Names of a sample's images, before and after; they stay the same during a run."""
    return f"prompt-{place:02d}-before", f"prompt-{place:02d}"


def _images(samples: Sequence[Sample]) -> dict[str, Path]:
    """The sources of the card's images, by name."""
    images = {
        stem: image
        for place, sample in enumerate(samples)
        for stem, image in zip(_stems(place), (sample.before, sample.after), strict=True)
        if image is not None
    }
    return {
        f"{stem}{suffix}": file
        for stem, image in images.items()
        for suffix in (".png", ".mp4")
        if (file := image.with_suffix(suffix)).is_file()
    }


def _rendered(card: ModelCard, images: set[str]) -> str:
    """The card; secrets are masked before anything is escaped or wrapped, and once more after that."""
    rows = [_row(sample, place, images) for place, sample in enumerate(card.samples)]
    header = ModelCardData(**redacted(card.header), widget=[row["widget"] for row in rows] or None)
    text = (
        _environment()
        .get_template("model_card.md.jinja")
        .render(
            card=card,
            rows=rows,
            code=None if card.code is None else Markup(redacted(card.code)),
        )
    )
    return marked(redacted(f"---\n{header.to_yaml()}\n---\n\n{text}"))


@cache
def _environment() -> Environment:
    """Cached with its compiled template, which takes most of the time of a card; a run writes several."""
    return Environment(
        loader=PackageLoader("diffsynth_lite.run_folder", ""),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else Markup(_as_markdown(str(value))),
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _row(sample: Sample, place: int, images: set[str]) -> dict[str, Any]:
    """A sample as the template shows it, and as an entry of the hub's widget."""
    files = [
        {suffix: f"{IMAGES}/{stem}.{suffix}" for suffix in ("png", "mp4") if f"{stem}.{suffix}" in images}
        for stem in _stems(place)
    ]
    prompt, negative_prompt = redacted((sample.prompt, sample.negative_prompt))
    widget: dict[str, Any] = {"text": prompt}
    if negative_prompt is not None:
        widget["parameters"] = {"negative_prompt": negative_prompt}
    widget["output"] = {"url": files[1].get("mp4", files[1]["png"])}
    return {"prompt": prompt, "files": files, "widget": widget}


def _as_markdown(text: str) -> str:
    """Text on one line that Markdown shows as it is, outside of code."""
    shown = "".join(character if character.isprintable() else " " for character in redacted(text))
    return " ".join(shown.split()).translate(_ESCAPES)
