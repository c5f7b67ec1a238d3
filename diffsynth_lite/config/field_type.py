"""The type of one setting: what its annotation allows, in words for messages and for the documentation."""

import math
import re
from dataclasses import dataclass, fields, is_dataclass
from types import NoneType
from typing import Annotated, Literal, Protocol, get_args, get_origin, get_type_hints

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_LISTED_WORDS = {int: "whole numbers", str: "texts"}


class Rule(Protocol):
    """A limit on values, given in an ``Annotated``; its text completes "must be a number, ..."."""

    def allows(self, value: object) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class Range:
    """The numbers between two bounds, alone or in a list; a bound left out is open."""

    at_least: float = -math.inf
    above: float = -math.inf
    at_most: float = math.inf
    below: float = math.inf

    def allows(self, value: object) -> bool:
        if isinstance(value, list):
            return all(map(self.allows, value))
        assert isinstance(value, int | float)
        return math.isfinite(value) and all(
            [self.at_least <= value, self.above < value, value <= self.at_most, value < self.below]
        )

    def __str__(self) -> str:
        bounds = {
            "at least": self.at_least,
            "above": self.above,
            "at most": self.at_most,
            "below": self.below,
        }
        return " and ".join(f"{word} {bound:g}" for word, bound in bounds.items() if math.isfinite(bound))


@dataclass(frozen=True)
class NotEmpty:
    """Text with something in it; a list with at least one entry and no empty one."""

    def allows(self, value: object) -> bool:
        texts = value if isinstance(value, list) else [value]
        return bool(texts) and all(str(text).strip() for text in texts)

    def __str__(self) -> str:
        return "not empty"


@dataclass(frozen=True)
class NoEmptyEntry:
    """A list in which no text is empty; the list itself may be."""

    def allows(self, value: object) -> bool:
        assert isinstance(value, list)
        return all(text.strip() for text in value)

    def __str__(self) -> str:
        return "none of them empty"


@dataclass(frozen=True)
class Distinct:
    """A list in which nothing stands twice."""

    def allows(self, value: object) -> bool:
        assert isinstance(value, list)
        return len(set(value)) == len(value)

    def __str__(self) -> str:
        return "each once"


@dataclass(frozen=True)
class Form:
    """Texts, alone or in a list, that are as a pattern says as a whole; ``words`` describe it."""

    pattern: str
    words: str

    def allows(self, value: object) -> bool:
        texts = value if isinstance(value, list) else [value]
        return all(re.fullmatch(self.pattern, str(text)) for text in texts)

    def __str__(self) -> str:
        return self.words


@dataclass(frozen=True, kw_only=True)
class FieldType:
    """What a setting may be: ``base``, one of ``choices``, a list of these, or nothing, within ``rules``.

    A base that is a class of settings makes a list of sections.
    """

    base: type
    choices: tuple[str, ...]
    is_list: bool
    optional: bool
    rules: tuple[Rule, ...]

    @classmethod
    def of(cls, hint: object) -> "FieldType":
        """The field type of an annotation such as ``Annotated[int | None, Range(at_least=1)]``."""
        rules: tuple[Rule, ...] = ()
        if get_origin(hint) is Annotated:
            hint, *annotations = get_args(hint)
            rules = tuple(annotations)
        optional = NoneType in get_args(hint)
        if optional:
            hint = next(member for member in get_args(hint) if member is not NoneType)
        is_list = get_origin(hint) is list
        if is_list:
            (hint,) = get_args(hint)
        choices = get_args(hint) if get_origin(hint) is Literal else ()
        base = str if choices else hint
        assert isinstance(base, type)
        assert base in _WORDS or (is_dataclass(base) and is_list), f"a setting cannot be annotated {hint}"
        return cls(base=base, choices=choices, is_list=is_list, optional=optional, rules=rules)

    @property
    def is_list_of_sections(self) -> bool:
        """Whether its value is a list of sections, each with settings of its own."""
        return is_dataclass(self.base)

    def objection(self, value: object) -> str | None:
        """What a value of the right type still does wrong, as "must ..."; None when it will do."""
        if value is None:
            return None
        if any(not _can_be_stored(text) for text in (value if isinstance(value, list) else [value])):
            return "must not contain '${', a zero byte or half a character, nor be '???'"
        return None if all(rule.allows(value) for rule in self.rules) else f"must be {self}"

    def __str__(self) -> str:
        words = self._listed_words() if self.is_list else self._words()
        return ", ".join([words, *map(str, self.rules), *(["or null"] if self.optional else [])])

    def _words(self) -> str:
        return f"one of {', '.join(self.choices)}" if self.choices else _WORDS[self.base]

    def _listed_words(self) -> str:
        if is_dataclass(self.base):
            key = fields(self.base)[0].name
            return f"a list of sections, written [{{{key}: a}}, {{{key}: b}}]"
        example = "[a, b]" if self.base is str else "[1, 2]"
        return f"a list of {', '.join(self.choices) or _LISTED_WORDS[self.base]}, written {example}"


def field_types(settings: type) -> dict[str, FieldType]:
    """The field type of every setting of a section, by name."""
    hints = get_type_hints(settings, include_extras=True)
    return {name: FieldType.of(hint) for name, hint in hints.items()}


def _can_be_stored(value: object) -> bool:
    """Whether a text survives being written to a file as yaml, used in a path, and read again."""
    if not isinstance(value, str):
        return True
    is_unicode = not any("\ud800" <= character <= "\udfff" for character in value)
    return is_unicode and "\0" not in value and "${" not in value and value != "???"
