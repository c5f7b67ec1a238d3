"""This file scores a run between its steps: images for its prompts, and from their files the scores."""

import hashlib
import json
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch

from diffsynth_lite.config import Config
from diffsynth_lite.core.randomness import random_state_scope
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora import without_adapter
from diffsynth_lite.media import STRIP_FRAMES
from diffsynth_lite.report.scores import with_interval
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.scores.features import FeatureModels
from diffsynth_lite.scores.job import ImageColumn, ReadFrames, ScoreJob, ScoreSubject
from diffsynth_lite.scores.recommendation import recommend
from diffsynth_lite.scores.record import BASE_STEP, ScoredColumn
from diffsynth_lite.training.encoding.scored_prompts import ScoredPrompt, ScoredPrompts
from diffsynth_lite.training.previews import Previews

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunScores:
    """The scores of the steps that are both evaluated and saved.

    Attributes:
        previews: generates the images; without prompts nothing is scored.
        every_steps: steps between those that are scored; the last one is, too.
        job: None where another process writes the files.
    """

    previews: Previews
    every_steps: int | None
    last_step: int
    job: ScoreJob | None

    def record(self, transformer: torch.nn.Module, step: int) -> None:
        """Generate the images of a step that is due, and of the base where they are missing, and score them.

        A failure is logged, and training continues. The global random state is as before.
        """
        if not self._is_due(step):
            return
        # Where a kill came before the scores, the images are there.
        for known in sorted({BASE_STEP, step}):
            if self.previews.are_missing(known):
                with without_adapter(transformer) if known == BASE_STEP else nullcontext():
                    self.previews.generate(transformer, known)
        if self.job is not None:
            with random_state_scope(next(transformer.parameters()).device):
                self._score(self.job, step)

    def are_missing(self, step: int) -> bool:
        """Whether a step that is due lacks its scores; asked of the process that writes them."""
        return self.job is not None and self._is_due(step) and self.job.lacks(ScoredColumn.name(step))

    def _score(self, job: ScoreJob, step: int) -> None:
        """Score what has images and no scores yet, up to a step, and log the scores of that step."""
        steps = [known for known in self.previews.generated_steps() if known <= step]
        if steps[:1] != [BASE_STEP]:
            return
        try:
            record = job.update([column_of(self.previews, known) for known in steps])
        except (UserError, OSError, MemoryError) as error:
            logger.warning("Scores after step %d failed; training continues: %s", step, error)
            return
        for judged in recommend(record).columns:
            if judged.step == step:
                values = map(with_interval, (judged.total, judged.new, judged.kept, judged.prompt))
                text = "After step %d: score %s, learned %s, kept %s, prompt %s%s."
                logger.info(text, step, *values, "".join(f"; {mark}" for mark in judged.marks))

    def _is_due(self, step: int) -> bool:
        is_due = step in (BASE_STEP, self.last_step) or (self.every_steps and step % self.every_steps == 0)
        return bool(self.previews.requests and is_due)


def column_of(previews: Previews, step: int, name: str | None = None) -> ImageColumn:
    """The files of a step, or of a LoRA of others, which has a name."""
    files = [previews.file(step, place) for place in range(len(previews.requests))]
    return ImageColumn(name=name or ScoredColumn.name(step), step=step if name is None else None, files=files)


def score_job(config: Config, folder: RunFolder, prompts: ScoredPrompts, previews: Previews) -> ScoreJob:
    """The job that scores the images of a run.

    Raises:
        UserError: a model of ``validation.score_models`` is missing.
    """
    models = FeatureModels.find(config.validation.score_models)
    is_average = config.validation.use_ema and config.train.ema_decay is not None
    items = [[item.identity() for item in prompt.items] for prompt in prompts.all]
    decides = [previews.marks, items, models.identity, is_average]
    subject = ScoreSubject(
        measure=hashlib.blake2b(json.dumps(decides).encode(), digest_size=16).hexdigest(),
        num_frames=min(previews.requests[0].num_frames, STRIP_FRAMES),
        new_prompts=_texts(prompts.new),
        plain_prompts=_texts(prompts.plain),
        taught_prompts=_texts(prompts.taught),
        held_out=_images(prompts.new),
        training=_images(prompts.taught),
    )
    return ScoreJob(folder.scores_file, subject, models)


def _texts(prompts: Sequence[ScoredPrompt]) -> list[str]:
    return [prompt.text for prompt in prompts]


def _images(prompts: Sequence[ScoredPrompt]) -> list[list[ReadFrames]]:
    return [[partial(item.few_frames, STRIP_FRAMES) for item in prompt.items] for prompt in prompts]
