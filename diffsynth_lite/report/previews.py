"""This file finds the previews of a run, chooses those that the page shows, and embeds them."""

import base64
import io
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path

from PIL import Image

from diffsynth_lite.errors import UserError
from diffsynth_lite.files import read_bytes
from diffsynth_lite.media import evenly_spread, jpeg_url
from diffsynth_lite.run_folder.reading import read_run_file

_FILE_NAME = re.compile(r"step-(\d{1,12})-prompt-(\d{1,6})-(\w+)\.png")
_MAX_STEPS = 12
_MAX_IMAGE_PX = (768, 768)
_MAX_STRIP_PX = (1600, 320)
"""Size of the frames of a video side by side."""
_AS_IT_IS_BYTES = 64 * 1024
"""Smaller files are embedded as they are, larger ones as JPEG."""
_MAX_VIDEO_BYTES = 2**21
MAX_EMBEDDED_BYTES = 8 * 2**20
"""Size of all previews in a page, as text: small enough to open on a phone and to reload quickly."""


@dataclass(frozen=True, kw_only=True)
class Preview:
    """The preview of one prompt at one step.

    Attributes:
        image: path in the run folder; of a video, a strip of its frames.
        video: path of the MP4; None of an image.
    """

    step: int
    image: str
    video: str | None


@dataclass(frozen=True, kw_only=True)
class PromptPreviews:
    """A prompt and its shown previews, the earliest first.

    Attributes:
        num_found: number of previews, including those that are not shown.
    """

    prompt: str
    previews: Sequence[Preview]
    num_found: int


def find_previews(
    folder: Path, prompts: Sequence[str], *, generated_on: str | None = None
) -> list[PromptPreviews]:
    """The previews of each prompt: the first, the last, and those between them, evenly spread.

    If a prompt or its settings changed, the previews of the latest version are shown.

    Args:
        prompts: by place, as far as they are known.
        generated_on: name of the model if it is not the trained one.
    """
    suffix = "" if generated_on is None else f" (generated on {generated_on})"
    found: dict[int, dict[str, dict[int, Path]]] = {}
    for path in sorted((folder / "previews").glob("step-*.png")):
        if (match := _FILE_NAME.fullmatch(path.name)) and _is_regular(path):
            step, place, mark = int(match[1]), int(match[2]), match[3]
            found.setdefault(place, {}).setdefault(mark, {})[step] = path
    shown = []
    for place, by_mark in sorted(found.items()):
        paths = max(by_mark.values(), key=lambda paths: (max(paths), _written_at(paths[max(paths)])))
        steps = evenly_spread(sorted(paths), _MAX_STEPS)
        shown.append(
            PromptPreviews(
                prompt=(prompts[place] if place < len(prompts) else f"prompt {place + 1}") + suffix,
                previews=[_preview(step, paths[step], folder) for step in steps],
                num_found=len(paths),
            )
        )
    return shown


def last_preview(folder: Path) -> str | None:
    """Path in the run folder of the image of the latest step, of the first prompt there; None without one."""
    with suppress(OSError):
        found = [
            match for entry in os.scandir(folder / "previews") if (match := _FILE_NAME.fullmatch(entry.name))
        ]
        latest = max(found, key=lambda match: (int(match[1]), -int(match[2])), default=None)
        return latest and f"previews/{latest[0]}"
    return None


def is_preview(folder: Path, name: str) -> bool:
    """Whether a path in the run folder is that of a preview that is there."""
    parent, _, file = name.rpartition("/")
    known = _FILE_NAME.fullmatch(file.removesuffix(".mp4") + ".png" if file.endswith(".mp4") else file)
    return parent == "previews" and known is not None and _is_regular(folder / name)


def _is_regular(path: Path) -> bool:
    """Whether it is a regular file: a link could point to any file, and a page is shown to other people."""
    with suppress(OSError):
        return path.is_file() and not path.is_symlink()
    return False


def embedded(folder: Path, prompts: Sequence[PromptPreviews], *, share: float = 1.0) -> dict[str, str]:
    """Data URLs of previews, by their paths in the run folder, as many as a page may hold.

    Args:
        share: of the bytes that a page may hold.
    """
    urls: dict[str, str] = {}
    left = int(share * MAX_EMBEDDED_BYTES)
    # One after the other: after the first that does not fit, no more are decoded.
    for path, url in chain.from_iterable(_urls(folder, preview) for preview in _by_interest(prompts)):
        left -= len(url)
        if left < 0:
            break
        urls[path] = url
    return urls


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # It was removed meanwhile.
        return 0.0


def _preview(step: int, path: Path, folder: Path) -> Preview:
    video = path.with_suffix(".mp4")
    return Preview(
        step=step,
        image=path.relative_to(folder).as_posix(),
        video=video.relative_to(folder).as_posix() if _is_regular(video) else None,
    )


def _by_interest(prompts: Sequence[PromptPreviews]) -> Iterator[Preview]:
    """The latest of each prompt, the first of each, and then the others, the later ones first."""
    columns = []
    for prompt in prompts:
        first, *others = prompt.previews
        columns.append([*others[-1:], first, *reversed(others[:-1])])
    for row in zip_longest(*columns):
        yield from filter(None, row)


def _urls(folder: Path, preview: Preview) -> Iterator[tuple[str, str]]:
    """The files of a preview and their data URLs, as far as they can be read."""
    largest_px = _MAX_STRIP_PX if preview.video else _MAX_IMAGE_PX
    if image := _image_url(folder / preview.image, largest_px=largest_px):
        yield preview.image, image
    if preview.video:
        with suppress(OSError, UserError):  # It cannot be read, or is too large.
            content = read_bytes(folder / preview.video, most_bytes=_MAX_VIDEO_BYTES)
            yield preview.video, _data_url("video/mp4", content)


def _image_url(path: Path, *, largest_px: tuple[int, int]) -> str | None:
    """An image as a data URL; None where it cannot be read."""
    try:
        content = read_run_file(path)
        if len(content) <= _AS_IT_IS_BYTES:
            return _data_url("image/png", content)
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            small = image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    small.thumbnail(largest_px)
    return jpeg_url(small)


def _data_url(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
