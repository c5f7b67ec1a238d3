"""This file finds the configs of a data set, what is odd about its items, and makes their thumbnails."""

import io
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from diffsynth_lite.captioning.contents import Contents
from diffsynth_lite.config import Config, load_config
from diffsynth_lite.data.images import check_image, load_thumbnail
from diffsynth_lite.data.records import Source, is_video
from diffsynth_lite.errors import UserError
from diffsynth_lite.files import file_fingerprint, read_bytes

_FEWEST_PIXELS = 512 * 512
"""Of an image that is not small for most models; the doctor knows what is small for a config."""
_JPEG_QUALITY = 82
_MOST_CONFIG_BYTES = 1 << 20


def configs_with(folder: Path, configs: Mapping[str, Path]) -> list[str]:
    """Names of the configs that seem to train on a data set: their text has a path that ends in its name."""
    ends_in_name = re.compile(rf"(?<![\w.-]){re.escape(folder.name)}/?(?![\w.-])")
    return [name for name, path in configs.items() if ends_in_name.search(_text(path))]


def source_of(folder: Path, config: Config | None) -> Source:
    """The source of a config that is this folder; without a config all settings have their defaults.

    Raises:
        UserError: the config does not train on the folder, or no config can hold its path.
    """
    if config is None:
        try:
            return Source(path=str(folder))
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise UserError(f"no run can read this folder: its path {reason}") from None
    for settings in config.data.sources_by_key.values():
        source = Source(**dict(settings))
        if source.folder is not None and source.folder.resolve() == folder.resolve():
            return source
    raise UserError("this config does not train on this data set")


def prefix_of(folder: Path, config: Config) -> str:
    """What the doctor puts in front of the names of a data set's items: nothing where it is the only one."""
    source, all_sources = source_of(folder, config), config.data.sources
    places = [place for place, each in enumerate(all_sources) if each.path == source.path]
    return f"{places[0]}/" if len(all_sources) > 1 else ""


def trigger_of(folder: Path, configs: Iterable[Path]) -> str:
    """The trigger of the first config with one that trains on a data set; empty where there is none."""
    for path in configs:
        with suppress(UserError):
            if trigger := source_of(folder, load_config(path).config).trigger:
                return trigger
    return ""


def findings(contents: Contents) -> dict[str, dict[str, Any]]:
    """What the files themselves show, by the names of the items; those that can be used are opened.

    Returns:
        ``width``, ``height`` and ``bytes`` of each; with ``is_small``, with ``equal``, an item before it
        that has the same bytes, and with ``problem`` where it cannot be read.
    """
    found: dict[str, dict[str, Any]] = {}
    by_size: dict[int, list[str]] = defaultdict(list)
    paths = {item.file: item.path for item in contents.items if item.path is not None}
    for name, path in paths.items():
        facts = found[name] = {}
        try:
            width, height = _size(path)
            facts |= {"width": width, "height": height, "bytes": (size := path.stat().st_size)}
            facts |= {"is_small": True} if width * height < _FEWEST_PIXELS else {}
            by_size[size].append(name)
        except (UserError, OSError) as error:
            facts["problem"] = str(error).removeprefix(f"{path}: ")
    for alike in by_size.values():
        first_with: dict[str, str] = {}
        for name in alike if len(alike) > 1 else ():
            first = first_with.setdefault(file_fingerprint(paths[name]), name)
            if first != name:
                found[name]["equal"] = first
    return found


def home_of(path: Path, folders: Mapping[str, Path]) -> tuple[str, str] | None:
    """Name of the data set that a file is in, and its name there; None where it is in none of them.

    Args:
        folders: resolved folders of the data sets, by name.
    """
    path = path.parent.resolve() / path.name
    homes = ((name, folder) for name, folder in folders.items() if folder in path.parents)
    return next(((name, path.relative_to(folder).as_posix()) for name, folder in homes), None)


def thumbnail(path: Path, *, side: int) -> bytes:
    """A JPEG of an image, or of the frame of a clip that is shown first, of at most ``side`` pixels a side.

    Raises:
        UserError: it cannot be read.
    """
    if is_video(path.name):
        # Imported here: FFmpeg takes 18 MB of memory, and most data sets need none of it.
        from diffsynth_lite.data.video_decoding import all_frames, rgb_image

        with closing(all_frames(path)) as frames:
            image = rgb_image(next(frames))
        image.thumbnail((side, side))
    else:
        image = load_thumbnail(path, side=side)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=_JPEG_QUALITY)
    return file.getvalue()


def _size(path: Path) -> tuple[int, int]:
    """Width and height of an image or clip, from its header and, of a clip, its first frame."""
    if not is_video(path.name):
        facts = check_image(path)
        return facts.width, facts.height
    from diffsynth_lite.data.video_decoding import clip_start

    start = clip_start(path)
    return start.width, start.height


def _text(path: Path) -> str:
    try:
        return read_bytes(path, most_bytes=_MOST_CONFIG_BYTES).decode(errors="replace")
    except (UserError, OSError):  # No run reads it either.
        return ""
