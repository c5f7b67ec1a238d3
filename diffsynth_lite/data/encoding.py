"""This file encodes media and prompts: ahead into the cache, or while training runs.

Encoders come as functions that load them, so nothing is loaded when nothing is missing, and this file knows
no model. They get one thing at a time: in a batch, numbers may depend on the other items, and an entry of the
cache must depend on nothing that its key does not name.
"""

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from torch import Tensor

from diffsynth_lite.data.cache import TensorCache, is_present, remember_written, require_finite
from diffsynth_lite.data.items import PromptItem, TrainingItem
from diffsynth_lite.data.media_index import FileMemory, FileState
from diffsynth_lite.data.records import Part
from diffsynth_lite.errors import UserError
from diffsynth_lite.progress_log import Phase, ProgressLog

logger = logging.getLogger(__name__)

Encode = Callable[[Sequence[Any]], list[dict[str, Tensor]]]


Encodable: TypeAlias = TrainingItem | PromptItem


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoder:
    """One of the encoders of a model family.

    Attributes:
        identity: name of everything besides the item that its tensors depend on.
        load: gives the function that encodes; the weights live as long as it does.
    """

    what: str
    identity: str
    load: Callable[[], Encode]


def encode_missing(
    items: Mapping[str, Encodable],
    encoder: Encoder,
    *,
    cache: TensorCache,
    memory: FileMemory,
    share: Part,
    stop_at_bad: bool,
) -> tuple[int, dict[str, str]]:
    """Encode the items that the cache lacks. Killed at any time, it resumes where it was.

    Args:
        encoder: loaded only when something is missing.
        memory: remembers the entries that were read and are complete.
        stop_at_bad: after the first bad item only look for more of them and encode nothing, as the run will
            stop.

    Returns:
        The number of new entries, and the key of each item that cannot be used to the reason.
    """
    # A key's owner depends only on the key, so that processes which look at a changing cache at different
    # times leave nothing out.
    missing = [key for key in items if share.owns(key) and not is_present(cache, memory, key)]
    missing.sort(key=lambda key: cast(Any, items[key].group))
    bad: dict[str, str] = {}
    if not missing:
        return 0, bad
    what = encoder.what if len(missing) > 1 else encoder.what.removesuffix("s")
    logger.info("encoding %d %s that the cache does not hold", len(missing), what)
    encode: Encode | None = None
    num_new = 0
    text = f"encoded %d of %d {encoder.what}"
    for key, loaded in _load_each(items, missing, bad, text, phase="encoding"):
        if not (bad and stop_at_bad):
            encode = encode or encoder.load()
            cache.write(key, _tensors(items[key], loaded, encode))
            remember_written(cache, memory, key)
            num_new += 1
    memory.flush()
    return num_new, bad


def find_undecodable(items: Mapping[str, Encodable], *, memory: FileMemory, share: Part) -> dict[str, str]:
    """Decode the items that were not decoded before, for runs without a cache, and remember the good ones.

    Returns:
        Key to the reason why an item cannot be used.
    """
    seen = FileState(0, 0)
    unknown = [
        key
        for key, item in items.items()
        if item.has_media and share.owns(key) and memory.recall(f"decodes {key}", seen) is None
    ]
    bad: dict[str, str] = {}
    if not unknown:
        return bad
    logger.info("decoding %d new items", len(unknown))
    for key, _ in _load_each(items, unknown, bad, "decoded %d of %d items", phase="reading"):
        memory.remember(f"decodes {key}", seen, "")
    memory.flush()
    return bad


def _load_each(
    items: Mapping[str, Encodable], keys: Sequence[str], bad: dict[str, str], text: str, *, phase: Phase
) -> Iterator[tuple[str, Any]]:
    """Each key with its decoded item; those that cannot be used go to ``bad``, with the reason."""
    progress = ProgressLog(text, len(keys), phase=phase)
    for key in keys:
        try:
            loaded = items[key].load()
        except UserError as error:
            bad[key] = str(error)
        else:
            yield key, loaded
        progress.advance()


class LiveTensors:
    """Tensors by key like those of a cache, but made when they are read; the encoders stay loaded.

    Args:
        groups: items by key, each group with its encoder.
    """

    def __init__(self, groups: Iterable[tuple[Mapping[str, Encodable], Encoder]]) -> None:
        self._groups = [(items, functools.cache(encoder.load)) for items, encoder in groups]

    def read(self, key: str) -> dict[str, Tensor] | None:
        """Tensors of ``key`` on the CPU, or None where it is not known."""
        for items, load_encoder in self._groups:
            if key in items:
                return _tensors(items[key], items[key].load(), load_encoder())
        return None


def _tensors(item: Encodable, loaded: Any, encode: Encode) -> dict[str, Tensor]:
    [encoded] = encode([loaded])
    tensors = item.complete(encoded, loaded)
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        require_finite(stored)
    except ValueError as error:
        raise UserError(
            f"{item.where}: the encoder gave numbers that are not finite ({error}); use bf16 or fp32"
        ) from error
    return stored
