"""A config in the making: settings arrive one by one, and everything wrong with them is collected."""

from collections.abc import Callable
from typing import Any, TypeVar

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from diffsynth_lite.config.field_type import FieldType, field_types
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

    An entry of a list of sections is a section too, with a name such as ``data.sources[0]``. OmegaConf holds
    the values: it judges their types, resolves references and writes them as yaml.

    Args:
        source: the place of a problem that has none of its own, such as ``recipe.yaml:1``.
    """

    def __init__(self, source: str) -> None:
        self.problems: list[str] = []
        self.types = {name: field_types(section) for name, section in section_types().items()}
        self._source = source
        self._sections = {name: _Section(section) for name, section in section_types().items()}
        self._entries: dict[str, list[str]] = {}
        self._places: dict[str, str] = {}
        self._failed: set[str] = set()

    def report(self, place: str, message: str) -> None:
        """Adds a problem; ``place`` is a file with its line and key, or a part of the command line."""
        self.problems.append(f"{place}: {message}")

    def open_section(self, name: str, place: str) -> None:
        """Notes where a section starts, to report there what is missing in it."""
        self._places[name] = place

    def type_of(self, section: str, key: str) -> FieldType | None:
        """The type of a setting of a known section; None for a key that the section does not have."""
        return self._sections[section].types.get(key)

    def assign(self, section: str, key: str, written: Written, place: str) -> None:
        """Sets one setting of a known section from what was written, or reports why it will not do."""
        types = self._sections[section].types
        if key not in types:
            self.report(place, unknown_key(section, key, self.types | {section: types}))
            return
        name = f"{section}.{key}"
        self._places[name] = place
        self._set(name, written, typed=shown(written))

    def open_list(self, section: str, key: str, place: str) -> None:
        """Empties a list of sections, which :meth:`add_entry` fills."""
        name = f"{section}.{key}"
        for entry in self._entries.get(name, ()):
            del self._sections[entry]
            self._places = {known: at for known, at in self._places.items() if not known.startswith(entry)}
        self._entries[name] = []
        self._places[name] = place

    def add_entry(self, section: str, key: str, place: str) -> str:
        """Adds a section of defaults to a list of sections; its name is returned."""
        entries = self._entries[f"{section}.{key}"]
        entry = f"{section}.{key}[{len(entries)}]"
        entries.append(entry)
        self._sections[entry] = _Section(self._sections[section].types[key].base)
        self.open_section(entry, place)
        return entry

    def fail(self, name: str, message: str) -> None:
        """Reports that what was written for a setting will not do."""
        self._failed.add(name)
        self.report(self._places[name], message)

    def values(self) -> dict[str, dict[str, Any]]:
        """All settings with their defaults; references are unresolved until :meth:`resolve`."""
        return {name: self._values(name) for name in section_types()}

    def resolve(self) -> None:
        """Puts what references refer to in their place."""
        unresolved = self.values()
        for name, section in self._sections.items():
            for key, value in section.values().items():
                if has_reference(value):
                    self._resolve(f"{name}.{key}", value, unresolved)

    def build(self) -> Config | None:
        """The config, or None when there are problems."""
        sections = {name: self._made_section(name) for name in section_types()}
        return None if self.problems else self._made(Config, sections)

    def located(self, problem: Problem, prefix: str = "") -> str:
        """A problem between settings as a line, placed at the first of them that somebody set."""
        names = [prefix + key for key in problem.keys]
        places = [self._places[name] for name in names if name in self._places]
        return f"{(places or [self._place_of_unset(names[0])])[0]}: {problem.message}"

    def _place_of_unset(self, name: str) -> str:
        section = name.rpartition(".")[0]
        return f"{self._places.get(section, self._source)} {name}"

    def _values(self, name: str) -> dict[str, Any]:
        lists = {key: [self._values(entry) for entry in entries] for key, entries in self._lists(name)}
        return self._sections[name].values() | lists

    def _lists(self, name: str) -> list[tuple[str, list[str]]]:
        """The lists of sections that were written in a section: their keys and entries."""
        keys = self._sections[name].types
        return [(key, self._entries[f"{name}.{key}"]) for key in keys if f"{name}.{key}" in self._entries]

    def _set(self, name: str, written: Written, *, typed: str) -> None:
        section, _, key = name.rpartition(".")
        field_type = self._sections[section].types[key]
        try:
            value = read_value(written, field_type)
            self._sections[section].typed[key] = value
        except UserError as error:
            self.fail(name, str(error))
        except OmegaConfBaseException:
            self.fail(name, f"got {typed}; {expectation(name, written, field_type)}")
        else:
            objection = None if has_reference(value) else field_type.objection(value)
            if objection:
                self.fail(name, f"got {typed}; {objection}")

    def _resolve(self, name: str, reference: Any, unresolved: dict[str, dict[str, Any]]) -> None:
        try:
            written = resolve(unresolved, name, reference)
        except UserError as error:
            self.fail(name, f"{reference}: {error}")
        else:
            # Shows the reference and not its value, which may be a secret.
            self._set(name, written, typed=f"the value of {reference}")

    def _made_section(self, name: str) -> Settings | None:
        section = self._sections[name]
        values = section.values()
        failed = {key for key in values if f"{name}.{key}" in self._failed}
        missing = [key for key, value in values.items() if value == MISSING and key not in failed]
        for key in missing:
            place = self._place_of_unset(f"{name}.{key}")
            self.report(place, f"is required; must be {section.types[key]}")
        for key, entries in self._lists(name):
            values[key] = [self._made_section(entry) for entry in entries]
            failed |= {key} if None in values[key] else set()
        return None if missing or failed else self._made(section.settings, values, prefix=f"{name}.")

    def _made(self, make: Callable[..., _Made], values: dict[str, Any], prefix: str = "") -> _Made | None:
        try:
            return make(**values)
        except InvalidSettingsError as error:
            self.problems += [self.located(problem, prefix) for problem in error.problems]
            return None


class _Section:
    """The settings of one section as they stand, in which OmegaConf takes values of the right type only."""

    def __init__(self, settings: type[Settings]) -> None:
        self.settings = settings
        self.types = field_types(settings)
        # Without the flag OmegaConf turns the text "10" into a number and "yes" into a switch.
        self.typed: DictConfig = OmegaConf.structured(settings, flags={"convert": False})
        # A frozen dataclass is read-only to OmegaConf.
        OmegaConf.set_readonly(self.typed, False)

    def values(self) -> dict[str, Any]:
        """The settings by their keys, references as written."""
        values = OmegaConf.to_container(self.typed)
        assert isinstance(values, dict)
        return {str(key): value for key, value in values.items()}
