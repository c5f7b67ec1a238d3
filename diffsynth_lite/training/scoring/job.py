"""This file scores images that lie in files: what has no scores yet gets them, after a kill, too."""

import hashlib
import json
import logging
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image

from diffsynth_lite.errors import UserError
from diffsynth_lite.media import STRIP_FRAMES
from diffsynth_lite.scores.features import FeatureModels
from diffsynth_lite.scores.measures import GeneratedFeatures, References
from diffsynth_lite.scores.record import BASE_STEP, ScoredColumn, ScoreRecord, read_scores, write_scores
from diffsynth_lite.training.encoding.scored_prompts import ScoredPrompt, ScoredPrompts
from diffsynth_lite.training.previews import Previews

logger = logging.getLogger(__name__)


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


class ScoreJob:
    """Scores columns of images, and keeps the record.

    Args:
        path: of the record.
        previews: of these prompts, as they are generated.
        again: those of :func:`other_seeds`.
        is_average: whether images of steps are of the averaged weights.

    Attributes:
        measure: as in the record.
    """

    def __init__(
        self,
        path: Path,
        prompts: ScoredPrompts,
        previews: Previews,
        again: Previews,
        models: FeatureModels,
        *,
        is_average: bool,
    ) -> None:
        self._path, self._prompts, self._again, self._models = path, prompts, again, models
        self._num_frames = min(previews.requests[0].num_frames, STRIP_FRAMES)
        items = [[item.identity() for item in prompt.items] for prompt in prompts.all]
        decides = json.dumps([previews.marks, again.marks, items, models.identity, is_average])
        self.measure = hashlib.blake2b(decides.encode(), digest_size=16).hexdigest()
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
                record = record.with_column(scored) if record else self._begun(scored, self._references)
                write_scores(self._path, record)
        assert record is not None, "there is the column of the base"
        return record

    def lacks(self, name: str) -> bool:
        """Whether the record has no scores of a column that compare with those of others."""
        record = self.known()
        return record is None or name not in {column.column for column in record.columns}

    def known(self) -> ScoreRecord | None:
        """The record that later scores compare with; None where there is none."""
        with suppress(UserError):
            record = read_scores(self._path)
            if record is not None and record.measure == self.measure:
                return record
        return None

    def _read(self) -> ScoreRecord | None:
        """The record; None where there is none of this measure, which is warned of."""
        try:
            record = read_scores(self._path)
        except UserError as error:
            logger.warning("%s. Scores start over.", error)
            return None
        if record is not None and record.measure != self.measure:
            logger.warning(
                "%s was measured in another way (prompts, seeds, sizes, sampler, models, items or "
                "validation.use_ema); scores start over.",
                self._path,
            )
            return None
        return record

    def _begun(self, base: ScoredColumn, references: References) -> ScoreRecord:
        new, plain, taught = map(_texts, (self._prompts.new, self._prompts.plain, self._prompts.taught))
        return ScoreRecord(
            measure=self.measure,
            models=self._models.names,
            held_out_contrast=references.held_out_contrast,
            other_seed=references.other_seed,
            new_prompts=new,
            plain_prompts=plain,
            taught_prompts=taught,
            columns=(base,),
        )

    def _read_references(self, base: GeneratedFeatures) -> References:
        groups = [prompt.items for prompt in (*self._prompts.new, *self._prompts.taught)]
        features = self._models.features(
            [item.few_frames(STRIP_FRAMES) for group in groups for item in group]
        )
        by_prompt = np.split(features, np.cumsum([len(group) for group in groups])[:-1])
        num_new = len(self._prompts.new)
        again = [_frames(file, self._num_frames) for file in ImageColumn.of(self._again, BASE_STEP).files]
        return References(
            held_out=by_prompt[:num_new],
            training=by_prompt[num_new:],
            base_plain=base.plain,
            base_again=self._models.features(again),
        )

    def _features(self, column: ImageColumn) -> GeneratedFeatures:
        prompts = _texts(self._prompts.new)
        clips = [_frames(file, self._num_frames) for file in column.files]
        images, ends = self._models.features(clips), [len(prompts), len(prompts) + len(self._prompts.plain)]
        new, plain, taught = np.split(images, ends)
        fit = self._models.similarity(clips[: len(prompts)], prompts)
        return GeneratedFeatures(new=new, plain=plain, taught=taught, prompt=fit)


def other_seeds(previews: Previews, prompts: ScoredPrompts) -> Previews:
    """Images of plain prompts from other noise, of the base: how much its own images of a prompt differ."""
    first = len(prompts.new)
    plain = previews.requests[first : first + len(prompts.plain)]
    requests = [replace(request, seed=request.seed + len(prompts.all)) for request in plain]
    return replace(previews, folder=previews.folder / "other-seed", requests=requests)


def _texts(prompts: Sequence[ScoredPrompt]) -> tuple[str, ...]:
    return tuple(prompt.text for prompt in prompts)


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
