"""This file scores LoRAs after a run, those of runs and others, with what their own scores are made of."""

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace

import torch

from diffsynth_lite.config import Config
from diffsynth_lite.errors import UserError
from diffsynth_lite.files import file_fingerprint
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.loras import SUFFIX, copy_by_step, lora_copies
from diffsynth_lite.sampling.request import GivenLora
from diffsynth_lite.sampling.session import SampleSession
from diffsynth_lite.scores.record import BASE_STEP, ScoredColumn
from diffsynth_lite.training.encoding.run_encoding import encode_scored
from diffsynth_lite.training.export.best_lora import follow_scores
from diffsynth_lite.training.previews import Previews, model_name
from diffsynth_lite.training.scoring.job import ImageColumn, ScoreJob, base_settings, scored_images

logger = logging.getLogger(__name__)


def score_runs(runs: Sequence[tuple[RunFolder, Config]], others: Sequence[GivenLora]) -> list[int | None]:
    """Score the base and the LoRAs that runs kept of their steps, and others next to those of the first run.

    Images that are there are not generated again, nor scores of steps computed again. The best LoRA of each
    run becomes that of the recommended step.

    Args:
        runs: each with its config.

    Returns:
        Of each run the step whose LoRA is its best one; None where there is none.

    Raises:
        UserError: something that the user can fix, before weights load wherever that is possible; runs whose
            scores do not compare, before images are generated.
    """
    (first, of_first), *rest = runs
    for folder, config in rest:
        _require_equal(first, folder, base_settings(of_first), base_settings(config))
    with ExitStack() as held:
        scorers = [held.enter_context(closing(_RunScorer(*run))) for run in runs]
        for scorer in scorers[1:]:
            _require_equal(first, scorer.folder, scorers[0].job.decided_by, scorer.job.decided_by)
        return [scorer.score(others if scorer is scorers[0] else ()) for scorer in scorers]


def _require_equal(
    first: RunFolder, other: RunFolder, of_first: Mapping[str, object], of_other: Mapping[str, object]
) -> None:
    if differs := [name for name, value in of_first.items() if of_other[name] != value]:
        raise UserError(
            f"RUN: {first.path} and {other.path} differ in {differs[0]}, so their scores do not compare; "
            "give settings of validation for both, as key=value, or score LoRAs of one with the other: "
            f"diffsynth-lite score {first.path} --lora {other.path}@STEP"
        )


class _RunScorer:
    """Scores the LoRAs of one run; the model is loaded for what has no images."""

    def __init__(self, folder: RunFolder, config: Config) -> None:
        if config.validation.model_path is not None:
            raise UserError(
                f"validation.model_path: the previews of {folder.path} are another model's, whose images are "
                "scored only while it trains (validation.scores); null scores it on its own model"
            )
        self.folder, self._is_by_scores = folder, config.best_by == "scores"
        validation = config.validation.model_copy(update={"scores": True, "prompts": []})
        output = config.output.model_copy(update={"dir": str(folder.path)})  # it may have moved
        config = config.model_copy(update={"validation": validation, "output": output})
        self._session = SampleSession.open(config, folder)
        self._config, family = self._session.config, self._session.family
        family.folder.download_weights(family.components)
        prompts, requests = encode_scored(self._config, family, self._session.accelerator)
        previews = Previews(
            family=family,
            folder=folder.scored_folder,
            requests=requests,
            model=model_name(family, config.model.path),
            sampler=family.sampler,
            vae_dtype=getattr(torch, config.model.vae_dtype),
        )
        self._images = scored_images(config, folder, previews, prompts)
        self.job = ScoreJob.of(config, folder, prompts, self._images)
        self._export = (folder.ema_lora_folder if config.scores_average else folder.lora_folder).name

    def close(self) -> None:
        """Free the model."""
        self._session.close()

    def score(self, others: Sequence[GivenLora]) -> int | None:
        """Score what has no scores, and have the best LoRA follow; its step, None where there is none."""
        columns, new = [ImageColumn.of(self._images.previews, BASE_STEP)], []
        for column, shown, lora in self._columns(others):
            columns.append(column)
            if is_missing := shown.are_missing(column.step or BASE_STEP):
                logger.info("Generating: %s.", column.name if column.step is None else f"step {column.step}")
                generated = self._session.generate_requests(shown.requests, [lora])
                shown.save(generated, column.step or BASE_STEP, [(lora.name, lora.weight)])
            # Under the name of a LoRA of others another file may have been scored.
            new += [column.name] if is_missing or column.step is None else []
        for shown in (self._images.previews, self._images.again):
            if shown.are_missing(BASE_STEP):
                logger.info("Generating: base.")
                shown.save(self._session.generate_requests(shown.requests, []), BASE_STEP, [])
        self.close()
        self.job.update(columns, again=new)
        if not self._config.output.keep_best:
            return None
        kept = None
        with suppress(UserError):  # there is no best one, or no copy of its step
            kept = copy_by_step(self.folder, self.folder.best_lora_folder).step
        return follow_scores(self.folder, self._export, kept=kept, sets_aside=self._is_by_scores)

    def _columns(self, others: Sequence[GivenLora]) -> Iterator[tuple[ImageColumn, Previews, GivenLora]]:
        """The LoRAs that the run kept of its steps, and others, whose images are in folders of their own."""
        previews, names = self._images.previews, set[str]()
        for copy in lora_copies(self.folder.checkpoints_folder, self._export):
            lora = GivenLora(place=copy.path, name=f"step-{copy.step:08d}", weight=1.0)
            yield ImageColumn.of(previews, copy.step), previews, lora
        for lora in others:
            files = sorted(lora.place.glob(f"*{SUFFIX}")) if lora.place.is_dir() else [lora.place]
            decides = [lora.weight, *map(file_fingerprint, files)]
            digest = hashlib.blake2b(repr(decides).encode(), digest_size=6).hexdigest()
            shown = replace(previews, folder=previews.folder / digest)
            name = lora.name if lora.weight == 1 else f"{lora.name}:{lora.weight:g}"
            if name in names or name.isdecimal() or name == ScoredColumn.name(BASE_STEP):
                name += f" ({digest})"
            names.add(name)
            yield ImageColumn.of(shown, BASE_STEP, name=name), shown, lora
