"""This file finds the inputs of a memory estimate, without weights: model, largest size, settings."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from diffsynth_lite.config import Config
from diffsynth_lite.core.gradient import blocks_in
from diffsynth_lite.data.buckets import Bucket
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora import adapter_shapes
from diffsynth_lite.pipelines import Conditioning, ModelFamily, load_family
from diffsynth_lite.pipelines.base.model_function import INPUT
from diffsynth_lite.pipelines.base.release_folder import write_release
from diffsynth_lite.training.checks import bind_family, block_policy, select_blocks
from diffsynth_lite.training.data_settings import (
    audio_shape,
    num_tokens_of,
    own_audio_shape,
    set_learned,
    sizes_of,
)
from diffsynth_lite.training.distilled import read_training_adapter
from diffsynth_lite.training.distributed.context import check_split, check_tokens
from diffsynth_lite.training.distributed.devices import num_data_ranks
from diffsynth_lite.training.frozen_weights import require_as_many_blocks
from diffsynth_lite.training.layer_groups import adapter_kind, find_targets, layer_groups, rank_overrides
from diffsynth_lite.training.optimization.optimizers import examine_optimizer
from diffsynth_lite.training.planning.gpus import ASSUMED_GPU, Gpu, gpu_named
from diffsynth_lite.training.planning.kept_counts import KeptCounts
from diffsynth_lite.training.planning.memory_count import MemoryCounter
from diffsynth_lite.training.planning.split_sequences import (
    Exchange,
    is_prompt_split,
    share_of,
    shared_conditioning,
)
from diffsynth_lite.training.planning.step import StepSettings
from diffsynth_lite.training.planning.step_time import StepTimer
from diffsynth_lite.training.slider.objective import STRENGTHS


@contextmanager
def family_without_weights(config: Config) -> Iterator[ModelFamily]:
    """The family of a config, bound to its local folder, or to the settings of a release that is known."""
    family_class, location = load_family(config.model.family), config.model.path
    if Path(location).expanduser().is_dir():
        yield bind_family(config, with_weights=False)
        return
    named = [release for release in family_class.releases if release.hub_id.lower() == location.lower()]
    if not named:
        known = ", ".join(release.hub_id for release in family_class.releases)
        raise UserError(
            f"model.path: {location} is neither a folder nor a known release of {config.model.family} "
            f"({known or 'there is none'}); give its folder, once it is there"
        )
    with TemporaryDirectory() as folder:
        family = family_class(write_release(named[0], Path(folder)), trained=config.lora.components)
        set_learned(config, family)
        yield family


def largest_size(config: Config, family: ModelFamily) -> Bucket:
    """Of the sizes that the config names, the one with the most tokens."""
    return max(sizes_of(config, family), key=lambda size: num_tokens_of(size, family))


def step_settings(config: Config, family: ModelFamily, *, num_processes: int = 1) -> StepSettings:
    """The settings of a config that decide how much memory a step takes, in one process of a machine."""
    train, memory, model = config.train, config.memory, config.model
    size = train.micro_batch_size
    if train.micro_batch_tokens is not None:
        size = max(1, train.micro_batch_tokens // num_tokens_of(largest_size(config, family), family))
    return StepSettings(
        micro_batch_size=size,
        has_anchors=config.objective.slider is not None and bool(config.objective.slider.kept),
        accumulates=train.global_batch_size > num_data_ranks(config, num_processes) * train.micro_batch_size,
        has_average=train.ema_decay is not None,
        compiles=train.compile != "off",
        mixed_precision=train.mixed_precision,
        use_gradient_checkpointing=train.use_gradient_checkpointing,
        use_gradient_checkpointing_offload=train.use_gradient_checkpointing_offload,
        policy=block_policy(config),
        resident_blocks=memory.resident_blocks,
        prefetched_blocks=memory.prefetched_blocks,
        skip_dead_ops=memory.skip_dead_ops and train.compile == "off",
        min_bytes=memory.min_bytes,
        dtype=getattr(torch, model.dtype),
        quantize=model.quantize,
        quantize_skip=tuple(model.quantize_skip),
        stream_blocks=0 if memory.stream_blocks == "auto" else memory.stream_blocks,
        stream_slots=memory.stream_slots,
        num_shards=1 if memory.shard_base == "no" else num_processes,
        saves_attention=model.saves_attention and train.context_parallel_kind != "ring",
    )


def counter_of(config: Config, family: ModelFamily, kept: KeptCounts | None = None) -> MemoryCounter:
    """Counts steps of a config at its largest size, with a prompt as long as may be.

    Where processes share each sample, the part that one of them computes is counted.
    """
    model = family.empty_transformer()
    num_blocks = len(blocks_in(family.parts_of(model)[family.trained[0]], family.block_lists))
    select_blocks(config, num_blocks)
    require_as_many_blocks(config, num_blocks)
    size = largest_size(config, family)
    shared = config.train.context_parallel
    shape = share_of(family.latents_shape(size.width, size.height, size.num_images), shared)
    conditioning = family.example_conditioning(shape)
    if conditioning is None:
        raise UserError(
            f"model.family: {config.model.family} does not define what its model is conditioned on "
            "(example_conditioning), so that its steps cannot be counted"
        )
    conditioning = shared_conditioning(family, conditioning, shared)
    image = torch.ones(share_of(family.latents_shape(size.width, size.height, 1), shared))
    inputs = {f"{INPUT}{place}": image for place in range(num_inputs_of(config, family))}
    layers, rank = find_targets(family, model, config), config.lora.rank
    groups = layer_groups(config, family, layers)
    own, kind = rank_overrides(groups), adapter_kind(config)
    shapes = adapter_shapes(model, layers, rank=rank, own=own, kind=kind)
    return MemoryCounter(
        family,
        layers,
        rank=rank,
        own=own,
        kind=kind,
        optimizer=examine_optimizer(config, groups, shapes, torch.device("cpu")),
        dropout=config.lora.dropout,
        training_adapter=read_training_adapter(config, family),
        latents_shape=shape,
        audio_latents_shape=audio_shape(config, family, size.num_frames),
        own_audio_level=own_audio_shape(config, family, size.num_frames) is not None,
        conditioning=conditioning | inputs,
        exchange=_exchange(config, family, model, shape, conditioning | inputs) if shared > 1 else None,
        kept=kept,
        model=model,
    )


def _exchange(
    config: Config,
    family: ModelFamily,
    model: torch.nn.Module,
    shape: Sequence[int],
    conditioning: Conditioning,
) -> Exchange:
    """The exchange between processes that share samples, each a part of one of this shape."""
    check_split(config, family, model)
    if config.data.given_sizes:  # others are known when the data are
        check_tokens(config, family, sizes_of(config, family))
    first: Any = family.parts_of(model)[family.trained[0]]
    images = [tensor.shape for name, tensor in conditioning.items() if name.startswith(INPUT)]
    return Exchange(
        width=first.config.num_attention_heads * first.config.attention_head_dim,
        embeds_whole=any(name.endswith(".0") for name in first._cp_plan),
        kind=config.train.context_parallel_kind,
        num_processes=config.train.context_parallel,
        tokens=sum(family.num_tokens(one) for one in (shape, *images)),
        prompt_tokens=len(conditioning["prompt_embeds"]) if is_prompt_split(family) else 0,
        num_blocks=len(blocks_in(first, family.block_lists)),
    )


def timer_of(config: Config, counter: MemoryCounter, gpu: Gpu | None, *, num_processes: int = 1) -> StepTimer:
    """Estimates how long optimizer steps of a config take in one of the processes, on a card each.

    Args:
        gpu: None, or one whose steps are not timed, leaves it to one that is assumed, which orders settings.
    """
    shared = config.train.context_parallel
    if shared > 1:
        # Attention to all tokens is more work than to those of a part.
        unsplit = {"train.context_parallel": 1, "train.context_parallel_kind": "ulysses"}
        counter = counter_of(with_changes(config, unsplit), counter.family, counter.kept)
    batch_size = -(-config.train.global_batch_size // num_data_ranks(config, num_processes))
    # diffusers' backward of Ulysses begins with attention's forward.
    attends_again = shared > 1 and config.train.context_parallel_kind == "ulysses"
    return StepTimer(
        counter,
        gpu if gpu and gpu.is_timed else gpu_named(ASSUMED_GPU),
        batch_size=batch_size,
        num_sharing=shared,
        attends_again=attends_again,
        num_backwards=1 if config.objective.slider is None else len(STRENGTHS),
        # Of the two sides of a slider each takes about one of the base model.
        other_forwards=(config.objective.guidance_target is not None or config.objective.slider is not None)
        + preserved_share(config),
    )


def preserved_share(config: Config) -> float:
    """Fraction of the samples that are preserved, if all sources hold as many items: no file is read."""
    passes = [
        (source.repeats * source.weight, source.preserve) for source in config.data.sources_by_key.values()
    ] or [(1, False)]
    return sum(each for each, preserve in passes if preserve) / sum(each for each, _ in passes)


def with_changes(config: Config, changes: Mapping[str, object]) -> Config:
    """A config with other values, by key such as ``memory.stream_blocks``, which are valid."""
    sections: dict[str, dict[str, object]] = {}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    changed = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update=changed)


def num_inputs_of(config: Config, family: ModelFamily) -> int:
    """Images that an item of an edit starts from, each counted as large as the result."""
    given = [
        len(source.input_columns) or len(source.input_dirs) for source in config.data.sources_by_key.values()
    ]
    return max(0, *given, int(family.record_kinds == ("edit",)))
