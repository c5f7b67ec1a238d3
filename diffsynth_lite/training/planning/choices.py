"""This file finds settings of a step that fit a device and its host, by count."""

import json
from dataclasses import dataclass, replace

from diffsynth_lite.config import Config
from diffsynth_lite.core.gradient import KEEP, BlockPolicy, BlockStrategy
from diffsynth_lite.training.planning.memory_count import MemoryCount, MemoryCounter, StepSettings

_STRATEGIES = (
    KEEP,
    BlockStrategy(save_attention="keep"),
    BlockStrategy(save_attention="park"),
    BlockStrategy(offload=True, save_attention="park"),
    BlockStrategy(),
    BlockStrategy(offload=True),
)
"""What may happen to all blocks: first what computes least again, then what copies least."""


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
        if (choice := least_streamed(counter, _under(settings, strategy), device_bytes)) is not None
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


def least_streamed(counter: MemoryCounter, settings: StepSettings, device_bytes: float) -> Choice | None:
    """The settings with as few streamed blocks as fit the device; None where no number does."""
    for number in (0, *range(settings.stream_slots + 1, counter.num_blocks + 1)):
        tried = replace(settings, stream_blocks=number)
        count = counter.count(tried)
        if count.device <= device_bytes:
            return Choice(settings=tried, count=count)
    return None
