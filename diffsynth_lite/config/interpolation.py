"""The ``${...}`` of a config: an environment variable or another setting, resolved by OmegaConf."""

import re

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from diffsynth_lite.config.document import scalar
from diffsynth_lite.errors import UserError

_REFERENCE = re.compile(r"\$\{(oc\.env:[A-Za-z_][A-Za-z0-9_]*(?:,[^${}]+)?|[a-z_]+\.[a-z_]+)\}")


def has_reference(value: object) -> bool:
    """Whether a value, or an entry of a list, has a ``${...}`` that is still to be resolved."""
    texts = value if isinstance(value, list) else [value]
    return any(isinstance(text, str) and "${" in text for text in texts)


def check_reference(text: str) -> None:
    """Refuses text with a ``${...}`` of a form that a config does not have.

    Raises:
        UserError: names the forms it does have.
    """
    forms = "${oc.env:NAME}, ${oc.env:NAME,default} or ${section.key}"
    is_known = "${" not in _REFERENCE.sub("", text) and "\\${" not in text
    try:
        OmegaConf.create([text if is_known else ""])
    except OmegaConfBaseException:  # a default with a bracket or quote that is not closed
        is_known = False
    if not is_known:
        raise UserError(f"got '{text}'; a reference must be {forms}")


def resolve(settings: DictConfig, name: str, reference: str | list[str]) -> yaml.Node:
    """What the references in a setting come to, as if that had been typed in their place.

    Args:
        settings: all settings, unresolved, by section and key.
        name: the setting, as ``section.key`` or ``section.key[0].key``.
        reference: its value in ``settings``.

    Raises:
        UserError: a variable that is not set, a setting that does not exist, has no value or holds sections,
            a circle. The message does not show the value of a variable, which may be a secret.
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


def _refuse_null_in_text(settings: DictConfig, value: str | list[str]) -> None:
    """OmegaConf would write null as the word None."""
    for text in [value] if isinstance(value, str) else value:
        for match in _REFERENCE.finditer(text):
            is_part = match[0] != text or value is not text
            is_setting = not match[1].startswith("oc.env:")
            if is_part and is_setting and OmegaConf.select(settings, match[1]) is None:
                raise UserError(f"'{text}' needs {match[1]}, which is null; set it")
