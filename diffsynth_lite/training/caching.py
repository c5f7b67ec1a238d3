"""This file encodes all that the text encoder and the VAE are needed for, before the transformer loads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from diffsynth_lite.config import Config
from diffsynth_lite.data import EncodedItem, Record, TensorCache, encode_captions, encode_images
from diffsynth_lite.data.encoding import CaptionEncoder, ImageEncoder
from diffsynth_lite.errors import RunStoppedError
from diffsynth_lite.media import Media, Prompt
from diffsynth_lite.pipelines import Conditioning, EncodedMedia
from diffsynth_lite.training.evaluation import ValidationItem
from diffsynth_lite.training.preflight import CheckedRun

_ENCODE_BATCH_SIZE = 4


@dataclass(frozen=True, kw_only=True)
class EncodedRun:
    """The encoded data of a run.

    Attributes:
        items: what is trained on, in order.
        validation_items: what the fixed-noise loss is measured on.
        prompts: conditioning of each preview prompt.
        negative: conditioning of the negative prompt.
    """

    items: Sequence[EncodedItem]
    validation_items: Sequence[ValidationItem]
    prompts: Sequence[Conditioning]
    negative: Conditioning


def encode_run(
    config: Config,
    checked: CheckedRun,
    cache: TensorCache,
    device: torch.device,
    quarantine: Callable[[Record, str], None],
) -> EncodedRun:
    """Encode captions, prompts and images, or find them in the cache; the encoders are freed on return.

    Args:
        config: of the run.
        checked: the run's records and family.
        cache: shared by runs.
        device: the encoders run there.
        quarantine: is told of each image left out.

    Raises:
        UserError: bad images, all of them named.
    """
    family, validation = checked.family, config.validation
    text_dtype = getattr(torch, config.model.text_encoder_dtype)
    held_out_records = checked.validation_records[: validation.loss_items]
    texts = [record.caption for record in (*checked.records, *held_out_records)]
    caption_keys = encode_captions(
        [*texts, *validation.prompts, validation.negative_prompt],
        cache=cache,
        encoder_id=family.prompt_encoder_id(text_dtype),
        encode=lambda: _of_texts(family.load_prompt_encoder(text_dtype, device)),
        batch_size=_ENCODE_BATCH_SIZE,
    )

    def encode_records(records: Sequence[Record]) -> list[EncodedItem]:
        vae_dtype = getattr(torch, config.model.vae_dtype)
        return encode_images(
            records,
            caption_keys=caption_keys,
            width=config.data.width,
            height=config.data.height,
            cache=cache,
            encoder_id=family.media_encoder_id(vae_dtype),
            encode=lambda: _of_pictures(family.load_media_encoder(vae_dtype, device)),
            batch_size=_ENCODE_BATCH_SIZE,
            on_bad_item=config.data.on_bad_item,
            quarantine=quarantine,
        )

    items = encode_records(checked.records)
    held_out = encode_records(held_out_records) if held_out_records else items
    return EncodedRun(
        items=items,
        validation_items=[_validation_item(cache, item) for item in held_out[: validation.loss_items]],
        prompts=[_require(cache, caption_keys[prompt]) for prompt in validation.prompts],
        negative=_require(cache, caption_keys[validation.negative_prompt]),
    )


def _of_texts(encode: Callable[[Sequence[Prompt]], list[Conditioning]]) -> CaptionEncoder:
    return lambda texts: encode([Prompt(text=text) for text in texts])


def _of_pictures(encode: Callable[[Sequence[Media]], list[EncodedMedia]]) -> ImageEncoder:
    return lambda pictures: encode([Media(frames=(picture,)) for picture in pictures])


def _require(cache: TensorCache, key: str) -> dict[str, torch.Tensor]:
    """An entry that the caching pass has just made or seen."""
    tensors = cache.read(key)
    if tensors is None:
        raise RunStoppedError(
            f"data.cache_dir: an entry of {cache.folder} vanished while the run started; "
            "the same command encodes it again"
        )
    return tensors


def _validation_item(cache: TensorCache, item: EncodedItem) -> ValidationItem:
    return ValidationItem(
        latents=_require(cache, item.latents_key)["latents"], conditioning=_require(cache, item.caption_key)
    )
