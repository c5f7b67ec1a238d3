"""This file finds settings with which the phases of a run beside its steps fit a device and its host."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from diffsynth_lite.training.planning.choices import Room
from diffsynth_lite.training.planning.phases import Phase, PhaseCounter
from diffsynth_lite.training.planning.step import StepSettings
from diffsynth_lite.training.preview_requests import preview_size

_Changes = dict[str, Any]

_OTHER_NUMBERS = frozenset(("model.text_encoder_quantize", "model.vae_dtype", "model.vae_tiling"))
"""Settings that change what a run is."""
_STREAMED: _Changes = {"memory.stream_text_encoder": True}
_IN_TILES: _Changes = {"model.vae_tiling": True}
_IN_BFLOAT16: _Changes = {"model.vae_dtype": "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """Settings with which a phase fits.

    Attributes:
        before: what it takes without them.
        changes: the settings, by key.
        after: what it takes with them; None where none are known, and ``changes`` is empty.
    """

    before: Phase
    changes: _Changes
    after: Phase | None

    @property
    def changes_numbers(self) -> bool:
        """Whether the run is another one with them."""
        return not _OTHER_NUMBERS.isdisjoint(self.changes)


def remedies(phases: PhaseCounter, settings: StepSettings, room: Room) -> Iterator[Remedy]:
    """For each phase that does not fit, the first settings that make it fit: those that change least.

    What helps the steps themselves is not looked for.

    Args:
        phases: of a run.
        settings: of its steps.
        room: that it has.

    Raises:
        UserError: as ``PhaseCounter.phase``.
    """
    for before in phases.count(settings):
        if before.fits(room.device, room.host):
            continue
        found = Remedy(before=before, changes={}, after=None)
        for changes in _helping(before, phases, settings):
            number = changes.get("memory.stream_blocks", settings.stream_blocks)
            after = phases.changed(changes).phase(before.name, replace(settings, stream_blocks=number))
            if after.fits(room.device, room.host):
                found = Remedy(before=before, changes=changes, after=after)
                break
        yield found


def _helping(phase: Phase, phases: PhaseCounter, settings: StepSettings) -> Iterator[_Changes]:
    """What may help a phase, first what changes least."""
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
        case "drawing previews":
            yield _IN_BFLOAT16
            width, height = preview_size(phases.config, phases.family)
            divisor = phases.family.size_divisor
            sides = [max(divisor, side // 2 // divisor * divisor) for side in (width, height)]
            yield dict(zip(("validation.width", "validation.height"), sides, strict=True))
            yield {"validation.prompts": []}
