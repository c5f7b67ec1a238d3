"""What encoding and previews are counted to hold is what the real models hold in their calls."""

import importlib
import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from family_sample import CPU, clip
from measured_calls import MeasuredCalls

from diffsynth_lite.config import Config, load_config
from diffsynth_lite.core.evaluation_mode import evaluation_mode
from diffsynth_lite.core.planning import ON_ALL_DEVICES, StandIns
from diffsynth_lite.lora import add_adapter
from diffsynth_lite.media import Media, Prompt
from diffsynth_lite.pipelines import ModelFamily, load_family
from diffsynth_lite.training.checks import bind_family
from diffsynth_lite.training.layer_groups import find_targets
from diffsynth_lite.training.planning import inference_count
from diffsynth_lite.training.planning.choices import MemoryBudget
from diffsynth_lite.training.planning.inference_count import preview_request
from diffsynth_lite.training.planning.phases import Phase, PhaseCounter, Remedy, remedies
from diffsynth_lite.training.planning.subject import (
    counter_of,
    largest_size,
    step_settings,
    with_changes,
)

CONFIG = """
model: {{family: {family}, path: {folder}, dtype: float32, text_encoder_dtype: float32}}
data: {{path: pictures, width: 64, height: 32, frame_counts: {frames}}}
train: {{mixed_precision: "no"}}
validation: {{prompts: [a ring], guidance_scale: 2.0, width: 64, height: 64}}
output: {{dir: run}}
"""
FRAMES = {"wan": 9}


def config_of(family: str, folder: Path, *overrides: str) -> Config:
    """Of the family's tiny pipeline, which is saved unless it is there."""
    if not folder.exists():
        importlib.import_module(load_family(family).__module__).tiny().save_pretrained(folder)
    file = folder.with_suffix(".yaml")
    file.write_text(CONFIG.format(family=family, folder=folder, frames=[FRAMES.get(family, 1)]))
    return load_config(str(file), overrides).config


def counter_of_phases(config: Config, family: ModelFamily) -> PhaseCounter:
    counter = counter_of(config, family)
    return PhaseCounter(config, family, counter, size=largest_size(config, family), num_inputs=0)


def by_name(phases: Iterable[Phase]) -> dict[str, Phase]:
    return {phase.name: phase for phase in phases}


@pytest.mark.parametrize("name", ["ernie_image", "flux2", "qwen_image", "sdxl", "wan", "z_image"])
def test_encoding_and_previews_hold_what_is_counted(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference_count, "StandIns", partial(StandIns, ON_ALL_DEVICES))
    config = config_of(name, tmp_path / "tiny")
    family = bind_family(config)
    counted = by_name(counter_of_phases(config, family).count(step_settings(config, family)))

    prompts, media, preview = (MeasuredCalls() for _ in range(3))
    load = family.load_component
    monkeypatch.setattr(family, "load_component", prompts.measuring(load))
    encode = family.load_prompt_encoder(torch.float32, CPU)
    for num_words in (1, 1000):
        encode([Prompt(text="word " * num_words)])
    monkeypatch.setattr(family, "load_component", media.measuring(load))
    frames = clip(64, 32, FRAMES.get(name, 1), 10)
    family.load_media_encoder(torch.float32, CPU)([Media(frames=frames)])
    monkeypatch.setattr(family, "load_component", load)
    model = family.load_transformer(torch.float32)
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    add_adapter(model, find_targets(family, model, config), rank=config.lora.rank, alpha=1, dropout=0, seed=0)
    lora = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    monkeypatch.setattr(family, "load_component", preview.measuring(load))
    preview.measure(model, "model", "forward")
    with evaluation_mode(model):
        family.sample(model, torch.float32, [preview_request(config, family)])

    for phase, calls in (("encoding prompts", prompts), ("encoding media", media)):
        assert counted[phase].device == sum(calls.weights.values()) + calls.peak
    drawing = counted["generating previews"]
    found = held + 3 * lora + preview.weights["vae"] + preview.peak
    # But for 304 bytes in a call of the UNet.
    assert drawing.device == pytest.approx(found, rel=0.001 if name == "sdxl" else 0)
    assert drawing.least_device <= drawing.device


def test_what_does_not_fit_is_helped_by_what_changes_least(tmp_path: Path) -> None:
    given = ["memory.stream_slots=1", "memory.min_bytes=0", "data.width=320"]
    config = config_of("qwen_image", tmp_path / "tiny", *given)
    family, settings = bind_family(config), step_settings(config, bind_family(config))
    phases = counter_of_phases(config, family)
    plain = by_name(phases.count(settings))

    def helping(name: str, *, device: float, host: float = math.inf) -> Remedy:
        found = remedies(phases, settings, MemoryBudget(device=device, host=host))
        return next(remedy for remedy in found if remedy.before == plain[name])

    prompts, media = plain["encoding prompts"].device, plain["encoding media"].device
    streamed = helping("encoding prompts", device=prompts - 1)
    assert (streamed.changes, streamed.changes_numbers) == ({"memory.stream_text_encoder": True}, False)
    assert streamed.after is not None
    assert streamed.after.device < prompts
    assert streamed.after.host > 0
    # What is streamed waits on the host.
    quantised = helping("encoding prompts", device=prompts - 1, host=streamed.after.host - 1)
    assert (quantised.changes, quantised.changes_numbers) == ({"model.text_encoder_quantize": "int8"}, True)
    assert helping("encoding media", device=media - 1).changes == {"model.vae_tiling": True}
    assert helping("encoding media", device=1).after is None
    smaller = helping("generating previews", device=plain["generating previews"].least_device - 1)
    assert smaller.changes == {"model.vae_dtype": "bfloat16"}

    # Another model that is drawn on: its LoRA, two slots of its blocks, and what is outside of these.
    elsewhere = by_name(phases.changed({"validation.model_path": "elsewhere"}).count(settings))
    streamed_model = counter_of(config, family).count(replace(settings, stream_blocks="all", stream_slots=2))
    added = streamed_model.weights + streamed_model.slots + streamed_model.lora
    drawing, plain_drawing = elsewhere.pop("generating previews"), plain["generating previews"]
    assert drawing.device - plain_drawing.device == added
    assert drawing.host - plain_drawing.host == streamed_model.weights_on_host
    assert elsewhere.items() <= plain.items()

    # Encoders that stay beside the model.
    live = phases.changed({"data.cache": False})
    beside = by_name(live.count(settings))
    encoders = beside["training"].device - plain["training"].device
    assert beside["loading"].device - plain["loading"].device == encoders
    assert 0 < encoders < prompts + media
    for remedy in remedies(live, settings, MemoryBudget(device=beside["training"].device - 1, host=math.inf)):
        assert remedy.changes == {"data.cache": True}
    # What schedule-free trains waits while its average draws; it keeps as much as AdamW.
    counter = counter_of(with_changes(config, {"train.optimizer": "schedule_free"}), family)
    averaging = PhaseCounter(config, family, counter, size=phases.size, num_inputs=0)
    waiting = averaging.phase("generating previews", settings).device - plain["generating previews"].device
    assert waiting == counter.lora_bytes
    assert (
        by_name(phases.changed({"validation.prompts": []}).count(settings))["generating previews"].device == 0
    )
