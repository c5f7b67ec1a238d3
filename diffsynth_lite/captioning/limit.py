"""This file cuts captions to what the text encoder of a model family reads, by its own count of tokens."""

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffsynth_lite.data.captions import compact_json, with_trigger
from diffsynth_lite.errors import UserError
from diffsynth_lite.files import parse_json
from diffsynth_lite.releases.families import require_family_name

if TYPE_CHECKING:
    from diffsynth_lite.pipelines.base.family import ModelFamily

_PAUSES = (
    re.compile(r"[.!?…。\uff01\uff1f]['\"”\u2019)]{0,4}(?=\s|$)|[。\uff01\uff1f]"),
    re.compile(r"[,;、\uff0c](?=\s|$)"),
)
_WORD_END = re.compile(r"(?<=\S)(?=\s)|(?<=[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af])")


Fits = Callable[[str], bool]
"""Whether a text encoder reads all of a caption, with the trigger in front where it lacks that."""


def limit_of_config(file: Path, *, trigger: str = "") -> Fits:
    """The limit of the model that a config of a run names; of the hub only small files are fetched."""
    from diffsynth_lite.config import load_config
    from diffsynth_lite.pipelines.base.discovery import load_family

    model = load_config(file).config.model
    return _limit(load_family(model.family), model.path, trigger=trigger, revision=model.revision)


def limit_of_family(name: str, *, trigger: str = "") -> Fits:
    """The limit of a model family, with the tokenizer of the first of its releases that can be had."""
    require_family_name(name)
    from diffsynth_lite.pipelines.base.discovery import load_family

    family_class = load_family(name)
    reasons = []
    for release in family_class.releases:
        try:
            return _limit(family_class, release.hub_id, trigger=trigger)
        except UserError as error:
            reasons.append(" ".join(str(error).split()).removeprefix("model.path: "))
    reason = reasons[0] if reasons else "no release of it is known"
    raise UserError(
        f"--family {name}: its tokenizer cannot be loaded: {reason}; --config FILE takes that of a folder"
    )


def _limit(
    family_class: "type[ModelFamily]", location: str, *, trigger: str, revision: str | None = None
) -> Fits:
    """The limit of the family with the tokenizers of a folder or of the hub."""
    from diffsynth_lite.pipelines.base.discovery import require_family
    from diffsynth_lite.pipelines.base.folder.pipeline_folder import resolve_folder

    known = [release.hub_id for release in family_class.releases]
    folder = resolve_folder(location, revision=revision, known=known)
    require_family(family_class, folder)
    family: Any = family_class(folder)
    family.load_tokenizer = cache(family.load_tokenizer)

    def fits(caption: str) -> bool:
        prompt = with_trigger(caption, trigger) if trigger else caption
        is_whole: bool = family.prompt_lengths([prompt])[0] <= family.max_prompt_tokens
        return is_whole

    fits("")  # an error of the tokenizer ends the command before a model is loaded
    return fits


def fitted(caption: str, fits: Fits) -> tuple[str, str]:
    """What a text encoder reads of a caption, up to the end of a sentence, tag or word, and what it does not.

    A sentence or tag is kept whole if that keeps at least half of what fits. Of a caption in JSON the last
    elements are left out.

    Returns:
        What is kept, empty where nothing fits, and what was cut, empty where all fits.
    """
    if fits(caption):
        return caption, ""
    with suppress(ValueError, TypeError, LookupError):
        return _fitted_json(caption, fits)
    ends = [found.end() for found in _WORD_END.finditer(caption)]
    kept = fitting = _longest([caption[:end] for end in ends], fits) or _longest(
        [caption[:end] for end in range(1, len(caption))],
        fits,  # a script without spaces
    )
    for pause in _PAUSES:
        whole = [found.end() for found in pause.finditer(fitting)]
        if whole and 2 * whole[-1] >= len(fitting):
            kept = fitting[: whole[-1]]
            break
    kept = kept.rstrip(" ,;、\uff0c")
    return kept, caption[len(kept) :].strip(" ,;、\uff0c")


def _fitted_json(caption: str, fits: Fits) -> tuple[str, str]:
    """Raises ValueError, TypeError or LookupError: it is not JSON that has elements."""
    value = parse_json(caption)
    parts = value["compositional_deconstruction"]
    elements = parts["elements"]
    candidates = [
        compact_json({**value, "compositional_deconstruction": {**parts, "elements": elements[:count]}})
        for count in range(1, len(elements))
    ]
    kept = _longest(candidates, fits)
    left = candidates.index(kept) + 1 if kept else 0
    return kept, compact_json(elements[left:]) if kept else caption


def _longest(candidates: Sequence[str], fits: Fits) -> str:
    """The longest of texts that fits, each of which begins like the one before; empty where none does."""
    count = bisect_left(candidates, True, key=lambda text: not fits(text))
    return candidates[count - 1] if count else ""
