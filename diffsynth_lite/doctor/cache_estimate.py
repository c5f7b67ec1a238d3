"""This file estimates what the cache of a run will take, and finds what of it is there already."""

import dataclasses
import math
from dataclasses import dataclass

import torch

from diffsynth_lite.data import PromptItem, TensorCache, TrainingItem
from diffsynth_lite.doctor.examined import ExaminedData
from diffsynth_lite.pipelines import ModelFamily
from diffsynth_lite.training.dataset import DataSet, FamilyEncoders

_FILE_BYTES = 300
"""Header of a file: names, shapes, hash."""
_LATENT_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheEstimate:
    """Entries of the cache that a run reads.

    Attributes:
        num_present: entries that are there.
        present_bytes: their size.
        num_missing: entries that will be made.
        missing_bytes: estimate of their size.
    """

    num_present: int
    present_bytes: int
    num_missing: int
    missing_bytes: float


def estimate_cache(data: ExaminedData, cache: TensorCache) -> CacheEstimate:
    """What the items of a run and their captions take; without previews, which are few.

    Args:
        data: of the run.
        cache: of the run; only looked into, not read.
    """
    config, family = data.config, data.family
    text_dtype: torch.dtype = getattr(torch, config.model.text_encoder_dtype)
    entries = DataSet(
        data.records,
        dataclasses.replace(data.plan, items=data.items),
        FamilyEncoders.of(
            family,
            text_dtype=text_dtype,
            vae_dtype=getattr(torch, config.model.vae_dtype),
            device=torch.device("cpu"),
        ),
        cache,
        prompt_sees_images=family.prompt_sees_images,
        has_unconditional=config.data.caption_dropout > 0,
    )
    token_bytes = _text_width(family) * text_dtype.itemsize
    planned: dict[str, TrainingItem | PromptItem] = {**entries.media, **entries.prompts}
    num_present = present_bytes = 0
    missing_bytes = 0.0
    for key, entry in planned.items():
        path = cache.path(key)
        if path.exists():
            num_present += 1
            present_bytes += path.stat().st_size
        elif isinstance(entry, TrainingItem):
            missing_bytes += _FILE_BYTES + _LATENT_BYTES * _num_latents(entry, family)
        else:
            missing_bytes += _FILE_BYTES + token_bytes * _num_tokens(entry, data)
    return CacheEstimate(
        num_present=num_present,
        present_bytes=present_bytes,
        num_missing=len(planned) - num_present,
        missing_bytes=missing_bytes,
    )


def _num_latents(item: TrainingItem, family: ModelFamily) -> int:
    bucket = item.bucket
    shape = family.latents_shape(bucket.width, bucket.height, bucket.num_frames)
    target = math.prod(shape) + family.num_condition_values(shape)
    return target + sum(math.prod(family.latents_shape(*size, 1)) for size in bucket.inputs)


def _num_tokens(prompt: PromptItem, data: ExaminedData) -> int:
    family = data.family
    of_text = min(data.caption_tokens.get(prompt.text, 0), family.max_prompt_tokens)
    return of_text + len(prompt.images) * family.prompt_tokens_of_an_input


def _text_width(family: ModelFamily) -> int:
    """Numbers of the text encoder for each token, as the config of its class calls them."""
    settings = family.folder.component_config("text_encoder")
    nested = settings.get("text_config", {})
    names = ("d_model", "hidden_size")
    return int(next((part[name] for part in (settings, nested) for name in names if name in part), 0))
