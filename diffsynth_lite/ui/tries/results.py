"""This file finds what was generated with a run's LoRA, by the page or by the command."""

import re
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

from PIL import Image

from diffsynth_lite.run_folder.folder import RunFolder

_FOLDER = re.compile(r"\d{4,9}")
_FILE = re.compile(r"(prompt-\d+-seed-\d+)-(?:step-(\d+)-)?scale-([\d.e+-]+)\.(png|mp4)")
_PROMPT = re.compile(r"(.*?)(?: <lora:[^\n>]*>)*(?:\nNegative prompt: .*)?\nSteps: ", re.DOTALL)
_MOST = 24


def results_of(run: Path) -> list[dict[str, Any]]:
    """The latest results, each with the image of the base model and the one of the LoRA, as far as both are.

    Returns:
        Of each the ``number`` of its folder, its ``prompt``, and as ``before`` and ``after`` the ``label``
        and the paths ``image`` and ``video`` below ``samples/``.
    """
    found: list[dict[str, Any]] = []
    for folder in _folders(run):
        found += _in_folder(folder)
        if len(found) >= _MOST:
            break
    return found[:_MOST]


def result_file(run: Path, number: str, name: str) -> Path | None:
    """A file of a result; None for any other."""
    folder = next((each for each in _folders(run) if each.name == number), None)
    return folder / name if folder is not None and _is_result(folder / name) else None


def _is_result(path: Path) -> bool:
    return bool(_FILE.fullmatch(path.name)) and path.is_file() and not path.is_symlink()


def _folders(run: Path) -> list[Path]:
    samples = RunFolder(run).samples_folder
    entries = [] if samples.is_symlink() or not samples.is_dir() else samples.iterdir()
    numbered = [each for each in entries if _FOLDER.fullmatch(each.name) and not each.is_symlink()]
    return sorted(numbered, key=lambda folder: int(folder.name), reverse=True)


def _in_folder(folder: Path) -> list[dict[str, Any]]:
    groups: dict[str, list[tuple[int, float, str]]] = defaultdict(list)
    names = {path.name for path in folder.glob("prompt-*") if _is_result(path)}
    for match in filter(None, map(_FILE.fullmatch, names)):
        if match[4] == "png":
            with suppress(ValueError):
                groups[match[1]].append((int(match[2] or 0), float(match[3]), match[0]))
    return [_result(folder, sorted(columns), names) for _, columns in sorted(groups.items())]


def _result(folder: Path, columns: list[tuple[int, float, str]], names: set[str]) -> dict[str, Any]:
    def shown(column: tuple[int, float, str]) -> dict[str, str | None]:
        step, scale, name = column
        video = f"{name.removesuffix('png')}mp4"
        words = f"Step {step:,}" if step else "LoRA"
        return {
            "label": f"{words}, scale {scale:g}" if scale else "Base",
            "image": f"{folder.name}/{name}",
            "video": f"{folder.name}/{video}" if video in names else None,
        }

    before = next((column for column in columns if column[1] == 0), columns[0])
    after = next(column for column in reversed(columns) if column is not before or len(columns) == 1)
    return {
        "number": folder.name,
        "prompt": _prompt(folder / after[2]),
        "before": shown(before) if before is not after else None,
        "after": shown(after),
    }


def _prompt(file: Path) -> str:
    """The prompt in an image; empty where none can be read."""
    try:
        with Image.open(file, formats=["PNG"]) as image:
            match = _PROMPT.match(str(image.info.get("parameters", "")))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return ""
    return match[1] if match else ""
