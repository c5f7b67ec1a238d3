"""This file gives a slider the images that it learns on: the base model generates them from its prompts.

They are kept in the cache as encoded images are, under everything that decides them, before the first step.
"""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import replace

import torch
from accelerate import Accelerator
from diffusers.training_utils import free_memory

from diffsynth_lite.config import Config
from diffsynth_lite.core.evaluation_mode import evaluation_mode
from diffsynth_lite.core.randomness import random_state_scope, torch_seed
from diffsynth_lite.data.batches import Anchor
from diffsynth_lite.data.buckets import Bucket
from diffsynth_lite.data.cache import TensorCache
from diffsynth_lite.data.item_table import ItemRow, ItemTable
from diffsynth_lite.data.items import DataIdentity
from diffsynth_lite.lora import without_adapter, without_training_adapter
from diffsynth_lite.media import Media, frames_of
from diffsynth_lite.pipelines import ModelFamily, PreviewRequest
from diffsynth_lite.progress_log import ProgressLog
from diffsynth_lite.training.data_settings import cache_folder
from diffsynth_lite.training.encoding.dataset import CheckedData
from diffsynth_lite.training.encoding.job import EncodingJob
from diffsynth_lite.training.encoding.run_encoding import (
    RunEncoder,
    TrainingData,
    encode_previews,
    encoded_previews,
    require_entry,
)
from diffsynth_lite.training.preview_requests import any_preview, data_size

logger = logging.getLogger(__name__)

_AT_ONCE = 4
"""Images that are generated and then encoded, so that a run that is stopped loses no more."""


def slider_data(config: Config, checked: CheckedData, accelerator: Accelerator) -> TrainingData:
    """The data of a slider that is learned from prompts only: which images there are to be, and the prompts.

    The images themselves need the model; :func:`generate_images` makes them once that is loaded.
    """
    slider, family = config.objective.slider, checked.family
    assert slider is not None
    with RunEncoder.opened(config, accelerator) as encoder:
        job = encoder.plan(checked)
        encoder.encode(job, {})
    if config.validation.model_path is None:
        previews = encoded_previews(config, family, job, job.cache)
    else:
        previews = encode_previews(config, checked.preview_family, accelerator)
    images = image_requests(config, family, job)
    encoded = {
        key: replace(
            request,
            conditioning=require_entry(job.cache, job.texts[request.prompt]),
            negative=require_entry(job.cache, job.steered_from),
        )
        for key, request in images.items()
    }
    keys_of = {
        text: tuple(key for key, request in images.items() if request.prompt == text) for text in slider.texts
    }
    width, height = data_size(config, family)
    rows = [
        ItemRow(
            name=f"triple {number} image {place}",
            bucket=Bucket(width=width, height=height),
            source=0,
            media_key=key,
            caption_keys=tuple(job.texts[text] for text in (one.neutral, one.positive, one.negative)),
        )
        for number, one in enumerate(slider.triples, start=1)
        for place, key in enumerate(keys_of[one.neutral], start=1)
    ]
    digest = hashlib.blake2b(repr(list(images)).encode(), digest_size=16).hexdigest()
    media_encoder, prompt_encoder = job.encoder_ids
    identity = replace(
        DataIdentity.of([], media_encoder=media_encoder, prompt_encoder=prompt_encoder),
        items=f"{len(rows)} generated images, {digest}",
    )
    return TrainingData(
        items=ItemTable.build(rows),
        identity=identity,
        tag_counts={},
        tensors=job.cache,
        is_live=False,
        validation_items=[],
        validation_identity=identity,
        tracked_items=[],
        previews=previews,
        anchors=[Anchor(caption_key=job.texts[text], media_keys=keys_of[text]) for text in slider.kept],
        generated=encoded,
    )


def image_requests(config: Config, family: ModelFamily, job: EncodingJob) -> dict[str, PreviewRequest]:
    """The images that the base model generates for a slider, by the key of their entry; prompts as text only.

    Empty where the slider is learned on images of the data.
    """
    slider = config.objective.slider
    if slider is None or not config.generates_data:
        return {}
    width, height = data_size(config, family)
    shared = replace(any_preview(config, family), width=width, height=height, num_frames=1)
    requests = [
        replace(shared, prompt=text, seed=torch_seed(0, f"slider {text}", place))
        for text in dict.fromkeys((*(one.neutral for one in slider.triples), *slider.kept))
        for place in range(slider.images_per_prompt)
    ]
    return {_key(config, family, job, request): request for request in requests}


def generate_images(
    config: Config,
    family: ModelFamily,
    images: Mapping[str, PreviewRequest],
    transformer: torch.nn.Module,
) -> None:
    """Have the base model generate and encode the images that the cache lacks.

    Args:
        images: by the key of their entry.
        transformer: with an adapter, which is left out.
    """
    cache = TensorCache(cache_folder(config))
    missing = [key for key in images if cache.read(key) is None]
    if not missing:
        return
    logger.info("objective.slider: the base model generates %d images to learn on.", len(missing))
    vae_dtype, device = getattr(torch, config.model.vae_dtype), next(transformer.parameters()).device
    progress = ProgressLog("generated %d of %d images of the slider", len(missing), phase="generating")
    base = (without_adapter(transformer), without_training_adapter(transformer))
    with random_state_scope(device), evaluation_mode(transformer), base[0], base[1]:
        for keys in (missing[first : first + _AT_ONCE] for first in range(0, len(missing), _AT_ONCE)):
            generated = family.sample(transformer, vae_dtype, [images[key] for key in keys])
            encode = family.load_media_encoder(vae_dtype, device)
            for key, image in zip(keys, generated, strict=True):
                [tensors] = encode([Media(frames=tuple(frames_of(image)))])
                cache.write(key, tensors)
                progress.advance()
            del encode
            free_memory()


def _key(config: Config, family: ModelFamily, job: EncodingJob, request: PreviewRequest) -> str:
    """Key of an image: everything that decides its tensors."""
    model = config.model
    return job.cache.key(
        kind="generated",
        text=request.prompt,
        negative=request.negative_prompt if request.guidance_scale > 1 else "",
        seed=request.seed,
        size=f"{request.width}x{request.height}",
        sampler=f"{family.sampler} {request.num_inference_steps} {request.guidance_scale!r}",
        base=f"{family.fingerprint()} {model.dtype} {model.quantize} {config.train.mixed_precision}",
        encoder=" ".join(job.encoder_ids),
    )
