"""This file scores images that lie in files: what has no scores yet gets them, after a kill, too."""

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from diffsynth_lite.errors import UserError
from diffsynth_lite.scores.features import FeatureModels
from diffsynth_lite.scores.measures import GeneratedFeatures, References
from diffsynth_lite.scores.record import ScoredColumn, ScoreRecord, read_scores, write_scores

logger = logging.getLogger(__name__)

ReadFrames = Callable[[], Sequence[Image.Image]]
"""Reads an image, or a few frames of a clip."""


@dataclass(frozen=True, kw_only=True)
class ScoreSubject:
    """What images are scored by.

    Attributes:
        measure: as in the record.
        num_frames: that lie next to each other in the image of a clip; 1 of an image.
        held_out: what images of each new prompt are compared with.
        training: the same of each taught prompt.
    """

    measure: str
    num_frames: int
    new_prompts: Sequence[str]
    plain_prompts: Sequence[str]
    taught_prompts: Sequence[str]
    held_out: Sequence[Sequence[ReadFrames]]
    training: Sequence[Sequence[ReadFrames]]


@dataclass(frozen=True, kw_only=True)
class ImageColumn:
    """The files of one LoRA, or of the base: of new prompts, of plain ones, then of taught ones."""

    name: str
    step: int | None
    files: Sequence[Path]


class ScoreJob:
    """Scores columns of images, and keeps the record.

    Args:
        path: of the record.
    """

    def __init__(self, path: Path, subject: ScoreSubject, models: FeatureModels) -> None:
        self._path, self._subject, self._models = path, subject, models
        self._references: References | None = None

    def update(self, columns: Sequence[ImageColumn], again: Collection[str] = ()) -> ScoreRecord:
        """Score the columns that the record lacks, and write it.

        Args:
            columns: the base first.
            again: names of those whose images are new, whatever the record has.

        Raises:
            UserError: a file or a model cannot be read.
            OSError: the same, or the record cannot be written.
        """
        record = self._read()
        known = {column.column for column in record.columns}.difference(again) if record else set()
        for column in columns:
            if column.name not in known:
                images = self._features(column)
                if self._references is None:
                    base = images if column is columns[0] else self._features(columns[0])
                    self._references = self._read_references(base)
                scored = self._references.scores(column.name, column.step, images)
                record = (
                    self._begun(scored, self._references) if record is None else record.with_column(scored)
                )
                write_scores(self._path, record)
        assert record is not None, "there is the column of the base"
        return record

    def lacks(self, name: str) -> bool:
        """Whether the record has no scores of a column that compare with those of others."""
        with suppress(UserError):
            record = read_scores(self._path)
            if record is not None and record.measure == self._subject.measure:
                return name not in {column.column for column in record.columns}
        return True

    def _read(self) -> ScoreRecord | None:
        """The record; None where there is none of this measure, which is warned of."""
        try:
            record = read_scores(self._path)
        except UserError as error:
            logger.warning("%s. Scores start over.", error)
            return None
        if record is not None and record.measure != self._subject.measure:
            logger.warning(
                "%s was measured in another way (prompts, seeds, sizes, sampler, models, items or "
                "validation.use_ema); scores start over.",
                self._path,
            )
            return None
        return record

    def _begun(self, base: ScoredColumn, references: References) -> ScoreRecord:
        subject = self._subject
        return ScoreRecord(
            measure=subject.measure,
            models=self._models.names,
            held_out_contrast=references.held_out_contrast,
            new_prompts=tuple(subject.new_prompts),
            plain_prompts=tuple(subject.plain_prompts),
            taught_prompts=tuple(subject.taught_prompts),
            num_seeds=1,
            columns=(base,),
        )

    def _read_references(self, base: GeneratedFeatures) -> References:
        groups = [*self._subject.held_out, *self._subject.training]
        features = self._models.features([read() for group in groups for read in group])
        by_group = np.split(features, np.cumsum([len(group) for group in groups])[:-1])
        num_new = len(self._subject.held_out)
        return References(held_out=by_group[:num_new], training=by_group[num_new:], base_plain=base.plain)

    def _features(self, column: ImageColumn) -> GeneratedFeatures:
        prompts = [*self._subject.new_prompts, *self._subject.plain_prompts]
        num_new, num_compared = len(self._subject.new_prompts), len(prompts)
        clips = [_frames(file, self._subject.num_frames) for file in column.files]
        images = self._models.features(clips)[:, None]
        fit = self._models.similarity(clips[:num_compared], prompts)[:, None]
        return GeneratedFeatures(
            new=images[:num_new],
            plain=images[num_new:num_compared],
            taught=images[num_compared:],
            new_prompt=fit[:num_new],
            plain_prompt=fit[num_new:],
        )


def _frames(file: Path, count: int) -> list[Image.Image]:
    """The frames that lie next to each other in an image."""
    try:
        with Image.open(file) as opened:
            strip = opened.convert("RGB")
    except (OSError, SyntaxError) as error:  # PIL's errors for a damaged PNG
        raise UserError(f"{file} cannot be read: {error}; remove it to have it generated again") from error
    width = strip.width // count
    return [strip.crop((place * width, 0, (place + 1) * width, strip.height)) for place in range(count)]


def cut_back(path: Path, images: Path, step: int) -> None:
    """Remove the scores and images of steps after one from which a run continues.

    Args:
        path: of the record.
        images: folder of the images, whose names begin as those of previews do.
    """
    for image in images.glob("step-*"):
        if int(image.name.split("-")[1]) > step:
            image.unlink()
    with suppress(UserError):  # One that is damaged is replaced.
        record = read_scores(path)
        kept = [column for column in record.columns if (column.step or 0) <= step] if record else []
        if record is not None and len(kept) < len(record.columns):
            write_scores(path, record.model_copy(update={"columns": tuple(kept)}))
