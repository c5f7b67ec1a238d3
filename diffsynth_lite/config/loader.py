"""Loads a config: yaml file, command line and defaults become one checked object."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from diffsynth_lite.config.assignment import Where, assign_block, without_repeats
from diffsynth_lite.config.document import YamlError, read_yaml
from diffsynth_lite.config.draft import Draft
from diffsynth_lite.config.lookup import find_config_file
from diffsynth_lite.config.overrides import assign_override
from diffsynth_lite.config.schema import Config
from diffsynth_lite.config.settings import Problem
from diffsynth_lite.config.spelling import unknown_section
from diffsynth_lite.config.written import Block, Entry, Scalar, shown
from diffsynth_lite.errors import UserError
from diffsynth_lite.redaction import MASK, redacted

# Many times the size of a config; a file of weights named by mistake is not read into memory.
_LARGEST_FILE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class LoadedConfig:
    """A config and where it came from.

    Args:
        config: the settings, checked.
        path: the yaml file.
        source_text: the text of that file, with secrets masked.
        resolved_yaml: every setting, also overrides and defaults, with secrets masked and ``${...}`` as
            written: what a variable of the environment holds is not in it.
        warnings: settings that have no effect, and those that hold a secret, one line each.
    """

    config: Config
    path: Path
    source_text: str
    resolved_yaml: str
    warnings: tuple[str, ...]


def load_config(
    path: str | Path, overrides: Sequence[str] = (), flags: Mapping[str, object] | None = None
) -> LoadedConfig:
    """Reads and checks a config. A flag wins over an override, that over the file, that over the default.

    Args:
        path: a yaml file, or the bare name of one; see :func:`find_config_file`.
        overrides: settings of the command line, as ``section.key=value``.
        flags: values of command-line flags, by ``section.key``; those that are None were not given.

    Raises:
        UserError: everything that is wrong, one line each.
    """
    found = find_config_file(path)
    text = _read_text(found)
    draft = Draft(f"{found}:1")
    _assign_file(draft, text, found)
    for override in overrides:
        assign_override(draft, override)
    for name, value in (flags or {}).items():
        if value is not None:
            assign_override(draft, f"{name}={value}")
    unresolved = draft.values()
    draft.resolve()
    config = draft.build()
    if config is None:
        raise UserError("\n".join(draft.problems))
    remarks = (*config.without_effect(), *_secrets_in(unresolved))
    return LoadedConfig(
        config=config,
        path=found,
        source_text=redacted(text),
        resolved_yaml=_to_yaml(redacted(unresolved)),
        warnings=tuple(map(draft.located, remarks)),
    )


def dump_config(config: Config) -> str:
    """A config as yaml that :func:`load_config` reads as an equal config."""
    return _to_yaml(asdict(config))


def _secrets_in(unresolved: dict[str, dict[str, Any]]) -> Iterator[Problem]:
    message = (
        f"holds a secret, which the run folder and the trackers get as {MASK}; "
        "put it in an environment variable, and write ${oc.env:NAME} here"
    )
    for section, values in unresolved.items():
        for key, value in values.items():
            if redacted(value) != value:
                yield Problem((f"{section}.{key}",), message)


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # yaml has no types
    """Quotes a text that is the word None: written plain, it is refused as a null that was meant."""


def _represent_text(dumper: Any, text: str) -> Any:
    # Between single quotes these line breaks of Unicode would be read back as spaces.
    style = '"' if any(character in text for character in "\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_implicit_resolver("!none", re.compile("^None$"), ["N"])
_Dumper.add_representer(str, _represent_text)


def _to_yaml(values: dict[str, Any]) -> str:
    text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_FILE + 1)
        if len(content) > _LARGEST_FILE:
            raise UserError(f"{path}:1: too large for a config; name a yaml file")
        return content.decode("utf-8")
    except OSError as error:
        raise UserError(f"{path}:1: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: is not UTF-8 text; save it as UTF-8") from None


def _assign_file(draft: Draft, text: str, path: Path) -> None:
    try:
        root = read_yaml(text)
    except YamlError as error:
        raise UserError(f"{path}:{error.line}: {error}") from None
    if root == Scalar(""):
        raise UserError(f"{path}:1: is empty; start from a copy of configs/qwen_lora.yaml")
    if not isinstance(root, Block):
        raise UserError(
            f"{path}:1: must be sections with settings, such as 'train:' and below it '  steps: 1000'"
        )

    def where(line: int) -> str:
        return f"{path}:{line}"

    for section in without_repeats(draft, root, where, prefix=""):
        _assign_section(draft, section, where)


def _assign_section(draft: Draft, section: Entry, where: Where) -> None:
    place = where(section.line)
    if section.key not in draft.types:
        draft.report(f"{place} {section.key}", unknown_section(section.key, draft.types))
        return
    draft.open_section(section.key, place)
    if section.value == Scalar(""):
        return
    if not isinstance(section.value, Block):
        message = "must hold 'key: value' lines, indented below it; is there a space after each colon?"
        draft.report(f"{place} {section.key}", f"got {shown(section.value)}; {message}")
        return
    assign_block(draft, section.key, section.value, where)
