"""Loads a config: merges files and command line; OmegaConf resolves references, pydantic validates."""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffsynth_lite.config.builder import ConfigBuilder
from diffsynth_lite.config.document import write_yaml
from diffsynth_lite.config.files import (
    ConfigFile,
    Preset,
    find_config_file,
    read_config_files,
    read_preset,
    recipes_by_card,
)
from diffsynth_lite.config.schema import Config, section_types
from diffsynth_lite.config.settings import Problem
from diffsynth_lite.errors import UserError
from diffsynth_lite.redaction import MASK, redacted

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LoadedConfig:
    """A checked config and where it came from.

    Args:
        source_text: the text of the file at ``path`` or, where it extends others or presets lie on top, the
            settings of all of them; secrets masked.
        resolved_yaml: every setting, also overrides and defaults, with secrets masked and ``${...}`` as
            written: the values of environment variables are not in it.
        warnings: settings that have no effect or less than was asked for, and those that hold a secret, one
            line each.
    """

    config: Config
    path: Path
    source_text: str
    resolved_yaml: str
    warnings: tuple[str, ...]


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    presets: Sequence[str] = (),
    text: str | None = None,
) -> LoadedConfig:
    """Reads and checks a config, and logs what presets change in it.

    An override wins over a preset, that over the file, that over the default.

    Args:
        path: a yaml file, or the bare name of one; see :func:`find_config_file`.
        overrides: settings of the command line, as ``section.key=value``; a later one wins.
        presets: their names; a later one wins over those before.
        text: of the file, in place of what it has, if it is there at all; what it extends is looked for
            as from there.

    Raises:
        ConfigError: all that is wrong, one line each: the file, the command line, then what is missing.
        UserError: there is no such file or preset.
    """
    found = find_config_file(path) if text is None else Path(path)
    files, builder = read_config_files(found, text), ConfigBuilder(found)
    for file in files:
        builder.add_file(file)
    chosen = [read_preset(name) for name in presets]
    written = builder.written()
    stages = [_by_name(written)]
    for preset in chosen:
        builder.add_file(preset)
        written = builder.written()
        stages.append(_by_name(written))
    for pieces in _by_setting(overrides):
        builder.add_override(*pieces)
    given = _differences(stages[-1], _by_name(builder.written()))
    if chosen and builder.written().get("objective", {}).get("slider"):
        message = "is for training data, and objective.slider learns from prompts; leave it out"
        raise UserError(f"--preset {chosen[0].name}: {message}")
    config, unresolved = builder.build()
    for preset in chosen:
        preset.require_fit(config.model.family)
    for preset, before, after in zip(chosen, stages, stages[1:], strict=False):
        logger.info("--preset %s: %s", preset.name, ", ".join(_changes(before, after, given)))
    slider = config.objective.slider
    advice = () if slider is None else slider.advice()
    remarks = (*config.without_effect(), *advice, *_secrets_in(unresolved))
    return LoadedConfig(
        config=config,
        path=found,
        source_text=redacted(_in_one(files, chosen, written)),
        resolved_yaml=write_yaml(redacted(unresolved)),
        warnings=tuple(map(builder.located, remarks)),
    )


def recipes_for_card(like: LoadedConfig, card_gib: float, **given: Any) -> Iterator[tuple[int, LoadedConfig]]:
    """The recipes that train the LoRA of another recipe, itself among them, on a card of so much memory.

    Args:
        given: overrides and presets for each.

    Returns:
        GB of the card that each is for, the largest first, and the recipe.
    """
    for card_gb, path in sorted(recipes_by_card(like.path), reverse=True):
        if card_gb > card_gib:
            continue
        found = load_config(path, **given)
        ours, theirs = like.config, found.config
        # Where model.path is given, only output distinguishes the smaller of two models from the larger.
        if (theirs.model.path, theirs.output) == (ours.model.path, ours.output):
            yield card_gb, found


def dump_config(config: Config) -> str:
    """A config as yaml that :func:`load_config` reads as an equal config."""
    return write_yaml(config.model_dump())


def _by_setting(overrides: Sequence[str]) -> list[list[str]]:
    """Each setting, with the words after it that a shell cut off: without ``=``, and not a setting's name."""
    settings: list[list[str]] = []
    for text in overrides:
        is_rest = "=" not in text and text.partition(".")[0] not in section_types() and text[:1] not in "+~-"
        if is_rest and settings and "=" in settings[-1][0]:
            settings[-1].append(text)
        else:
            settings.append([text])
    return settings


def _changes(before: dict[str, Any], after: dict[str, Any], given: dict[str, Any]) -> Iterator[str]:
    """Each setting that has another value now, such as ``lora.rank 16 (was 32)``.

    Args:
        given: those of the command line, which win over it.
    """
    for name, value in _differences(before, after).items():
        if name in given:
            remark = f" (the command line wins: {json.dumps(given[name])})"
        else:
            remark = f" (was {json.dumps(before[name])})" if name in before else ""
        yield f"{name} {json.dumps(value)}{remark}"


def _differences(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """The settings that have another value now, with that."""
    return {name: value for name, value in after.items() if name not in before or before[name] != value}


def _by_name(settings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Values by ``section.key``, from those by section and key."""
    return {f"{section}.{key}": value for section, own in settings.items() for key, value in own.items()}


def _in_one(
    files: Sequence[ConfigFile], presets: Sequence[Preset], written: dict[str, dict[str, Any]]
) -> str:
    """The text of a file that extends none, else one file with the settings of all, which are ``written``."""
    if len(files) + len(presets) == 1:
        return files[0].text
    names = ", which extends ".join(file.path.name for file in reversed(files))
    on_top = f", with --preset {' --preset '.join(preset.name for preset in presets)}" if presets else ""
    return f"# The settings of {names}{on_top}.\n\n{write_yaml(written)}"


def _secrets_in(unresolved: dict[str, dict[str, Any]]) -> Iterator[Problem]:
    message = (
        f"holds a secret, which the run folder and the trackers get as {MASK}; "
        "put it in an environment variable, and write ${oc.env:NAME} here"
    )
    for name, value in _by_name(unresolved).items():
        if redacted(value) != value:
            yield Problem((name,), message)
