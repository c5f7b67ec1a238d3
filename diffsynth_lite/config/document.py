"""Reads yaml as nodes with lines, refusing what a config has no use for, and writes settings as yaml.

In a node a value is still the text that somebody typed, whatever type its setting has.
"""

import re
from typing import Any

import yaml

from diffsynth_lite.errors import UserError
from diffsynth_lite.redaction import redacted

NULLS = frozenset(["", "~", "null", "Null", "NULL"])
"""What stands for no value, unless it is in quotes."""

# A config nests five deep; a little more is let through so that the message can name the key.
_DEEPEST = 8
_LONGEST_SHOWN = 60
_NO_CHARACTER = re.compile(r"\\U(?!000|0010)")


class YamlError(UserError):
    """Text that is not the yaml of a config.

    Args:
        message: what is wrong and what would do.
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
        loader = _Loader(text)
        loader.name = source
        node = loader.get_single_node()
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
        raise YamlError("an escape \\U stands for no character; the last one is \\U0010FFFF", line) from None
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
        return _Loader("").construct_document(root)
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
    """What was written, in one short line for a message."""
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


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """Refuses what a config never needs where it comes, so that no text can make a tree expensive."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
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
    """What is wrong, from what yaml says and what stands before it on its line."""
    if "'\\t'" in problem:
        return f"a tab {'stands between words' if before.strip() else 'is used to indent'}; use spaces"
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
