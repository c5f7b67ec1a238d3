"""This file estimates the memory of each phase of a run, and finds settings with which a phase fits."""

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypeVar, get_args

from diffsynth_lite.config import Config
from diffsynth_lite.core.weights.stream import SLOTS_TO_GENERATE
from diffsynth_lite.pipelines import ModelFamily
from diffsynth_lite.training.planning.choices import MemoryBudget, setting_of
from diffsynth_lite.training.planning.inference_count import (
    LoadedBytes,
    count_media_encoder,
    count_preview,
    count_prompt_encoder,
    preview_request,
)
from diffsynth_lite.training.planning.memory_count import MemoryCount, MemoryCounter
from diffsynth_lite.training.planning.step import StepSettings
from diffsynth_lite.training.planning.subject import largest_size, num_inputs_of, with_changes
from diffsynth_lite.training.planning.without_weights import copied_bytes, frozen_component
from diffsynth_lite.training.preview_requests import preview_size

_WEIGHTS = ("model.path",)  # their dtype in the files of a release
_VAE = (*_WEIGHTS, "model.vae_dtype", "model.vae_tiling")
READ: Mapping[str, tuple[str, ...]] = {
    "media": _VAE,
    "prompts": (
        *_WEIGHTS,
        *("model.text_encoder_dtype", "model.text_encoder_quantize"),
        *("memory.stream_text_encoder", "memory.stream_slots", "memory.min_bytes"),
    ),
    "copied": _WEIGHTS,
    "preview": (*_VAE, "validation.guidance_scale"),
}
"""The settings that each count of something other than a step reads, in addition to sizes and formats."""
_Counted = TypeVar("_Counted")
PhaseName = Literal["encoding media", "encoding prompts", "loading", "training", "generating previews"]


@dataclass(frozen=True, kw_only=True)
class Phase:
    """The peak memory of a phase of a run.

    Attributes:
        least_device: bytes of the device that it needs at least: previews are decoded in tiles on a full one.
    """

    name: PhaseName
    device: int
    host: int
    least_device: int

    @classmethod
    def of(cls, name: PhaseName, device: int, host: int) -> Self:
        """One that always needs as much of the device."""
        return cls(name=name, device=device, host=host, least_device=device)

    def fits(self, device_bytes: float, host_bytes: float) -> bool:
        """Whether it takes no more than this."""
        return self.least_device <= device_bytes and self.host <= host_bytes


class PhaseCounter:
    """Counts the phases of a run, in one process.

    Attributes:
        size: the largest that is trained on.
    """

    def __init__(self, config: Config, family: ModelFamily, counter: MemoryCounter) -> None:
        self.config, self.family, self._counter = config, family, counter
        self.size, self._num_inputs = largest_size(config, family), num_inputs_of(config, family)
        self._known: dict[str, Any] = {}

    def count(self, settings: StepSettings) -> list[Phase]:
        """The phases of a run that takes its steps under these settings, in order."""
        return [self.phase(name, settings) for name in get_args(PhaseName)]

    def phase(self, name: PhaseName, settings: StepSettings) -> Phase:
        """One of them; a UserError where the family loads its models in a way that cannot be counted."""
        match name:
            case "encoding media":
                return self._encoding(name, self._encoder("media", count_media_encoder))
            case "encoding prompts":
                return self._encoding(name, self._encoder("prompts", count_prompt_encoder))
            case "loading":
                return self._loading(self._counter.count(settings), settings)
            case "training":
                step, resident = self._counter.count(settings), self._resident_encoders
                # A batch is encoded between two steps.
                peak = max(step.device, step.between_steps + resident.calls)
                return Phase.of(name, resident.device + peak, resident.host + step.host)
            case "generating previews" if self.config.validation.prompts:
                return self._previewing(self._counter.count(settings), settings)
            case "generating previews":
                return Phase.of(name, 0, 0)

    def changed(self, changes: Mapping[str, object]) -> "PhaseCounter":
        """The same with other settings, by key, that change neither the steps nor the data."""
        changed = copy(self)  # shares the counts
        changed.config = with_changes(self.config, changes)
        return changed

    def _once(
        self, name: str, kind: type[_Counted], count: Callable[[], _Counted], others: Mapping[str, object]
    ) -> _Counted:
        """The result of a count, which is made once.

        Args:
            name: of the count, in ``READ``.
            others: what it depends on in addition to the settings named there.
        """
        settings = {key: setting_of(self.config, key) for key in READ[name]} | dict(others)
        key = repr((name, settings))
        if key not in self._known:
            self._known[key] = self._counter.kept.of(name, settings, kind, count)
        counted: _Counted = self._known[key]
        return counted

    def _encoder(self, name: str, count: Callable[..., LoadedBytes]) -> LoadedBytes:
        sizes = {"size": self.size, "num_inputs": self._num_inputs}
        return self._once(name, LoadedBytes, lambda: count(self.config, self.family, **sizes), sizes)

    def _encoding(self, name: PhaseName, encoder: LoadedBytes) -> Phase:
        """One encoder after the other, unless both stay."""
        resident = self._resident_encoders
        device, host = max(encoder.device, resident.device), max(encoder.host, resident.host)
        return Phase.of(name, device + encoder.calls, host + encoder.passing)

    @property
    def _resident_encoders(self) -> LoadedBytes:
        """The encoders that stay next to the model, where data are encoded while it trains."""
        if self.config.data.cache:
            return LoadedBytes()
        media = self._encoder("media", count_media_encoder)
        encoders = media, self._encoder("prompts", count_prompt_encoder)
        return LoadedBytes(
            device=sum(one.device for one in encoders),
            calls=max(one.calls for one in encoders),
            host=sum(one.host for one in encoders),
            passing=max(one.passing for one in encoders),
        )

    def _loading(self, step: MemoryCount, settings: StepSettings) -> Phase:
        """Weights, in place or cast by their library; the optimizer's state is made in the first step."""
        copied = 0
        if settings.quantize == "none" and not settings.stream_blocks and settings.num_shards == 1:
            copied = self._once("copied", int, lambda: self._copied(settings), {"dtype": settings.dtype})
        device = step.weights + step.slots + step.lora
        return Phase.of(
            "loading",
            self._resident_encoders.device + device,
            self._resident_encoders.host + step.weights_on_host + copied,
        )

    def _copied(self, settings: StepSettings) -> int:
        family, where = self.family, self.config.model.path
        parts = {name: frozen_component(family, name, settings.dtype) for name in family.trained}
        return sum(copied_bytes(family, where, name, part) for name, part in parts.items())

    def _previewing(self, step: MemoryCount, settings: StepSettings) -> Phase:
        """The model without gradients; between two steps."""
        held = step.between_steps + self._resident_encoders.device
        is_moving = settings.has_average and self.config.validation.use_ema
        if is_moving or self._counter.optimizer.has_average:
            held += self._counter.lora_bytes  # a copy of the trained values while the average generates
        return self._generating(step, settings, held, self._resident_encoders.host + step.host)

    def sampling(self, settings: StepSettings, lora_bytes: int) -> Phase:
        """A model that only generates, and encodes new prompts in between.

        ``device`` is with the text encoder next to it, ``least_device`` with one at a time.
        """
        step, prompts = self._counter.count(settings), self._encoder("prompts", count_prompt_encoder)
        model = self._bytes_without_adapter(step) + step.slots + lora_bytes
        encoder = prompts.device + prompts.calls
        found = self._generating(step, settings, model, step.weights_on_host)
        encoding_host = step.weights_on_host + prompts.host + prompts.passing
        return replace(
            found,
            device=max(found.device, model + encoder),
            least_device=max(found.least_device, encoder),
            host=max(found.host, encoding_host, self._loading(step, settings).host),
        )

    def _generating(self, step: MemoryCount, settings: StepSettings, held: int, host: int) -> Phase:
        """Previews, with the autoencoder, which is loaded for them, and with models that only generate.

        Args:
            held: bytes of the device that the trained model and all around it take.
            host: those of host memory.
        """
        request = preview_request(self.config, self.family)
        subject = self.config, self.family, self._counter, settings
        others = {
            **self._counter.subject,
            "blocks": self._counter.few_blocks(settings).kinds,
            "formats": (settings.dtype, settings.quantize, settings.quantize_skip, settings.mixed_precision),
            "size": (request.width, request.height, request.num_frames, request.num_layers, request.fps),
            "media": (
                len(request.inputs),
                len(request.control),
                len(request.inpaint_mask),
                len(request.face),
            ),
        }
        preview = self._once("preview", LoadedBytes, lambda: count_preview(*subject), others)
        held, host = held + preview.device, host + preview.passing
        if set(self.family.denoisers) - set(self.family.trained):
            # The other expert generates, too, and waits in host memory, or is sharded as well.
            is_whole = settings.num_shards == 1
            other = self._generator(settings) if is_whole else replace(step, slots=0, weights_on_host=0)
            held, host = held + self._bytes_without_adapter(other) + other.slots, host + other.weights_on_host
        if self.config.validation.model_path is not None:
            # All of another model, with the LoRA once more.
            other = self._generator(settings)
            held += self._bytes_without_adapter(other) + other.slots + self._counter.lora_bytes
            host += other.weights_on_host
        return Phase(
            name="generating previews",
            device=held + preview.calls,
            host=host,
            least_device=held + preview.calls_in_tiles,
        )

    def _generator(self, settings: StepSettings) -> MemoryCount:
        """A model that only generates, next to the trained one."""
        return self._counter.count(replace(settings, stream_blocks="all", stream_slots=SLOTS_TO_GENERATE))

    def _bytes_without_adapter(self, other: MemoryCount) -> int:
        """Bytes of the weights of a model that only generates: no training adapter is on it."""
        return other.weights - self._counter.training_adapter_bytes


_Changes = dict[str, Any]

OTHER_NUMBERS = frozenset(
    ("model.quantize", "model.text_encoder_quantize", "model.vae_dtype", "model.vae_tiling")
)
"""Settings that make it another run."""
_STREAMED: _Changes = {"memory.stream_text_encoder": True}
_IN_TILES: _Changes = {"model.vae_tiling": True}
_IN_BFLOAT16: _Changes = {"model.vae_dtype": "bfloat16"}


def remedies(
    phases: PhaseCounter, settings: StepSettings, room: MemoryBudget
) -> Iterator[tuple[Phase, _Changes]]:
    """For each phase that does not fit, the first settings that make it fit: those that change least.

    They are empty where none are known. Settings that make the steps themselves fit are not searched.
    """

    def helps(phase: Phase, changes: _Changes) -> bool:
        number = changes.get("memory.stream_blocks", settings.stream_blocks)
        after = phases.changed(changes).phase(phase.name, replace(settings, stream_blocks=number))
        return after.fits(room.device, room.host)

    for phase in phases.count(settings):
        if not phase.fits(room.device, room.host):
            tried = _helping(phase, phases, settings)
            yield phase, next((changes for changes in tried if helps(phase, changes)), {})


def _helping(phase: Phase, phases: PhaseCounter, settings: StepSettings) -> Iterator[_Changes]:
    """Settings that may help a phase, those that change least first."""
    own = list(_of_phase(phase, phases, settings))
    if phases.config.data.cache:
        yield from own
        return
    # The encoders then go before the model comes.
    yield from ({"data.cache": True, **changes} for changes in ({}, *own))


def _of_phase(phase: Phase, phases: PhaseCounter, settings: StepSettings) -> Iterator[_Changes]:
    match phase.name:
        case "encoding media":
            tiles, size = phases.family.known_vae_tiles, phases.size
            if tiles is not None and tiles.split(size.width, size.height, size.num_frames):
                yield from (_IN_TILES, _IN_TILES | _IN_BFLOAT16)
            yield _IN_BFLOAT16
        case "encoding prompts":
            yield _STREAMED
            formats: list[_Changes] = [{"model.text_encoder_quantize": name} for name in ("int8", "nf4")]
            yield from formats
            yield from (_STREAMED | changes for changes in formats)
        case "loading" if settings.quantize == "none" and not settings.stream_blocks:
            # A model of which something is streamed, or sharded, is filled in place, and cast row by row.
            yield {"memory.stream_blocks": settings.stream_slots + 1}
        case "generating previews":
            yield _IN_BFLOAT16
            width, height = preview_size(phases.config, phases.family)
            divisor = phases.family.size_divisor
            sides = [max(divisor, side // 2 // divisor * divisor) for side in (width, height)]
            yield dict(zip(("validation.width", "validation.height"), sides, strict=True))
            yield {"validation.prompts": []}
