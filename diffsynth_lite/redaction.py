"""This file masks secrets in everything that a run writes, prints or sends.

A secret is known by its form, or as the value of an environment variable whose name marks it as one.
What cannot be known that way is listed in ``docs/security.md``.
"""

import html
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar
from urllib.parse import quote, quote_plus

_Value = TypeVar("_Value")

MASK = "REDACTED"
"""Replaces a secret. A plain word: text with it is still yaml, json, a URL or a file name."""

_SECRET_NAME = re.compile("TOKEN|KEY|SECRET|PASSWORD", re.IGNORECASE)
# TOKENIZERS_PARALLELISM=false has such a name, too; its value is a word that logs are full of.
_SHORTEST_VALUE = 8

# All are bounded where they could start anywhere: a long text must not make them slow.
_FORMS = (
    (re.compile(r"(?:hf|api_org)_[A-Za-z0-9]{16,}"), MASK),
    (re.compile(r"wandb_v[0-9]+_[A-Za-z0-9_-]{16,}"), MASK),
    # A commit is 40 hexadecimal digits as well, so only a name can mark these as a key of W&B.
    (
        re.compile(
            r"((?:token|key|secret|password)\w{0,32}[\"']?\s{0,8}[:=]?\s{0,8}[\"']?)"
            r"(?:local-)?[0-9a-f]{40}\b",
            re.IGNORECASE,
        ),
        rf"\1{MASK}",
    ),
    (re.compile(r"\b(Bearer\s{1,8})[\w.~+/=-]{16,}", re.IGNORECASE), rf"\1{MASK}"),
    (re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,31}://)[^\s/?#\"'<>]{1,1024}@"), rf"\1{MASK}@"),
)


class Redactor:
    """Masks tokens of Hugging Face and W&B, ``Bearer ...``, and the user and password of a URL, by their
    form; and the values of secret variables wherever they occur.

    Args:
        environment: variables; those whose name has TOKEN, KEY, SECRET or PASSWORD in it are secret, if they
            are 8 characters or longer.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        secrets = {
            written
            for name, value in environment.items()
            if _SECRET_NAME.search(name)
            # A private key has several lines, which yaml indents.
            for line in value.splitlines()
            if len(line.strip()) >= _SHORTEST_VALUE
            for written in _ways_to_write(line.strip())
        }
        # The longest first: one secret may be the beginning of another.
        longest_first = sorted(secrets, key=lambda secret: (-len(secret), secret))
        self._values = re.compile("|".join(map(re.escape, longest_first))) if secrets else None

    def text(self, text: str) -> str:
        """A text with its secrets masked."""
        if self._values is not None:
            text = self._values.sub(MASK, text)
        for form, mask in _FORMS:
            text = form.sub(mask, text)
        return text

    def masked(self, value: _Value) -> _Value:
        """A text, or what holds texts (mappings and their keys, lists, tuples, sets), with secrets masked."""
        return self._masked(value)  # type: ignore[no-any-return]

    def _masked(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self._masked(key): self._masked(held) for key, held in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return type(value)(map(self._masked, value))
        return value


_FORMS_ALONE = Redactor({})
_in_force: ContextVar[Redactor] = ContextVar("redactor", default=_FORMS_ALONE)


@contextmanager
def in_force(redactor: Redactor) -> Iterator[None]:
    """Scope in which :func:`redacted` masks what this redactor knows; elsewhere it masks forms only."""
    before = _in_force.set(redactor)
    try:
        yield
    finally:
        _in_force.reset(before)


def redacted(value: _Value) -> _Value:
    """A text, or what holds texts, with the secrets masked that the redactor in force knows."""
    return _in_force.get().masked(value)


def _ways_to_write(secret: str) -> set[str]:
    """The secret, and its spellings in json, yaml, Python, HTML and a URL."""
    return {
        secret,
        json.dumps(secret)[1:-1],
        json.dumps(secret, ensure_ascii=False)[1:-1],
        secret.replace("'", "''"),
        repr(secret)[1:-1],
        html.escape(secret),
        quote(secret, safe=""),
        quote_plus(secret),
    }
