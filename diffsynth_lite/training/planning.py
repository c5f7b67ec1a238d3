"""This file plans all that a run encodes: its data, what is held out, and the prompts of its previews."""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from accelerate import Accelerator

from diffsynth_lite.config import Config
from diffsynth_lite.data import (
    FileMemory,
    MediaIndex,
    Plan,
    PlannedItem,
    PlannedPrompt,
    PlanRules,
    Record,
    TensorCache,
    plan_items,
)
from diffsynth_lite.training.data_rules import DataRules, cache_folder, data_rules
from diffsynth_lite.training.data_set import DataSet, FamilyEncoders
from diffsynth_lite.training.preflight import CheckedRun
from diffsynth_lite.training.processes import main_process_first


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """All that a run encodes, by the keys of its tensors.

    Attributes:
        rules: how the data are taken.
        encoders: of the family.
        cache: of the run.
        training: what is trained on, and the prompts of the previews.
        held_out: what the validation loss is measured on; empty where it is training items.
        prompt_keys: key of each preview prompt, and of its negative.
    """

    rules: DataRules
    encoders: FamilyEncoders
    cache: TensorCache
    training: DataSet
    held_out: DataSet
    prompt_keys: Sequence[tuple[str, str]]

    @property
    def media(self) -> Mapping[str, PlannedItem]:
        """Items by key."""
        return {**self.training.media, **self.held_out.media}

    @property
    def prompts(self) -> Mapping[str, PlannedPrompt]:
        """Captions and prompts by key."""
        return {**self.training.prompts, **self.held_out.prompts}


def plan_run(config: Config, checked: CheckedRun, accelerator: Accelerator, memory: FileMemory) -> PlannedRun:
    """Plan a run; no pixel is decoded but first frames of clips that are new.

    Args:
        config: of the run.
        checked: the run's records and family.
        accelerator: tells processes and device.
        memory: of the files.

    Raises:
        UserError: settings that the family cannot do.
    """
    family, validation = checked.family, config.validation
    rules, cache = data_rules(config, family), TensorCache(cache_folder(config))
    encoders = FamilyEncoders.of(
        family,
        text_dtype=getattr(torch, config.model.text_encoder_dtype),
        vae_dtype=getattr(torch, config.model.vae_dtype),
        device=accelerator.device,
    )
    index = MediaIndex(memory)

    def data_set(records: Sequence[Record], plan_rules: PlanRules, *, has_unconditional: bool) -> DataSet:
        def plan() -> Plan:
            planned = plan_items(records, index=index, rules=plan_rules)
            memory.flush()
            return planned

        planned, bad = main_process_first(accelerator, plan, lambda planned: planned.bad)
        return DataSet(
            records,
            planned.without(dict(ChainMap(*map(dict, bad)))),
            encoders,
            cache,
            prompt_sees_images=family.prompt_sees_images,
            has_unconditional=has_unconditional,
        )

    training = data_set(checked.records, rules.plan, has_unconditional=rules.has_unconditional)
    held_out = data_set(
        checked.validation_records[: validation.loss_items], rules.held_out_plan, has_unconditional=False
    )
    seen = family.prompt_sees_images
    return PlannedRun(
        rules=rules,
        encoders=encoders,
        cache=cache,
        training=training,
        held_out=held_out,
        prompt_keys=[
            _add_prompts(config, training, text, preview_files(config, place) if seen else (), index)
            for place, text in enumerate(validation.prompts)
        ],
    )


def preview_files(config: Config, place: int) -> tuple[Path, ...]:
    """Files of the picture that the preview at ``place`` starts from, and of the one that it leads to."""
    validation = config.validation
    files = (*validation.inputs[place : place + 1], *validation.last_frames[place : place + 1])
    return tuple(Path(file).expanduser() for file in files)


def _add_prompts(
    config: Config, data: DataSet, text: str, images: tuple[Path, ...], index: MediaIndex
) -> tuple[str, str]:
    """Also encode a preview prompt and its negative; returns their keys."""
    content = tuple(index.content(path) for path in images)
    prompt = PlannedPrompt(text=text, images=images, content=content, background=config.data.background)
    negative = replace(prompt, text=config.validation.negative_prompt, is_negative=True)
    return data.add_prompt(prompt), data.add_prompt(negative)
