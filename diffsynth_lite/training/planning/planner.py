"""This file counts a run as its config has it, and finds a way to make it that fits a card."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines import ModelFamily
from diffsynth_lite.training.planning.choices import (
    SMALLER_FORMATS,
    Choice,
    MemoryBudget,
    changed_settings,
    choices_of_first_format,
    least_streamed,
)
from diffsynth_lite.training.planning.gpus import Gpu
from diffsynth_lite.training.planning.kept_counts import KeptCounts
from diffsynth_lite.training.planning.memory_count import MemoryCount
from diffsynth_lite.training.planning.phases import OTHER_NUMBERS, Phase, PhaseCounter, remedies
from diffsynth_lite.training.planning.plan_input import PlanInput
from diffsynth_lite.training.planning.step import StepSettings
from diffsynth_lite.training.planning.subject import (
    counter_of,
    step_settings,
    timer_of,
)


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a run can be made: as its config has it, with other settings, or by another recipe.

    Attributes:
        phases: all of a run, or only training where a family loads its models in a way of its own.
        uncounted: why the other phases are not counted; empty where they are.
        seconds: of an optimizer step.
        changes: settings that differ from those of the config, by dotted key.
        recipe: name of the config that takes its place; empty for none.
        other_numbers: those that make it another run, with other losses and weights; of a recipe its input
            has them.
    """

    step: MemoryCount
    phases: Sequence[Phase]
    uncounted: str
    seconds: float
    changes: Mapping[str, Any]
    recipe: str = ""
    other_numbers: tuple[str, ...] = ()

    def fits(self, room: MemoryBudget) -> bool:
        """Whether all phases, and what processes share, fit."""
        return room.fits(self.step) and all(phase.fits(room.device, room.host) for phase in self.phases)

    def device_in(self, room: MemoryBudget | None) -> int:
        """Bytes of the device in the largest phase; previews are decoded in tiles only where they must be."""
        limit = room.device if room else 0
        return max(one.device if one.device <= limit else one.least_device for one in self.phases)

    def host_in(self, room: MemoryBudget | None) -> float:
        """Bytes of the host in the largest phase."""
        least = room.host_needed(self.step) if room else 0
        return max(least, *(phase.host for phase in self.phases))


class RunPlanner:
    """Counts the run of one config, in one of the processes of a machine.

    What it has is counted when it is asked for, and once.

    Attributes:
        size: the largest that is trained on.
        given: settings of the steps, as in the config.
    """

    def __init__(self, asked: PlanInput, family: ModelFamily, kept: KeptCounts) -> None:
        self.asked, self.config, self.room = asked, asked.config, asked.room
        config, num_processes = asked.config, asked.num_processes
        self._counter = counter_of(config, family, kept)
        self._timer = timer_of(config, self._counter, asked.gpu, num_processes=num_processes)
        self.given = step_settings(config, family, num_processes=num_processes)
        self._phases = PhaseCounter(config, family, self._counter)
        self.size = self._phases.size
        self._family, self._kept = family, kept

    @cached_property
    def choices(self) -> list[Choice]:
        """Settings of the steps that fit, the fastest first."""
        if self.room is None:
            return []
        formats = self.given.quantize, *SMALLER_FORMATS
        return choices_of_first_format(self._counter, self._timer.seconds, [self.given], self.room, formats)

    @cached_property
    def choices_and_configured(self) -> list[Choice]:
        """The same with those of the config, whether they fit or not; none where no card is known."""
        own, found = self.settings, self.choices
        if self.room is None or any(one.settings == own or not one.overrides(self.config) for one in found):
            return found
        configured = Choice(settings=own, count=self.step, seconds=self.seconds)
        return sorted([*found, configured], key=lambda choice: choice.seconds)

    @property
    def changes_format(self) -> bool:
        """Whether the choices are those of fewer bits, as nothing fits in the format of the config."""
        return bool(self.choices) and self.choices[0].settings.quantize != self.given.quantize

    @cached_property
    def step(self) -> MemoryCount:
        """The memory of a step as the config has it."""
        return self._counter.count(self.settings)

    @property
    def seconds(self) -> float:
        """Of an optimizer step as the config has it."""
        return self._timer.seconds(self.settings)

    def seconds_on(self, gpu: Gpu) -> float:
        """The same on another card."""
        timer = timer_of(self.config, self._counter, gpu, num_processes=self.asked.num_processes)
        return timer.seconds(self.settings)

    @cached_property
    def as_configured(self) -> Way:
        """The run as its config has it."""
        return self._way(self.settings, {})

    @cached_property
    def settings(self) -> StepSettings:
        """Those of the steps in the config, or where it leaves them open those that the run chooses."""
        memory = self.config.memory
        if memory.auto and self.choices and not self.changes_format:
            return self.choices[0].settings
        if memory.stream_blocks == "auto" and self.room:
            return least_streamed(self._counter, self.given, self.room.device) or self.given
        return self.given

    @cached_property
    def best(self) -> Way | None:
        """The first way that fits: as configured, a recipe, more for other phases, other steps.

        With no card it is the run as configured; None where nothing fits.
        """
        if self.room is None or self.as_configured.fits(self.room):
            return self.as_configured
        ways = chain(self._by_recipes(), self._repaired(self.room))
        return next((way for way in ways if way.fits(self.room)), None)

    def _by_recipes(self) -> Iterator[Way]:
        for name, config in self.asked.recipes:
            planner = RunPlanner(replace(self.asked, config=config, recipes=()), self._family, self._kept)
            yield replace(planner.as_configured, recipe=name)

    def _repaired(self, room: MemoryBudget) -> Iterator[Way]:
        """With what helps the other phases; steps are changed where they do not fit themselves."""
        kinds = [self.settings] if room.fits(self.step) else []
        for settings in (*kinds, *(choice.settings for choice in self.choices)):
            changes = {} if settings is self.settings else changed_settings(settings, self.config)
            with suppress(UserError):  # the other phases are not counted
                for _, remedy in remedies(self._phases, settings, room):
                    changes |= remedy
            number = changes.get("memory.stream_blocks", settings.stream_blocks)
            yield self._way(replace(settings, stream_blocks=number), changes)

    def _way(self, settings: StepSettings, changes: Mapping[str, Any]) -> Way:
        step, uncounted = self._counter.count(settings), ""
        try:
            phases = self._phases.changed(changes).count(settings)
        except UserError as error:  # steps are counted all the same
            phases, uncounted = [Phase.of("training", step.device, step.host)], str(error)
        return Way(
            step=step,
            phases=phases,
            uncounted=uncounted,
            seconds=self._timer.seconds(settings),
            changes=changes,
            other_numbers=tuple(key for key in changes if key in OTHER_NUMBERS),
        )
