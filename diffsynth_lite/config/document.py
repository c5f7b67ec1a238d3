"""Reads yaml as texts with line numbers, and refuses every part of yaml that a config has no use for."""

import re

import yaml

from diffsynth_lite.config.written import Block, Entry, Scalar, Written
from diffsynth_lite.errors import UserError

# A config nests five deep; a little more is let through so that the message can name the key.
_DEEPEST = 8

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


def read_yaml(text: str) -> Written:
    """The one document in a text, as written; an empty text is an empty scalar.

    Raises:
        YamlError: a syntax error, a second document, an anchor, alias or tag, nesting too deep, or a key
            that is not plain text.
    """
    try:
        _refuse_what_a_config_never_needs(text)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(f"character {error.character:#x} is not allowed in yaml; remove it", line) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise YamlError(_syntax_message(error.problem or error.context), mark.line + 1) from None
    except YamlError:
        raise
    except (ValueError, OverflowError):
        # From chr() inside PyYAML, without a place.
        match = _NO_CHARACTER.search(text)
        line = text.count("\n", 0, match.start()) + 1 if match else 1
        raise YamlError("an escape \\U stands for no character; the last one is \\U0010FFFF", line) from None
    return Scalar("") if node is None else _written(node)


def _refuse_what_a_config_never_needs(text: str) -> None:
    """Looks at the events before a tree is built, so that no text can make that expensive."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line = event.start_mark.line + 1
        if getattr(event, "anchor", None):
            raise YamlError(
                f"'{event.anchor}' is a yaml anchor or alias (& or *), which a config does not have; "
                "write the value out, refer to another setting as ${section.key}, or put text in quotes",
                line,
            )
        if getattr(event, "tag", None):
            raise YamlError(
                f"'{event.tag}' is a yaml tag, which a config does not have; write the plain value, "
                "or put text that starts with ! in quotes",
                line,
            )
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise YamlError("nested too deeply; a config has sections, and settings in them", line)


def _syntax_message(problem: str) -> str:
    if "'\\t'" in problem:
        return "a tab is used to indent; use spaces"
    if "single document" in problem or "another document" in problem:
        return "a second yaml document starts here (---); a config is one"
    hint = "is a quote, bracket or colon missing? Text with ': ' or ' #' needs quotes"
    return f"not valid yaml: {problem}; {hint}"


def _written(node: yaml.Node) -> Written:
    if isinstance(node, yaml.ScalarNode):
        return Scalar(node.value, quoted=node.style is not None)
    if isinstance(node, yaml.SequenceNode):
        return [_written(item) for item in node.value]
    return Block(tuple(_entry(key, value) for key, value in node.value), node.start_mark.line + 1)


def _entry(key: yaml.Node, value: yaml.Node) -> Entry:
    line = key.start_mark.line + 1
    if not isinstance(key, yaml.ScalarNode):
        raise YamlError("a key must be plain text, as in 'steps: 1000'", line)
    return Entry(key.value, _written(value), line)
