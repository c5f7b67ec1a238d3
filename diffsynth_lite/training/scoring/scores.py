"""This file scores a run between its steps: images for its prompts, and from their files the scores."""

import logging
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from diffsynth_lite.core.randomness import random_state_scope
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora import without_adapter
from diffsynth_lite.report.scores import with_interval
from diffsynth_lite.scores.recommendation import parts_of_total, recommend
from diffsynth_lite.scores.record import BASE_STEP, ScoredColumn
from diffsynth_lite.training.previews import Previews
from diffsynth_lite.training.scoring.job import ImageColumn, ScoreJob

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StepScores:
    """The scores of the steps that are both evaluated and saved.

    Attributes:
        previews: generates the images; without prompts nothing is scored.
        again: the same of the base from other noise.
        every_steps: steps between those that are scored; the last one is, too.
        job: None where another process writes the files.
    """

    previews: Previews
    again: Previews
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
        of_step = [(self.previews, step)] if step != BASE_STEP else []
        for previews, known in ((self.previews, BASE_STEP), (self.again, BASE_STEP), *of_step):
            if previews.are_missing(known):
                with without_adapter(transformer) if known == BASE_STEP else nullcontext():
                    previews.generate(transformer, known)
        if self.job is not None:
            with random_state_scope(next(transformer.parameters()).device):
                self._score(self.job, step)

    def are_missing(self, step: int) -> bool:
        """Whether a step that is due lacks its scores; asked of the process that writes them."""
        return self.job is not None and self._is_due(step) and self.job.lacks(ScoredColumn.name(step))

    def samples(self, step: int) -> list[list[float]]:
        """Samples whose means add up to a lower value the higher the score of a step is; none without one."""
        record = self.job.known() if self.job else None
        return [(-part).tolist() for part in parts_of_total(record, step)] if record else []

    def _score(self, job: ScoreJob, step: int) -> None:
        """Score what has images and no scores yet, up to a step, and log the scores of that step."""
        steps = [known for known in self.previews.generated_steps() if known <= step]
        if steps[:1] != [BASE_STEP] or self.again.are_missing(BASE_STEP):
            return
        try:
            record = job.update([ImageColumn.of(self.previews, known) for known in steps])
        except (UserError, OSError, MemoryError, RuntimeError) as error:  # torch's for a full memory
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
