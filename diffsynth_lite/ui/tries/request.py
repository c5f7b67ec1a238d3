"""This file makes a request, and the command that does the same, of a form, whose names are looked up."""

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from diffsynth_lite.config import Config, load_config
from diffsynth_lite.data.folder import usable_file
from diffsynth_lite.errors import UserError
from diffsynth_lite.report.card import RunCard
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.loras import CHOSEN, SUFFIX, chosen_copy, exports_of, lora_copies
from diffsynth_lite.run_folder.reading import require_run_file
from diffsynth_lite.sampling.request import FILES
from diffsynth_lite.workspace import Workspace

FILE_WORDS = {
    "input": "Input image",
    "last_frame": "Last frame",
    "control": "Control",
    "mask": "Mask",
    "face": "Face",
}
"""What files that a family may need are called, by their arguments."""
_WORDS = {"last": "Latest", "best": "Best", "ema": "Averaged"}
_SIZE = re.compile(r"(\d{1,5})\s*x\s*(\d{1,5})")
_LONGEST_TEXT = 10_000
_MOST_OTHERS = 8


def loras_of(folder: Path) -> dict[str, str]:
    """The LoRAs that a run has, by what names them after an ``@``, with words for people."""
    run = RunFolder(folder)
    exports = [which for which, place in exports_of(run).items() if any(place.glob(f"*{SUFFIX}"))]
    with suppress(UserError):  # the file that names it is damaged
        chosen = chosen_copy(run)
        exports = [CHOSEN] * (chosen is not None and chosen.path.is_dir()) + exports
    steps = [str(copy.step) for copy in reversed(lora_copies(run.checkpoints_folder))]
    return {which: _WORDS.get(which, which.capitalize()) for which in exports} | {
        step: f"Step {int(step):,}" for step in steps
    }


def config_of(folder: Path) -> Config:
    """The settings that a run was started with.

    Raises:
        UserError: they cannot be read, or name code that comes with none of the packages.
    """
    file = RunFolder(folder).resolved_file
    try:
        require_run_file(file)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; nothing names the base model of this run") from None
    config = load_config(file).config
    for key, name in config.code_of_others.items():
        raise UserError(
            f"{key}: {name} is code that comes with neither diffsynth_lite nor torch; if you know it, give "
            "the command in a terminal"
        )
    return config


def partners(name: str, cards: Mapping[str, RunCard]) -> list[str]:
    """Names of other runs of the same family that have a LoRA."""
    family = cards[name].family
    return [
        other
        for other, card in cards.items()
        if other != name and family and card.family == family and "last" in loras_of(card.folder)
    ]


def request_of(
    given: Mapping[str, Any], name: str, cards: Mapping[str, RunCard], workspace: Workspace
) -> dict[str, Any]:
    """The arguments of ``sample``, by their names, that a form asks for.

    Args:
        given: the fields by name, and as ``others`` the name of a run and the weight of each further LoRA.

    Raises:
        UserError: a field holds what it cannot.
    """
    validation = config_of(cards[name].folder).validation
    scale, seed = _number("Scale", given.get("scale"), 1.0), _whole("Seed", given.get("seed"))
    asked: dict[str, Any] = {
        "lora": list(_loras(given, name, cards, workspace)),
        "prompt": [_text("Prompt", given.get("prompt"))],
        "seed": [validation.seed if seed is None else seed],
        "scale": [0.0, scale] if scale else [scale],
        "steps": _whole("Steps", given.get("steps")),
        "guidance": _number("Guidance", given.get("guidance"), None),
        "frames": _whole("Frames", given.get("frames")),
        "size": _size(given.get("size")),
    }
    if not asked["prompt"][0]:
        raise UserError("Prompt: is empty; describe what to generate")
    negative = _text("Negative", given.get("negative", validation.negative_prompt))
    if negative != validation.negative_prompt.strip():
        asked["negative"] = negative
    for kind in FILES:
        asked[kind] = _file(kind, given.get(kind), workspace)
    return {key: value for key, value in asked.items() if value is not None}


def command(request: Mapping[str, Any], config: Config) -> str:
    """The command with the same result, as it is typed in the workspace."""
    words = ["diffsynth-lite", "sample"]
    for key, value in request.items():
        if key == "size":
            words += ["--size", "x".join(map(str, value))]
        elif key == "scale":
            words += ["--scale", ",".join(map(_written, value))]
        elif key == "prompt" and value[0].startswith("@"):  # which would be the name of a file
            emptied = [setting for setting in FILES.values() if getattr(config.validation, setting)]
            words += [
                f"validation.prompts={json.dumps(value, ensure_ascii=False)}",
                *(f"validation.{one}=[]" for one in emptied),
            ]
        else:
            for each in map(str, value if isinstance(value, list) else [value]):
                flag = f"--{key.replace('_', '-')}"
                words += [f"{flag}={each}"] if each.startswith("-") or not each else [flag, each]
    return shlex.join(words)


def _loras(
    given: Mapping[str, Any], name: str, cards: Mapping[str, RunCard], workspace: Workspace
) -> Iterator[str]:
    known = loras_of(cards[name].folder)
    which = str(given.get("lora") or next(iter(known), ""))
    if which not in known:
        raise UserError(f"LoRA: {name} has none" + (f" of {which}" if known else " yet"))
    yield _with_weight(workspace.shown(cards[name].folder) + f"@{which}" * (which != "last"), 1.0)
    others = given.get("others")
    for other in others[:_MOST_OTHERS] if isinstance(others, list) else []:
        run, weight = (other.get("run"), other.get("weight")) if isinstance(other, dict) else (None, None)
        if not run:
            continue
        if run not in partners(name, cards):
            raise UserError("Further LoRAs: choose runs of the same family")
        place = workspace.shown(cards[run].folder)
        yield _with_weight(place, _number(f"Weight of {run}", weight, 1.0))


def _with_weight(place: str, weight: float) -> str:
    return place if weight == 1 and ":" not in place else f"{place}:{_written(weight)}"


def _written(number: float) -> str:
    short = f"{number:g}"
    return short if float(short) == number else repr(number)


def _file(kind: str, given: Any, workspace: Workspace) -> list[str] | None:
    """Path of a file that is given as ``DATA SET/FILE``; None without one."""
    if not given:
        return None
    words = FILE_WORDS[kind]
    data_set, _, file = str(given).partition("/")
    folder = workspace.data_sets.get(data_set)
    if folder is None or usable_file(folder, file) is None:
        raise UserError(f"{words}: choose a file of a data set")
    return [f"{workspace.shown(folder)}/{file}"]


def _text(name: str, given: Any) -> str:
    text = str(given or "").strip()
    if len(text) > _LONGEST_TEXT or "\0" in text or text != text.encode(errors="replace").decode():
        raise UserError(f"{name}: give text of up to {_LONGEST_TEXT:,} letters")
    return text


def _whole(name: str, given: Any) -> int | None:
    text = str(given if given is not None else "").strip()
    if text and not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise UserError(f"{name}: give a whole number")
    return int(text) if text else None


def _number(name: str, given: Any, default: Any) -> Any:
    text = str(given if given is not None else "").strip()
    try:
        value = float(text) if text else default
    except ValueError:
        value = math.nan
    if value is not None and not math.isfinite(value):
        raise UserError(f"{name}: give a number")
    return value


def _size(given: Any) -> list[int] | None:
    text = str(given or "").strip()
    match = _SIZE.fullmatch(text)
    if text and match is None:
        raise UserError("Size: give width x height in pixels, such as 1024x768")
    return [int(match[1]), int(match[2])] if match else None
