"""This file shows the text of a config as fields, and puts what is typed into a field into the text."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias

import yaml

from diffsynth_lite.config import ConfigError, ConfigProblem, load_config, section_types
from diffsynth_lite.config.document import NULLS, has_reference, read_value, read_yaml, write_yaml
from diffsynth_lite.config.editing import settings_of, with_value
from diffsynth_lite.config.files import read_config_files
from diffsynth_lite.config.schema import (
    Schema,
    section_of_entries,
    setting_schemas,
    takes_null,
    without_null,
    words_instead,
)
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
    choices: Sequence[str]
    schema: Schema


@dataclass(frozen=True, kw_only=True)
class Value:
    """What a text says of a setting.

    Attributes:
        value: as it is typed into the field.
        inherited: the same without the setting in this file: what its recipe says, or the default.
        is_own: whether this file has it.
        wrong: why the loader refuses it; empty where it does not.
        line: of this file, where it is wrong there.
        remark: why it has no effect.
    """

    value: str
    inherited: str
    is_own: bool
    wrong: str = ""
    line: int = 0
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


def hash_of(text: str) -> str:
    """What a page sends with a change, so that nothing is changed that it does not know."""
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def view_of(path: Path, text: str) -> View:
    """What the loader and the form say of a text.

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
    except ConfigError as error:
        problems = error.problems
    own, inherited = settings_of(files[-1:]), settings_of(files[:-1])
    here = (one if one.file == path else replace(one, line=0) for one in reversed(problems))
    wrong = {_setting(problem.key): problem for problem in here}
    values = {
        key: _value(field, own.get(key), inherited.get(key), wrong.get(key), remarks.get(key, ""))
        for key, field in fields().items()
    }
    extends = files[-2].path.name if len(files) > 1 else ""
    return View(path=path, text=text, extends=extends, values=values, problems=problems)


def changed(text: str, key: str, typed: str | None) -> str:
    """A text with what was typed into a field; None takes the setting out of it.

    Raises:
        UserError: there is no such setting, or the text has it in a form that cannot be changed by itself.
    """
    field = fields().get(key)
    if field is None:
        raise UserError(f"{key}: is not a setting")
    return with_value(text, key, None if typed is None else as_yaml(field, typed))


def as_yaml(field: Field, typed: str) -> str:
    """What was typed into a field, as yaml on one line."""
    nothing = "null" if takes_null(field.schema) else None
    match field.kind:
        case "lines":
            lines = [line.strip() for line in typed.splitlines() if line.strip()]
            if len(lines) == 1 and lines[0] in words_instead(field.schema):
                return lines[0]
            return f"[{', '.join(map(_as_text, lines))}]" if lines or nothing is None else nothing
        case "words":
            words = [_as_plain(word) for word in typed.replace(",", " ").split()]
            if len(words) == 1 and words[0] in words_instead(field.schema):
                return words[0]
            return f"[{', '.join(words)}]" if words or nothing is None else nothing
        case "text":
            return _as_text(typed) if typed or nothing is None else nothing
        case "yaml":
            return " ".join(typed.split()) or nothing or "[]"
        case "choice" | "plain":
            return _as_plain(typed.strip()) if typed.strip() else "null"


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
            kind, choices = _kind(schema)
            found[key] = Field(key=key, label=label, help=text, kind=kind, choices=choices, schema=schema)
    return {key: found[key] for key in (*main, *found)}


def _kind(schema: Schema) -> tuple[Kind, Sequence[str]]:
    value, words = without_null(schema), words_instead(schema)
    none = [""] if takes_null(schema) else []
    if value.get("type") == "boolean":
        return "choice", [*none, "true", "false"]
    if "enum" in value:
        return "choice", [*none, *map(str, value["enum"])]
    if section_of_entries(schema) or value.get("type") == "object":
        return "yaml", ()
    if value.get("type") == "array":
        has_words = "enum" in value["items"] or value["items"].get("type") != "string"
        is_nested = value["items"].get("type") == "array"
        return "yaml" if is_nested else "words" if has_words else "lines", ()
    return ("plain" if words or value.get("type") in ("integer", "number") else "text"), ()


def _value(
    field: Field,
    own: yaml.Node | None,
    inherited: yaml.Node | None,
    wrong: ConfigProblem | None,
    remark: str,
) -> Value:
    without = inherited if inherited is not None else _defaults().get(field.key)
    node = own if own is not None else without
    return Value(
        value=shown(field, node),
        inherited=shown(field, without),
        is_own=own is not None,
        wrong=wrong.text if wrong else "",
        line=wrong.line if wrong else 0,
        remark=remark,
    )


@cache
def _defaults() -> Mapping[str, yaml.Node]:
    """The nodes of the optional settings' default values."""
    values = {name: model.defaults() for name, model in section_types().items()}
    root = read_yaml(write_yaml(json.loads(json.dumps(values, default=list))))
    return {
        f"{section.value}.{key.value}": node for section, block in root.value for key, node in block.value
    }


def _setting(key: str) -> str:
    """The setting that a problem is about, such as ``data.sources`` of ``data.sources[0].path``."""
    return ".".join(re.split(r"[.\[]", key)[:2])


def shown(field: Field, node: yaml.Node | None) -> str:
    """What a field has for a value."""
    if node is None or (isinstance(node, yaml.ScalarNode) and node.style is None and node.value in NULLS):
        return ""
    is_list = isinstance(node, yaml.SequenceNode) and field.kind in ("lines", "words")
    if is_list and all(isinstance(entry, yaml.ScalarNode) for entry in node.value):
        return ("\n" if field.kind == "lines" else ", ").join(entry.value for entry in node.value)
    if not isinstance(node, yaml.ScalarNode):
        return "" if not node.value else on_one_line(node)
    if field.kind == "choice" and not has_reference(node.value):
        try:
            read = read_value(node, field.schema)
        except UserError:
            read = node.value
        return json.dumps(read) if isinstance(read, bool) else str(read)
    return str(node.value)


def on_one_line(node: yaml.Node) -> str:
    """A node as yaml on one line."""
    if isinstance(node, yaml.SequenceNode):
        return f"[{', '.join(map(on_one_line, node.value))}]"
    if isinstance(node, yaml.MappingNode):
        return f"{{{', '.join(f'{on_one_line(key)}: {on_one_line(value)}' for key, value in node.value)}}}"
    return node.value if node.style is None else _as_text(node.value)


def _as_plain(typed: str) -> str:
    """A number or word as it is; anything else in quotes, for the loader to refuse by its type."""
    return typed if _PLAIN.fullmatch(typed) else json.dumps(typed, ensure_ascii=False)


def _as_text(typed: str) -> str:
    is_plain = _TEXT.fullmatch(typed) and typed.casefold() not in ("null", "none")
    return typed if is_plain else json.dumps(typed, ensure_ascii=False)
