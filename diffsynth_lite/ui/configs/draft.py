"""This file shows the text of a config as fields, and puts what is typed into a field into the text."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias

import yaml

from diffsynth_lite.config import ConfigError, ConfigProblem, load_config, section_types
from diffsynth_lite.config.document import NULLS, YamlError, has_reference, read_value, read_yaml, write_yaml
from diffsynth_lite.config.editing import settings_of, with_value
from diffsynth_lite.config.files import read_config_files
from diffsynth_lite.config.schema import Schema, setting_schemas, takes_null, without_null, words_instead
from diffsynth_lite.errors import UserError

Kind: TypeAlias = Literal["choice", "text", "plain", "lines", "words", "yaml"]
"""What a field takes: one of a few words, a text, a number or word, a text on each line, several words or
numbers with commas between, or yaml."""

MAIN: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "What it learns from": {
        "data.path": ("Images or clips", "Folder; subfolders are read, too"),
        "data.trigger": ("Trigger words", "Put in front of captions that lack them"),
        "data.resolutions": ("Resolutions", "Each image keeps about its shape, in as many pixels"),
    },
    "How it learns": {
        "train.steps": ("Steps", "Optimizer steps of the whole run"),
        "train.learning_rate": ("Learning rate", "Lower it if previews fall apart"),
        "train.global_batch_size": ("Images per step", "Over all devices together"),
        "lora.rank": ("Rank", "8 for a simple subject, 64 for a detailed style"),
    },
    "Model": {
        "model.path": ("Model", "Hub id, downloaded when the run starts, or a folder with it"),
        "model.quantize": ("Quantize", "Bits a weight of the frozen blocks"),
        "memory.auto": ("Choose memory settings", "The fastest that fits, when the run starts"),
    },
    "What you watch": {
        "validation.prompts": ("Prompts of previews", "One a line: with the subject, and one without it"),
        "output.dir": ("Folder of the run", "The same command continues a run that is there"),
    },
}
"""The fields that are shown first: label and help of each, by group."""
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_PLAIN = re.compile(r"[\w./+-]+")
_TEXT = re.compile(r"[^\W\d_][\w./ -]*(?<! )|/[\w./-]*")


@dataclass(frozen=True, kw_only=True)
class Field:
    """A setting as a form shows it, whatever its value is."""

    key: str
    label: str
    help: str
    kind: Kind
    schema: Schema

    @property
    def choices(self) -> Sequence[str]:
        """Of a field with a few words."""
        value = without_null(self.schema)
        words = value.get("enum", ("true", "false"))
        return [*([""] if takes_null(self.schema) else []), *map(str, words)]


@dataclass(frozen=True, kw_only=True)
class Value:
    """What a text says of a setting.

    Attributes:
        value: as it is typed into the field.
        inherited: the same without the setting in this file: what its recipe says, or the default.
        is_own: whether this file has it.
        problem: why the loader refuses it, with the line where it is wrong in this file, else 0.
        remark: why it has no effect.
    """

    value: str
    inherited: str
    is_own: bool
    problem: ConfigProblem | None = None
    remark: str = ""


@dataclass(frozen=True, kw_only=True)
class View:
    """A text as the screen shows it.

    Attributes:
        extends: the file that it is on top of; empty for none.
        values: of all settings, by key; none where the text is not a config.
        problems: all that is wrong, in the loader's order.
    """

    path: Path
    text: str
    extends: str
    values: Mapping[str, Value]
    problems: Sequence[ConfigProblem]

    @property
    def num_own(self) -> int:
        """Settings that this file has."""
        return sum(value.is_own for value in self.values.values())


def view_of(path: Path, text: str) -> View:
    """What the loader and the form make of a text.

    Args:
        path: of its file, from where the files that it extends are looked for.
    """
    problems: Sequence[ConfigProblem] = ()
    remarks: dict[str, str] = {}
    try:
        files = read_config_files(path, text)
    except ConfigError as error:
        return View(path=path, text=text, extends="", values={}, problems=error.problems)
    try:
        config = load_config(path, text=text).config
        remarks = {problem.keys[0]: problem.message for problem in config.without_effect()}
        if config.data.given_sizes:
            given = "data.sizes is" if config.data.sizes else "data.width and data.height are"
            remarks["data.resolutions"] = f"has no effect while {given} set"
    except ConfigError as error:
        problems = error.problems
    own, inherited = settings_of(files[-1:]), {**_defaults(), **settings_of(files[:-1])}
    here = (one if one.file == path else replace(one, line=0) for one in reversed(problems))
    # A problem may be with a part of a setting, such as ``data.sources[0].path``.
    wrong = {".".join(re.split(r"[.\[]", problem.key)[:2]): problem for problem in here}
    values = {
        key: Value(
            value=shown(field, own.get(key, inherited.get(key))),
            inherited=shown(field, inherited.get(key)),
            is_own=key in own,
            problem=wrong.get(key),
            remark=remarks.get(key, ""),
        )
        for key, field in fields().items()
    }
    extends = files[-2].path.name if len(files) > 1 else ""
    return View(path=path, text=text, extends=extends, values=values, problems=problems)


def changed(text: str, key: str, typed: str | None) -> str:
    """A text with what was typed into a field; None takes the setting out of it."""
    field = fields().get(key)
    if field is None:
        raise UserError(f"{key}: is not a setting")
    return with_value(text, key, None if typed is None else as_yaml(field, typed))


def as_yaml(field: Field, typed: str) -> str:
    """What was typed into a field, as yaml on one line."""
    entries: Sequence[str] = ()
    match field.kind:
        case "text" if typed:
            return _as_text(typed)
        case "choice" | "plain" if typed.strip():
            return _as_plain(typed.strip())
        case "yaml" if typed.strip():
            return " ".join(typed.split())
        case "lines":
            entries = [_as_text(line.strip()) for line in typed.splitlines() if line.strip()]
        case "words":
            entries = [_as_plain(word) for word in typed.replace(",", " ").split()]
    if entries:
        is_word = len(entries) == 1 and entries[0] in words_instead(field.schema)
        return entries[0] if is_word else f"[{', '.join(entries)}]"
    if takes_null(field.schema) or field.kind in ("choice", "plain"):
        return "null"
    return '""' if field.kind == "text" else "[]"


def sources_of(typed: str) -> str:
    """The entries in the field of data.sources as JSON; each setting of one is yaml on one line."""
    entries = []
    with suppress(YamlError, AttributeError):  # of what is not a list of mappings
        [(_, node)] = read_yaml(f"x: {typed}").value
        listed = node.value if isinstance(node, yaml.SequenceNode) else []
        entries = [{key.value: on_one_line(value) for key, value in each.value} for each in listed]
    return json.dumps(entries, ensure_ascii=False, separators=(",", ":"))


@cache
def fields() -> Mapping[str, Field]:
    """All settings by key, those of the main form first."""
    main = {key: texts for group in MAIN.values() for key, texts in group.items()}
    found = {}
    for section, model in section_types().items():
        for name, schema in setting_schemas()[model.__name__]["properties"].items():
            key = f"{section}.{name}"
            described = _LINK.sub(r"\1", schema.get("description", "")).replace("`", "")
            label, text = main.get(key, (name.replace("_", " ").capitalize(), described))
            found[key] = Field(key=key, label=label, help=text, kind=_kind(schema), schema=schema)
    return {key: found[key] for key in (*main, *found)}


def _kind(schema: Schema) -> Kind:
    value = without_null(schema)
    kind, entries = value.get("type"), value.get("items", {})
    if kind == "boolean" or "enum" in value:
        return "choice"
    if kind in ("object", None) or "$ref" in entries or entries.get("type") == "array":
        return "yaml"
    if kind == "array":
        return "lines" if entries.get("type") == "string" and "enum" not in entries else "words"
    return "plain" if words_instead(schema) or kind in ("integer", "number") else "text"


@cache
def _defaults() -> Mapping[str, yaml.Node]:
    """The nodes of the optional settings' default values."""
    values = {name: model.defaults() for name, model in section_types().items()}
    root = read_yaml(write_yaml(json.loads(json.dumps(values, default=list))))
    return {
        f"{section.value}.{key.value}": node for section, block in root.value for key, node in block.value
    }


def shown(field: Field, node: yaml.Node | None) -> str:
    """What a field has for a value."""
    if node is None or (isinstance(node, yaml.ScalarNode) and node.style is None and node.value in NULLS):
        return ""
    if isinstance(node, yaml.ScalarNode):
        if field.kind == "choice" and not has_reference(node.value):
            with suppress(UserError):
                read = read_value(node, field.schema)
                return read if isinstance(read, str) else json.dumps(read)
        return str(node.value)
    if field.kind in ("lines", "words") and all(isinstance(entry, yaml.ScalarNode) for entry in node.value):
        return ("\n" if field.kind == "lines" else ", ").join(entry.value for entry in node.value)
    return on_one_line(node) if node.value else ""


def on_one_line(node: yaml.Node) -> str:
    """A node as yaml on one line."""
    if isinstance(node, yaml.SequenceNode):
        return f"[{', '.join(map(on_one_line, node.value))}]"
    if isinstance(node, yaml.MappingNode):
        return f"{{{', '.join(f'{on_one_line(key)}: {on_one_line(value)}' for key, value in node.value)}}}"
    is_plain = node.style is None and not set(node.value) & set(",[]{}")  # which a block has without quotes
    return node.value if is_plain else _as_text(node.value)


def _as_plain(typed: str) -> str:
    """A number or word as it is; anything else in quotes, for the loader to refuse by its type."""
    return typed if _PLAIN.fullmatch(typed) else json.dumps(typed, ensure_ascii=False)


def _as_text(typed: str) -> str:
    is_plain = _TEXT.fullmatch(typed) and typed.casefold() not in ("null", "none")
    return typed if is_plain else json.dumps(typed, ensure_ascii=False)
