"""This file says what the training of a config takes, and which settings fit a device: nothing is downloaded.

It is about the training steps alone, of one process. Encoding before them and previews are not counted.
"""

import json
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from accelerate import Accelerator

from diffsynth_lite.config import Config
from diffsynth_lite.core.gradient import KEEP, BlockPolicy, BlockStrategy, blocks_in
from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.data import Bucket
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines import ModelFamily, load_family
from diffsynth_lite.pipelines.base.batching import INPUT
from diffsynth_lite.pipelines.base.release_folder import write_release
from diffsynth_lite.training.checks import bind_family, block_policy, find_targets, select_blocks
from diffsynth_lite.training.data_settings import num_tokens_of, sizes_of
from diffsynth_lite.training.distributed import on_all_processes
from diffsynth_lite.training.memory_count import MemoryCount, MemoryCounter, StepSettings
from diffsynth_lite.training.streaming import check_stream, require_as_many_blocks

logger = logging.getLogger(__name__)

_STRATEGIES = (
    KEEP,
    BlockStrategy(save_attention="keep"),
    BlockStrategy(save_attention="park"),
    BlockStrategy(offload=True, save_attention="park"),
    BlockStrategy(),
    BlockStrategy(offload=True),
)
"""What may happen to all blocks: first what computes least again, then what copies least."""
_SHARE_COUNTED = 0.9
"""Of what is free on a device. The rest is for what is not counted: kernels, what the allocator cannot use;
how much these take was measured on no GPU."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Settings, and what a step takes under them.

    Attributes:
        settings: of the step.
        count: what it takes.
    """

    settings: StepSettings
    count: MemoryCount

    def overrides(self, config: Config) -> list[str]:
        """What the settings change of a config, as ``key=value`` for the command line."""
        step, strategy = self.settings, self.settings.policy.selected
        wanted: dict[str, object] = {
            "model.quantize": step.quantize,
            "memory.stream_blocks": step.stream_blocks,
            "train.use_gradient_checkpointing": step.use_gradient_checkpointing,
            "train.use_gradient_checkpointing_offload": step.use_gradient_checkpointing_offload,
            "memory.policy": "all",
            "memory.policy_n": None,
            "memory.policy_blocks": [],
            "memory.save_attention": strategy.save_attention,
        }
        changed = {key: value for key, value in wanted.items() if _setting(config, key) != value}
        return [
            f"{key}={value if isinstance(value, str) else json.dumps(value)}"
            for key, value in changed.items()
        ]

    def fits(self, device_bytes: float, host_bytes: float) -> bool:
        """Whether it takes no more than this."""
        return self.count.device <= device_bytes and self.count.host <= host_bytes


def _setting(config: Config, key: str) -> object:
    section, _, name = key.partition(".")
    value: object = getattr(getattr(config, section), name)
    return value


@contextmanager
def family_without_weights(config: Config) -> Iterator[ModelFamily]:
    """The family of a config, bound to its local folder, or to the settings of a release that is known.

    Raises:
        UserError: there is neither; and what ``bind_family`` raises.
    """
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
        yield family_class(write_release(named[0], Path(folder)), trained=config.lora.components)


def largest_size(config: Config, family: ModelFamily) -> Bucket:
    """Of the sizes that the config names, the one with the most tokens."""
    return max(sizes_of(config, family), key=lambda size: num_tokens_of(size, family))


def step_settings(config: Config, family: ModelFamily) -> StepSettings:
    """What of a config decides how much memory a step takes, in one process."""
    train, memory, model = config.train, config.memory, config.model
    size = train.micro_batch_size
    if train.micro_batch_tokens is not None:
        size = max(1, train.micro_batch_tokens // num_tokens_of(largest_size(config, family), family))
    return StepSettings(
        micro_batch_size=size,
        accumulates=train.global_batch_size > train.micro_batch_size,
        has_average=train.ema_decay is not None,
        mixed_precision=train.mixed_precision,
        use_gradient_checkpointing=train.use_gradient_checkpointing,
        use_gradient_checkpointing_offload=train.use_gradient_checkpointing_offload,
        policy=block_policy(config),
        resident_blocks=memory.resident_blocks,
        prefetched_blocks=memory.prefetched_blocks,
        skip_dead_ops=memory.skip_dead_ops,
        min_bytes=memory.min_bytes,
        dtype=getattr(torch, model.dtype),
        quantize=model.quantize,
        quantize_skip=tuple(model.quantize_skip),
        stream_blocks=0 if memory.stream_blocks == "auto" else memory.stream_blocks,
        stream_slots=memory.stream_slots,
    )


def counter_of(config: Config, family: ModelFamily) -> MemoryCounter:
    """Counts steps of a config at its largest size, with a prompt as long as may be.

    Raises:
        UserError: the family does not say what its steps are conditioned on; or the config names layers or
            blocks that are not there.
    """
    model = family.empty_transformer()
    num_blocks = len(blocks_in(family.parts_of(model)[family.trained[0]], family.block_lists))
    select_blocks(config, num_blocks)
    require_as_many_blocks(config, num_blocks)
    size = largest_size(config, family)
    shape = family.latents_shape(size.width, size.height, size.num_frames)
    conditioning = family.example_conditioning(shape)
    if conditioning is None:
        raise UserError(
            f"model.family: {config.model.family} does not say what its model is conditioned on "
            "(example_conditioning), so that its steps cannot be counted"
        )
    picture = torch.ones(family.latents_shape(size.width, size.height, 1))
    inputs = {f"{INPUT}{place}": picture for place in range(_num_inputs(config, family))}
    return MemoryCounter(
        family,
        find_targets(family, model, config),
        rank=config.lora.rank,
        dropout=config.lora.dropout,
        latents_shape=shape,
        conditioning=conditioning | inputs,
    )


def _num_inputs(config: Config, family: ModelFamily) -> int:
    """Pictures that an item of an edit starts from, each taken to be as large as what is made."""
    given = [
        len(source.input_columns) or len(source.input_dirs) for source in config.data.sources_by_key.values()
    ]
    return max(*given, int(family.record_kinds == ("edit",)))


def choices(
    counter: MemoryCounter, settings: StepSettings, *, device_bytes: float, host_bytes: float
) -> list[Choice]:
    """Settings that fit, and give the same numbers: of what happens to all blocks, and how many are streamed.

    As few as do are streamed. First those that stream least, then those that compute least again, then those
    that copy least. How long a step takes is not known.
    """
    fitting = [
        choice
        for strategy in _STRATEGIES
        if (choice := _least_streamed(counter, _under(settings, strategy), device_bytes)) is not None
        and choice.fits(device_bytes, host_bytes)
    ]
    return sorted(fitting, key=lambda choice: choice.count.weights_on_host)


def _under(settings: StepSettings, strategy: BlockStrategy) -> StepSettings:
    """The settings with all blocks treated alike, and none streamed."""
    return replace(
        settings,
        use_gradient_checkpointing=strategy.recompute,
        use_gradient_checkpointing_offload=strategy.offload,
        policy=BlockPolicy(selected=strategy),
        stream_blocks=0,
    )


def _least_streamed(counter: MemoryCounter, settings: StepSettings, device_bytes: float) -> Choice | None:
    """The settings with as few streamed blocks as fit the device; None where no number does."""
    for number in (0, *range(settings.stream_slots + 1, counter.num_blocks + 1)):
        tried = replace(settings, stream_blocks=number)
        count = counter.count(tried)
        if count.device <= device_bytes:
            return Choice(settings=tried, count=count)
    return None


def with_streamed_blocks(config: Config, family: ModelFamily, accelerator: Accelerator) -> Config:
    """A config in which ``memory.stream_blocks: auto`` is a number: as few blocks as fit all devices.

    Raises:
        UserError: a step does not fit with all of them, or the host has too little memory for that many; or
            what ``counter_of`` raises.
    """
    if config.memory.stream_blocks != "auto":
        return config
    plain = _with_number(config, 0)
    device_bytes = min(on_all_processes(accelerator, lambda: _device_bytes(config, accelerator.device)))
    if math.isinf(device_bytes):
        logger.info("memory.stream_blocks: auto streams nothing: the device is the host.")
        return plain
    counter, settings = counter_of(plain, family), step_settings(plain, family)
    choice = _least_streamed(counter, settings, device_bytes)
    if choice is None:
        least = counter.count(replace(settings, stream_blocks="all")).device
        raise UserError(
            f"memory.stream_blocks: auto; with all blocks streamed a step takes {format_bytes(least)} by "
            f"count, and {format_bytes(int(device_bytes))} may be taken: `diffsynth-lite plan` says what fits"
        )
    chosen = _with_number(config, int(choice.settings.stream_blocks))
    frozen = family.empty_transformer().requires_grad_(False)
    check_stream(chosen, family, frozen, counter.num_blocks, accelerator.device)
    logger.info(
        "memory.stream_blocks: auto streams %d of %d blocks: a step takes %s by count, of %s.",
        chosen.memory.stream_blocks,
        counter.num_blocks,
        format_bytes(choice.count.device),
        format_bytes(int(device_bytes)),
    )
    return chosen


def _with_number(config: Config, number: int) -> Config:
    return config.model_copy(update={"memory": config.memory.model_copy(update={"stream_blocks": number})})


def _device_bytes(config: Config, device: torch.device) -> float:
    """What training steps may take of a device; infinite on the CPU."""
    if config.memory.device_gib is not None:
        return config.memory.device_gib * 1024**3
    if device.type != "cuda":
        return math.inf
    free, _ = torch.cuda.mem_get_info(device)
    return _SHARE_COUNTED * free
