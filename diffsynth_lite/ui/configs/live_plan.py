"""This file has the plan of the config that is edited, as a process of its own counts it part by part."""

import math
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Any

from diffsynth_lite.config import load_config
from diffsynth_lite.config.editing import with_value
from diffsynth_lite.errors import UserError
from diffsynth_lite.report.page import duration
from diffsynth_lite.serving import Served
from diffsynth_lite.training.planning.gpus import GPUS, Gpu
from diffsynth_lite.ui.pages import device, digest

_SERVE = ("-m", "diffsynth_lite.cli.main", "plan", "--serve", "15")
_NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": ""}
_OLDER = "This plan is of an older text or card; the settings were not written. Use those of the newest plan."
_REPLACED = "another tab has asked for one since."
_MOST_LETTERS = 300  # of an error


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A plan as far as it was counted.

    Attributes:
        parts: all that was answered, by the names of ``diffsynth-lite plan --json``.
        error: why there is no plan, or no more of it.
        is_open: whether more is to come.
    """

    parts: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    is_open: bool = False

    @property
    def verdict(self) -> str:
        """Whether it fits; empty where that was not counted yet."""
        parts, fits = self.parts, self.parts.get("fits")
        if fits is None:
            return ""
        device = parts["needed_gib"], parts["limit_gib"]
        host = parts["needed_host_gib"], parts["limit_host_gib"] or math.inf
        shown = [f"{_of(*device)} GiB"] if fits or device[0] > device[1] else []
        shown += [f"{_of(*host)} GiB of host memory"] if host[0] > host[1] else []
        only = " (training only)" if parts["uncounted"] else ""
        return f"{'Fits' if fits else 'Does not fit'}: {', and '.join(shown)}{only}"

    @property
    def bars(self) -> Mapping[str, tuple[float, str]]:
        """GiB of each phase, and them in words; until that was counted, of training only."""
        if "step_gib" not in self.parts:
            return {}
        limit, phases = self.parts["limit_gib"], {"training": self.parts["step_gib"]}
        if counted := self.parts.get("phases"):
            phases = {
                one["name"]: one["device_gib" if one["device_gib"] <= limit else "in_tiles_gib"]
                for one in counted
            }
        return {name.capitalize(): (gib, f"{_of(gib, limit, ' GiB')} GiB") for name, gib in phases.items()}

    @property
    def settings(self) -> Sequence[tuple[str, str]]:
        """Those that make it fit: key and value, as yaml on one line."""
        given = () if self.parts.get("fits", True) else self.parts.get("overrides", ())
        return [(key, value) for key, _, value in (one.partition("=") for one in given)]

    def time(self, prefix: str = "") -> str:
        """Of a step and of the run; empty where it is not known.

        Args:
            prefix: "configured_", or none for the settings that fit.
        """
        step, run = (self.parts.get(f"{prefix}{name}") for name in ("step_s", "run_s"))
        return "" if step is None or run is None else f"{step:.3g} s a step, {duration(run)} in all"


@dataclass(frozen=True, kw_only=True)
class _Question:
    number: int
    path: Path
    hash: str
    name: int = 0  # of its answers
    wrong: str = ""  # why it was not asked


class LivePlan:
    """The plan of the config that was changed last: a newer question takes the place of the one before.

    Args:
        served: answers as ``diffsynth-lite plan --serve`` does.
    """

    def __init__(self, served: Served) -> None:
        self._served, self._lock = served, threading.Lock()
        self._asked: _Question | None = None

    @classmethod
    def of(cls, folder: Path) -> "LivePlan":
        """That of a workspace, whose process is started when it is first asked."""
        return cls(Served([sys.executable, *_SERVE], folder, variables=_NO_GPU))

    def ask(self, path: Path, text: str, gpu: Gpu, host_gib: str) -> int:
        """Ask for the plan of a config; returns its number.

        Args:
            host_gib: as it was typed; empty for any amount.
        """
        with self._lock:
            number = self._asked.number + 1 if self._asked else 1
            name, wrong = 0, ""
            try:
                host = _host_gib(host_gib)
                _require_plannable(path, text)
                given = {"gpu": gpu.name if gpu in GPUS else None, "device_gib": gpu.training_gib} | host
                name = self._served.ask(config=f"configs/{path.name}", text=text, **given)
            except UserError as error:
                wrong = str(error)
            found = digest(text.encode())
            self._asked = _Question(number=number, path=path, hash=found, name=name, wrong=wrong)
            return number

    def plan(self, number: str, path: Path) -> Plan:
        """What is known so far of the plan of that number."""
        asked = self._asked
        if asked is None or (str(asked.number), asked.path) != (number, path):
            return Plan(error=_REPLACED)
        parts: dict[str, Any] = {}
        last: dict[str, Any] = {"state": "failed", "error": asked.wrong} if asked.wrong else {}
        for last in self._served.answers(asked.name):
            parts |= last.get("plan", {})
        error = shorten(str(last.get("error", "")), _MOST_LETTERS, placeholder="...")
        return Plan(parts=parts, error=error, is_open=last.get("state", "part") == "part")

    def fitting(self, number: object, path: Path, text: str) -> str:
        """The text of a config with the settings that fit, by the plan of that number."""
        asked, plan = self._asked, self.plan(str(number), path)
        if not plan.settings or asked is None or asked.hash != digest(text.encode()):
            raise UserError(_OLDER)
        for key, value in plan.settings:
            text = with_value(text, key, value)
        return text


def host_gib() -> int | None:
    """Memory of this machine, where it has the card that comes first; None elsewhere."""
    names = getattr(os, "sysconf_names", {})
    if not device() or "SC_PHYS_PAGES" not in names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 1024**3


def _host_gib(typed: str) -> dict[str, float]:
    try:
        found = float(typed) if typed.strip() else math.inf
    except ValueError:
        found = 0
    if not found > 0:
        raise UserError(f"Host memory: {typed}: give GiB above 0, or nothing for any amount")
    return {} if math.isinf(found) else {"host_gib": found}


def _require_plannable(path: Path, text: str) -> None:
    for key, name in load_config(path, text=text).config.code_of_others.items():
        raise UserError(
            f"{key}: {name} is code that comes with neither diffsynth_lite nor torch; if you know it, "
            f"use a terminal: diffsynth-lite plan --config configs/{path.name}"
        )


def _of(needed: float, limit: float, unit: str = "") -> str:
    # That 21.63 do not fit 21.6 must be seen.
    digits = 1 if f"{needed:.1f}" != f"{limit:.1f}" else 2
    return f"{needed:.{digits}f}{unit} of {limit:.{digits}f}"
