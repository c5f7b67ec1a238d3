"""Builds a config: merges files and command line; OmegaConf resolves references, pydantic validates."""

import re
import shlex
from collections.abc import Collection, Iterable, Iterator
from copy import deepcopy
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, TypeAlias

import yaml
from omegaconf import OmegaConf
from pydantic import ValidationError

from diffsynth_lite.config.document import (
    NULLS,
    has_reference,
    is_nothing,
    line_of,
    read_value,
    read_yaml,
    resolve,
    scalar,
    shortened,
    shown,
)
from diffsynth_lite.config.files import ConfigFile
from diffsynth_lite.config.messages import (
    expectation,
    in_words,
    unknown_key,
    unknown_section,
)
from diffsynth_lite.config.schema import (
    NO_DATA,
    Config,
    Schema,
    section_of_entries,
    section_types,
    setting_schemas,
    without_null,
)
from diffsynth_lite.config.settings import ConfigError, ConfigProblem, ConflictError, Problem
from diffsynth_lite.errors import MAX_LINES, UserError

_FORM = "write section.key=value, such as train.steps=10"

_Path: TypeAlias = tuple[str | int, ...]
"""The keys that lead to a setting, such as ``("data", "sources", 0, "path")``."""


class ConfigBuilder:
    """Merges settings by their paths, remembering the yaml node of each, whose mark has its file and line."""

    def __init__(self, path: Path) -> None:
        self._models = setting_schemas()
        self._sections: dict[str, dict[str, Schema]] = {
            name: self._models[model.__name__]["properties"] for name, model in section_types().items()
        }
        self._values: dict[str, dict[str, Any]] = {name: {} for name in self._sections}
        self._keys: dict[_Path, yaml.Node] = {(): scalar("", source=str(path))}
        self._settings: dict[_Path, tuple[yaml.Node, Schema]] = {}
        self._references: dict[_Path, Any] = {}
        self._failures: dict[_Path, str] = {}
        self._sources: dict[str, int] = {}
        self._arguments: dict[str, str] = {}
        self._problems: list[tuple[tuple[bool, int, int], ConfigProblem]] = []

    def add_file(self, file: ConfigFile) -> None:
        """Takes the settings of a file, which win over those that were taken before."""
        self._sources.setdefault(str(file.path), len(self._sources))
        for path, node in self._distinct(file.sections, ()):
            name = str(path[0])
            if name not in self._sections:
                self._note(path, unknown_section(name, self._sections))
            elif isinstance(node, yaml.MappingNode):
                self._add_settings(node.value, path, self._sections[name], self._values[name])
            elif not is_nothing(node):
                message = (
                    "must hold 'key: value' lines, indented below it; is there a space after each colon?"
                )
                self._note(path, f"got {shown(node)}; {message}")

    def written(self) -> dict[str, dict[str, Any]]:
        """The settings so far, by section, with references as they were written."""
        return deepcopy({name: values for name, values in self._values.items() if values})

    def add_override(self, text: str, *rest: str) -> None:
        """Takes one setting from ``section.key=value``, which wins over those that were taken before.

        Args:
            rest: what the shell cut off at spaces in it.
        """
        name, equals, value = text.partition("=")
        section, _, key = name.partition(".")
        source = f"{shortened(text)} (command line)"
        self._sources[source] = len(self._sources)
        self._arguments[source] = _name((section, key))
        key_node, own = scalar(key, source=source), self._sections.get(section)
        if rest:
            whole = shlex.quote(shortened(" ".join((text, *rest))))
            problem = f"ends here, as a shell splits at spaces; put quotes around all of it: {whole}"
        elif name[:1] in {"+", "~", "-"}:
            problem = f"'{name[0]}' has no meaning here; {_FORM}"
        elif own is None:
            problem = unknown_section(name, self._sections)
        elif not key:
            problem = f"{section} is a section; {_FORM}"
        elif not equals:
            problem = f"has no value; {_FORM}"
        else:
            try:
                self._add_settings(
                    [self._entry_of_argument(key, value, own, source)], (section,), own, self._values[section]
                )
                return
            except UserError as error:
                problem = f"{error}; write a list as '[a, b]'"
        self._note((section, key), problem, key_node)

    def _entry_of_argument(
        self, key: str, value: str, own: dict[str, Schema], source: str
    ) -> tuple[yaml.ScalarNode, yaml.Node]:
        """A setting of the command line, also one of a section within its section, as a file has it."""
        outer, _, inner = key.partition(".")
        if inner and _is_section(own.get(outer, {})):
            within = self._models[section_of_entries(own[outer]) or ""]["properties"]
            entry = self._entry_of_argument(inner, value, within, source)
            name = scalar(outer, source=source)
            return name, yaml.MappingNode("", [entry], name.start_mark)
        return scalar(key, source=source), _node_of_argument(value, own.get(key, {}), source)

    def build(self) -> tuple[Config, dict[str, Any]]:
        """The config, and all of its values with references as they were written."""
        self._resolve()
        config = None
        try:
            config = Config.model_validate(self._values)
        except ValidationError as error:
            self._note_refusals(error)
            # Which is checked between sections, and so not where one of them is wrong.
            wrong = {refusal["loc"][:1] for refusal in error.errors(include_url=False, include_input=False)}
            names_data = any(self._values["data"].get(key) for key in ("path", "dataset", "sources"))
            if not wrong & {(), ("data",)} and not names_data and not self._values["objective"].get("slider"):
                self._note(self._blamed(NO_DATA, ()), NO_DATA.message)
        if config is None or self._problems:
            raise ConfigError(*(problem for _, problem in sorted(self._problems, key=lambda each: each[0])))
        unresolved = config.model_dump()
        for path, reference in self._references.items():
            _holder(unresolved, path)[path[-1]] = reference
        return config, unresolved

    def located(self, problem: Problem) -> str:
        """A problem between settings as a line, placed at the first of them that somebody set."""
        path = self._blamed(problem, ())
        return str(self._problem(path, self._nearest(path), problem.message))

    def _add_settings(
        self,
        entries: Iterable[tuple[yaml.ScalarNode, yaml.Node]],
        section: _Path,
        own: dict[str, Schema],
        values: dict[str, Any],
    ) -> None:
        """Puts settings, which must be among ``own``, into the ``values`` of their section."""
        for path, node in self._distinct(entries, section):
            key = str(path[-1])
            if key in own:
                self._settings[path] = (node, own[key])
                values[key] = self._value(path, node, own[key], values.get(key))
            else:
                # A suggestion takes milliseconds to find, so only the problems that are shown get one.
                is_shown = len(self._problems) < MAX_LINES
                self._note(
                    path, unknown_key(_name(section), key, own, self._sections) if is_shown else "unknown key"
                )

    def _distinct(
        self, entries: Iterable[tuple[yaml.ScalarNode, yaml.Node]], section: _Path
    ) -> Iterator[tuple[_Path, yaml.Node]]:
        """The entries of one block by their paths; reports a key that comes twice."""
        keys: dict[str, yaml.Node] = {}
        for key, node in entries:
            path = (*section, key.value)
            if key.value in keys:
                message = f"is there already, on line {line_of(keys[key.value])}; keep one of them"
                self._note(path, message, key)
                continue
            keys[key.value] = key
            if path in self._settings and not self._goes_on(path, node):
                self._replace(path)
            if path not in self._settings:
                self._keys[path] = key
            yield path, node

    def _goes_on(self, path: _Path, node: yaml.Node) -> bool:
        """Whether settings come on top of those of a section within a section."""
        before, schema = self._settings[path]
        return _is_section(schema) and all(isinstance(one, yaml.MappingNode) for one in (before, node))

    def _replace(self, path: _Path) -> None:
        """Forgets a setting and those in it, and reports a wrong value all the same: that file is broken."""
        section = str(path[0])
        if path not in self._references:
            try:
                section_types()[section].model_validate(self._values[section])
            except ValidationError as error:
                self._note_refusals(error, section=(section,), only=path)
        known: dict[_Path, Any]
        for known in (self._keys, self._settings, self._references, self._failures):
            for old in [old for old in known if old[: len(path)] == path]:
                del known[old]

    def _value(self, path: _Path, node: yaml.Node, schema: Schema, before: Any) -> Any:
        """A value for pydantic to judge; a node, which it refuses, where there is none.

        Args:
            before: the value so far, which a section goes on from.
        """
        if model := section_of_entries(schema):
            if _is_section(schema):
                return self._section(path, node, self._models[model]["properties"], before)
            blocks = node.value if isinstance(node, yaml.SequenceNode) else [node]
            if not isinstance(node, yaml.SequenceNode) or not all(
                isinstance(block, yaml.MappingNode) for block in blocks
            ):
                return node
            entries: list[dict[str, Any]] = [{} for _ in blocks]
            for place, (block, values) in enumerate(zip(blocks, entries, strict=True)):
                self._keys[*path, place] = block
                self._add_settings(block.value, (*path, place), self._models[model]["properties"], values)
            return entries
        try:
            value = read_value(node, schema)
        except UserError as error:
            self._failures[path] = str(error)
            return node
        if has_reference(value):
            self._references[path] = value
        return value

    def _section(self, path: _Path, node: yaml.Node, own: dict[str, Schema], before: Any) -> Any:
        """The values of a section within a section; None where it is switched off."""
        if not isinstance(node, yaml.MappingNode):
            is_off = isinstance(node, yaml.ScalarNode) and node.style is None and node.value in NULLS
            return None if is_off else node
        values: dict[str, Any] = before if isinstance(before, dict) else {}
        self._add_settings(node.value, path, own, values)
        return values

    def _resolve(self) -> None:
        """Puts the values of references in their place."""
        if not self._references:
            return
        settings = OmegaConf.create(
            {name: model.defaults() | self._values[name] for name, model in section_types().items()},
            flags={"allow_objects": True},
        )
        for path, reference in self._references.items():
            node, schema = self._settings[path]
            try:
                node = resolve(settings, _name(path), reference)
                value = read_value(node, schema)
            except UserError as error:
                self._failures[path], value = f"{reference}: {error}", node
            self._settings[path] = (node, schema)
            _holder(self._values, path)[path[-1]] = value

    def _note_refusals(self, error: ValidationError, *, section: _Path = (), only: _Path = ()) -> None:
        """Adds what pydantic refused to the problems, each setting once.

        Args:
            section: that was validated; empty for the whole config.
            only: notes nothing but wrong values of this setting.
        """
        noted = set()
        for refusal in error.errors(include_url=False, include_input=False):
            location = (*section, *refusal["loc"])
            reason = refusal.get("ctx", {}).get("error", "")
            if location[: len(only)] != only:
                continue
            if isinstance(reason, ConflictError):
                for problem in reason.problems if not only else ():
                    self._note(self._blamed(problem, location), problem.message)
                continue
            # An entry of a list of values is not a setting of its own.
            is_missing = refusal["type"] == "missing"
            path = location if is_missing else _longest(location, self._settings) or location
            if path not in noted:
                noted.add(path)
                self._note(path, self._objection(path, str(reason)))

    def _objection(self, path: _Path, reason: str) -> str:
        """Why pydantic refused a setting; ``reason`` is given where a validator of ours refused it."""
        if path not in self._settings:
            return f"is required; must be {in_words(self._schema(path))}"
        node, schema = self._settings[path]
        # Shows the reference and not its value, which may be a secret.
        typed = f"the value of {self._references[path]}" if path in self._references else shown(node)
        return self._failures.get(path) or f"got {typed}; {reason or expectation(_name(path), node, schema)}"

    def _schema(self, path: _Path) -> Schema:
        """That of a setting, also of one within others."""
        section, first, *rest = (key for key in path if isinstance(key, str))
        schema = self._sections[section][first]
        for key in rest:
            schema = self._models[section_of_entries(schema) or ""]["properties"][key]
        return schema

    def _blamed(self, problem: Problem, section: _Path) -> _Path:
        names = [re.findall(r"[^.\[\]]+", key) for key in problem.keys]
        paths = [(*section, *(int(key) if key.isdecimal() else key for key in name)) for name in names]
        given = [path for path in paths if path in self._settings] or paths[:1]
        if not problem.blames_last:
            return given[0]
        return max(given, key=lambda path: self._sources.get(self._nearest(path).start_mark.name, 0))

    def _nearest(self, path: _Path) -> yaml.Node:
        """The key of a setting, or of the section or file that it would belong to."""
        return self._keys[_longest(path, self._keys)]

    def _note(self, path: _Path, message: str, key: yaml.Node | None = None) -> None:
        """Adds a problem, at ``key`` if given; those with settings that nobody wrote are listed last."""
        node = key or self._nearest(path)
        is_missing = key is None and path not in self._keys
        order = (is_missing, self._sources.get(node.start_mark.name, 0), line_of(node))
        self._problems.append((order, self._problem(path, node, message)))

    def _problem(self, path: _Path, node: yaml.Node, message: str) -> ConfigProblem:
        name, source = _name(path), node.start_mark.name
        text = message.removeprefix(f"{name} ")
        if source not in self._arguments:
            return ConfigProblem.in_file(Path(source), line_of(node), text, key=name)
        place = source if self._arguments[source] == name else f"{source} {name}"
        return ConfigProblem(key=name, file=None, line=0, text=text, place=place)


def _node_of_argument(value: str, schema: Schema, source: str) -> yaml.Node:
    """The shell has dealt with quotes, so text is taken as it is; only lists and mappings are yaml."""
    kind = without_null(schema).get("type", "object")
    if (kind == "array" and value.startswith("[")) or (kind == "object" and value.startswith("{")):
        return read_yaml(value, source)
    return scalar(value, quoted=value == "", source=source)


def _is_section(schema: Schema) -> bool:
    """Whether a setting is a section of its own, such as ``objective.slider``."""
    return section_of_entries(schema) is not None and "items" not in without_null(schema)


def _name(path: _Path) -> str:
    """A path as it is written, such as ``data.sources[0].path``."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


def _longest(path: _Path, known: Collection[_Path]) -> _Path:
    """The longest known beginning of a path; an empty one where there is none."""
    return next((path[:end] for end in range(len(path), 0, -1) if path[:end] in known), ())


def _holder(tree: Any, path: _Path) -> Any:
    """The section that holds a setting."""
    return reduce(getitem, path[:-1], tree)
