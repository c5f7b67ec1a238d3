"""Reads what was typed as the value of a setting, by the setting's type; OmegaConf resolves ``${...}``."""

import math
import re
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from diffsynth_lite.config.document import NULLS, scalar, shortened
from diffsynth_lite.config.messages import Schema, takes_null, without_null
from diffsynth_lite.errors import UserError

# YAML 1.1's words for true and false, as people know them from other yaml files.
_SWITCHES = dict.fromkeys(["true", "yes", "on"], True) | dict.fromkeys(["false", "no", "off"], False)
# At most 18 digits, to fit in 64 bits. No leading zero: 010 is 8 to some readers of yaml, 10 to others.
_WHOLE_NUMBER = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")
_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_REFERENCE = re.compile(r"\$\{(oc\.env:[A-Za-z_][A-Za-z0-9_]*(?:,[^${}]+)?|[a-z_]+\.[a-z_]+)\}")


def read_value(node: yaml.Node, schema: Schema) -> Any:
    """What was typed as a value of the setting's type; else as text or node, for pydantic to refuse.

    Text with a reference (``${oc.env:NAME}``, ``${section.key}``) stays text.
    """
    if isinstance(node, yaml.MappingNode):
        return _mapping(node) if without_null(schema).get("type") == "object" else node
    if isinstance(node, yaml.SequenceNode):
        entry = without_null(schema).get("items", schema)
        return [read_value(part, entry) for part in node.value]
    if has_reference(node.value):
        _check_references(node.value)
        return node.value
    return _plain_value(node.value, schema) if node.style is None else node.value


def has_reference(value: object) -> bool:
    """Whether a value, or an entry of a list, has a ``${...}`` that is still to be resolved."""
    texts = value if isinstance(value, list) else [value]
    return any(isinstance(text, str) and "${" in text for text in texts)


def resolve(settings: DictConfig, name: str, reference: str | list[str]) -> yaml.Node:
    """What the references in a setting come to, as if that had been typed in their place.

    Args:
        settings: all settings, unresolved, by section and key.
        name: the setting, as ``section.key`` or ``section.key[0].key``.
        reference: its value in ``settings``.
    """
    try:
        value = OmegaConf.select(settings, name)
        entries = list(value) if isinstance(value, ListConfig) else None
        _refuse_null_in_text(settings, reference)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0].rpartition("interpolation: ")[2].strip('"')
        raise UserError(
            f"{reason}; set what is referred to, or write the value here "
            "(an environment variable can have a default: ${oc.env:NAME,default})"
        ) from None
    if any(isinstance(entry, DictConfig) for entry in entries or []):
        raise UserError("stands for a list of sections; refer to a setting with a value of its own")
    if has_reference(value if entries is None else entries):
        raise UserError(
            "the value it stands for has a '${' of its own, which cannot be told from a reference"
        )
    if entries is not None:
        return yaml.SequenceNode("", [scalar(str(entry), quoted=True) for entry in entries])
    return scalar("null" if value is None else str(value))


def _mapping(node: yaml.MappingNode) -> dict[str, Any]:
    """Words to values of no certain type: numbers, switches and nothing are what they look like."""
    read: dict[str, Any] = {}
    for key, value in node.value:
        if key.value in read:
            raise UserError(f"has {key.value} twice; keep one of them")
        read[key.value] = _untyped(value)
    return read


def _untyped(node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return node
    if isinstance(node, yaml.SequenceNode):
        return [_untyped(part) for part in node.value]
    if "${" in node.value:
        raise UserError(f"got '{shortened(node.value)}'; here no value can be a reference")
    if node.style is not None:
        return node.value
    if node.value in NULLS:
        return None
    if _WHOLE_NUMBER.fullmatch(node.value):
        return int(node.value)
    if _NUMBER.fullmatch(node.value) and math.isfinite(float(node.value)):
        return float(node.value)
    return _SWITCHES.get(node.value.lower(), node.value)


def _plain_value(text: str, schema: Schema) -> object:
    """Text without quotes by the type of its setting: ``yes`` is text in a text, true in a switch."""
    kind = without_null(schema)["type"]
    if text in NULLS:
        return None
    if text == "None" and takes_null(schema):
        raise UserError("got 'None'; write null for no value, or put the word in quotes")
    if kind == "boolean" and text in (text.lower(), text.capitalize(), text.upper()):
        return _SWITCHES.get(text.lower(), text)
    if kind == "integer" and _WHOLE_NUMBER.fullmatch(text):
        return int(text)
    if kind == "number" and _NUMBER.fullmatch(text) and math.isfinite(float(text)):
        return float(text)
    return text


def _check_references(text: str) -> None:
    forms = "${oc.env:NAME}, ${oc.env:NAME,default} or ${section.key}"
    is_known = "${" not in _REFERENCE.sub("", text) and "\\${" not in text
    try:
        OmegaConf.create([text if is_known else ""])
    except OmegaConfBaseException:  # a default with a bracket or quote that is not closed
        is_known = False
    if not is_known:
        raise UserError(f"got '{shortened(text)}'; a reference must be {forms}")


def _refuse_null_in_text(settings: DictConfig, value: str | list[str]) -> None:
    """OmegaConf would write null as the word None."""
    for text in [value] if isinstance(value, str) else value:
        for match in _REFERENCE.finditer(text):
            is_part = match[0] != text or value is not text
            is_setting = not match[1].startswith("oc.env:")
            if is_part and is_setting and OmegaConf.select(settings, match[1]) is None:
                raise UserError(f"'{text}' needs {match[1]}, which is null; set it")
