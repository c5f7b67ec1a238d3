"""Reads what a person wrote as a value of a setting's type: ``yes`` is text in a text, true in a switch."""

import math
import re

from omegaconf import MISSING

from diffsynth_lite.config.field_type import FieldType
from diffsynth_lite.config.interpolation import check_reference, has_reference
from diffsynth_lite.config.written import Block, Scalar, Written
from diffsynth_lite.errors import UserError

_NULLS = frozenset(["", "~", "null", "Null", "NULL"])
# YAML 1.1's words for true and false, as people know them from other yaml files.
_SWITCHES = dict.fromkeys(["true", "yes", "on"], True) | dict.fromkeys(["false", "no", "off"], False)
_AUTO_IS_PLANNED = frozenset(
    ["train.use_gradient_checkpointing", "train.use_gradient_checkpointing_offload", "memory.policy"]
)
# At most 18 digits, to fit in 64 bits. No leading zero: 010 is 8 to some readers of yaml, 10 to others.
_WHOLE_NUMBER = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")
_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")


def read_value(written: Written, field_type: FieldType) -> object:
    """What was written as the setting's type, or nearest to it; the caller judges the type of the result.

    Text with a reference (``${oc.env:NAME}``, ``${section.key}``) stays text.

    Raises:
        UserError: a ``${...}`` of another form, OmegaConf's ``???``, or Python's None in place of null.
    """
    if isinstance(written, Block):
        return {}
    if isinstance(written, list):
        return [read_value(item, field_type) for item in written]
    if has_reference(written.text):
        check_reference(written.text)
        return written.text
    if written.text == MISSING:
        raise UserError(f"got '{MISSING}', which stands for a value that is missing; write one")
    return written.text if written.quoted else _plain_value(written.text, field_type)


def expectation(name: str, written: Written, field_type: FieldType) -> str:
    """What the setting ``name`` must be instead of what was written, which has the wrong type."""
    words = f"must be {field_type}"
    parts = written if isinstance(written, list) else [written]
    if any(isinstance(part, Block) for part in parts):
        return f"{words}; text with ': ' needs quotes"
    if not isinstance(written, Scalar):
        return words
    if written.text == "auto" and name in _AUTO_IS_PLANNED:
        return f"auto is planned, not available yet; {words}"
    if written.quoted and field_type.base is not str:
        return f"{words}, without quotes"
    if written.text in _NULLS and field_type.base is str:
        return f"{words}; put it in quotes to mean the text itself"
    return words


def _plain_value(text: str, field_type: FieldType) -> object:
    if text in _NULLS:
        return None
    if text == "None" and field_type.optional:
        raise UserError("got 'None'; write null for no value, or put the word in quotes")
    if field_type.base is bool and text in (text.lower(), text.capitalize(), text.upper()):
        return _SWITCHES.get(text.lower(), text)
    if field_type.base is int and _WHOLE_NUMBER.fullmatch(text):
        return int(text)
    if field_type.base is float and _NUMBER.fullmatch(text) and math.isfinite(float(text)):
        return float(text)
    return text
