"""The whole config: its sections, and what is checked between them."""

import math
import os
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, TypeAlias, get_type_hints

from diffsynth_lite.config.data import DataSettings, SourceSettings
from diffsynth_lite.config.model import LoraSettings, ModelSettings, ObjectiveSettings
from diffsynth_lite.config.run import LoggingSettings, OutputSettings, ResumeSettings, ValidationSettings
from diffsynth_lite.config.settings import Problem, Settings
from diffsynth_lite.config.train import ADAM_SETTINGS, MemorySettings, TrainSettings

Schema: TypeAlias = dict[str, Any]
"""The JSON schema of one setting, as pydantic makes it."""


EXPECTED_PACKAGES = ("diffsynth_lite", "torch", "bitsandbytes", "prodigyopt", "schedulefree")
"""Of the modules that settings usually name: this one, torch, and those of the extras for optimizers."""
NO_DATA = Problem(
    ("data.path", "data.dataset"),
    "is required; name a folder (data.path) or a dataset (data.dataset), or list data.sources",
)
_OF_GENERATING = "negative_prompt num_inference_steps guidance_scale"
"""Settings of ``validation`` that decide how images are generated."""


class Config(Settings):
    """A checked config, section by section."""

    model: ModelSettings
    lora: LoraSettings = LoraSettings()
    data: DataSettings = DataSettings()
    objective: ObjectiveSettings = ObjectiveSettings()
    train: TrainSettings = TrainSettings()
    memory: MemorySettings = MemorySettings()
    validation: ValidationSettings = ValidationSettings()
    logging: LoggingSettings = LoggingSettings()
    output: OutputSettings
    resume: ResumeSettings = ResumeSettings()

    @property
    def needs_empty_captions(self) -> bool:
        """Whether an empty caption of each item that is trained on is encoded next to its own."""
        return self.data.caption_dropout > 0 or self.objective.guidance_target is not None

    @property
    def holds_out(self) -> bool:
        """Whether the fixed-noise loss is measured on items that are not trained on."""
        return self.validation.data is not None or self.data.hold_out > 0

    @property
    def best_by(self) -> Literal["loss", "scores"] | None:
        """What decides which LoRA is kept as the best one; None where none is."""
        if not (self.output.keep_best and self.holds_out):
            return None
        return "scores" if self.validation.scores else "loss"

    @property
    def score_every_steps(self) -> int | None:
        """Steps between those that are both evaluated and saved; None where only the last one is."""
        evaluated = self.validation.every_steps
        return None if evaluated is None else math.lcm(evaluated, self.output.checkpoint_every_steps)

    @property
    def scores_average(self) -> bool:
        """Whether scores are of the averaged weights of a step."""
        return self.validation.use_ema and self.train.ema_decay is not None

    @property
    def generates_data(self) -> bool:
        """Whether the base model generates the images that are trained on, from the prompts of a slider."""
        return self.objective.slider is not None and not self.data.sources_by_key

    @property
    def keeps_distillation(self) -> bool:
        """Whether what trains on a distilled model is kept from undoing its distillation."""
        return self.objective.guidance_target is not None or self.model.training_adapter is not None

    @property
    def code_of_others(self) -> dict[str, str]:
        """Modules and classes that settings name and that come with none of these packages, by key."""
        named = {"model.family": self.model.family, "train.optimizer": self.train.optimizer}
        expected = tuple(f"{package}." for package in EXPECTED_PACKAGES)
        return {key: path for key, path in named.items() if "." in path and not path.startswith(expected)}

    def without_effect(self) -> Iterator[Problem]:
        """Settings that were changed but do nothing, as their part is off, or less than was asked for."""
        train, data, validation, trackers = self.train, self.data, self.validation, self.logging.trackers
        is_auto = self.memory.auto
        offload = train.use_gradient_checkpointing_offload or self.memory.save_attention == "park" or is_auto
        streams = self.memory.stream_blocks != 0 or is_auto
        visits = streams or self.memory.stream_text_encoder
        losses = self.objective.slider is None
        previews, loss = bool(validation.prompts), losses and validation.loss_items > 0
        generates = previews or validation.scores
        watched = generates or loss or (losses and validation.item_losses > 0)
        checkpointing = train.use_gradient_checkpointing or is_auto
        is_guided = not generates or validation.guidance_scale > 1
        of_previews = "model_path num_frames width height"
        of_prompts = "inputs last_frames control inpaint_masks faces"
        parts = [
            (offload or visits, "memory", "min_bytes", "while the offload is off and nothing is streamed"),
            (offload or streams, "memory", "host_gib", "while the offload is off and stream_blocks is 0"),
            (offload, "memory", "resident_blocks prefetched_blocks", "while the offload is off"),
            (visits, "memory", "stream_slots", "while nothing is streamed"),
            (
                self.memory.stream_blocks == "auto" or is_auto,
                "memory",
                "device_gib",
                "unless memory.auto is on, or memory.stream_blocks is auto",
            ),
            (data.cache, "data", "num_workers", "while data.cache is off: the main process encodes"),
            (checkpointing, "memory", "skip_dead_ops", "while train.use_gradient_checkpointing is off"),
            (train.compile == "off", "memory", "skip_dead_ops", "while train.compile compiles the blocks"),
            (train.compile != "off", "train", "compile_cache", "while train.compile is off"),
            (train.is_adam, "train", " ".join(ADAM_SETTINGS), f"with train.optimizer {train.optimizer}"),
            (data.audio, "data", "silent_clips", "while data.audio is off"),
            (
                data.names_controls or bool(validation.control),
                "data",
                "control_downscale",
                "without control_dir or control_column",
            ),
            (data.audio, "objective", "audio_loss_weight", "while data.audio is off"),
            (data.tag_shuffles > 0, "data", "tag_separator keep_tags", "while data.tag_shuffles is 0"),
            (data.on_bad_item == "skip", "data", "max_bad_ratio", "while data.on_bad_item is error"),
            (previews, "validation", of_prompts, "without validation.prompts"),
            (generates or self.generates_data, "validation", _OF_GENERATING, "without validation.prompts"),
            (generates, "validation", of_previews, "without validation.prompts"),
            (is_guided, "validation", "negative_prompt", "while validation.guidance_scale is at most 1"),
            (validation.scores, "validation", "plain_prompts score_models", "without validation.scores"),
            (loss or validation.scores, "validation", "data", "while validation.loss_items is 0"),
            (watched, "validation", "every_steps", "without prompts, loss_items and item_losses"),
            (self.holds_out and (loss or validation.scores), "output", "keep_best", "without held-out items"),
            (train.ema_decay is not None, "validation", "use_ema", "without train.ema_decay"),
            (bool(trackers), "logging", "project", "without logging.trackers"),
            ("wandb" in trackers, "logging", "wandb_mode", "without wandb in logging.trackers"),
        ]
        for is_on, section, keys, reason in parts:
            for key in keys.split() if not is_on else ():
                if not getattr(self, section).is_default(key):
                    yield Problem((f"{section}.{key}",), f"has no effect {reason}")
        if train.warmup_in_run < train.warmup_steps:
            message = (
                f"{train.warmup_steps} is shortened to {train.warmup_in_run}, as train.steps is {train.steps}"
            )
            yield Problem(("train.warmup_steps",), message)

    def conflicts(self) -> Iterator[Problem]:
        for key, off in (("policy", "all"), ("save_attention", "no")):
            value = getattr(self.memory, key)
            if value != off and not self.train.use_gradient_checkpointing:
                yield Problem(
                    (f"memory.{key}", "train.use_gradient_checkpointing"),
                    f"{value} is a way of checkpointing, which train.use_gradient_checkpointing turns off; "
                    f"turn it on, or set memory.{key}: {off}",
                )
        if self.model.dtype == "float16" and self.train.mixed_precision == "no":
            # As small as on a clip of 81 x 480 x 832, gradients of a tiny Wan were 28 % off; in bf16, 0.5 %.
            yield Problem(
                ("model.dtype", "train.mixed_precision"),
                "float16 rounds small gradients to 0 while train.mixed_precision is no; set that to bf16, or "
                "model.dtype to bfloat16",
            )
        if self.train.compile != "off" and self.memory.save_attention != "no":
            yield Problem(
                ("memory.save_attention", "train.compile"),
                f"{self.memory.save_attention} needs to see attention run, which it cannot in blocks that "
                "train.compile compiles; set memory.save_attention: no, or train.compile: off",
            )
        yield from self._attention_conflicts()
        if self.train.context_parallel > 1:
            yield from self._context_conflicts()
        yield from self._held_out_conflicts()
        yield from self._slider_conflicts()
        yield from self._preview_model_conflicts()
        yield from self._score_conflicts()
        yield from self._audio_conflicts()
        if self.train.compile != "off" and self.memory.shard_base != "no":
            yield Problem(
                ("memory.shard_base", "train.compile"),
                f"memory.shard_base {self.memory.shard_base}: compiled blocks cannot be sharded; set "
                "train.compile: off, or memory.shard_base: no",
            )
        if self.train.optimizer == "prodigy":
            yield from self._prodigy_conflicts()
        if _is_same_folder(self.data.cache_dir, self.output.dir):
            message = "data.cache_dir is output.dir, in which nothing else may be; name another folder"
            yield Problem(("data.cache_dir", "output.dir"), message)
        for key, source in self.data.sources_by_key.items():
            yield from self._folder_conflicts(f"{key}.path", source.path)

    def _held_out_conflicts(self) -> Iterator[Problem]:
        if self.data.hold_out > 0 and self.validation.data is not None:
            message = f"validation.data {self.validation.data} has the held-out items; keep one of the two"
            yield Problem(("data.hold_out", "validation.data"), message)
        if self.train.stop_after is not None and not self.validation.scores:
            needed = {
                "validation.every_steps": self.validation.every_steps is not None,
                "data.hold_out": self.holds_out,
                "validation.loss_items": self.validation.loss_items > 1,
            }
            if lacking := [key for key, is_there in needed.items() if not is_there]:
                message = f"{self.train.stop_after} needs losses of single held-out items; set {lacking[0]}"
                yield Problem(("train.stop_after", lacking[0]), message)

    def _preview_model_conflicts(self) -> Iterator[Problem]:
        """Of a run whose previews are another model's."""
        if self.validation.model_path is None:
            return
        is_split = {
            "memory.shard_base": self.memory.shard_base != "no",
            "train.context_parallel": self.train.context_parallel > 1,
        }
        for key in (key for key, is_on in is_split.items() if is_on):
            yield Problem(
                ("validation.model_path", key),
                f"is used by one process, which cannot hold what {key} has several share; leave it out, "
                "and generate with `diffsynth-lite sample`",
            )

    def _score_conflicts(self) -> Iterator[Problem]:
        """Of a run whose steps are scored."""
        validation, steps, saved = self.validation, self.train.steps, self.output.checkpoint_every_steps
        if not validation.scores:
            return
        if not self.holds_out:
            yield Problem(
                ("validation.scores", "validation.data"),
                "compares with items that are not trained on, and none are held out; set data.hold_out: 0.1, "
                "name a folder in validation.data, or set it to false",
            )
        if self.data.sealed is not None:
            yield Problem(
                ("validation.scores", "data.sealed"),
                "compares with the files of items, which a sealed cache does not have; set one of them off",
            )
        if (self.score_every_steps or steps) >= steps:
            yield Problem(
                ("validation.every_steps", "validation.scores", "output.checkpoint_every_steps"),
                "with validation.scores, steps that are both evaluated and saved are scored: here only the "
                f"last is; set it to {saved}, and output.checkpoint_every_steps to less than {steps}",
            )

    def _slider_conflicts(self) -> Iterator[Problem]:
        """Settings of other objectives, and of data that a slider does not look at."""
        if self.objective.slider is None:
            if not self.data.sources_by_key:
                yield NO_DATA
            return
        off = {"objective": ["guidance_target"], "validation": ["data", "scores"], "memory": ["shard_base"]}
        off["data"] = ["caption_dropout", "audio", "sealed", "trigger", "tag_shuffles", "hold_out"]
        off["data"] += ["mask_dir", "mask_column", "preserve", "loss_weight", "sources", "repeats", "weight"]
        if self.generates_data:
            off["data"] = [*off["data"], *SourceSettings.model_fields, "cache", "crops_per_item"]
        for section, names in off.items():
            for name in dict.fromkeys(names):
                if not getattr(self, section).is_default(name):
                    key = f"{section}.{name}"
                    message = "does not go with objective.slider, which learns from prompts; remove it"
                    yield Problem((key, "objective.slider"), message)

    def _audio_conflicts(self) -> Iterator[Problem]:
        if self.objective.audio_noise != "shared" and not self.data.audio:
            yield Problem(
                ("objective.audio_noise", "data.audio"),
                f"{self.objective.audio_noise} has no effect while data.audio is off; remove it, or set "
                "data.audio: true",
            )

    def _attention_conflicts(self) -> Iterator[Problem]:
        """Of a run that names its kernel of attention."""
        model, key = self.model, "model.attention"
        conflicts = (
            ("memory.save_attention", self.memory.save_attention != "no" and not model.saves_attention),
            ("train.deterministic", self.train.deterministic and model.has_own_attention),
            ("train.context_parallel", self.train.context_parallel > 1),
        )
        reasons = (
            "save_attention saves what torch's fused kernels compute; set it to no",
            "train.deterministic orders the sums of torch's kernels only; set it to false",
            "context parallelism computes attention in its own way; set train.context_parallel: 1",
        )
        for (other, is_there), reason in zip(conflicts, reasons, strict=True):
            if model.attention is not None and is_there:
                yield Problem((key, other), f"{model.attention}: {reason}, or {key}: null")

    def _context_conflicts(self) -> Iterator[Problem]:
        """Of a run that splits sequences."""
        degree, kind = self.train.context_parallel, self.train.context_parallel_kind
        if self.lora.dropout > 0:
            yield Problem(
                ("train.context_parallel", "lora.dropout"),
                f"{degree}: each device would draw the masks of lora.dropout {self.lora.dropout} for its own "
                "tokens, which are others than those of one device; set lora.dropout: 0, or "
                "train.context_parallel: 1",
            )
        if self.train.compile != "off":
            yield Problem(
                ("train.context_parallel", "train.compile"),
                f"{degree}: compiled blocks cannot exchange tokens; set train.compile: off, or "
                "train.context_parallel: 1",
            )
        if self.train.mixed_precision == "bf16" and self.model.dtype != "bfloat16":
            yield Problem(
                ("train.context_parallel", "model.dtype"),
                f"{degree}: next to train.mixed_precision bf16 a base in {self.model.dtype} gives attention "
                "inputs of two precisions, which its backward pass cannot take; set model.dtype: bfloat16, "
                "or train.mixed_precision: no",
            )
        if kind == "ring" and self.memory.save_attention != "no":
            yield Problem(
                ("memory.save_attention", "train.context_parallel_kind"),
                f"{self.memory.save_attention} has no effect with train.context_parallel_kind ring, whose "
                "attention is computed part by part; set memory.save_attention: no, or the kind to ulysses",
            )

    def _prodigy_conflicts(self) -> Iterator[Problem]:
        reason = "prodigy finds one learning rate for all weights; leave it out, or take another optimizer"
        if self.lora.loraplus_ratio != 1:
            message = f"lora.loraplus_ratio {self.lora.loraplus_ratio:g}: {reason}"
            yield Problem(("lora.loraplus_ratio", "train.optimizer"), message)
        for place, group in enumerate(self.lora.groups):
            if group.learning_rate is not None:
                key = f"lora.groups[{place}].learning_rate"
                yield Problem((key, "train.optimizer"), f"{key} {group.learning_rate:g}: {reason}")

    def _folder_conflicts(self, key: str, folder: str | None) -> Iterator[Problem]:
        if _is_same_folder(self.validation.data, folder):
            message = f"validation.data is {key}, so nothing is held out; name another folder, or remove it"
            yield Problem(("validation.data", key), message)
        if _is_same_folder(self.output.dir, folder):
            message = f"output.dir is {key}; previews would mix with the data, so name another folder"
            yield Problem(("output.dir", key), message)
        if _is_same_folder(self.data.cache_dir, folder):
            yield Problem(("data.cache_dir", key), f"data.cache_dir is {key}; name another folder")


@cache
def setting_schemas() -> dict[str, Any]:
    """The JSON schema of each class of settings, by its name; pydantic takes some 30 ms to make them."""
    schemas: dict[str, Any] = Config.model_json_schema()["$defs"]
    return schemas


@cache
def section_types() -> dict[str, type[Settings]]:
    """The class of every section, by its name in the yaml."""
    hints = get_type_hints(Config)
    return {name: hints[name] for name in Config.model_fields}


def without_null(schema: Schema) -> Schema:
    """The schema of the values of a setting other than null."""
    return next((option for option in schema.get("anyOf", ()) if option != {"type": "null"}), schema)


def takes_null(schema: Schema) -> bool:
    """Whether a setting may have no value."""
    return {"type": "null"} in schema.get("anyOf", ())


def words_instead(schema: Schema) -> list[str]:
    """The words that may be in place of the list or number that a setting else holds; mostly none."""
    value = without_null(schema)
    words: list[str] = []
    for option in schema.get("anyOf", ()):
        if option is not value:
            words += option.get("enum", [option["const"]] if "const" in option else [])
    return words


def section_of_entries(schema: Schema) -> str | None:
    """The model of the sections that a setting lists, or of the one that it is; None where it is neither."""
    value = without_null(schema)
    reference: str = value.get("items", value).get("$ref", "")
    return reference.rpartition("/")[2] or None


def _is_same_folder(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and os.path.normpath(one) == os.path.normpath(other)
