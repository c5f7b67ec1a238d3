"""This file is the caching pass: every caption and image is encoded once, before the transformer is loaded.

The encoders come as functions that load them, so nothing is loaded when nothing is missing, and this file
knows no model.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from PIL import Image
from torch import Tensor

from diffsynth_lite.data.bad_items import OnBadItem, without_bad_items
from diffsynth_lite.data.cache import TensorCache, file_fingerprint
from diffsynth_lite.data.images import check_image, image_transform_id, load_image
from diffsynth_lite.data.listing import listed
from diffsynth_lite.data.records import Record
from diffsynth_lite.errors import UserError

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

CaptionEncoder = Callable[[list[str]], list[dict[str, Tensor]]]
ImageEncoder = Callable[[list[Image.Image]], list[dict[str, Tensor]]]


@dataclass(frozen=True, kw_only=True)
class EncodedItem:
    """Where the cache holds the tensors of one record."""

    name: str
    latents_key: str
    caption_key: str


def encode_captions(
    captions: Sequence[str],
    *,
    cache: TensorCache,
    encoder_id: str,
    encode: Callable[[], CaptionEncoder],
    batch_size: int,
) -> dict[str, str]:
    """Cache key of each caption, after encoding those that the cache does not hold.

    Args:
        captions: captions, repeated ones welcome.
        cache: where embeddings are kept.
        encoder_id: name of all that decides the embeddings besides the caption: weights, template, precision.
        encode: loads the encoder; called at most once, and only when a caption is missing.
        batch_size: captions given to the encoder at a time.

    Raises:
        UserError: the encoder gave NaN or infinity.
    """
    keys = {caption: cache.key(kind="caption", text=caption, encoder=encoder_id) for caption in captions}
    missing = [caption for caption, key in keys.items() if cache.read(key) is None]
    encoder: CaptionEncoder | None = None
    for batch in _batches(missing, batch_size, "captions"):
        encoder = encoder or encode()
        for caption, tensors in zip(batch, encoder(batch), strict=True):
            _store(cache, keys[caption], tensors, f"caption {caption!r}")
    return keys


def encode_images(
    records: Sequence[Record],
    *,
    caption_keys: Mapping[str, str],
    width: int,
    height: int,
    cache: TensorCache,
    encoder_id: str,
    encode: Callable[[], ImageEncoder],
    batch_size: int,
    on_bad_item: OnBadItem,
    quarantine: Callable[[Record, str], None],
) -> list[EncodedItem]:
    """Cache entries of all records, after encoding the images that the cache does not hold.

    Args:
        records: records of the data set.
        caption_keys: caption to cache key, as `encode_captions` returns it.
        width: training width in pixels.
        height: training height in pixels.
        cache: where latents are kept; an entry holds what the encoder gives, "latents" among it.
        encoder_id: name of all that decides the latents besides the pixels: weights, precision.
        encode: loads the encoder; called at most once, and only when an image is missing.
        batch_size: images given to the encoder at a time.
        on_bad_item: "error" names all bad images in one error, "skip" leaves them out.
        quarantine: is told each record that is left out, and why.

    Raises:
        UserError: bad images as `without_bad_items` says, or the encoder gave NaN or infinity.
    """
    transform = image_transform_id(width, height)
    bad: dict[str, str] = {}
    records_of_key: dict[str, list[Record]] = {}  # equal files are encoded once
    for record in records:
        try:
            content = file_fingerprint(record.image)
        except OSError as error:
            bad[record.name] = f"{record.image}: cannot be read: {error.strerror}"
            continue
        key = cache.key(kind="image", content=content, transform=transform, encoder=encoder_id)
        records_of_key.setdefault(key, []).append(record)
    missing = [key for key in records_of_key if cache.read(key) is None]
    encoder: ImageEncoder | None = None
    for batch in _batches(missing, batch_size, "images"):
        images: dict[str, Image.Image] = {}
        for key in batch:
            try:
                images[key] = load_image(records_of_key[key][0].image, width=width, height=height)
            except UserError as error:
                bad |= {record.name: str(error) for record in records_of_key[key]}
        if not images or (bad and on_bad_item == "error"):
            continue  # this ends in an error, so the rest is only searched for more bad images
        encoder = encoder or encode()
        for key, tensors in zip(images, encoder(list(images.values())), strict=True):
            _store(cache, key, tensors, str(records_of_key[key][0].image))
    usable = without_bad_items(records, bad, on_bad_item=on_bad_item, quarantine=quarantine)
    _warn_of_small_images(usable, width, height)
    keys = {record.name: key for key, equal in records_of_key.items() for record in equal}
    return [
        EncodedItem(name=record.name, latents_key=keys[record.name], caption_key=caption_keys[record.caption])
        for record in usable
    ]


def _warn_of_small_images(records: Sequence[Record], width: int, height: int) -> None:
    sizes = {record.name: check_image(record.image) for record in records}
    small = [name for name, size in sizes.items() if size[0] < width or size[1] < height]
    if small:
        logger.warning(
            "%d of %d images are smaller than %d x %d and are enlarged: %s",
            len(small),
            len(records),
            width,
            height,
            listed(small),
        )


def _batches(items: list[Item], batch_size: int, what: str) -> Iterator[list[Item]]:
    """Slices of ``items``, with a line in the log at each tenth of a long pass."""
    if items:
        logger.info("encoding %d %s that the cache does not hold", len(items), what)
    for start in range(0, len(items), batch_size):
        yield items[start : start + batch_size]
        end = min(start + batch_size, len(items))
        if end * 10 // len(items) > start * 10 // len(items):
            logger.info("encoded %d of %d %s", end, len(items), what)


def _store(cache: TensorCache, key: str, tensors: Mapping[str, Tensor], what: str) -> None:
    try:
        cache.write(key, tensors)
    except ValueError as error:
        raise UserError(
            f"{what}: the encoder gave numbers that are not finite ({error}); use bf16 or fp32"
        ) from error
