"""This file says which data a run trains on, by what they hold and not by where a cache keeps them."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from diffsynth_lite.data.planned import PlannedItem, decoder_id


@dataclass(frozen=True, kw_only=True, slots=True)
class DataIdentity:
    """What two runs on the same data, taken in the same way, have in common.

    Attributes:
        items: how many there are, and a hash of what each holds and how it is cropped, cut and paired, in
            order. Their names and places are not in it: no number depends on them.
        num_buckets: that they fall into.
        decoder: what makes pixels of their files.
        media_encoder: what makes latents of these.
        prompt_encoder: what makes embeddings of captions.
    """

    items: str
    num_buckets: int
    decoder: str
    media_encoder: str
    prompt_encoder: str

    @classmethod
    def of(cls, items: Sequence[PlannedItem], *, media_encoder: str, prompt_encoder: str) -> "DataIdentity":
        """Identity of items; no file is read for it.

        Args:
            items: planned, in order.
            media_encoder: name of all that decides latents besides the media.
            prompt_encoder: likewise for captions.
        """
        digest = hashlib.blake2b(digest_size=16)
        for item in items:
            # One line each, so that nothing can move from one item to its neighbour.
            digest.update(f"{json.dumps(item.identity())}\n".encode())
        return cls(
            items=f"{len(items)} items, {digest.hexdigest()}",
            num_buckets=len({item.bucket for item in items}),
            decoder=decoder_id(has_clips=any(item.is_clip for item in items)),
            media_encoder=_short(media_encoder),
            prompt_encoder=_short(prompt_encoder),
        )


def _short(identity: str) -> str:
    """An encoder's identity can hold a template: its first word, for people, and a hash of all of it."""
    digest = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
    return f"{identity.split(maxsplit=1)[0]} {digest}"
