"""What an unknown key was probably meant to be."""

from collections.abc import Collection, Mapping
from difflib import get_close_matches

_PLANNED = frozenset(["memory.budget"])
_RENAMED = {"image_column": "'media_column'", "caption_column": "'caption_columns', a list"}


def unknown_section(name: str, sections: Mapping[str, Collection[str]]) -> str:
    """A message for a top-level name that is no section.

    Args:
        name: what was written.
        sections: the keys of every section, by its name.
    """
    key = name.rpartition(".")[2]
    homes = _homes(key, sections)
    if homes:
        return f"'{key}' belongs under {' or '.join(homes)}, as {homes[0]}.{key}"
    close = get_close_matches(name, sections, n=1)
    if close:
        return f"unknown section; did you mean '{close[0]}'?"
    close = get_close_matches(key, {known for keys in sections.values() for known in keys}, n=1)
    if close:
        return f"unknown section; did you mean '{_homes(close[0], sections)[0]}.{close[0]}'?"
    return f"unknown section; there are {', '.join(sections)}"


def unknown_key(section: str, key: str, sections: Mapping[str, Collection[str]]) -> str:
    """A message for a key that its section does not have; see :func:`unknown_section`."""
    if f"{section}.{key}" in _PLANNED:
        return "planned, not available yet; remove it"
    if section == "data" and key in _RENAMED:
        return f"is now called {_RENAMED[key]}"
    of_list = key.partition("[")[0]
    if of_list != key and of_list in sections[section]:
        return f"an entry cannot be set alone; set the whole list, as {section}.{of_list}=[...]"
    meant = get_close_matches(key, sections[section], n=1)
    homes = _homes(key, sections)
    if homes:
        other = f", or did you mean '{meant[0]}'" if meant else ""
        return f"'{key}' belongs under {' or '.join(homes)}{other}"
    if meant:
        return f"unknown key; did you mean '{meant[0]}'?"
    elsewhere = get_close_matches(key, {known for keys in sections.values() for known in keys}, n=1)
    if elsewhere:
        return f"unknown key; did you mean '{_homes(elsewhere[0], sections)[0]}.{elsewhere[0]}'?"
    return f"unknown key; {section} has {', '.join(sections[section])}"


def _homes(key: str, sections: Mapping[str, Collection[str]]) -> list[str]:
    return [section for section, keys in sections.items() if key in keys]
