"""Builds a config: merges file and command line, has OmegaConf resolve references and pydantic judge."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import reduce
from itertools import count
from operator import getitem
from pathlib import Path
from typing import Any, TypeAlias

import yaml
from omegaconf import OmegaConf
from pydantic import ValidationError

from diffsynth_lite.config.document import is_nothing, line_of, read_yaml, scalar, shortened, shown
from diffsynth_lite.config.files import ConfigFile
from diffsynth_lite.config.messages import (
    Schema,
    expectation,
    in_words,
    section_of_entries,
    unknown_key,
    unknown_section,
    without_null,
)
from diffsynth_lite.config.schema import Config, section_types, setting_schemas
from diffsynth_lite.config.settings import ConflictError, Problem
from diffsynth_lite.config.values import REFUSED, has_reference, read_value, resolve
from diffsynth_lite.errors import MAX_LINES, UserError, join_lines

_FORM = "write section.key=value, such as train.steps=10"
# Problems are listed by file and line, then by the argument of the command line, then what is missing.
_LINES, _FIRST_ARGUMENT, _MISSING = 1 << 20, 1 << 30, 1 << 31

_Path: TypeAlias = tuple[str | int, ...]
"""The keys that lead to a setting, such as ``("data", "sources", 0, "path")``."""


@dataclass(frozen=True)
class _Place:
    """Where something was written.

    Args:
        order: the number of the line, plus ``_LINES`` for each file before; of an argument, from
            ``_FIRST_ARGUMENT`` on.
        text: for messages, such as ``recipe.yaml:3``.
        setting: the one that an argument names itself.
    """

    order: int
    text: str
    setting: _Path | None = None

    def line(self, path: _Path, message: str) -> str:
        """A problem with what stands here; the message may begin with the setting's name."""
        name = _name(path)
        place = self.text if path == self.setting else f"{self.text} {name}"
        return f"{place}: {message.removeprefix(f'{name} ')}"


_PlaceOf: TypeAlias = Callable[[yaml.Node], _Place]
"""The place of a node."""
_Entry: TypeAlias = tuple[yaml.ScalarNode, yaml.Node]
"""A key and what was written for it."""


@dataclass
class _Given:
    """What was written for one setting.

    Args:
        node: as typed, or what its references come to.
        reference: the value with its ``${...}``, if it has one.
        failure: why there is no value that pydantic could judge.
    """

    node: yaml.Node
    schema: Schema
    reference: Any = None
    failure: str = ""


class ConfigBuilder:
    """Takes what a file and then the command line say, and makes a config of it, or lists all that is wrong.

    Args:
        path: of the file that is named, for messages.
    """

    def __init__(self, path: Path) -> None:
        self._models = setting_schemas()
        self._sections: dict[str, dict[str, Schema]] = {
            name: self._models[model.__name__]["properties"] for name, model in section_types().items()
        }
        self._values: dict[str, dict[str, Any]] = {name: {} for name in self._sections}
        self._given: dict[_Path, _Given] = {}
        self._places: dict[_Path, _Place] = {(): _Place(1, f"{path}:1")}
        self._problems: list[tuple[int, str]] = []
        self._files, self._arguments = count(0, _LINES), count(_FIRST_ARGUMENT)

    def add_file(self, file: ConfigFile) -> None:
        """Takes the settings of a file, which win over those that were taken before."""
        above = next(self._files)

        def place_of(node: yaml.Node) -> _Place:
            return _Place(above + line_of(node), f"{file.path}:{line_of(node)}")

        for path, node in self._without_repeats(file.sections, (), place_of):
            self._add_section(path, node, place_of)

    def written(self) -> dict[str, dict[str, Any]]:
        """What was taken so far, by section, with references as they were written."""
        return deepcopy({name: values for name, values in self._values.items() if values})

    def add_override(self, text: str) -> None:
        """Takes one setting from ``section.key=value``, which wins over those that were taken before."""
        name, equals, value = text.partition("=")
        section, _, key = name.partition(".")
        path = (section, key)
        place = _Place(next(self._arguments), f"{shortened(text)} (command line)", path)
        own = self._sections.get(section)
        if name[:1] in {"+", "~", "-"}:
            self._report(place, path, f"'{name[0]}' has no meaning here; {_FORM}")
        elif own is None:
            self._report(place, path, unknown_section(name, self._sections))
        elif not key:
            self._report(place, path, f"{section} is a section; {_FORM}")
        elif not equals:
            self._report(place, path, f"has no value; {_FORM}")
        else:
            try:
                entry = (scalar(key), _node_of_argument(value, own.get(key, {})))
            except UserError as error:
                self._report(place, path, f"{error}; write a list as '[a, b]'")
                return
            self._add_settings([entry], (section,), own, self._values[section], lambda _: place)

    def build(self) -> tuple[Config, dict[str, Any]]:
        """The config, and all of its values with references as they were written.

        Raises:
            UserError: everything that is wrong, one line each: with what was written, in the order of the
                file and the command line, then what is missing.
        """
        self._resolve()
        config = None
        try:
            config = Config.model_validate(self._values)
        except ValidationError as error:
            self._note_refusals(error)
        if config is None or self._problems:
            self._problems.sort(key=lambda problem: problem[0])
            raise UserError(join_lines([line for _, line in self._problems]))
        unresolved = config.model_dump()
        for path, given in self._given.items():
            if given.reference is not None:
                _holder(unresolved, path)[path[-1]] = given.reference
        return config, unresolved

    def located(self, problem: Problem) -> str:
        """A problem between settings as a line, placed at the first of them that somebody set."""
        path = self._blamed(problem, ())
        return self._place_of(path).line(path, problem.message)

    def _add_section(self, path: _Path, node: yaml.Node, place_of: _PlaceOf) -> None:
        name = str(path[0])
        if name not in self._sections:
            self._report(self._places[path], path, unknown_section(name, self._sections))
        elif isinstance(node, yaml.MappingNode):
            self._add_settings(node.value, path, self._sections[name], self._values[name], place_of)
        elif not is_nothing(node):
            message = "must hold 'key: value' lines, indented below it; is there a space after each colon?"
            self._report(self._places[path], path, f"got {shown(node)}; {message}")

    def _add_settings(
        self,
        entries: Iterable[_Entry],
        section: _Path,
        own: dict[str, Schema],
        values: dict[str, Any],
        place_of: _PlaceOf,
    ) -> None:
        """Puts the settings of a section that has those of ``own`` into its ``values``."""
        for path, node in self._without_repeats(entries, section, place_of):
            key = str(path[-1])
            if key not in own:
                # What was meant takes milliseconds to find, and is told of the first ones alone.
                is_told = len(self._problems) < MAX_LINES
                meant = unknown_key(_name(section), key, own, self._sections) if is_told else "unknown key"
                self._report(self._places[path], path, meant)
                continue
            self._given[path] = _Given(node, own[key])
            values[key] = self._value(path, place_of)

    def _without_repeats(
        self, entries: Iterable[_Entry], section: _Path, place_of: _PlaceOf
    ) -> Iterator[tuple[_Path, yaml.Node]]:
        """The entries of a block by their paths, which it places; it reports a key that was there before."""
        keys: dict[str, yaml.Node] = {}
        for key, node in entries:
            path = (*section, key.value)
            if key.value in keys:
                message = f"is there already, on line {line_of(keys[key.value])}; keep one of them"
                self._report(place_of(key), path, message)
                continue
            keys[key.value] = key
            if section:  # of a section that comes again only the settings that do
                self._judge_replaced(path)
                self._forget(path)
            self._places[path] = place_of(key)
            yield path, node

    def _judge_replaced(self, path: _Path) -> None:
        """Reports a value that is wrong, though a later one takes its place: a recipe with it is broken."""
        given = self._given.get(path)
        if given is None or given.reference is not None:
            return
        section = str(path[0])
        try:
            section_types()[section].model_validate(self._values[section])
        except ValidationError as error:
            self._note_refusals(error, section=(section,), only=path)

    def _forget(self, path: _Path) -> None:
        """Drops what was given for a setting and, if it is a list of sections, for those in it."""
        if path not in self._places:
            return
        for known in [known for known in self._places if known[: len(path)] == path]:
            del self._places[known]
            self._given.pop(known, None)

    def _value(self, path: _Path, place_of: _PlaceOf) -> Any:
        """What pydantic is to judge as the value of a setting."""
        given = self._given[path]
        if model := section_of_entries(given.schema):
            return self._list_of_sections(path, self._models[model]["properties"], place_of)
        try:
            value = read_value(given.node, given.schema)
        except UserError as error:
            given.failure = str(error)
            return REFUSED
        given.reference = value if has_reference(value) else None
        return value

    def _list_of_sections(self, path: _Path, own: dict[str, Schema], place_of: _PlaceOf) -> Any:
        node = self._given[path].node
        is_list = isinstance(node, yaml.SequenceNode)
        if not is_list or not all(isinstance(block, yaml.MappingNode) for block in node.value):
            return REFUSED
        sections: list[dict[str, Any]] = []
        for block in node.value:
            section = (*path, len(sections))
            self._places[section] = place_of(block)
            sections.append({})
            self._add_settings(block.value, section, own, sections[-1], place_of)
        return sections

    def _resolve(self) -> None:
        """Puts what references refer to in their place."""
        referring = {path: given for path, given in self._given.items() if given.reference is not None}
        if not referring:
            return
        settings = OmegaConf.create(
            {name: model.defaults() | self._values[name] for name, model in section_types().items()}
        )
        for path, given in referring.items():
            value: Any = REFUSED
            try:
                given.node = resolve(settings, _name(path), given.reference)
                value = read_value(given.node, given.schema)
            except UserError as error:
                given.failure = f"{given.reference}: {error}"
            _holder(self._values, path)[path[-1]] = value

    def _note_refusals(self, error: ValidationError, *, section: _Path = (), only: _Path = ()) -> None:
        """Adds what pydantic refused to the problems: each setting once, where it is or belongs.

        Args:
            section: what was judged; empty for the whole config.
            only: notes nothing but wrong values of this setting.
        """
        noted = set()
        for refusal in error.errors(include_url=False, include_input=False):
            location = (*section, *refusal["loc"])
            if location[: len(only)] != only:
                continue
            reason = refusal.get("ctx", {}).get("error", "")
            if isinstance(reason, ConflictError):
                for problem in reason.problems if not only else ():
                    self._note(self._blamed(problem, location), problem.message)
                continue
            # An entry of a list of values is not a setting of its own.
            path = _longest(location, self._given) or location
            if path not in noted:
                noted.add(path)
                self._note(path, self._objection(path, str(reason)))

    def _objection(self, path: _Path, reason: str) -> str:
        """Why pydantic refused a setting; ``reason`` is given where a check of ours refused it."""
        given = self._given.get(path)
        if given is None:
            section, key = map(str, path)
            return f"is required; must be {in_words(self._sections[section][key])}"
        # Shows the reference and not its value, which may be a secret.
        typed = f"the value of {given.reference}" if given.reference is not None else shown(given.node)
        return given.failure or f"got {typed}; {reason or expectation(_name(path), given.node, given.schema)}"

    def _blamed(self, problem: Problem, section: _Path) -> _Path:
        paths = [(*section, *_path(key)) for key in problem.keys]
        return next((path for path in paths if path in self._given), paths[0])

    def _place_of(self, path: _Path) -> _Place:
        """Where a setting was written, or the section or file that it would belong to."""
        return self._places[_longest(path, self._places)]

    def _note(self, path: _Path, message: str) -> None:
        place = self._place_of(path)
        order = place.order if path in self._given else _MISSING
        self._problems.append((order, place.line(path, message)))

    def _report(self, place: _Place, path: _Path, message: str) -> None:
        self._problems.append((place.order, place.line(path, message)))


def _node_of_argument(value: str, schema: Schema) -> yaml.Node:
    """The shell has dealt with quotes, so text is taken as it is; lists and mappings alone are yaml."""
    kind = without_null(schema).get("type")
    if (kind == "array" and value.startswith("[")) or (kind == "object" and value.startswith("{")):
        return read_yaml(value)
    return scalar(value, quoted=value == "")


def _name(path: _Path) -> str:
    """A path as it is written, such as ``data.sources[0].path``."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


def _path(name: str) -> _Path:
    """The path of a setting, from its name."""
    keys = re.findall(r"[^.\[\]]+", name)
    return tuple(int(key) if key.isdecimal() else key for key in keys)


def _longest(path: _Path, known: Collection[_Path]) -> _Path:
    """The longest known beginning of a path; an empty one where there is none."""
    return next((path[:end] for end in range(len(path), 0, -1) if path[:end] in known), ())


def _holder(tree: Any, path: _Path) -> Any:
    """The section that holds a setting."""
    return reduce(getitem, path[:-1], tree)
