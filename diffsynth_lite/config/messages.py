"""Words for messages: what a setting must be, by its JSON schema, and what an unknown key was meant to be."""

import json
from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches

import yaml

from diffsynth_lite.config.document import NULLS
from diffsynth_lite.config.files import EXTENDS
from diffsynth_lite.config.peers import answer_to, reason_against, setting_named
from diffsynth_lite.config.schema import (
    Schema,
    section_of_entries,
    takes_null,
    without_null,
    words_instead,
)

_KINDS = {"boolean": "true or false", "integer": "a whole number", "number": "a number", "string": "text"}
_LISTED_KINDS = {"integer": ("whole numbers", "[1, 2]"), "string": ("texts", "[a, b]")}
_BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}
_FIRST_KEYS = {"SourceSettings": "path", "LoraGroup": "match", "SliderTriple": "neutral"}
"""What an entry of a list of sections begins with, for examples."""
_MOST_LISTED = 10
"""Keys that a message lists; for a section with more it refers to the docs."""


def in_words(schema: Schema) -> str:
    """What a setting must be, such as "a whole number, at least 1, or null"."""
    value = without_null(schema)
    entry = value.get("items")
    if "$ref" in value:
        words = ["a section of its own, written {name: value}"]
    elif value.get("type") == "object":
        words = ["names and their values, written {name: value, name: value}"]
    elif entry is None:
        choices = value.get("enum")
        others = words_instead(schema)
        kind = f"one of {', '.join(choices)}" if choices else _KINDS[value["type"]]
        words = [*others, f"or {kind}" if others else kind, *_limits(value)]
    elif section := section_of_entries(schema):
        key = _FIRST_KEYS[section]
        words = [f"a list of sections, written [{{{key}: a}}, {{{key}: b}}]", *_limits(value)]
    else:
        many, example = _LISTED_KINDS[entry["type"]]
        listed = f"a list of {', '.join(entry.get('enum', [many]))}, written {example}"
        others = words_instead(schema)
        words = [*others, f"or {listed}" if others else listed, *_limits(value)]
        words += [f"each {limit}" for limit in _limits(entry)]
    return ", ".join([*words, *(["or null"] if takes_null(schema) else [])])


def _limits(schema: Schema) -> Iterator[str]:
    if "minItems" in schema:
        yield "at least one"
    if schema.get("uniqueItems"):
        yield "each once"
    if schema.get("pattern") == r"\S":
        yield "not empty"
    if "examples" in schema:
        yield f"such as {' or '.join(map(json.dumps, schema['examples']))}"
    bounds = {key: schema[key] for key in _BOUNDS if key in schema}
    if schema.get("type") == "integer" and "exclusiveMinimum" in schema:
        bounds["minimum"] = bounds.pop("exclusiveMinimum") + 1
    digits = {key: str(value) if isinstance(value, int) else f"{value:g}" for key, value in bounds.items()}
    if limits := [f"{word} {digits[key]}" for key, word in _BOUNDS.items() if key in digits]:
        yield " and ".join(limits)


def expectation(name: str, node: yaml.Node, schema: Schema) -> str:
    """What the setting ``name`` must be instead of the written value, with a hint at the likely mistake."""
    words = f"must be {in_words(schema)}"
    if section_of_entries(schema) or without_null(schema).get("type") == "object":
        return words
    parts = node.value if isinstance(node, yaml.SequenceNode) else [node]
    if any(isinstance(part, yaml.MappingNode) for part in parts):
        return f"{words}; text with ': ' needs quotes"
    if not isinstance(node, yaml.ScalarNode):
        return words
    if reason := reason_against(name, node.value):
        return f"{words}; {reason}"
    value = without_null(schema)
    kind = value["type"]
    if meant := get_close_matches(node.value, [*value.get("enum", ()), *words_instead(schema)], n=1):
        return f"{words}; did you mean '{meant[0]}'?"
    if node.style is not None and kind not in ("string", "array"):
        return f"{words}, without quotes"
    if node.value in NULLS and node.style is None and kind == "string":
        return f"{words}; put it in quotes to mean the text itself"
    return words


def unknown_section(name: str, sections: Mapping[str, Collection[str]]) -> str:
    """A message for a top-level name that is not a section.

    Args:
        sections: the keys of every section, by its name.
    """
    if name == EXTENDS:  # in a file it is none
        return "is for files; name a file that has it"
    section, _, key = name.rpartition(".")
    if answer := answer_to(key):
        return answer
    if answer := answer_to(section):
        return f"{section} {answer}"
    homes = _homes(key, sections)
    if homes:
        return f"'{key}' belongs under {' or '.join(homes)}, as {homes[0]}.{key}"
    if close := get_close_matches(name, [*sections, EXTENDS], n=1):
        return f"unknown section; did you mean '{close[0]}'?"
    if elsewhere := _close_elsewhere(key, sections):
        return f"unknown section; did you mean '{elsewhere}'?"
    return f"unknown section; there are {', '.join(sections)}"


def unknown_key(section: str, key: str, own: Collection[str], sections: Mapping[str, Collection[str]]) -> str:
    """A message for a key that its section does not have.

    Args:
        section: its name, which may be that of an entry of a list, such as ``data.sources[0]``.
    """
    of_list = key.partition("[")[0]
    if of_list != key and of_list in own:
        return f"an entry cannot be set by itself; set the whole list, as {section}.{of_list}=[...]"
    if answer := answer_to(key):
        return answer
    meant = get_close_matches(key, own, n=1)
    if homes := _homes(key, sections):
        other = f", or did you mean '{meant[0]}'" if meant else ""
        return f"'{key}' belongs under {' or '.join(homes)}{other}"
    if meant:
        return f"unknown key; did you mean '{meant[0]}'?"
    if elsewhere := _close_elsewhere(key, sections):
        return f"unknown key; did you mean '{elsewhere}'?"
    if len(own) > _MOST_LISTED:
        return f"unknown key; the {len(own)} keys of {section} are in docs/configuration.md"
    return f"unknown key; {section} has {', '.join(own)}"


def in_place_of_flag(flag: str, sections: Mapping[str, Collection[str]]) -> str | None:
    """What to write in place of an unknown flag, such as "train.steps=...", or its equivalent, such as
    "--num_epochs is train.steps here"; None if there is none.

    Args:
        flag: as it was typed, such as ``--lr`` or ``--lr=1e-4``.
    """
    name, _, value = flag.lstrip("-").partition("=")
    section, _, key = name.replace("-", "_").rpartition(".")
    answer, setting = answer_to(key), setting_named(key)
    if answer and not setting:
        return f"--{name} {answer}"
    homes = [section] if key in sections.get(section, ()) else _homes(key, sections)
    setting = f"{homes[0]}.{key}" if homes else setting
    return f"{setting}={value or '...'}" if setting else None


def _homes(key: str, sections: Mapping[str, Collection[str]]) -> list[str]:
    return [section for section, keys in sections.items() if key in keys]


def _close_elsewhere(key: str, sections: Mapping[str, Collection[str]]) -> str | None:
    """The setting of any section that is spelled much like a key."""
    close = get_close_matches(key, {known for keys in sections.values() for known in keys}, n=1)
    return f"{_homes(close[0], sections)[0]}.{close[0]}" if close else None
