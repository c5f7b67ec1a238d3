"""Loads a config: yaml file, presets, command line and defaults become one checked object."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffsynth_lite.config.builder import ConfigBuilder
from diffsynth_lite.config.document import write_yaml
from diffsynth_lite.config.files import ConfigFile, Preset, find_config_file, read_config_files, read_preset
from diffsynth_lite.config.schema import Config
from diffsynth_lite.config.settings import Problem
from diffsynth_lite.config.train import TrainSettings
from diffsynth_lite.redaction import MASK, redacted

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LoadedConfig:
    """A config and where it came from.

    Args:
        config: the settings, checked.
        path: the yaml file.
        source_text: the text of that file or, where it extends others or presets lie on top, what all of them
            say; secrets masked.
        resolved_yaml: every setting, also overrides and defaults, with secrets masked and ``${...}`` as
            written: what a variable of the environment holds is not in it.
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
    flags: Mapping[str, object] | None = None,
    *,
    presets: Sequence[str] = (),
) -> LoadedConfig:
    """Reads and checks a config, and logs what presets change in it.

    A flag wins over an override, that over a preset, that over the file, that over the default.

    Args:
        path: a yaml file, or the bare name of one; see :func:`find_config_file`.
        overrides: settings of the command line, as ``section.key=value``.
        flags: values of command-line flags, by ``section.key``; those that are None were not given.
        presets: names of presets; a later one wins over those before.

    Raises:
        UserError: everything that is wrong, one line each.
    """
    found = find_config_file(path)
    files, builder = read_config_files(found), ConfigBuilder(found)
    for file in files:
        builder.add_file(file)
    written, changes = builder.written(), []
    chosen = [read_preset(name) for name in presets]
    for preset in chosen:
        builder.add_file(preset)
        before, written = written, builder.written()
        changes.append(f"--preset {preset.name}: {', '.join(_changes(before, written))}")
    given_flags = [f"{name}={value}" for name, value in (flags or {}).items() if value is not None]
    for override in [*overrides, *given_flags]:
        builder.add_override(override)
    config, unresolved = builder.build()
    for preset in chosen:
        preset.require_fit(config.model.family)
    for change in changes:
        logger.info("%s", change)
    remarks = (*config.without_effect(), *_shortened_warmup(config.train), *_secrets_in(unresolved))
    return LoadedConfig(
        config=config,
        path=found,
        source_text=redacted(_in_one(files, chosen, written)),
        resolved_yaml=write_yaml(redacted(unresolved)),
        warnings=tuple(map(builder.located, remarks)),
    )


def dump_config(config: Config) -> str:
    """A config as yaml that :func:`load_config` reads as an equal config."""
    return write_yaml(config.model_dump())


def _changes(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Each setting that has another value now, such as ``lora.rank 16 (was 32)``."""
    for section, values in after.items():
        old = before.get(section, {})
        for key, value in values.items():
            if key not in old:
                yield f"{section}.{key} {json.dumps(value)}"
            elif old[key] != value:
                yield f"{section}.{key} {json.dumps(value)} (was {json.dumps(old[key])})"


def _in_one(
    files: Sequence[ConfigFile], presets: Sequence[Preset], written: dict[str, dict[str, Any]]
) -> str:
    """The text of a file that extends none, or one file that says what several do.

    Args:
        files: that extend each other.
        presets: that lie on top.
        written: what they say together.
    """
    if len(files) + len(presets) == 1:
        return files[0].text
    names = ", which extends ".join(file.path.name for file in reversed(files))
    on_top = f", with --preset {' --preset '.join(preset.name for preset in presets)}" if presets else ""
    return f"# What {names}{on_top}, says.\n\n{write_yaml(written)}"


def _shortened_warmup(train: TrainSettings) -> Iterator[Problem]:
    if train.warmup_in_run < train.warmup_steps:
        message = (
            f"{train.warmup_steps} is shortened to {train.warmup_in_run}, as train.steps is {train.steps}"
        )
        yield Problem(("train.warmup_steps",), message)


def _secrets_in(unresolved: dict[str, dict[str, Any]]) -> Iterator[Problem]:
    message = (
        f"holds a secret, which the run folder and the trackers get as {MASK}; "
        "put it in an environment variable, and write ${oc.env:NAME} here"
    )
    for section, values in unresolved.items():
        for key, value in values.items():
            if redacted(value) != value:
                yield Problem((f"{section}.{key}",), message)
