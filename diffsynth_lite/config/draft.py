"""A config in the making: settings arrive one by one, and everything wrong with them is collected."""

from collections.abc import Callable
from typing import Any, TypeVar

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from diffsynth_lite.config.field_type import field_types
from diffsynth_lite.config.interpolation import has_reference, resolve
from diffsynth_lite.config.schema import Config, section_types
from diffsynth_lite.config.settings import InvalidSettingsError, Problem, Settings
from diffsynth_lite.config.spelling import unknown_key
from diffsynth_lite.config.values import expectation, read_value
from diffsynth_lite.config.written import Written, shown
from diffsynth_lite.errors import UserError

_Made = TypeVar("_Made")


class Draft:
    """Typed sections that start as the defaults, and the problems met so far, one line each.

    OmegaConf holds the values: it judges their types, resolves references and writes them as yaml.

    Args:
        source: the place of a problem that has none of its own, such as ``recipe.yaml:1``.
    """

    def __init__(self, source: str) -> None:
        self.problems: list[str] = []
        self.types = {name: field_types(section) for name, section in section_types().items()}
        self._source = source
        self._sections = {name: _typed(section) for name, section in section_types().items()}
        self._places: dict[str, str] = {}
        self._failed: set[str] = set()

    def report(self, place: str, message: str) -> None:
        """Adds a problem; ``place`` is a file with its line and key, or a part of the command line."""
        self.problems.append(f"{place}: {message}")

    def open_section(self, name: str, place: str) -> None:
        """Notes where a section starts, to report there what is missing in it."""
        self._places[name] = place

    def assign(self, section: str, key: str, written: Written, place: str) -> None:
        """Sets one setting of a known section from what was written, or reports why it will not do."""
        if key not in self.types[section]:
            self.report(place, unknown_key(section, key, self.types))
            return
        name = f"{section}.{key}"
        self._places[name] = place
        self._set(name, written, typed=shown(written))

    def values(self) -> dict[str, dict[str, Any]]:
        """All settings with their defaults; references are unresolved until :meth:`resolve`."""
        return {name: _plain(section) for name, section in self._sections.items()}

    def resolve(self) -> None:
        """Puts what references refer to in their place."""
        unresolved = self.values()
        for section, values in unresolved.items():
            for key, value in values.items():
                if has_reference(value):
                    self._resolve(f"{section}.{key}", value, unresolved)

    def build(self) -> Config | None:
        """The config, or None when there are problems."""
        sections = {name: self._section(name, section) for name, section in section_types().items()}
        return None if self.problems else self._made(Config, sections)

    def located(self, problem: Problem, prefix: str = "") -> str:
        """A problem between settings as a line, placed at the first of them that somebody set."""
        names = [prefix + key for key in problem.keys]
        places = [self._places[name] for name in names if name in self._places]
        return f"{(places or [f'{self._source} {names[0]}'])[0]}: {problem.message}"

    def _set(self, name: str, written: Written, *, typed: str) -> None:
        section, key = name.split(".")
        field_type = self.types[section][key]
        try:
            value = read_value(written, field_type)
            self._sections[section][key] = value
        except UserError as error:
            self._fail(name, str(error))
        except OmegaConfBaseException:
            self._fail(name, f"got {typed}; {expectation(name, written, field_type)}")
        else:
            objection = None if has_reference(value) else field_type.objection(value)
            if objection:
                self._fail(name, f"got {typed}; {objection}")

    def _resolve(self, name: str, reference: object, unresolved: dict[str, dict[str, Any]]) -> None:
        try:
            written = resolve(unresolved, name)
        except UserError as error:
            self._fail(name, f"{reference}: {error}")
        else:
            # Shows the reference and not its value, which may be a secret.
            self._set(name, written, typed=f"the value of {reference}")

    def _fail(self, name: str, message: str) -> None:
        self._failed.add(name)
        self.report(self._places[name], message)

    def _section(self, name: str, section: type[Settings]) -> Settings | None:
        values = _plain(self._sections[name])
        failed = {key for key in values if f"{name}.{key}" in self._failed}
        missing = [key for key, value in values.items() if value == MISSING and key not in failed]
        for key in missing:
            place = f"{self._places.get(name, self._source)} {name}.{key}"
            self.report(place, f"is required; must be {self.types[name][key]}")
        return None if missing or failed else self._made(section, values, prefix=f"{name}.")

    def _made(self, make: Callable[..., _Made], values: dict[str, Any], prefix: str = "") -> _Made | None:
        try:
            return make(**values)
        except InvalidSettingsError as error:
            self.problems += [self.located(problem, prefix) for problem in error.problems]
            return None


def _typed(section: type[Settings]) -> DictConfig:
    """The defaults of a section, in which OmegaConf takes values of exactly the right type only."""
    # Without the flag OmegaConf turns the text "10" into a number and "yes" into a switch.
    typed: DictConfig = OmegaConf.structured(section, flags={"convert": False})
    # A frozen dataclass is read-only to OmegaConf.
    OmegaConf.set_readonly(typed, False)
    return typed


def _plain(section: DictConfig) -> dict[str, Any]:
    values = OmegaConf.to_container(section)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}
