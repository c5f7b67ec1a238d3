"""This file has the arguments that commands share: the config, presets on top of it, single settings."""

import argparse
import math
import sys
from typing import Any

from diffsynth_lite.config import section_types
from diffsynth_lite.config.messages import in_place_of_flag


def add_config_arguments(parser: argparse.ArgumentParser, **of_config: Any) -> None:
    """``--config``, of which some options may be others, ``--preset`` and ``key=value``."""
    options: dict[str, Any] = {"required": True, "help": "yaml; a bare name is also looked for in configs/"}
    parser.add_argument("--config", metavar="FILE", **options | of_config)
    add_preset_argument(parser)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example train.steps=500")


def config_words(parsed: argparse.Namespace) -> list[str]:
    """The arguments of :func:`add_config_arguments` as they were given, for a command on the same config."""
    presets = (word for name in parsed.presets for word in ("--preset", name))
    return ["--config", parsed.config, *presets, *parsed.overrides]


def add_preset_argument(parser: argparse.ArgumentParser) -> None:
    """``--preset``, which may be given several times."""
    parser.add_argument(
        "--preset",
        action="append",
        default=[],
        dest="presets",
        metavar="NAME",
        help="settings for a goal, on top of the file: likeness, style, motion, few_pictures; repeatable",
    )


def argument_hint(message: str) -> str:
    """A hint for argparse's message where a flag is a setting, or a yaml is given without ``--config``."""
    sections = {name: model.model_fields for name, model in section_types().items()}
    flags = [word for word in message.split() if word.startswith("--")]
    if message.startswith("unrecognized"):
        instead = [words for flag in flags if (words := in_place_of_flag(flag, sections))]
        settings = [words for words in instead if not words.startswith("--")]
        answers = [words for words in instead if words.startswith("--")]
        if settings:
            answers.insert(0, f"settings are written without dashes: {' '.join(settings)}")
        return "".join(f"; {answer}" for answer in answers)
    files = [word for word in sys.argv[1:] if word.endswith((".yaml", ".yml"))]
    return f"; write --config {files[0]}" if files and "--config" in flags else ""


def positive_count(text: str) -> int:
    """Parse an argument that must be a whole number above 0."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text}: a whole number above 0")
    return int(text)


def part_of(text: str) -> tuple[int, int]:
    """Index and number of parts in an argument such as ``3/64``, the index from 0 on."""
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        last = (
            f"0/{count} to {int(count) - 1}/{count}" if count.isdecimal() and int(count) else "0/64 to 63/64"
        )
        raise argparse.ArgumentTypeError(f"{text}: parts are {last}")
    return int(index), int(count)


def positive_number(text: str) -> float:
    """Parse an argument that must be a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: a number above 0")
    return value
