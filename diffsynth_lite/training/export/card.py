"""This file says what the model card of a LoRA tells: its base model, how to use it, how it was trained."""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from PIL import Image

from diffsynth_lite.config import Config
from diffsynth_lite.data import ROLES
from diffsynth_lite.lora.metadata import LoraFacts
from diffsynth_lite.pipelines import ModelFamily, PreviewRequest
from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily
from diffsynth_lite.pipelines.base.release_folder import find_base_model
from diffsynth_lite.releases import BaseModel, Release
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.model_card import LORA_FOLDER, ModelCard, Sample, write_model_card
from diffsynth_lite.run_folder.reading import TolerantReader
from diffsynth_lite.training.export.usage import lora_files, usage_code
from diffsynth_lite.training.optimization.optimizers import shown_name
from diffsynth_lite.training.preview_requests import EncodedPrompt, PreviewMedia, build_preview_requests
from diffsynth_lite.training.previews import Previews

logger = logging.getLogger(__name__)

_MAX_SAMPLES = 4
_MAX_SIZES = 4
_HUB_LICENCES = {"Apache-2.0": "apache-2.0", "CreativeML Open RAIL++-M": "openrail++"}
"""Those of releases that are in the hub's list; any other is ``other`` there, with its name."""
_BASE_FOLDER = "path/to/the/base/model"
"""What the code loads where the base model has no known place on the hub."""


@dataclass(frozen=True, kw_only=True)
class CardWriter:
    """Writes the model card of a run's LoRA, each time that this is exported. Equal runs get equal cards.

    Attributes:
        measures_average: whether that, and the previews, are of the moving average.
        layers: full names of those that have the LoRA.
    """

    config: Config
    family: ModelFamily
    facts: LoraFacts
    previews: Previews
    loss_name: str
    measures_average: bool
    folder: RunFolder
    layers: Sequence[str]

    def write(self, lora_folder: Path, step: int) -> None:
        """Write the card beside a LoRA; a card that cannot be written is a warning, and the run goes on."""
        try:
            write_model_card(lora_folder, self._card(lora_folder, step))
        except Exception as error:  # a card is never worth the run: a full disk, a family that says less
            logger.warning(
                "The model card in %s could not be written: %s",
                lora_folder,
                error,
                exc_info=not isinstance(error, OSError),
            )

    def _card(self, lora_folder: Path, step: int) -> ModelCard:
        is_best = lora_folder == self.folder.best_lora_folder
        is_average = self.measures_average if is_best else lora_folder == self.folder.ema_lora_folder
        drawn = max((drawn for drawn in self.previews.drawn_steps() if drawn <= step), default=0)
        samples = list(self._samples(drawn)) if drawn else []
        return ModelCard(
            header=self._header(),
            title=self.facts.title,
            summary=self._summary(step, is_average=is_average, is_best=is_best),
            triggers=self.facts.trigger_words,
            samples=samples,
            sample_caption=self._sample_caption(drawn),
            code=self._code,
            comfy_files=self._comfy_files(),
            settings=self._settings(step) | self._losses(step),
            caveats=list(self._caveats(is_average=is_average, has_samples=bool(samples))),
        )

    @cached_property
    def _request(self) -> PreviewRequest:
        """How a preview is drawn, or would be, but for its prompt."""
        if self.previews.requests:
            return self.previews.requests[0]
        # Of data that start from images, where no preview says what it starts from.
        inputs = (Image.new("RGB", (1, 1)),) if self._starts_from_images else ()
        no_prompt = EncodedPrompt(conditioning={}, negative={}, media=PreviewMedia(inputs=inputs))
        return build_preview_requests(self.config, self.family, [no_prompt])[0]

    def _header(self) -> dict[str, Any]:
        base, task = self.facts.base, self._task()
        return {
            "base_model": base.hub_id,
            "base_model_relation": "adapter" if base.hub_id else None,
            "library_name": "diffusers" if self._code is not None else None,
            **(_licence(base.release) if base.release else {}),
            "pipeline_tag": task,
            "tags": [
                *(task, "diffusers", "lora", "template:sd-lora"),
                *(self.facts.family.replace("_", "-"), "diffsynth-lite"),
            ],
            "instance_prompt": ", ".join(self.facts.trigger_words) or None,
        }

    def _task(self) -> str:
        """What the hub calls a pipeline that is used as the data are: prompts with or without pictures."""
        made = "image" if self.family.frame_step is None else "video"
        return f"{'image' if self._starts_from_images else 'text'}-to-{made}"

    @property
    def _starts_from_images(self) -> bool:
        return self.family.needs_inputs or any(
            getattr(source, role.column) or getattr(source, role.folder)
            for source in self.config.data.sources_by_key.values()
            for role in ROLES
            if role.kind is not None
        )

    def _summary(self, step: int, *, is_average: bool, is_best: bool) -> str:
        base = self.facts.base
        name = base.release.name if base.release else base.hub_id or f"a {self.facts.family} model"
        which = f"{'The moving average of a' if is_average else 'A'} {self.facts.kind}"
        best = ", where the loss on held-out data was lowest" if is_best else ""
        return (
            f"{which} for {name}, after {step} optimizer steps{best}. "
            f"Trained with diffsynth_lite {self.facts.version}."
        )

    def _samples(self, step: int) -> Iterator[Sample]:
        """The first previews of a step."""
        negative_prompt = self.previews.negative_prompt
        is_guided = self._request.guidance_scale > 1 and negative_prompt.strip()
        for place, prompt in enumerate(self.previews.prompts[:_MAX_SAMPLES]):
            before = self.previews.file(0, place)
            yield Sample(
                prompt=prompt,
                negative_prompt=negative_prompt if is_guided else None,
                before=before if before.is_file() else None,
                after=self.previews.file(step, place),
            )

    def _sample_caption(self, step: int) -> str:
        request = self._request
        frames = f", {request.num_frames} frames, of which some are shown" if request.num_frames > 1 else ""
        if request.num_layers:
            frames = f", in {request.num_layers} layers, over a checkerboard"
        return (
            f"Before training and after step {step}, from the same noise (seed {request.seed}): "
            f"{request.width}x{request.height}{frames}, {request.num_inference_steps} denoising steps, "
            f"guidance scale {request.guidance_scale:g}."
        )

    @cached_property
    def _code(self) -> str | None:
        family, location = self.previews.family, self.config.validation.model_path
        base = self.facts.base
        if self.previews.other is not None:
            # With the steps and the guidance of the model that is drawn on.
            base = find_base_model(family.releases, location or "", family.folder)
        return usage_code(
            family,
            self._request,
            base=base.hub_id or _BASE_FOLDER,
            dtype=self.config.model.dtype,
            lora=LORA_FOLDER,
            prompt=next(iter((*self.previews.prompts, *self.facts.trigger_words)), "your prompt"),
            negative_prompt=self.previews.negative_prompt,
            fps=self.previews.source.fps,
        )

    def _comfy_files(self) -> dict[str, str] | None:
        """The files, and the components that each is for; None where ComfyUI knows none of the layers."""
        if not isinstance(self.family, DiffusersFamily) or self._num_unknown_to_comfyui == len(self.layers):
            return None
        return {file: ", ".join(components) for file, components in lora_files(self.family).items()}

    @cached_property
    def _num_unknown_to_comfyui(self) -> int:
        prefix = f"{self.family.trained[0]}." if len(self.family.trained) == 1 else ""
        return sum(not self.family.lora_spelling.in_comfyui(f"{prefix}{layer}") for layer in self.layers)

    def _settings(self, step: int) -> dict[str, str]:
        facts, config = self.facts, self.config
        train, objective = config.train, config.objective
        static = "" if objective.shift_value is None else f" {objective.shift_value:g}"
        audio = "" if objective.audio_noise == "shared" else ", audio at levels of its own"
        return {
            facts.kind: f"rank {facts.rank}, alpha {facts.alpha:g}, on {', '.join(self.family.trained)}",
            **_groups(config),
            "optimizer steps": f"{step} of {train.steps}, of {train.global_batch_size} samples each",
            "learning rate": f"{train.learning_rate:g}, {train.lr_scheduler}, warm-up {train.warmup_in_run}",
            "optimizer": f"{shown_name(config)}, weight decay {train.weight_decay:g}{_options(config)}",
            "data": self._data(),
            "base weights": f"{config.model.dtype}, quantize: {config.model.quantize}",
            "mixed precision": train.mixed_precision,
            "noise levels": f"{objective.timestep_density}, shift: {objective.shift}{static}{audio}",
            "seed": str(train.seed),
        }

    def _data(self) -> str:
        """How many items there are, and of which sizes most of them."""
        by_size = sorted(self.facts.items_by_size.items(), key=lambda entry: (-entry[1], entry[0]))
        sizes = [f"{width}x{height} ({count})" for (width, height), count in by_size[:_MAX_SIZES]]
        others = f" and {len(by_size) - _MAX_SIZES} more" if len(by_size) > _MAX_SIZES else ""
        return f"{sum(self.facts.items_by_size.values())} items: {', '.join(sizes)}{others}"

    def _losses(self, step: int) -> dict[str, str]:
        """The loss on fixed noise where it was first measured, and last."""
        rows = TolerantReader(self.folder.path).rows(self.folder.metrics_file.name)
        measured = {
            row["step"]: row[self.loss_name]
            for row in rows
            if isinstance(row.get(self.loss_name), float) and row["step"] <= step
        }
        items = "held-out" if self.loss_name == "validation_loss" else "training"
        return {
            f"loss on fixed noise, {items} items, step {at}": f"{measured[at]:.4f}"
            for at in sorted(measured)
            if at in (min(measured), max(measured))
        }

    def _caveats(self, *, is_average: bool, has_samples: bool) -> Iterator[str]:
        yield from _caveats_of_base(self.facts.base, keeps_distillation=self.config.keeps_distillation)
        if self.config.model.training_adapter:
            yield "It was trained beside a frozen adapter on the base model, and is to be used without that."
        if self.config.lora.init_from:
            yield "It started from another LoRA: what is shown of before training is with that one."
        yield from self._caveats_of_use()
        if self.family.folder.files:
            yield "Weights of the base model came from a file of their own, which the code does not load."
        if (quantize := self.config.model.quantize) != "none":
            yield f"It was trained on weights in {quantize}; on others it draws a little differently."
        if self.measures_average and not is_average:
            measured = "Samples and loss are" if has_samples else "The loss is"
            yield f"{measured} of the moving average of its weights."
        if not has_samples:
            yield "It has no samples."
        elif self.previews.other is not None:
            yield f"Samples are drawn on {self.previews.source.model}, which it was not trained on."
        yield "Nothing else was measured than what stands here."

    def _caveats_of_use(self) -> Iterator[str]:
        family = self.family
        if files := re.findall(r'load_\w+\("(\S+)"\)', self._code or ""):
            yield f"The code reads {', '.join(files)}, which you provide: those of the samples are not here."
        if isinstance(family, DiffusersFamily) and not family.loaded_by_diffusers:
            readers = " and ".join(family.other_readers())
            yield f"Nothing of diffusers loads a {self.facts.kind} of this model: the file is for {readers}."
        if family.lora_spelling.is_converted_for_comfyui:
            converted = "For ComfyUI convert the file with diffsynth-lite convert --to comfyui"
            yield f"{converted}." if self.facts.kind == "LoRA" else f"{converted}, which takes a LoRA only."
        elif unknown := self._num_unknown_to_comfyui:
            yield f"ComfyUI has no names that we know for {unknown} of its {len(self.layers)} layers."


def _groups(config: Config) -> dict[str, str]:
    """What some of its layers have of their own, by how they are called."""
    own = {
        group.match: [
            f"{name.replace('_', ' ')} {value:g}"
            for name, value in group.model_dump(exclude={"match"}).items()
            if value is not None
        ]
        for group in config.lora.groups
    }
    ratio = config.lora.loraplus_ratio
    second = {"second matrices": f"{ratio:g} times the learning rate"} if ratio != 1 else {}
    return {f"of {name}": ", ".join(facts) for name, facts in own.items()} | second


def _options(config: Config) -> str:
    """What the optimizer was told beside."""
    return "".join(f", {name} {value}" for name, value in config.train.optimizer_options.items())


def _licence(release: Release) -> Mapping[str, str]:
    """Of a base model, in the hub's words."""
    if known := _HUB_LICENCES.get(release.licence):
        return {"license": known}
    name = re.sub("[^a-z0-9]+", "-", release.licence.lower()).strip("-")
    return {
        "license": "other",
        "license_name": name,
        "license_link": f"https://huggingface.co/{release.hub_id}",
    }


def _caveats_of_base(base: BaseModel, *, keeps_distillation: bool) -> Iterator[str]:
    if base.hub_id is None:
        yield (
            "Where the base model is on the hub is not known here, nor its licence: name both in the header "
            "of this card, as base_model and license."
        )
    elif base.release is None:
        yield "The licence of the base model is not known here: name it in the header, as license."
    else:
        doubt = ", which we could not confirm" if "licence" in base.release.unconfirmed else ""
        yield (
            f"The licence is that of the base model: {base.release.licence}{doubt}. What it asks of "
            "models that are made from that one holds for this."
        )
    if base.release and base.release.distilled and not keeps_distillation:
        yield (
            f"The base model was distilled to {base.release.distilled}. Training does not keep that, so that "
            "it may need more steps, and guidance."
        )
