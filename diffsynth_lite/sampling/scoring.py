"""This file scores LoRAs after a run, those of the run and others, with what its own scores are made of."""

import hashlib
import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import torch

from diffsynth_lite.config import Config
from diffsynth_lite.errors import UserError
from diffsynth_lite.files import file_fingerprint
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.loras import SUFFIX, lora_copies
from diffsynth_lite.sampling.request import GivenLora
from diffsynth_lite.sampling.session import SampleSession
from diffsynth_lite.scores.job import ImageColumn
from diffsynth_lite.scores.record import BASE_STEP, ScoreRecord
from diffsynth_lite.training.encoding.run_encoding import encode_scored
from diffsynth_lite.training.previews import Previews, model_name
from diffsynth_lite.training.scoring.scores import column_of, score_job

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
    sections = {
        "validation": config.validation.model_copy(update=scored),
        "output": config.output.model_copy(update={"dir": str(run.path)}),  # it may have moved
    }
    with closing(SampleSession.open(config.model_copy(update=sections), run)) as session:
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
        job = score_job(config, run, prompts, images)
        columns = [_Column(images=images, step=BASE_STEP), *_kept(config, run, images)]
        columns += [
            _Column(
                images=replace(images, folder=run.scored_folder / _digest(lora)), step=BASE_STEP, lora=lora
            )
            for lora in others
        ]
        new = [column for column in columns if column.images.are_missing(column.step)]
        for column in new:
            logger.info("Generating: %s.", column.files.name)
            loras = [] if column.lora is None else [column.lora]
            generated = session.generate_requests(requests, loras)
            column.images.save(generated, column.step, [(lora.name, lora.weight) for lora in loras])
    return job.update(
        [column.files for column in columns], again=[column.files.name for column in new if column.lora]
    )


@dataclass(frozen=True, kw_only=True)
class _Column:
    """A LoRA to score, or the base.

    Attributes:
        images: its previews, in a folder of its own where it is not of the run.
        step: in the names of its files.
    """

    images: Previews
    step: int
    lora: GivenLora | None = None

    @property
    def files(self) -> ImageColumn:
        name = self.lora.name if self.lora is not None and self.step == BASE_STEP else None
        return column_of(self.images, self.step, name)


def _kept(config: Config, run: RunFolder, images: Previews) -> list[_Column]:
    """The LoRAs that a run kept of its steps, of the weights that it scores."""
    is_average = config.validation.use_ema and config.train.ema_decay is not None
    export = (run.ema_lora_folder if is_average else run.lora_folder).name
    return [
        _Column(
            images=images,
            step=copy.step,
            lora=GivenLora(place=copy.path, name=f"step-{copy.step:08d}", weight=1.0),
        )
        for copy in lora_copies(run.checkpoints_folder, export)
    ]


def _digest(lora: GivenLora) -> str:
    """Name of the folder of its images: another for other weights."""
    files = sorted(lora.place.glob(f"*{SUFFIX}")) if lora.place.is_dir() else [lora.place]
    decides = [lora.weight, *map(file_fingerprint, files)]
    return hashlib.blake2b(repr(decides).encode(), digest_size=6).hexdigest()
