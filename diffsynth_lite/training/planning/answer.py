"""This file puts a plan into three lines, and into JSON: whether it fits, what would, how long it takes."""

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from diffsynth_lite.report.page import duration
from diffsynth_lite.training.planning.choices import Choice, as_overrides
from diffsynth_lite.training.planning.plan_input import PlanInput
from diffsynth_lite.training.planning.planner import RunPlanner, Way

_GIB = 1024**3


PartName = Literal["memory", "time", "phases", "choices"]


@dataclass(frozen=True)
class Answer:
    """What a plan says about a run.

    Attributes:
        asked: the input of the run, which is equal to the planner's.
    """

    planner: RunPlanner
    asked: PlanInput

    def parts(self) -> Iterator[tuple[PartName, dict[str, Any]]]:
        """The answer for programs, part by part, each counted when it is asked for; the last is all of it."""
        planner, room = self.planner, self.planner.room
        step, limits = planner.step, self._limits()
        host = room.host_needed(step) if room else step.host
        yield "memory", {"step_gib": _gib(step.device), "step_host_gib": _gib(host), **limits}
        seconds = self.seconds(planner)
        run_s = seconds and seconds * self.asked.steps
        yield "time", {"configured_step_s": seconds, "configured_run_s": run_s}
        yield "phases", {**self._needs(), **limits, "phases": self._phases()}
        yield "choices", self.as_json()

    @property
    def fits(self) -> bool | None:
        """Whether the run fits as configured; None where no card is known."""
        room = self.planner.room
        return None if room is None else self.planner.as_configured.fits(room)

    @property
    def lines(self) -> list[str]:
        """Whether it fits; what to do about it, which ends with text to copy; how long it takes."""
        return [self.verdict, self._remedy(), self._time()]

    @property
    def verdict(self) -> str:
        """Whether it fits, and what is needed of what there is."""
        room, way = self.planner.room, self.planner.as_configured
        device, host = way.device_in(room) / _GIB, way.host_in(room) / _GIB
        only = " (training only)" if way.uncounted else ""
        if room is None:
            return f"Needs {device:.1f} GiB of the GPU and {host:.1f} GiB of host memory{only}."
        limit = room.device / _GIB
        # That 21.63 do not fit 21.6 must be seen.
        digits = 1 if f"{device:.1f}" != f"{limit:.1f}" else 2
        with_host = ""
        if math.isfinite(room.host):
            with_host = f", and {host:.1f} of {room.host / _GIB:.1f} GiB of host memory"
        card = f" your {self.asked.gpu.name}" if self.asked.gpu else ""
        processes = self.asked.num_processes
        each = f", in each of {processes} processes" if processes > 1 else ""
        word = "Fits" if self.fits else "Does not fit"
        return f"{word}{card}: {device:.{digits}f} of {limit:.{digits}f} GiB{with_host}{each}{only}."

    def seconds(self, way: Way | Choice | RunPlanner | None) -> float | None:
        """Of a step; None where the speed of the card is not known."""
        return way.seconds if way and self.asked.gpu and self.asked.gpu.is_timed else None

    @property
    def _other_numbers(self) -> Sequence[str]:
        """The settings of the best way that make it another run."""
        best = self.planner.best
        if best is None:
            return ()
        return self.asked.other_numbers[best.recipe] if best.recipe else best.other_numbers

    def is_configured(self, choice: Choice) -> bool:
        """Whether these are the settings of the config, or those that it leaves to the run."""
        planner = self.planner
        return choice.settings == planner.settings or not choice.overrides(planner.config)

    def as_json(self) -> dict[str, Any]:
        """The same for programs: sizes in GiB, times in seconds."""
        planner, best = self.planner, self.planner.best
        seconds = self.seconds(best)
        return {
            **self._needs(),
            **self._limits(),
            "overrides": as_overrides(best.changes) if best else [],
            "recipe": best.recipe or None if best else None,
            "changes_numbers": bool(self._other_numbers),
            "step_s": seconds,
            "run_s": None if seconds is None else seconds * self.asked.steps,
            "summary": self.lines,
            "phases": self._phases(),
            "choices": [
                {
                    "overrides": [] if self.is_configured(choice) else choice.overrides(planner.config),
                    "is_configured": self.is_configured(choice),
                    "fits": planner.room is not None and planner.room.fits(choice.count),
                    "device_gib": _gib(choice.count.device),
                    "host_gib": _gib(choice.count.host),
                    "step_s": self.seconds(choice),
                }
                for choice in planner.choices_and_configured
            ],
        }

    def _needs(self) -> dict[str, Any]:
        room, way = self.planner.room, self.planner.as_configured
        return {
            "fits": self.fits,
            "needed_gib": _gib(way.device_in(room)),
            "needed_host_gib": _gib(way.host_in(room)),
            "uncounted": way.uncounted or None,
        }

    def _limits(self) -> dict[str, Any]:
        room = self.planner.room
        has_limit = room is not None and math.isfinite(room.host)
        return {
            "gpu": self.asked.gpu.name if self.asked.gpu else None,
            "limit_gib": _gib(room.device) if room else None,
            "limit_host_gib": _gib(room.host) if room and has_limit else None,
        }

    def _phases(self) -> list[dict[str, Any]]:
        return [
            {
                "name": phase.name,
                "device_gib": _gib(phase.device),
                "in_tiles_gib": _gib(phase.least_device),
                "host_gib": _gib(phase.host),
            }
            for phase in self.planner.as_configured.phases
        ]

    def _remedy(self) -> str:
        best = self.planner.best
        if self.planner.room is None:
            return "For what fits your card: --gpu 'RTX 4090', or its memory: --device-gib 24"
        if best is None:
            return "Nothing that is known makes it fit. Smaller or shorter data, or a smaller model, may."
        if self.fits:
            return "Nothing needs to change."
        others = ", ".join(self._other_numbers)
        numbers = f" (changes results: {others})" if others else ""
        if best.recipe:
            return f"The recipe for this card fits{numbers}: --config {best.recipe}"
        return f"It fits with these settings{numbers}: {shlex.join(as_overrides(best.changes))}"

    def _time(self) -> str:
        if self.planner.best is None:
            return "Time: none, as nothing fits."
        if self.asked.gpu is None:
            return "Time: not known without the name of a card, as in --gpu 'RTX 4090'."
        seconds, steps = self.seconds(self.planner.best), self.asked.steps
        if seconds is None:
            return f"Time: not known. {self.asked.gpu.remark}"
        with_that, run = "" if self.fits else "with that ", duration(seconds * steps)
        return (
            f"Time: {with_that}{seconds:.3g} s a step of batch {self.asked.config.train.global_batch_size}, "
            f"{run} for {steps} steps; estimated from the card's data sheet, measured on no GPU."
        )


def _gib(num_bytes: float) -> float:
    return round(num_bytes / _GIB, 3)
