"""This file describes a LoRA to its users: the metadata of its files, and its model card."""

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from PIL import Image

from diffsynth_lite import __version__
from diffsynth_lite.config import Config
from diffsynth_lite.data.captions import TagCounts
from diffsynth_lite.data.records import ROLES
from diffsynth_lite.lora.metadata import LoraFacts, SourceFacts
from diffsynth_lite.pipelines import ModelFamily, PreviewRequest
from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily
from diffsynth_lite.pipelines.base.diffusion_family import DiffusionFamily
from diffsynth_lite.pipelines.base.release_folder import find_base_model
from diffsynth_lite.redaction import redacted
from diffsynth_lite.releases import BaseModel, Release
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.model_card import LORA_FOLDER, ModelCard, Sample, write_model_card
from diffsynth_lite.run_folder.reading import TolerantReader
from diffsynth_lite.training.checkpoint.resume import RunFingerprint
from diffsynth_lite.training.data_settings import data_sources, learned_sources
from diffsynth_lite.training.encoding.run_encoding import TrainingData
from diffsynth_lite.training.export.usage import usage_code
from diffsynth_lite.training.layer_groups import adapter_kind, default_size
from diffsynth_lite.training.optimization.optimizers import shown_arguments, shown_name
from diffsynth_lite.training.preview_requests import any_preview
from diffsynth_lite.training.previews import Previews

logger = logging.getLogger(__name__)

_MAX_SAMPLES = 4
_MAX_SIZES = 4
_HUB_LICENCES = {"Apache-2.0": "apache-2.0", "CreativeML Open RAIL++-M": "openrail++"}
"""Licences of releases in the hub's list; any other is ``other`` there, with its name."""
_BASE_FOLDER = "path/to/the/base/model"
"""Loaded by the code where the base model has no known place on the hub."""


@dataclass(frozen=True, kw_only=True)
class CardWriter:
    """Writes the model card of a run's LoRA, each time that this is exported. Equal runs get equal cards.

    Attributes:
        measures_average: whether the loss on fixed noise, and the previews, are of the moving average.
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
        """Write the card of a LoRA; a card that cannot be written is a warning, and the run continues."""
        try:
            write_model_card(lora_folder, self._card(lora_folder, step))
        except (
            Exception
        ) as error:  # a failed card must not end the run: a full disk, a family with less metadata
            logger.warning(
                "The model card in %s could not be written: %s",
                lora_folder,
                error,
                exc_info=not isinstance(error, OSError),
            )

    def _card(self, lora_folder: Path, step: int) -> ModelCard:
        is_best = lora_folder == self.folder.best_lora_folder
        is_average = self.measures_average if is_best else lora_folder == self.folder.ema_lora_folder
        newest = max((shown for shown in self.previews.generated_steps() if shown <= step), default=0)
        samples = list(self._samples(newest)) if newest else []
        return ModelCard(
            header=self._header(),
            title=self.facts.title,
            summary=self._summary(step, is_average=is_average, is_best=is_best),
            triggers=self.facts.trigger_words,
            samples=samples,
            sample_caption=self._sample_caption(newest),
            code=self._code,
            comfy_files=self._comfy_files(),
            settings=self._settings(step) | self._losses(step),
            caveats=list(self._caveats(is_average=is_average, has_samples=bool(samples))),
        )

    @cached_property
    def _request(self) -> PreviewRequest:
        """How a preview is generated, or would be, but for its prompt."""
        if self.previews.requests:
            return self.previews.requests[0]
        # For data that start from images, where no preview has one.
        inputs = (Image.new("RGB", (1, 1)),) if self._starts_from_images else ()
        return replace(any_preview(self.config, self.family), inputs=inputs)

    def _header(self) -> dict[str, Any]:
        base, made = self.facts.base, "image" if self.family.frame_step is None else "video"
        # The hub's name for the task: from prompts with or without images.
        task = f"{'image' if self._starts_from_images else 'text'}-to-{made}"
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
        measure = "score was highest" if self.config.validation.scores else "loss on held-out data was lowest"
        best = f", where the {measure}" if is_best else ""
        usage = f" {self.facts.usage}" if self.facts.usage else ""
        return (
            f"{which} for {name}, after {step} optimizer steps{best}. "
            f"Trained with diffsynth_lite {self.facts.version}.{usage}"
        )

    def _samples(self, step: int) -> Iterator[Sample]:
        """The first previews of a step."""
        for place, preview in enumerate(self.previews.requests[:_MAX_SAMPLES]):
            is_guided = preview.guidance_scale > 1 and preview.negative_prompt.strip()
            before = self.previews.file(0, place)
            yield Sample(
                prompt=preview.prompt,
                negative_prompt=preview.negative_prompt if is_guided else None,
                before=before if before.is_file() else None,
                after=self.previews.file(step, place),
            )

    def _sample_caption(self, step: int) -> str:
        request = self._request
        frames = f", {request.num_frames} frames, of which some are shown" if request.num_frames > 1 else ""
        if self.previews.strengths:
            frames = f", at strengths {', '.join(f'{one:g}' for one in self.previews.strengths)}"
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
            # With the steps and the guidance of the model of the previews.
            base = find_base_model(family.releases, location or "", family.folder)
        return usage_code(
            family,
            self._request,
            base=base.hub_id or _BASE_FOLDER,
            dtype=self.config.model.dtype,
            lora=LORA_FOLDER,
            prompt=next(filter(None, (self._request.prompt, *self.facts.trigger_words)), "your prompt"),
            negative_prompt=self._request.negative_prompt,
            fps=self._request.fps,
        )

    def _comfy_files(self) -> dict[str, str] | None:
        """The components of each file; None where ComfyUI knows none of the layers."""
        if not isinstance(self.family, DiffusersFamily) or self._num_unknown_to_comfyui == len(self.layers):
            return None
        return {file: ", ".join(components) for file, components in self.family.lora_files.by_name.items()}

    @cached_property
    def _num_unknown_to_comfyui(self) -> int:
        prefix = f"{self.family.trained[0]}." if len(self.family.trained) == 1 else ""
        return sum(
            not self.family.lora_files.spelling.in_comfyui(f"{prefix}{layer}") for layer in self.layers
        )

    def _settings(self, step: int) -> dict[str, str]:
        facts, config = self.facts, self.config
        train, objective = config.train, config.objective
        static = "" if objective.shift_value is None else f" {objective.shift_value:g}"
        audio = "" if objective.audio_noise == "shared" else ", audio at levels of its own"
        options = "".join(f", {name} {value}" for name, value in train.optimizer_options.items())
        return {
            facts.kind: f"rank {facts.rank}, alpha {facts.alpha:g}, on {', '.join(self.family.trained)}",
            **_groups(config),
            "optimizer steps": f"{step} of {train.steps}, of {train.global_batch_size} samples each",
            "learning rate": f"{train.learning_rate:g}, {train.lr_scheduler}, warm-up {train.warmup_in_run}",
            "optimizer": f"{shown_name(config)}, weight decay {train.weight_decay:g}{options}",
            "data": self._data(),
            "base weights": f"{config.model.dtype}, quantize: {config.model.quantize}",
            "mixed precision": train.mixed_precision,
            "noise levels": f"{objective.timestep_density}, shift: {objective.shift}{static}{audio}",
            "seed": str(train.seed),
            **{
                f"slider of {neutral}": f"{positive} at 1, {negative} at -1"
                for neutral, positive, negative in facts.slider
            },
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
            yield "It was trained with a frozen adapter on the base model, and is to be used without that."
        if self.config.lora.init_from:
            yield "It started from another LoRA: samples from before training are with that one."
        yield from self._caveats_of_use()
        if self.family.folder.files:
            yield "Weights of the base model came from a separate file, which the code does not load."
        if (quantize := self.config.model.quantize) != "none":
            yield f"It was trained on weights in {quantize}; on others its results differ a little."
        if self.measures_average and not is_average:
            measured = "Samples and loss are" if has_samples else "The loss is"
            yield f"{measured} of the moving average of its weights."
        if not has_samples:
            yield "It has no samples."
        elif self.previews.other is not None:
            yield f"Samples were generated on {self.previews.model}, which it was not trained on."
        yield "Nothing else was measured."

    def _caveats_of_use(self) -> Iterator[str]:
        family = self.family
        if files := re.findall(r'load_\w+\("(\S+)"\)', self._code or ""):
            yield f"The code reads {', '.join(files)}, which you provide: those of the samples are not here."
        if isinstance(family, DiffusersFamily) and not family.lora_files.loaded_by_diffusers:
            readers = " and ".join(family.lora_files.other_readers())
            yield f"Nothing of diffusers loads a {self.facts.kind} of this model: the file is for {readers}."
        if family.lora_files.spelling.is_converted_for_comfyui:
            converted = "For ComfyUI convert the file with diffsynth-lite convert --to comfyui"
            yield f"{converted}." if self.facts.kind == "LoRA" else f"{converted}, which takes a LoRA only."
        elif unknown := self._num_unknown_to_comfyui:
            yield f"ComfyUI has no names that we know for {unknown} of its {len(self.layers)} layers."


def _groups(config: Config) -> dict[str, str]:
    """Settings of layer groups, by their patterns."""
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


def _licence(release: Release) -> Mapping[str, str]:
    """Keys of the header for a base model's licence."""
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
            f"The licence of the base model is {base.release.licence}{doubt}. Its terms for derived models "
            "apply to this one."
        )
    if base.release and base.release.distilled and not keeps_distillation:
        yield (
            f"The base model was distilled to {base.release.distilled}. Training does not keep that, so that "
            "it may need more steps, and guidance."
        )


def gather_lora_facts(
    config: Config, family: ModelFamily, encoded: TrainingData, fingerprint: RunFingerprint
) -> LoraFacts:
    """The facts of a run, with secrets masked: its name, and the settings that change numbers."""
    data, squares = config.data, [(edge, edge) for edge in config.data.resolutions]
    return LoraFacts(
        version=__version__,
        name=redacted(config.logging.run_name),
        family=config.model.family.rpartition(".")[2],
        base=find_base_model(family.releases, config.model.path, family.folder),
        contract=hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest(),
        trigger_words=redacted(_trigger_words(config, encoded)),
        kind=adapter_kind(config).title,
        rank=config.lora.rank,
        alpha=default_size(config).alpha,
        resolution=max(data.given_sizes or squares, key=lambda size: size[0] * size[1]),
        items_by_size=_items_by_size(encoded),
        sources=_sources(config, encoded),
        sigma_range=(config.objective.sigma_min, config.objective.sigma_max),
        prediction_type=_prediction_type(family),
        training=_training(config),
        of_family=family.lora_metadata,
        slider=redacted(_slider(config)),
    )


def _slider(config: Config) -> tuple[tuple[str, str, str], ...]:
    slider = config.objective.slider
    triples = () if slider is None else slider.triples
    return tuple((one.neutral, one.positive, one.negative) for one in triples)


def _trigger_words(config: Config, encoded: TrainingData) -> tuple[str, ...]:
    """The trigger words of the config; where it has none, the tags of all items."""
    learned = [source for source in config.data.sources_by_key.values() if not source.preserve]
    given = [source.trigger for source in learned if source.trigger]
    if given:
        return tuple(dict.fromkeys(given))
    places, counts = learned_sources(config), encoded.tag_counts
    if config.objective.slider is not None:
        return ()
    first, *others = (counts[place].in_all for place in counts if place in places)
    return tuple(tag for tag in first if all(tag in other for other in others))


def _items_by_size(encoded: TrainingData) -> dict[tuple[int, int], int]:
    counts: dict[tuple[int, int], int] = {}
    for place, count in encoded.items.items_by_bucket.items():
        bucket = encoded.items.buckets[place]
        size = bucket.width, bucket.height
        counts[size] = counts.get(size, 0) + count
    return counts


def _sources(config: Config, encoded: TrainingData) -> dict[str, SourceFacts]:
    names, sources = config.data.sources_by_key, data_sources(config)
    counts = encoded.items.items_by_source
    return {
        name: SourceFacts(
            num_items=counts.get(place, 0),
            passes=float(source.passes),
            tag_counts=redacted(_tag_counts(encoded.tag_counts.get(place), source.trigger)),
            is_preserved=source.preserve,
        )
        for place, (name, source) in enumerate(zip(names, sources, strict=True))
    }


def _tag_counts(counted: TagCounts | None, trigger: str | None) -> dict[str, int]:
    """The most frequent first, the trigger before equally frequent ones: readers show the first few."""
    by_tag = counted.by_tag if counted else {}
    return dict(sorted(by_tag.items(), key=lambda entry: (-entry[1], entry[0] != trigger)))


def _prediction_type(family: ModelFamily) -> str | None:
    if not isinstance(family, DiffusionFamily):
        return None
    return "v" if family.prediction_type == "v_prediction" else str(family.prediction_type)


def _training(config: Config) -> dict[str, Any]:
    """Settings by their names in sd-scripts."""
    train, data, objective = config.train, config.data, config.objective
    is_min_snr, is_static = objective.loss_weighting == "min_snr", objective.shift == "static"
    return {
        "seed": train.seed,
        "max_train_steps": train.steps,
        "total_batch_size": train.global_batch_size,
        "learning_rate": train.learning_rate,
        "lr_scheduler": train.lr_scheduler,
        "lr_warmup_steps": train.warmup_in_run,
        "optimizer": shown_arguments(config),
        "max_grad_norm": train.max_grad_norm,
        "mixed_precision": train.mixed_precision,
        "network_dropout": config.lora.dropout or None,
        "caption_dropout_rate": data.caption_dropout,
        "shuffle_caption": data.tag_shuffles > 0,
        "keep_tokens": data.keep_tags,
        "random_crop": data.crop == "random",
        "min_snr_gamma": objective.min_snr_gamma if is_min_snr else None,
        "discrete_flow_shift": objective.shift_value if is_static else None,
    }
