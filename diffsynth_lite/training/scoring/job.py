"""This file scores a run between its steps, or after it: images for its prompts, and of these the scores.

What has no scores yet gets them from the files of its images, after a kill, too.
"""

import hashlib
import json
import logging
from collections.abc import Collection, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from diffsynth_lite.config import Config
from diffsynth_lite.core.randomness import random_state_scope
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora import without_adapter
from diffsynth_lite.media import STRIP_FRAMES
from diffsynth_lite.report.scores import with_interval
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.scores.features import FeatureModels
from diffsynth_lite.scores.measures import GeneratedFeatures, References
from diffsynth_lite.scores.recommendation import parts_of_total, recommend
from diffsynth_lite.scores.record import BASE_STEP, ScoredColumn, ScoreRecord, read_scores, write_scores
from diffsynth_lite.training.encoding.scored_prompts import ScoredPrompt, ScoredPrompts
from diffsynth_lite.training.previews import Previews

logger = logging.getLogger(__name__)

_OF_BASE = (
    *("dtype", "quantize", "quantize_skip", "text_encoder_dtype", "text_encoder_quantize"),
    *("vae_dtype", "vae_tiling"),
)


@dataclass(frozen=True, kw_only=True)
class ScoredImages:
    """The images that a run is scored by.

    Attributes:
        again: of plain prompts from other noise, of the base: how much its own images of a prompt differ.
    """

    previews: Previews
    again: Previews


def base_settings(config: Config) -> dict[str, object]:
    """The settings that decide the images of a base model, next to its files, by dotted key."""
    of_model = {f"model.{name}": getattr(config.model, name) for name in _OF_BASE}
    return of_model | {"train.mixed_precision": config.train.mixed_precision}


def scored_images(config: Config, run: RunFolder, previews: Previews, prompts: ScoredPrompts) -> ScoredImages:
    """The images that a run is scored by: those of averaged weights are in a folder of their own.

    Args:
        previews: of all prompts of the scores, none where the run is not scored.
    """
    base = f"{previews.family.fingerprint()} {base_settings(config)}" if prompts.all else None
    folder = run.scored_folder / ("average" if config.scores_average else "")
    previews = replace(previews, folder=folder, generated_by=base, has_grid=False)
    first = len(prompts.new)
    plain = previews.requests[first : first + len(prompts.plain)]
    requests = [replace(request, seed=request.seed + len(prompts.all)) for request in plain]
    again = replace(previews, folder=folder / "other-seed", requests=requests)
    return ScoredImages(previews=previews, again=again)


@dataclass(frozen=True, kw_only=True)
class ImageColumn:
    """The files of one LoRA, or of the base: of new prompts, of plain ones, then of taught ones."""

    name: str
    step: int | None
    files: Sequence[Path]

    @classmethod
    def of(cls, previews: Previews, step: int, name: str | None = None) -> "ImageColumn":
        """The files of a step, or of a LoRA that is not of the run, which has a name."""
        files = [previews.file(step, place) for place in range(len(previews.requests))]
        return cls(name=name or ScoredColumn.name(step), step=None if name else step, files=files)


@dataclass(kw_only=True)
class ScoreJob:
    """Scores columns of images, and keeps the record.

    Attributes:
        path: of the record.
        images: of these prompts.
        is_average: whether images of steps are of the averaged weights.
    """

    path: Path
    prompts: ScoredPrompts
    images: ScoredImages
    models: FeatureModels
    is_average: bool
    _references: References | None = field(default=None, init=False)

    @classmethod
    def of(cls, config: Config, run: RunFolder, prompts: ScoredPrompts, images: ScoredImages) -> "ScoreJob":
        """The job of a run."""
        models, is_average = FeatureModels.find(config.validation.score_models), config.scores_average
        return cls(path=run.scores_file, prompts=prompts, images=images, models=models, is_average=is_average)

    @cached_property
    def decided_by(self) -> dict[str, object]:
        """All that decides which scores compare, by names for people."""
        return {
            "the base model": self.images.previews.generated_by,
            "validation.score_models": self.models.identity,
            "the prompts": _texts(self.prompts.all),
            "held-out or training items": [
                [item.identity() for item in prompt.items] for prompt in self.prompts.all
            ],
            "seeds, sizes or sampler settings": [self.images.previews.marks, self.images.again.marks],
        }

    @cached_property
    def measure(self) -> str:
        """A digest of it, as in the record."""
        decides = json.dumps(list(self.decided_by.values()))
        return hashlib.blake2b(decides.encode(), digest_size=16).hexdigest()

    def update(self, columns: Sequence[ImageColumn], again: Collection[str] = ()) -> ScoreRecord:
        """Score the columns that the record lacks, and write it.

        Args:
            columns: the base first.
            again: names of those whose images are new, whatever the record has.

        Raises:
            UserError: a file or a model cannot be read.
            OSError: the same, or the record cannot be written.
        """
        record = self.known()
        if record is None and self.path.exists():
            logger.warning(
                "%s is damaged, or was measured in another way (base, prompts, seeds, sizes, sampler, "
                "models, items or validation.use_ema); scores start over.",
                self.path,
            )
        known = {column.column for column in record.columns}.difference(again) if record else set()
        for column in columns:
            if column.name not in known:
                images = self._features(column)
                if self._references is None:
                    base = images if column is columns[0] else self._features(columns[0])
                    self._references = self._read_references(base)
                scored = self._references.scores(column.name, column.step, images)
                record = record.with_column(scored) if record else self._begun(scored, self._references)
                write_scores(self.path, record)
        assert record is not None, "there is the column of the base"
        return record

    def lacks(self, name: str) -> bool:
        """Whether the record has no scores of a column that compare with those of others."""
        record = self.known()
        return record is None or name not in {column.column for column in record.columns}

    def known(self) -> ScoreRecord | None:
        """The record that later scores compare with; None where there is none."""
        with suppress(UserError):
            record = read_scores(self.path)
            if record and (record.measure, record.is_average) == (self.measure, self.is_average):
                return record
        return None

    def _begun(self, base: ScoredColumn, references: References) -> ScoreRecord:
        new, plain, taught = map(_texts, (self.prompts.new, self.prompts.plain, self.prompts.taught))
        return ScoreRecord(
            measure=self.measure,
            is_average=self.is_average,
            models=self.models.names,
            held_out_contrast=references.held_out_contrast,
            other_seed=references.other_seed,
            new_prompts=new,
            plain_prompts=plain,
            taught_prompts=taught,
            columns=(base,),
        )

    def _read_references(self, base: GeneratedFeatures) -> References:
        groups = [prompt.items for prompt in (*self.prompts.new, *self.prompts.taught)]
        features = self.models.features([item.few_frames(STRIP_FRAMES) for group in groups for item in group])
        by_prompt = np.split(features, np.cumsum([len(group) for group in groups])[:-1])
        num_new = len(self.prompts.new)
        again = self._clips(ImageColumn.of(self.images.again, BASE_STEP).files)
        return References(
            held_out=by_prompt[:num_new],
            training=by_prompt[num_new:],
            base_plain=base.plain,
            base_again=self.models.features(again),
        )

    def _features(self, column: ImageColumn) -> GeneratedFeatures:
        prompts, clips = _texts(self.prompts.new), self._clips(column.files)
        images, ends = self.models.features(clips), [len(prompts), len(prompts) + len(self.prompts.plain)]
        new, plain, taught = np.split(images, ends)
        fit = self.models.similarity(clips[: len(prompts)], prompts)
        return GeneratedFeatures(new=new, plain=plain, taught=taught, prompt=fit)

    def _clips(self, files: Iterable[Path]) -> list[list[Image.Image]]:
        """The frames of files, which lie next to each other in each."""
        count, clips = min(self.images.previews.requests[0].num_frames, STRIP_FRAMES), []
        for file in files:
            try:
                with Image.open(file) as opened:
                    strip = opened.convert("RGB")
            except (OSError, SyntaxError) as error:  # PIL's errors for a damaged PNG
                raise UserError(
                    f"{file} cannot be read: {error}; remove it to have it generated again"
                ) from error
            width, height = strip.width // count, strip.height
            clips.append([strip.crop((width * at, 0, width * (at + 1), height)) for at in range(count)])
        return clips


@dataclass(frozen=True, kw_only=True)
class StepScores:
    """The scores of the steps that are both evaluated and saved.

    Attributes:
        images: generates them; without prompts nothing is scored.
        every_steps: steps between those that are scored; the last one is, too.
        job: None where another process writes the files.
    """

    images: ScoredImages
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
        of_step = [(self.images.previews, step)] if step != BASE_STEP else []
        of_base = [(each, BASE_STEP) for each in (self.images.previews, self.images.again)]
        for previews, known in of_base + of_step:
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
        previews = self.images.previews
        steps = [known for known in previews.generated_steps() if known <= step]
        if steps[:1] != [BASE_STEP] or self.images.again.are_missing(BASE_STEP):
            return
        try:
            record = job.update([ImageColumn.of(previews, known) for known in steps])
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
        return bool(self.images.previews.requests and is_due)


def cut_back(path: Path, images: Path, step: int) -> None:
    """Remove the scores and images of steps after one from which a run continues.

    Args:
        path: of the record.
        images: folder of the images, whose names begin as those of previews do.
    """
    for image in images.rglob("step-*"):
        if int(image.name.split("-")[1]) > step:
            image.unlink()
    with suppress(UserError):  # One that is damaged is replaced.
        record = read_scores(path)
        kept = [column for column in record.columns if (column.step or 0) <= step] if record else []
        if record is not None and len(kept) < len(record.columns):
            write_scores(path, record.model_copy(update={"columns": tuple(kept)}))


def _texts(prompts: Sequence[ScoredPrompt]) -> tuple[str, ...]:
    return tuple(prompt.text for prompt in prompts)
