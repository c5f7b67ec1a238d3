"""This file cuts captions to what the text encoder of a model family reads, by its own count of tokens."""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffsynth_lite.data.captions import compact_json, with_trigger
from diffsynth_lite.errors import UserError
from diffsynth_lite.files import parse_json

if TYPE_CHECKING:
    from diffsynth_lite.pipelines.base.family import ModelFamily

_PAUSES = (
    re.compile(r"[.!?…。\uff01\uff1f]['\"”\u2019)]{0,4}(?=\s|$)|[。\uff01\uff1f]"),
    re.compile(r"[,;、\uff0c](?=\s|$)"),
)
_WORD_END = re.compile(r"(?<=\S)(?=\s)|(?<=[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af])")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLimit:
    """What a text encoder reads of a prompt.

    Attributes:
        num_tokens: at most; the rest of a prompt is not read.
        count: tokens of each text as the family counts them, with special tokens, and with the trigger.
    """

    num_tokens: int
    count: Callable[[Sequence[str]], list[int]]


def limit_of_config(file: Path, *, trigger: str = "") -> TokenLimit:
    """The limit of the model that a config of a run names; of the hub only small files are fetched.

    Args:
        trigger: is in front of each caption that does not have it.

    Raises:
        UserError: the config has errors, or its model's tokenizer is not there.
    """
    from diffsynth_lite.config import load_config
    from diffsynth_lite.pipelines.base.discovery import load_family

    model = load_config(file).config.model
    family = _bound(load_family(model.family), model.path, model.revision)
    return _limit(family, trigger)


def limit_of_family(name: str, *, trigger: str = "") -> TokenLimit:
    """The limit of a model family, with the tokenizer of the first of its releases that can be had.

    Args:
        trigger: is in front of each caption that does not have it.

    Raises:
        UserError: there is no such family, or none of its tokenizers is here or can be fetched.
    """
    from diffsynth_lite.pipelines.base.discovery import load_family

    family_class = load_family(name)
    reasons = []
    for release in family_class.releases:
        try:
            return _limit(_bound(family_class, release.hub_id), trigger)
        except UserError as error:
            reasons.append(" ".join(str(error).split()).removeprefix("model.path: "))
    reason = reasons[0] if reasons else "no release of it is known"
    raise UserError(
        f"--family {name}: its tokenizer cannot be loaded: {reason}; --config FILE takes that of a folder"
    )


def fitted(caption: str, limit: TokenLimit | None) -> tuple[str, str]:
    """What a text encoder reads of a caption, up to the end of a sentence, tag or word, and what it does not.

    A sentence or tag is kept whole if that keeps at least half of what fits. Of a caption in JSON the last
    elements are left out.

    Returns:
        What is kept, empty where nothing fits, and what was cut, empty where all fits.
    """
    if limit is None or limit.count([caption])[0] <= limit.num_tokens:
        return caption, ""
    with suppress(ValueError, TypeError, LookupError):
        return _fitted_json(caption, limit)
    ends = [found.end() for found in _WORD_END.finditer(caption)]
    fitting = _longest([caption[:end] for end in ends], limit)
    if not fitting:  # a script without spaces
        fitting = _longest([caption[:end] for end in range(1, len(caption))], limit)
    kept = fitting
    for pause in _PAUSES:
        whole = [found.end() for found in pause.finditer(fitting)]
        if whole and 2 * whole[-1] >= len(fitting):
            kept = fitting[: whole[-1]]
            break
    kept = kept.rstrip(" ,;、\uff0c")
    return kept, caption[len(kept) :].strip(" ,;、\uff0c")


def _fitted_json(caption: str, limit: TokenLimit) -> tuple[str, str]:
    """Raises ValueError, TypeError or LookupError: it is not JSON that has elements."""
    value = parse_json(caption)
    elements = value["compositional_deconstruction"]["elements"]

    def with_elements(count: int) -> str:
        parts = {**value["compositional_deconstruction"], "elements": elements[:count]}
        return compact_json({**value, "compositional_deconstruction": parts})

    candidates = [with_elements(count) for count in range(1, len(elements))]
    kept = _longest(candidates, limit)
    left = candidates.index(kept) + 1 if kept else 0
    return kept, compact_json(elements[left:]) if kept else caption


def _longest(candidates: Sequence[str], limit: TokenLimit) -> str:
    """The longest of texts that fits, each of which begins like the one before; empty where none does."""
    low, high = 0, len(candidates)
    while low < high:
        middle = (low + high) // 2
        if limit.count([candidates[middle]])[0] <= limit.num_tokens:
            low = middle + 1
        else:
            high = middle
    return candidates[low - 1] if low else ""


def _limit(family: "ModelFamily", trigger: str) -> TokenLimit:
    def count(captions: Sequence[str]) -> list[int]:
        return family.prompt_lengths(
            [with_trigger(caption, trigger) if trigger else caption for caption in captions]
        )

    count([""])  # an error of the tokenizer ends the command before a model is loaded
    return TokenLimit(num_tokens=family.max_prompt_tokens, count=count)


def _bound(family_class: "type[ModelFamily]", location: str, revision: str | None = None) -> "ModelFamily":
    """The family with the tokenizers of a folder or of the hub; each is loaded once."""
    from diffsynth_lite.pipelines.base.discovery import require_family
    from diffsynth_lite.pipelines.base.folder.pipeline_folder import resolve_folder

    known = [release.hub_id for release in family_class.releases]
    folder = resolve_folder(location, revision=revision, known=known)
    require_family(family_class, folder)
    family = family_class(folder)
    remembering: Any = family
    remembering.load_tokenizer = cache(remembering.load_tokenizer)
    return family
