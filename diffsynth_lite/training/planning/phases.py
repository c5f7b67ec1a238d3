"""This file counts what each phase of a run takes: encoding, loading, training, drawing previews."""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, get_args

from diffsynth_lite.config import Config
from diffsynth_lite.data import Bucket
from diffsynth_lite.pipelines import ModelFamily
from diffsynth_lite.pipelines.wan.experts import NUM_SLOTS
from diffsynth_lite.training.planning.encoder_count import (
    EncoderBytes,
    count_media_encoder,
    count_prompt_encoder,
)
from diffsynth_lite.training.planning.memory_count import MemoryCount, MemoryCounter
from diffsynth_lite.training.planning.preview_count import PreviewBytes, count_preview
from diffsynth_lite.training.planning.step import StepSettings
from diffsynth_lite.training.planning.subject import with_changes
from diffsynth_lite.training.planning.without_weights import copied_bytes, frozen_component
from diffsynth_lite.training.streaming import SLOTS_TO_DRAW

_Counted = TypeVar("_Counted")
PhaseName = Literal["encoding media", "encoding prompts", "loading", "training", "drawing previews"]


@dataclass(frozen=True, kw_only=True)
class Phase:
    """What a phase of a run takes at most.

    Attributes:
        name: of it.
        device: bytes there.
        host: bytes of host memory.
        least_device: bytes of the device where it has no more: previews are then decoded in tiles.
    """

    name: PhaseName
    device: int
    host: int
    least_device: int

    def fits(self, device_bytes: float, host_bytes: float) -> bool:
        """Whether it takes no more than this."""
        return self.least_device <= device_bytes and self.host <= host_bytes


class PhaseCounter:
    """Counts the phases of a run, in one process.

    Args:
        config: of the run.
        family: bound to a folder, with or without weights.
        counter: of its training steps.
        size: the largest one that is trained on.
        num_inputs: pictures of that size that an item starts from.

    Attributes:
        config: as given, as are ``family`` and ``size``.
    """

    def __init__(
        self, config: Config, family: ModelFamily, counter: MemoryCounter, *, size: Bucket, num_inputs: int
    ) -> None:
        self.config, self.family, self._counter = config, family, counter
        self.size, self._num_inputs = size, num_inputs
        self._known: dict[str, Any] = {}

    def count(self, settings: StepSettings) -> list[Phase]:
        """The phases of a run that takes its steps under these settings, in order.

        Raises:
            UserError: as ``phase``.
        """
        return [self.phase(name, settings) for name in get_args(PhaseName)]

    def phase(self, name: PhaseName, settings: StepSettings) -> Phase:
        """One of them.

        Raises:
            UserError: the family loads its models in a way of its own, so that they cannot be counted; or
                what ``MemoryCounter.count`` raises.
        """
        match name:
            case "encoding media":
                return self._encoding(name, self._media)
            case "encoding prompts":
                return self._encoding(name, self._prompts)
            case "loading":
                return self._loading(self._counter.count(settings), settings)
            case "training":
                return self._training(self._counter.count(settings))
            case "drawing previews" if self.config.validation.prompts:
                return self._drawing(self._counter.count(settings), settings)
            case "drawing previews":
                return _phase(name, 0, 0)

    def changed(self, changes: Mapping[str, object]) -> "PhaseCounter":
        """Of the same run with other settings, by key, that do not touch the steps or the data."""
        changed = copy(self)  # what was counted is known to both
        changed.config = with_changes(self.config, changes)
        return changed

    def _once(self, count: Callable[[], _Counted], *settings: object) -> _Counted:
        """What is counted under these settings, unless it is known."""
        key = repr(settings)
        if key not in self._known:
            self._known[key] = count()
        counted: _Counted = self._known[key]
        return counted

    @property
    def _media(self) -> EncoderBytes:
        subject = self.config, self.family, self.size, self._num_inputs
        return self._once(lambda: count_media_encoder(*subject), "media", self.config.model)

    @property
    def _prompts(self) -> EncoderBytes:
        subject = self.config, self.family, self.size, self._num_inputs
        memory = self.config.memory
        return self._once(lambda: count_prompt_encoder(*subject), "prompts", self.config.model, memory)

    def _encoding(self, name: PhaseName, encoder: EncoderBytes) -> Phase:
        """One encoder after the other, unless both stay."""
        beside = self._beside
        device, host = max(encoder.device, beside.device), max(encoder.host, beside.host)
        return _phase(name, device + encoder.calls, host + encoder.passing)

    @property
    def _beside(self) -> EncoderBytes:
        """What stays beside the model: both encoders, where data are encoded while it trains."""
        if self.config.data.cache:
            return EncoderBytes(device=0, calls=0, host=0, passing=0)
        encoders = self._media, self._prompts
        return EncoderBytes(
            device=sum(one.device for one in encoders),
            calls=max(one.calls for one in encoders),
            host=sum(one.host for one in encoders),
            passing=max(one.passing for one in encoders),
        )

    def _loading(self, step: MemoryCount, settings: StepSettings) -> Phase:
        """Weights, in place or cast by their library; the optimizer's state is made in the first step."""
        copied = 0
        if settings.quantize == "none" and not settings.stream_blocks and settings.num_shards == 1:
            copied = self._once(lambda: self._copied(settings), "copied", settings.dtype)
        device = step.weights + step.slots + step.lora
        return _phase(
            "loading", self._beside.device + device, self._beside.host + step.weights_on_host + copied
        )

    def _copied(self, settings: StepSettings) -> int:
        family, where = self.family, self.config.model.path
        parts = {name: frozen_component(family, name, settings.dtype) for name in family.trained}
        return sum(copied_bytes(family, where, name, part) for name, part in parts.items())

    def _training(self, step: MemoryCount) -> Phase:
        beside = self._beside
        # A batch is encoded between two steps.
        peak = max(step.device, step.between_steps + beside.calls)
        return _phase("training", beside.device + peak, beside.host + step.host)

    def _drawing(self, step: MemoryCount, settings: StepSettings) -> Phase:
        """The model without gradients, and the autoencoder, which is loaded for it; between two steps."""
        subject = self.config, self.family, self._counter, settings
        formats = settings.dtype, settings.quantize, settings.quantize_skip, settings.mixed_precision
        keys = "preview", formats, self.config.model, self.config.validation
        drawn: PreviewBytes = self._once(lambda: count_preview(*subject), *keys)
        held = step.between_steps + self._beside.device + drawn.weights
        is_moving = settings.has_average and self.config.validation.use_ema
        if is_moving or self._counter.optimizer.has_average:
            held += self._counter.lora_bytes  # what is trained waits while the average draws
        host = self._beside.host + step.host + drawn.copies
        if set(self.family.denoisers) - set(self.family.trained):
            # The other expert draws, too, and waits in host memory, or is sharded likewise.
            other = replace(step, slots=0, weights_on_host=0)
            if settings.num_shards == 1:
                other = self._counter.count(replace(settings, stream_blocks="all", stream_slots=NUM_SLOTS))
            held, host = held + self._beside_adapter(other) + other.slots, host + other.weights_on_host
        if self.config.validation.model_path is not None:
            # All of another model, likewise, with the LoRA once more.
            other = self._counter.count(replace(settings, stream_blocks="all", stream_slots=SLOTS_TO_DRAW))
            held += self._beside_adapter(other) + other.slots + self._counter.lora_bytes
            host += other.weights_on_host
        return Phase(
            name="drawing previews",
            device=held + drawn.calls,
            host=host,
            least_device=held + drawn.calls_in_tiles,
        )

    def _beside_adapter(self, other: MemoryCount) -> int:
        """Bytes of the weights of a model that only draws: no training adapter is on it."""
        return other.weights - self._counter.training_adapter_bytes


def _phase(name: PhaseName, device: int, host: int) -> Phase:
    return Phase(name=name, device=device, host=host, least_device=device)
