"""This file answers questions of a program that shows the plan of a config while that changes.

A question is a :class:`PlanRequest` as a JSON object. The answers are the parts of its plan, as they are
counted: ``{"id": 1, "state": "part", "part": "memory", "plan": {...}}``, then "time", "phases" and "choices",
of :meth:`Answer.parts`, and ``{"id": 1, "state": "done"}``; or "failed" with an ``error``, or "dropped" where
a newer question came.
"""

import math
from contextlib import ExitStack
from pathlib import Path

from pydantic import PositiveFloat, PositiveInt

from diffsynth_lite.config import LoadedConfig, load_config
from diffsynth_lite.pipelines import ModelFamily
from diffsynth_lite.serving import Request, Requests
from diffsynth_lite.training.planning.answer import Answer
from diffsynth_lite.training.planning.gpus import gpu_named
from diffsynth_lite.training.planning.kept_counts import KeptCounts
from diffsynth_lite.training.planning.plan_input import PlanInput, room_of
from diffsynth_lite.training.planning.planner import RunPlanner
from diffsynth_lite.training.planning.step_time import gpu_here
from diffsynth_lite.training.planning.subject import family_without_weights

_NUM_KEPT = 4


class PlanRequest(Request):
    """A question, with the arguments of ``diffsynth-lite plan`` by their names.

    Attributes:
        text: of the config, in place of what its file has.
        host_gib: None is any amount.
    """

    config: str
    text: str | None = None
    overrides: tuple[str, ...] = ()
    presets: tuple[str, ...] = ()
    gpu: str | None = None
    device_gib: PositiveFloat | None = None
    host_gib: PositiveFloat | None = None
    processes: PositiveInt = 1

    def input_of(self, loaded: LoadedConfig, family: ModelFamily) -> PlanInput:
        """What the plan of its config depends on; without a card, it is for the one of this machine.

        Raises:
            UserError: no run could do what the config says.
        """
        gpu = gpu_here() if self.gpu is None else gpu_named(self.gpu)
        device_gib = gpu.training_gib if gpu and self.device_gib is None else self.device_gib
        return PlanInput.of(
            loaded,
            family,
            room=room_of(device_gib, self.host_gib or math.inf, num_processes=self.processes),
            gpu=gpu,
            num_processes=self.processes,
            overrides=self.overrides,
            presets=self.presets,
        )


class LivePlan:
    """Answers requests, and keeps the last plans, which other questions may have, too.

    Args:
        folder: of the counts of earlier plans; None is none.
    """

    def __init__(self, requests: Requests[PlanRequest], folder: Path | None) -> None:
        self._requests, self._folder = requests, folder
        self._kept: list[tuple[RunPlanner, ExitStack]] = []

    def serve(self) -> None:
        """Answer until no more requests come."""
        for request in self._requests:
            with self._requests.answering(request, outdated="dropped"):
                self._answer(request)
                self._requests.answer(request, "done")
        self._keep(0)

    def _answer(self, wanted: PlanRequest) -> None:
        loaded = load_config(wanted.config, wanted.overrides, presets=wanted.presets, text=wanted.text)
        with ExitStack() as opened:
            family = opened.enter_context(family_without_weights(loaded.config))
            asked = wanted.input_of(loaded, family)
            planner = next((one for one, _ in self._kept if one.asked == asked), None)
            if planner is None:
                planner = RunPlanner(
                    asked, family, KeptCounts(self._folder, family, self._requests.require_wanted)
                )
                self._keep(_NUM_KEPT - 1)
                self._kept.append((planner, opened.pop_all()))
            for name, part in Answer(planner, asked).parts():
                self._requests.answer(wanted, "part", part=name, plan=part)

    def _keep(self, number: int) -> None:
        """Close all but so many of the last plans."""
        while len(self._kept) > number:
            _, opened = self._kept.pop(0)
            opened.close()
