"""Finds and loads a config: yaml file, command line and defaults become one checked object."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from diffsynth_lite.config.builder import ConfigBuilder
from diffsynth_lite.config.document import write_yaml
from diffsynth_lite.config.schema import Config
from diffsynth_lite.config.settings import Problem
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
    builder = ConfigBuilder(found)
    builder.add_file(text)
    given_flags = [f"{name}={value}" for name, value in (flags or {}).items() if value is not None]
    for override in [*overrides, *given_flags]:
        builder.add_override(override)
    config, unresolved = builder.build()
    remarks = (*config.without_effect(), *_secrets_in(unresolved))
    return LoadedConfig(
        config=config,
        path=found,
        source_text=redacted(text),
        resolved_yaml=write_yaml(redacted(unresolved)),
        warnings=tuple(map(builder.located, remarks)),
    )


def find_config_file(name: str | Path) -> Path:
    """The file of that name: as given, or in the recipes that come with this package for a bare file name.

    Raises:
        UserError: there is no such file; the message says where it was looked for and what is there.
    """
    given = Path(name)
    try:
        exists = given.exists()
    except OSError as error:
        raise UserError(f"--config {name}: cannot be read: {error.strerror}") from None
    if given.is_dir():
        raise UserError(f"--config {name}: is a folder; name a yaml file")
    if exists:
        return given
    if given.name != str(name):
        raise UserError(
            f"--config {name}: there is no such file; check the path (working folder: {Path.cwd()})"
        )
    recipes = _recipe_folder()
    if (recipes / given).is_file():
        return recipes / given
    known = sorted(path.name for path in recipes.glob("*.yaml"))
    close = get_close_matches(given.name, known, n=1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    raise UserError(
        f"--config {name}: not found in {Path.cwd()} nor in {recipes}; "
        f"{hint}There: {', '.join(known) or 'no yaml file'}"
    )


def dump_config(config: Config) -> str:
    """A config as yaml that :func:`load_config` reads as an equal config."""
    return write_yaml(config.model_dump())


def _recipe_folder() -> Path:
    """The folder ``configs`` of an installed wheel, or of the repository around a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def _secrets_in(unresolved: dict[str, dict[str, Any]]) -> Iterator[Problem]:
    message = (
        f"holds a secret, which the run folder and the trackers get as {MASK}; "
        "put it in an environment variable, and write ${oc.env:NAME} here"
    )
    for section, values in unresolved.items():
        for key, value in values.items():
            if redacted(value) != value:
                yield Problem((f"{section}.{key}",), message)


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
