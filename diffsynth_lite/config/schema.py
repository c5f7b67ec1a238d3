"""The whole config: its sections, and what is checked between them."""

import os
from collections.abc import Iterator
from typing import get_type_hints

from diffsynth_lite.config.data import DataSettings
from diffsynth_lite.config.model import LoraSettings, ModelSettings, ObjectiveSettings
from diffsynth_lite.config.run import LoggingSettings, OutputSettings, ResumeSettings, ValidationSettings
from diffsynth_lite.config.settings import Problem, Settings
from diffsynth_lite.config.train import MemorySettings, TrainSettings

# Settings of a part of the run that can be off; then they do nothing.
_OFFLOAD_SETTINGS = (
    "memory.min_bytes",
    "memory.host_gib",
    "memory.resident_blocks",
    "memory.prefetched_blocks",
)
_LOADER_SETTINGS = ("data.num_workers",)
_CHECKPOINTING_SETTINGS = ("memory.skip_dead_ops",)
_TAG_SETTINGS = ("data.tag_separator", "data.keep_tags")
_SKIP_SETTINGS = ("data.max_bad_ratio",)
_PREVIEW_SETTINGS = (
    "validation.inputs",
    "validation.last_frames",
    "validation.num_frames",
    "validation.negative_prompt",
    "validation.num_inference_steps",
    "validation.guidance_scale",
    "validation.width",
    "validation.height",
)
_LOSS_SETTINGS = ("validation.data",)
_VALIDATION_SETTINGS = ("validation.every_steps",)
_BEST_SETTINGS = ("output.keep_best",)
_EMA_SETTINGS = ("validation.use_ema",)
_TRACKER_SETTINGS = ("logging.project", "logging.run_name")
_WANDB_SETTINGS = ("logging.wandb_mode",)


class Config(Settings):
    """A checked config, section by section."""

    model: ModelSettings
    lora: LoraSettings = LoraSettings()
    data: DataSettings
    objective: ObjectiveSettings = ObjectiveSettings()
    train: TrainSettings = TrainSettings()
    memory: MemorySettings = MemorySettings()
    validation: ValidationSettings = ValidationSettings()
    logging: LoggingSettings = LoggingSettings()
    output: OutputSettings
    resume: ResumeSettings = ResumeSettings()

    def without_effect(self) -> Iterator[Problem]:
        """The settings that were changed but do nothing, because what they belong to is off."""
        previews, trackers = bool(self.validation.prompts), self.logging.trackers
        loss = self.validation.loss_items > 0
        parks = self.train.use_gradient_checkpointing_offload or self.memory.save_attention == "park"
        groups = [
            (parks, _OFFLOAD_SETTINGS, "while the offload is off"),
            (self.data.cache, _LOADER_SETTINGS, "while data.cache is off: the main process encodes"),
            (
                self.train.use_gradient_checkpointing,
                _CHECKPOINTING_SETTINGS,
                "while train.use_gradient_checkpointing is off",
            ),
            (self.data.tag_shuffles > 0, _TAG_SETTINGS, "while data.tag_shuffles is 0"),
            (self.data.on_bad_item == "skip", _SKIP_SETTINGS, "while data.on_bad_item is error"),
            (previews, _PREVIEW_SETTINGS, "without validation.prompts"),
            (loss, _LOSS_SETTINGS, "while validation.loss_items is 0"),
            (previews or loss, _VALIDATION_SETTINGS, "without validation.prompts and validation.loss_items"),
            (loss and bool(self.validation.data), _BEST_SETTINGS, "without a loss on validation.data"),
            (self.train.ema_decay is not None, _EMA_SETTINGS, "without train.ema_decay"),
            (bool(trackers), _TRACKER_SETTINGS, "without logging.trackers"),
            ("wandb" in trackers, _WANDB_SETTINGS, "without wandb in logging.trackers"),
        ]
        for is_used, names, reason in groups:
            for name in names if not is_used else ():
                section, key = name.split(".")
                if not getattr(self, section).is_default(key):
                    yield Problem((name,), f"has no effect {reason}")

    def conflicts(self) -> Iterator[Problem]:
        if not self.train.use_gradient_checkpointing:
            yield from self._checkpointing_conflicts()
        if self.model.dtype == "float16" and self.train.mixed_precision == "no":
            # As small as on a clip of 81 x 480 x 832, gradients of a tiny Wan were 28 % off; in bf16, 0.5 %.
            yield Problem(
                ("model.dtype", "train.mixed_precision"),
                "float16 rounds small gradients to 0 while train.mixed_precision is no; set that to bf16, or "
                "model.dtype to bfloat16",
            )
        for key, source in self.data.sources_by_key.items():
            yield from self._folder_conflicts(f"{key}.path", source.path)

    def _folder_conflicts(self, key: str, folder: str | None) -> Iterator[Problem]:
        if _is_same_folder(self.validation.data, folder):
            message = f"validation.data is {key}, so nothing is held out; name another folder, or remove it"
            yield Problem(("validation.data", key), message)
        if _is_same_folder(self.output.dir, folder):
            message = f"output.dir is {key}; previews would mix with the data, so name another folder"
            yield Problem(("output.dir", key), message)

    def _checkpointing_conflicts(self) -> Iterator[Problem]:
        for key, off in (("policy", "all"), ("save_attention", "no")):
            if getattr(self.memory, key) != off:
                yield Problem(
                    (f"memory.{key}", "train.use_gradient_checkpointing"),
                    f"{getattr(self.memory, key)} is a way of checkpointing, which "
                    f"train.use_gradient_checkpointing turns off; turn it on, or set memory.{key}: {off}",
                )


def section_types() -> dict[str, type[Settings]]:
    """The class of every section, by its name in the yaml."""
    hints = get_type_hints(Config)
    return {name: hints[name] for name in Config.model_fields}


def _is_same_folder(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and os.path.normpath(one) == os.path.normpath(other)
