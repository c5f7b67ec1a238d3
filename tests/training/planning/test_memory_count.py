"""What steps and phases hold, counted and measured."""

import importlib
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import convert_outputs_to_fp32
from family_sample import clip
from held_step import CPU, assert_same_cost, step_on_cpu
from measured_calls import MeasuredCalls
from narrow_releases import NARROW, NarrowRelease, conditioning_of, narrow_family

from diffsynth_lite.config import Config, load_config
from diffsynth_lite.core.evaluation_mode import evaluation_mode
from diffsynth_lite.core.gradient import BlockPolicy, BlockStrategy, blocks_in
from diffsynth_lite.core.planning import counts
from diffsynth_lite.core.planning.counts import count_step
from diffsynth_lite.core.planning.kernels import ON_ALL_DEVICES
from diffsynth_lite.core.planning.stand_ins import StandIns
from diffsynth_lite.core.weights.formats import Int8
from diffsynth_lite.core.weights.frozen_linear import Quantization
from diffsynth_lite.lora import add_adapter, add_training_adapter, find_target_layers
from diffsynth_lite.lora.updates import LoraFile
from diffsynth_lite.media import Media, Prompt
from diffsynth_lite.pipelines import ModelFamily, load_family
from diffsynth_lite.pipelines.base.quantized import quantizable_layers
from diffsynth_lite.training.checks import bind_family
from diffsynth_lite.training.layer_groups import find_targets
from diffsynth_lite.training.planning import inference_count, memory_count
from diffsynth_lite.training.planning.choices import MemoryBudget
from diffsynth_lite.training.planning.inference_count import preview_request
from diffsynth_lite.training.planning.memory_count import MemoryCounter
from diffsynth_lite.training.planning.phases import OTHER_NUMBERS, Phase, PhaseCounter, remedies
from diffsynth_lite.training.planning.step import StepSettings
from diffsynth_lite.training.planning.subject import (
    counter_of,
    step_settings,
    with_changes,
)

RANK = 4
FROZEN = ("attn.to_q", "img_mlp.net.2")
PARK = BlockStrategy(offload=True, save_attention="park")
RESIDENT = StepSettings()
OFFLOADED = StepSettings(use_gradient_checkpointing_offload=True, min_bytes=0)


@contextmanager
def narrow(family: str, num_blocks: int) -> Iterator[tuple[ModelFamily, NarrowRelease]]:
    """A release of a family with a few heads and blocks."""
    release = next(release for release in NARROW if release.family == family)
    with narrow_family(release, num_blocks) as found:
        yield found, release


def release_counter(
    family: ModelFamily, release: NarrowRelease, training_adapter: LoraFile | None = None
) -> MemoryCounter:
    pixels = release.small_pixels
    return MemoryCounter(
        family,
        targets(family, family.empty_transformer()),
        rank=RANK,
        latents_shape=family.latents_shape(*pixels),
        conditioning=conditioning_of(family, pixels),
        training_adapter=training_adapter,
    )


def targets(family: ModelFamily, model: torch.nn.Module) -> list[str]:
    return find_target_layers(
        model, family.default_target_modules, unused_modules=family.unused_modules(model)
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_blocks", "numbers"), [("flux", 5, [5]), ("wan", 9, [4, 5])])
def test_a_few_blocks_of_each_list_take_what_all_of_them_take(
    name: str, num_blocks: int, numbers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    monkeypatch.setattr(memory_count, "count_step", lambda *a, **k: counted.append(1) or count_step(*a, **k))
    policies = [BlockPolicy(select="last_k", n=n) for n in numbers]
    mixtures = [replace(OFFLOADED, policy=replace(policy, selected=PARK)) for policy in policies]
    with narrow(name, num_blocks) as (family, release):
        counter = release_counter(family, release)
        few = [counter.count(settings) for settings in mixtures]
        # Another number of blocks that are treated alike takes no other count.
        assert len(counted) == 1
        monkeypatch.setattr(counts, "fewer_blocks", lambda kinds, _: (list(range(len(kinds))), []))
        whole = release_counter(family, release)
        assert [whole.count(settings) for settings in mixtures] == few
    assert len({count.device for count in few}) == len(few)
    assert all(count.step.host > 0 and count.step.forward.flops > 0 for count in few)


def test_blocks_of_which_each_counts_are_all_kept() -> None:
    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList(torch.nn.Linear(2, 2, device="meta") for _ in range(9))
    alike, each = (
        counts.BlockLists(model, ["blocks"], {}, are_alike=are_alike).few(BlockPolicy(), num_neighbours=1)
        for are_alike in (True, False)
    )
    assert (alike.kept, len(alike.repeats)) == (((0, 1, 2, 3),), 1)
    assert (each.kept, each.repeats) == ((tuple(range(9)),), ())
    assert each.policy == BlockPolicy()


def test_weights_that_are_streamed_are_on_the_host_and_the_device_has_slots_for_the_largest_block() -> None:
    with narrow("flux", 2) as (family, release):
        counter = release_counter(family, release)
        model = family.empty_transformer().to(torch.bfloat16)
        blocks = blocks_in(model, family.block_lists)
        sizes = [sum(weight.nbytes for weight in weights_to_move(block)) for block in blocks]
        whole = [sum(weight.nbytes for weight in block.parameters()) for block in blocks]
        packed = [
            sum(-(-(weight.nbytes + 64) // 512) * 512 for weight in weights_to_move(block))
            for block in blocks
        ]
        resident, streamed, half, int8, rotated, nf4, averaged, sharded = (
            counter.count(replace(RESIDENT, **settings))
            for settings in (
                {},
                {"stream_blocks": "all", "stream_slots": 3},
                {"stream_blocks": 2},
                {"quantize": "int8"},
                {"quantize": "int8_convrot"},
                {"quantize": "nf4"},
                {"has_average": True},
                {"num_shards": 4},
            )
        )
        names = quantizable_layers(model, family.block_lists)
        quantised = [model.get_submodule(name).weight for name in names]
    assert resident.weights == sum(weight.nbytes for weight in model.parameters())
    assert (resident.slots, resident.host) == (0, 0)
    assert streamed.weights == resident.weights - sum(sizes)
    assert (streamed.slots, streamed.weights_on_host) == (3 * max(packed), sum(packed))
    # Evenly spread: the second block of each kind.
    assert half.weights_on_host == packed[1] + packed[3]
    rows, numbers = sum(weight.shape[0] for weight in quantised), sum(weight.numel() for weight in quantised)
    assert resident.weights - int8.weights == numbers * (2 - 1) - rows * 4
    assert resident.weights - nf4.weights == numbers * 2 - numbers // 2 - numbers // 64 * 4
    assert streamed.step == half.step == resident.step
    # While one layer computes, its weight is there as it was; and rotated before, twice, in fp32.
    assert int8.step.peak - resident.step.peak <= max(weight.nbytes for weight in quantised)
    assert rotated.weights == int8.weights
    assert 0 < rotated.step.peak - int8.step.peak <= 8 * max(weight.numel() for weight in quantised)
    assert resident.optimizer == 2 * resident.lora
    # A block computes, one arrives, and the room that it arrives in is a third.
    assert sharded.slots == resident.weights - sum(whole) + 3 * max(whole)
    assert averaged == replace(resident, lora=2 * resident.lora)
    assert resident.device == resident.weights + 3 * resident.lora + resident.step.peak


def weights_to_move(block: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [weight for weight in block.parameters() if weight.nbytes >= 64 * 1024]


def test_a_step_on_the_cpu_under_autocast_holds_what_is_counted() -> None:
    settings = replace(
        OFFLOADED, quantize="int8", micro_batch_size=2, accumulates=True, device_type="cpu", min_bytes=None
    )
    with narrow("qwen_image", 2) as (family, release):
        adapter = frozen_adapter(family.empty_transformer())
        counted = release_counter(family, release, adapter).count(settings)
        pixels = release.small_pixels
        held = step_on_cpu(
            family,
            in_int8(family, adapter),
            settings,
            latents_shape=family.latents_shape(*pixels),
            conditioning=conditioning_of(family, pixels),
        )
    # Of the norm before the last layer: mean and deviation of 256 tokens, which only the CPU keeps in bf16.
    means = 2 * 2 * 256 * torch.bfloat16.itemsize
    expected = replace(held, kept=held.kept + means, peak=held.peak + counted.lora)
    assert_same_cost(counted.step, expected)
    with narrow("qwen_image", 2) as (family, release):
        without = release_counter(family, release).count(settings)
    assert counted.weights - without.weights == sum(4 * tensor.numel() for tensor in adapter[0].values())


def frozen_adapter(model: torch.nn.Module) -> LoraFile:
    """One on layers with a LoRA, and on layers without."""
    shapes = {name: layer.weight.shape for name, layer in model.named_modules() if name.endswith(FROZEN)}
    firsts = {f"{name}.lora_A.weight": torch.ones(3, shape[1]) for name, shape in shapes.items()}
    return firsts | {f"{name}.lora_B.weight": torch.ones(shape[0], 3) for name, shape in shapes.items()}, {}


def in_int8(family: ModelFamily, training_adapter: LoraFile) -> torch.nn.Module:
    """What the family trains, under autocast of the CPU, with a LoRA and a frozen adapter."""
    (component,) = family.trained
    model = family.component_class(component).from_config(family.folder.component_config(component))
    for weight in model.requires_grad_(False).parameters():
        weight.data = weight.data.bfloat16()
    layers = tuple(quantizable_layers(model, family.block_lists))
    Quantization(format=Int8(), layers=layers, device=CPU).apply_to(model)
    add_adapter(model, targets(family, model), rank=RANK, alpha=1, dropout=0, seed=0)
    add_training_adapter(model, *training_adapter)
    forward = torch.autocast("cpu", torch.bfloat16)(model.train().forward)
    model.forward = convert_outputs_to_fp32(forward)  # as accelerate does
    return model


CONFIG = """
model: {{family: {family}, path: {folder}, dtype: float32, text_encoder_dtype: float32}}
data: {{path: images, width: 64, height: 32, frame_counts: {frames}}}
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
    return PhaseCounter(config, family, counter_of(config, family))


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

    def helping(name: str, *, device: float, host: float = math.inf) -> dict[str, Any]:
        return dict(remedies(phases, settings, MemoryBudget(device=device, host=host)))[plain[name]]

    prompts, media = plain["encoding prompts"].device, plain["encoding media"].device
    streamed = helping("encoding prompts", device=prompts - 1)
    assert streamed == {"memory.stream_text_encoder": True}
    after = phases.changed(streamed).phase("encoding prompts", settings)
    assert after.device < prompts
    assert after.host > 0
    # What is streamed waits on the host.
    quantised = helping("encoding prompts", device=prompts - 1, host=after.host - 1)
    assert quantised == {"model.text_encoder_quantize": "int8"}
    assert OTHER_NUMBERS & (streamed | quantised).keys() == quantised.keys()
    assert helping("encoding media", device=media - 1) == {"model.vae_tiling": True}
    assert helping("encoding media", device=1) == {}
    smaller = helping("generating previews", device=plain["generating previews"].least_device - 1)
    assert smaller == {"model.vae_dtype": "bfloat16"}

    # Another model that is drawn on: its LoRA, two slots of its blocks, and what is outside of these.
    elsewhere = by_name(phases.changed({"validation.model_path": "elsewhere"}).count(settings))
    streamed_model = counter_of(config, family).count(replace(settings, stream_blocks="all", stream_slots=2))
    added = streamed_model.weights + streamed_model.slots + streamed_model.lora
    drawing, plain_drawing = elsewhere.pop("generating previews"), plain["generating previews"]
    assert drawing.device - plain_drawing.device == added
    assert drawing.host - plain_drawing.host == streamed_model.weights_on_host
    assert elsewhere.items() <= plain.items()

    # Encoders that stay with the model.
    live = phases.changed({"data.cache": False})
    resident = by_name(live.count(settings))
    encoders = resident["training"].device - plain["training"].device
    assert resident["loading"].device - plain["loading"].device == encoders
    assert 0 < encoders < prompts + media
    budget = MemoryBudget(device=resident["training"].device - 1, host=math.inf)
    for _, remedy in remedies(live, settings, budget):
        assert remedy == {"data.cache": True}
    # What schedule-free trains waits while its average draws; it keeps as much as AdamW.
    counter = counter_of(with_changes(config, {"train.optimizer": "schedule_free"}), family)
    averaging = PhaseCounter(config, family, counter)
    waiting = averaging.phase("generating previews", settings).device - plain["generating previews"].device
    assert waiting == counter.lora_bytes
    assert (
        by_name(phases.changed({"validation.prompts": []}).count(settings))["generating previews"].device == 0
    )
