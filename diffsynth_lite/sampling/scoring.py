"""This file scores LoRAs after a run, those of the run and others, with what its own scores are made of."""

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace

import torch

from diffsynth_lite.config import Config
from diffsynth_lite.errors import UserError
from diffsynth_lite.files import file_fingerprint
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.loras import SUFFIX, lora_copies
from diffsynth_lite.sampling.request import GivenLora
from diffsynth_lite.sampling.session import SampleSession
from diffsynth_lite.scores.features import FeatureModels
from diffsynth_lite.scores.record import BASE_STEP, ScoreRecord
from diffsynth_lite.training.encoding.run_encoding import encode_scored
from diffsynth_lite.training.previews import Previews, model_name
from diffsynth_lite.training.scoring.job import ImageColumn, ScoreJob, other_seeds

logger = logging.getLogger(__name__)


def score_loras(config: Config, run: RunFolder, others: Sequence[GivenLora]) -> ScoreRecord:
    """Score the base, the LoRAs that a run kept of its steps, and others next to them.

    Images that are there are not generated again, nor scores computed again.

    Args:
        config: of the run.

    Raises:
        UserError: something that the user can fix, before weights load wherever that is possible.
    """
    if config.validation.model_path is not None:
        raise UserError(
            "validation.model_path: the previews of this run are another model's, whose images are scored "
            "only while it trains (validation.scores)"
        )
    scored = {"scores": True, "prompts": []}
    validation = config.validation.model_copy(update=scored)
    output = config.output.model_copy(update={"dir": str(run.path)})  # it may have moved
    config = config.model_copy(update={"validation": validation, "output": output})
    with closing(SampleSession.open(config, run)) as session:
        config, family = session.config, session.family
        prompts, requests = encode_scored(config, family, session.accelerator)
        images = Previews(
            family=family,
            folder=run.scored_folder,
            requests=requests,
            model=model_name(family, config.model.path),
            sampler=family.sampler,
            vae_dtype=getattr(torch, config.model.vae_dtype),
            has_grid=False,
        )
        models = FeatureModels.find(config.validation.score_models)
        again = other_seeds(images, prompts)
        job = ScoreJob(run.scores_file, prompts, images, again, models, is_average=config.scores_average)
        base = ImageColumn.of(images, BASE_STEP)
        columns, new = [base], []
        for shown, lora, step in [*_kept(config, run, images), *_others(images, others)]:
            columns.append(ImageColumn.of(shown, step or BASE_STEP, name=None if step else lora.name))
            if shown.are_missing(step or BASE_STEP):
                new.append(columns[-1].name)
                logger.info("Generating: %s.", lora.name)
                generated = session.generate_requests(requests, [lora])
                shown.save(generated, step or BASE_STEP, [(lora.name, lora.weight)])
        for shown in (images, again):
            if shown.are_missing(BASE_STEP):
                logger.info("Generating: base.")
                shown.save(session.generate_requests(shown.requests, []), BASE_STEP, [])
    return job.update(columns, again=new)


def _kept(
    config: Config, run: RunFolder, images: Previews
) -> Iterator[tuple[Previews, GivenLora, int | None]]:
    """The LoRAs that a run kept of its steps, of the weights that it scores."""
    export = (run.ema_lora_folder if config.scores_average else run.lora_folder).name
    for copy in lora_copies(run.checkpoints_folder, export):
        yield images, GivenLora(place=copy.path, name=f"step-{copy.step:08d}", weight=1.0), copy.step


def _others(images: Previews, loras: Sequence[GivenLora]) -> Iterator[tuple[Previews, GivenLora, int | None]]:
    """LoRAs that are not steps of the run: the images of each are in a folder of its own."""
    for lora in loras:
        files = sorted(lora.place.glob(f"*{SUFFIX}")) if lora.place.is_dir() else [lora.place]
        decides = [lora.weight, *map(file_fingerprint, files)]
        digest = hashlib.blake2b(repr(decides).encode(), digest_size=6).hexdigest()
        yield replace(images, folder=images.folder / digest), lora, None
