"""This file chooses the settings of ``memory.auto`` and ``memory.stream_blocks: auto``."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from accelerate import Accelerator

from diffsynth_lite.config import Config
from diffsynth_lite.core.gradient import KEEP
from diffsynth_lite.core.transfer.host_pool import available_host_bytes, num_local_processes
from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines import ModelFamily
from diffsynth_lite.training.distributed.agreement import on_all_processes
from diffsynth_lite.training.distributed.devices import num_data_ranks
from diffsynth_lite.training.planning.choices import (
    SMALLER_FORMATS,
    Choice,
    MemoryBudget,
    as_text,
    changed_settings,
    choices_of_first_format,
    least_of_device,
    least_streamed,
    setting_of,
    with_strategy,
)
from diffsynth_lite.training.planning.gpus import COUNTED_SHARE, Gpu
from diffsynth_lite.training.planning.memory_count import MemoryCounter
from diffsynth_lite.training.planning.step import StepSettings
from diffsynth_lite.training.planning.step_time import StepTimer, gpu_here
from diffsynth_lite.training.planning.subject import counter_of, step_settings, timer_of, with_changes

logger = logging.getLogger(__name__)

_OPEN = {"quantize": "model.quantize", "micro_batch_size": "train.micro_batch_size"}
"""The settings that ``memory.may_change`` names, by dotted key: all are part of a run's fingerprint."""
_MICRO_BATCH_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class ChosenMemory:
    """A config with the chosen settings.

    Attributes:
        lasting: the chosen settings that a resumed run keeps, by dotted key.
        predicted_bytes: estimated memory of a step on the device; None where nothing limits it.
    """

    config: Config
    lasting: Mapping[str, Any]
    predicted_bytes: int | None


def needs_auto_memory(config: Config) -> bool:
    """Whether there is anything to choose."""
    return config.memory.auto or config.memory.stream_blocks == "auto"


def choose_memory(
    config: Config,
    family: ModelFamily,
    accelerator: Accelerator,
    *,
    earlier: Mapping[str, Any] | None = None,
) -> ChosenMemory:
    """Choose the settings that are left open, the same on all processes: the fastest that fit all of them.

    Args:
        earlier: the choice of the first start of a resumed run, which stays; None for a new run.
    """
    memory = config.memory
    lasting = dict(earlier or {}) if memory.auto else {}
    if lasting:
        logger.info("memory.auto: %s stay as the run's first start chose them.", _in_words(lasting))
    given = with_changes(config, lasting)
    room, card = _room(config, accelerator)
    settings = _settings_of(given, family, accelerator)
    if math.isinf(room.device):
        chosen, predicted_bytes = _unlimited(given, settings), None
    else:
        counter = counter_of(given, family)
        search = _Search(given, counter, timer_of(given, counter, card), room)
        if memory.auto:
            is_open = set[str](memory.may_change if earlier is None else ())
            if family.shards is not None and family.splits_batches:
                is_open.discard("micro_batch_size")  # more than one sample would be refused
            chosen = search.best(settings, is_open, num_data_ranks(given, accelerator.num_processes))
        else:
            chosen = search.least_streamed(settings)
        predicted_bytes = counter.count(chosen).device
    made = with_changes(given, changed_settings(chosen, given))
    if memory.auto and earlier is None:
        lasting = {_OPEN[name]: setting_of(made, _OPEN[name]) for name in memory.may_change}
    return ChosenMemory(config=made, lasting=lasting, predicted_bytes=predicted_bytes)


def suggest_settings(config: Config, family: ModelFamily, accelerator: Accelerator) -> str:
    """The estimated memory of a step, and the fastest settings that take less and fit, to copy."""
    counter, settings = counter_of(config, family), _settings_of(config, family, accelerator)
    timer = timer_of(config, counter, gpu_here())
    taken = counter.count(settings).device
    # The step did not fit, even if its estimate does.
    room = _room_of(config, _device_bytes(config, accelerator.device, is_taken=True))
    room = replace(room, device=min(room.device, taken - 1))
    message = f"A step is estimated to take {format_bytes(taken)} of the device; "
    formats = settings.quantize, *filter(_is_there, SMALLER_FORMATS)
    found = choices_of_first_format(counter, timer.seconds, [settings], room, formats)
    if not found:
        return f"{message}no settings that are known fit {_amount(room.device)}"
    best = found[0]
    where = "" if best.settings.quantize == settings.quantize else ", in a new run,"
    return (
        f"{message}with {' '.join(best.overrides(config))}{where} it takes "
        f"{format_bytes(best.count.device)}, and {format_bytes(best.count.host)} of the host"
    )


def _unlimited(config: Config, settings: StepSettings) -> StepSettings:
    if config.memory.auto:
        logger.info("memory.auto: the device is the host, so that all is kept; memory.device_gib limits it.")
        return with_strategy(settings, KEEP)
    logger.info("memory.stream_blocks: auto streams nothing: the device is the host.")
    return settings


@dataclass(frozen=True)
class _Search:
    """Finds what fits, and logs why."""

    given: Config
    counter: MemoryCounter
    timer: StepTimer
    room: MemoryBudget

    def least_streamed(self, settings: StepSettings) -> StepSettings:
        """As few streamed blocks as fit."""
        chosen = least_streamed(self.counter, settings, self.room.device)
        if chosen is None:
            least = self.counter.count(replace(settings, stream_blocks="all")).device
            raise UserError(
                "memory.stream_blocks: auto; with all blocks streamed a step is estimated to "
                f"take {format_bytes(least)}, and {format_bytes(int(self.room.device))} are free: "
                "memory.auto: true tries the other settings, too, and `diffsynth-lite plan` shows what fits"
            )
        logger.info(
            "memory.stream_blocks: auto streams %d of %d blocks: a step is estimated to take %s, of %s.",
            chosen.stream_blocks,
            self.counter.num_blocks,
            format_bytes(self.counter.count(chosen).device),
            format_bytes(int(self.room.device)),
        )
        return chosen

    def best(self, settings: StepSettings, is_open: set[str], num_data_ranks: int) -> StepSettings:
        """The fastest that fits; another format only where nothing fits without."""
        batch_size = self.given.train.global_batch_size // num_data_ranks
        sizes: Sequence[int] = [settings.micro_batch_size]
        if "micro_batch_size" in is_open and self.given.train.micro_batch_tokens is None:
            sizes = sorted({*sizes, *(size for size in _MICRO_BATCH_SIZES if batch_size % size == 0)})
        formats = [settings.quantize]
        if "quantize" in is_open:
            formats += filter(_is_there, SMALLER_FORMATS)
        kinds = [replace(settings, micro_batch_size=size, accumulates=batch_size > size) for size in sizes]
        found = choices_of_first_format(self.counter, self.timer.seconds, kinds, self.room, formats)
        if not found:
            raise UserError(self._why_nothing_fits(settings, is_open))
        self._explain(settings, found[0])
        return found[0].settings

    def _explain(self, settings: StepSettings, choice: Choice) -> None:
        plain = self.counter.count(settings)
        changes = changed_settings(choice.settings, self.given)
        overridden = {key: setting_of(self.given, key) for key in changes if not _is_default(self.given, key)}
        kept = self.timer.seconds(with_strategy(choice.settings, KEEP))
        logger.info(
            "memory.auto: as configured, a step needs %s of GPU and %s of host memory (free: %s and %s).",
            *map(_amount, (plain.device, self.room.host_needed(plain), self.room.device, self.room.host)),
        )
        logger.info(
            "memory.auto: chose %s: %s of the device, %s of the host. Without memory saving a step "
            "would take %.2f x as long.",
            _in_words(changes) or "the configured settings",
            *map(_amount, (choice.count.device, choice.count.host)),
            kept / choice.seconds,
        )
        if overridden:
            logger.info("memory.auto: that is in place of the config's %s.", _in_words(overridden))

    def _why_nothing_fits(self, settings: StepSettings, is_open: set[str]) -> str:
        least = least_of_device(self.counter, settings)
        count = self.counter.count(least)
        ways = ["smaller or shorter data (data.resolutions, data.sizes, data.frame_counts)"]
        if settings.micro_batch_size > 1 and "micro_batch_size" not in is_open:
            ways.insert(0, "train.micro_batch_size: 1")
        if settings.quantize == "none" and "quantize" not in is_open:
            in_int8 = self.counter.count(replace(least, quantize="int8"))
            ways.insert(0, f"model.quantize: int8, with which it is {_amount(in_int8.device)} (a new run)")
        changes = _in_words(changed_settings(least, self.given)) or "the configured settings"
        return (
            f"memory.auto: nothing fits {_amount(self.room.device)} of the device and "
            f"{_amount(self.room.host)} of the host. Least of the device is needed with {changes}: "
            f"{_amount(count.device)}, and {_amount(self.room.host_needed(count))} of the host. "
            f"What would help: {'; '.join(ways)}"
        )


def _settings_of(config: Config, family: ModelFamily, accelerator: Accelerator) -> StepSettings:
    """The settings of a step in one of the processes, on their kind of device."""
    settings = step_settings(config, family, num_processes=accelerator.num_processes)
    return replace(
        settings,
        num_shards=1 if family.shards is None else family.shards.num_shards,
        device_type="cuda" if accelerator.device.type == "cuda" else "cpu",
    )


def _room(config: Config, accelerator: Accelerator) -> tuple[MemoryBudget, Gpu | None]:
    """The memory that every process may take, and the card of the main one."""
    found = on_all_processes(
        accelerator,
        lambda: (_device_bytes(config, accelerator.device), _host_bytes(config), gpu_here()),
    )
    room = _room_of(config, min(device for device, _, _ in found))
    return replace(room, host=min(host for _, host, _ in found)), found[0][2]


def _room_of(config: Config, device_bytes: float) -> MemoryBudget:
    return MemoryBudget(
        device=device_bytes,
        host=_host_bytes(config),
        num_sharing=num_local_processes(),
        # As the engine does by default.
        offload_ratio=0.5 if config.memory.host_gib is None else 1.0,
    )


def _device_bytes(config: Config, device: torch.device, *, is_taken: bool = False) -> float:
    """The memory of a device that training steps may take; infinite on the CPU.

    Args:
        is_taken: whether this process holds most of it already.
    """
    if config.memory.device_gib is not None:
        return config.memory.device_gib * 1024**3
    if device.type != "cuda":
        return math.inf
    free, whole = torch.cuda.mem_get_info(device)
    return COUNTED_SHARE * (whole if is_taken else free)


def _host_bytes(config: Config) -> float:
    """The host memory that a process may take; infinite where the system does not report it."""
    if config.memory.host_gib is not None:
        return config.memory.host_gib * 1024**3
    available = available_host_bytes()
    return math.inf if available is None else COUNTED_SHARE * available / num_local_processes()


def _is_there(name: str) -> bool:
    return name != "nf4" or find_spec("bitsandbytes") is not None


def _is_default(config: Config, key: str) -> bool:
    section, _, name = key.partition(".")
    return bool(getattr(config, section).is_default(name))


def _in_words(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {as_text(value)}" for key, value in settings.items())


def _amount(num_bytes: float) -> str:
    return "any amount" if math.isinf(num_bytes) else format_bytes(int(num_bytes))
