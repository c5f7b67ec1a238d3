"""Reads ``section.key=value`` from the command line."""

from diffsynth_lite.config.assignment import assign_setting
from diffsynth_lite.config.document import read_yaml
from diffsynth_lite.config.draft import Draft
from diffsynth_lite.config.spelling import unknown_section
from diffsynth_lite.config.written import Scalar, Written, shortened
from diffsynth_lite.errors import UserError

_FORM = "write section.key=value, such as train.steps=10"


def assign_override(draft: Draft, text: str) -> None:
    """Sets one setting of a draft from ``section.key=value``, or reports why it will not do."""
    place = f"{shortened(text)} (command line)"
    name, equals, value = text.partition("=")
    section, _, key = name.partition(".")
    if name[:1] in {"+", "~", "-"}:
        draft.report(place, f"'{name[0]}' has no meaning here; {_FORM}")
    elif section not in draft.types:
        draft.report(place, unknown_section(name, draft.types))
    elif not key:
        draft.report(place, f"{section} is a section; {_FORM}")
    elif not equals:
        draft.report(place, f"has no value; {_FORM}")
    else:
        field_type = draft.type_of(section, key)
        try:
            written = _written(value, is_list=field_type is not None and field_type.is_list)
        except UserError as error:
            draft.report(place, f"{error}; write a list as '[a, b]'")
            return
        assign_setting(draft, section, key, written, place=place, where=lambda _line: place)


def _written(value: str, *, is_list: bool) -> Written:
    """The shell has dealt with quotes, so text is taken as it is; only a list is read as yaml."""
    if is_list and value.startswith("["):
        return read_yaml(value)
    return Scalar(value, quoted=value == "")
