"""Reads yaml as nodes with lines, and each value by the type of its setting; writes settings as yaml.

In a node a value is still the text that somebody typed, whatever type its setting has.
"""

import math
import re
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from diffsynth_lite.config.schema import Schema, takes_null, without_null
from diffsynth_lite.errors import UserError
from diffsynth_lite.redaction import redacted

NULLS = frozenset(["", "~", "null", "Null", "NULL"])
"""Spellings of no value, unless they are in quotes."""

# A config nests five deep; a little more is let through so that the message can name the key.
_DEEPEST = 8
_LONGEST_SHOWN = 60
_NO_CHARACTER = re.compile(r"\\U(?!000|0010)")


# YAML 1.1's words for true and false, as people know them from other yaml files.
_SWITCHES = dict.fromkeys(["true", "yes", "on"], True) | dict.fromkeys(["false", "no", "off"], False)
# At most 18 digits, to fit in 64 bits. No leading zero: 010 is 8 to some readers of yaml, 10 to others.
_WHOLE_NUMBER = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")
_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_REFERENCE = re.compile(r"\$\{(oc\.env:[A-Za-z_][A-Za-z0-9_]*(?:,[^${}]+)?|[a-z_]+\.[a-z_]+)\}")


class YamlError(UserError):
    """Text that is not the yaml of a config.

    Args:
        message: the problem and its remedy.
        line: the line it was found on, counted from 1.
    """

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


def read_yaml(text: str, source: str = "") -> yaml.Node:
    """The one document in a text, whose nodes are marked with ``source``; an empty scalar of an empty text.

    Raises:
        YamlError: a syntax error, a second document, an anchor, alias or tag, nesting too deep, or a key
            that is not plain text.
    """
    try:
        node = _Loader(text, source).get_single_node()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(f"character {error.character:#x} is not allowed in yaml; remove it", line) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        before = text.splitlines()[mark.line][: mark.column] if mark.line < len(text.splitlines()) else ""
        raise YamlError(_syntax_message(error.problem or error.context, before), mark.line + 1) from None
    except YamlError:
        raise
    except (ValueError, OverflowError):
        # From chr() inside PyYAML, without a place.
        match = _NO_CHARACTER.search(text)
        line = text.count("\n", 0, match.start()) + 1 if match else 1
        raise YamlError("an escape \\U is not a character; the last one is \\U0010FFFF", line) from None
    if node is None:
        return scalar("", source=source)
    _require_plain_keys(node)
    return node


def load_yaml(text: str) -> Any:
    """The values in a text: of :func:`read_yaml`, with the types that yaml gives them; None of an empty one.

    Raises:
        YamlError: see there; or a value that cannot be, such as a date without its month.
    """
    root = read_yaml(text)
    if is_nothing(root):
        return None
    try:
        return _Loader("", "").construct_document(root)
    except (yaml.YAMLError, ValueError) as error:
        raise YamlError(f"a value cannot be read: {shortened(str(error))}", line_of(root)) from None


def scalar(text: str, *, quoted: bool = False, source: str = "") -> yaml.ScalarNode:
    """A value as if read on line 1 of ``source``; ``quoted`` makes it text, whatever it looks like."""
    mark = yaml.Mark(source, 0, 0, 0, None, 0)
    return yaml.ScalarNode("", text, start_mark=mark, style='"' if quoted else None)


def is_nothing(node: yaml.Node) -> bool:
    """Whether nothing was written, not even a pair of quotes."""
    return isinstance(node, yaml.ScalarNode) and node.style is None and node.value == ""


def line_of(node: yaml.Node) -> int:
    """The line that a node starts on, counted from 1."""
    line: int = node.start_mark.line + 1
    return line


def shown(node: yaml.Node) -> str:
    """The written value, in one short line for a message."""
    if isinstance(node, yaml.MappingNode):
        return "a 'key: value' block"
    if isinstance(node, yaml.SequenceNode):
        return shortened(f"[{', '.join(map(shown, node.value))}]")
    if node.style is not None:
        return f'"{shortened(node.value)}"'
    return f"'{shortened(node.value)}'" if node.value else "nothing"


def shortened(text: str) -> str:
    """A text on one line, of bounded length, with secrets masked: half of one would not be known as such."""
    text = redacted(text)
    line = text if text.isprintable() else repr(text)[1:-1]
    return line if len(line) <= _LONGEST_SHOWN else f"{line[:_LONGEST_SHOWN]}..."


def write_yaml(values: dict[str, Any]) -> str:
    """Values as yaml, from which :func:`read_yaml` reads the same texts."""
    text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


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
    """Resolve the references in a setting, as if their values had been typed in their place.

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
        raise UserError("is a list of sections; refer to a setting with a value of its own")
    if has_reference(value if entries is None else entries):
        raise UserError("its value has a '${' of its own, which would be read as a reference")
    if entries is not None:
        return yaml.SequenceNode("", [scalar(str(entry), quoted=True) for entry in entries])
    return scalar("null" if value is None else str(value))


def _mapping(node: yaml.MappingNode) -> dict[str, Any]:
    """Words to values of no certain type: numbers, true or false and null are read by their form."""
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


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """Refuses what a config never needs where it comes, so that no text can make a tree expensive."""

    def __init__(self, text: str, source: str) -> None:
        super().__init__(text)
        self.name = source
        self._depth = 0

    def get_event(self) -> yaml.Event:
        event = super().get_event()
        if getattr(event, "anchor", None):
            raise YamlError(
                f"'{event.anchor}' is a yaml anchor or alias (& or *), which a config does not have; "
                "write the value out, refer to another setting as ${section.key}, or put text in quotes",
                line_of(event),
            )
        if getattr(event, "tag", None):
            raise YamlError(
                f"'{event.tag}' is a yaml tag, which a config does not have; write the plain value, "
                "or put text that starts with ! in quotes",
                line_of(event),
            )
        self._depth += isinstance(event, yaml.CollectionStartEvent)
        self._depth -= isinstance(event, yaml.CollectionEndEvent)
        if self._depth > _DEEPEST:
            raise YamlError("nested too deeply; a config has sections, and settings in them", line_of(event))
        return event


def _require_plain_keys(node: yaml.Node) -> None:
    if isinstance(node, yaml.SequenceNode):
        for entry in node.value:
            _require_plain_keys(entry)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise YamlError("a key must be plain text, as in 'steps: 1000'", line_of(key))
            _require_plain_keys(value)


def _syntax_message(problem: str, before: str) -> str:
    """The problem in words, from yaml's message and the text before it on its line."""
    if "'\\t'" in problem:
        return f"a tab {'is between words' if before.strip() else 'is used to indent'}; use spaces"
    if "single document" in problem or "another document" in problem:
        return "a second yaml document starts here (---); a config is one"
    hint = "is a quote, bracket or colon missing? Text with ': ' or ' #' needs quotes"
    return f"not valid yaml: {problem}; {hint}"


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # yaml has no types
    """Quotes a text that is the word None: written plain, it is refused as a null that was meant."""


def _represent_text(dumper: Any, text: str) -> Any:
    # Between single quotes these line breaks of Unicode would be read back as spaces.
    style = '"' if any(character in text for character in "\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_implicit_resolver("!none", re.compile("^None$"), ["N"])
_Dumper.add_representer(str, _represent_text)
