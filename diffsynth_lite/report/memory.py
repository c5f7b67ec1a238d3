"""This file puts into words what a run's memory switches did, and its plan beside what was measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from diffsynth_lite.core.gradient import GradientReport
from diffsynth_lite.core.gradient.compiled import CompileReport
from diffsynth_lite.core.gradient.frames import NotOffloadedReason
from diffsynth_lite.core.gradient.report import NotOffloadedTensors
from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.core.weights import QuantizationReport
from diffsynth_lite.core.weights.stream import StreamReport
from diffsynth_lite.report.series import as_number

_Report = TypeVar("_Report", GradientReport, StreamReport, CompileReport)

_MEANINGS = {
    "quantised": "frozen weights kept in fewer bits",
    "blocks": "checkpointed blocks are computed a second time instead of being kept",
    "offloaded": "kept in host memory until they are needed again",
    "shared": "stay on the device, as all blocks read them",
    "not offloaded": "stay on the device, and why",
    "attention": "its outputs are kept, so that it is not computed a second time",
    "not recomputed": "left out, as no gradient needs them",
    "host memory": "taken for what is offloaded",
    "device memory": "what tensors took of the GPU",
    "streamed": "weights that live in host memory and visit the device when their block runs",
    "compiled": "blocks that torch made faster programs of",
}


@dataclass(frozen=True, kw_only=True)
class MemoryFact:
    """One line of the memory report.

    Attributes:
        meaning: what the name stands for.
    """

    name: str
    value: str
    meaning: str


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What a step was predicted to take of the device, and what it took, in bytes."""

    predicted: float
    measured: float

    @property
    def text(self) -> str:
        """Both, and how far they are apart."""
        apart = 100 * (self.measured / self.predicted - 1)
        return (
            f"{format_bytes(self.measured)} measured, {format_bytes(self.predicted)} planned ({apart:+.1f} %)"
        )


def memory_facts(rows: Sequence[Mapping[str, Any]]) -> list[MemoryFact]:
    """What was quantised, recomputed, offloaded, streamed and compiled, as the latest start of the run said.

    Args:
        rows: of ``metrics.jsonl``.
    """
    reports = [row for row in rows if "blocks_run" in row or "graphs_compiled" in row]
    starts = [place for place, row in enumerate(reports) if "blocks_run" in row]
    if not starts:
        return []
    numbers: dict[str, float] = {}
    for row in reports[starts[-1] :]:
        numbers |= {name: value for name, each in row.items() if (value := as_number(each)) is not None}
    lines = [*_quantised(numbers), *_gradient(numbers), *_report(StreamReport, numbers).lines()]
    lines += _report(CompileReport, numbers).lines()
    return [_fact(*line.split("  ", maxsplit=1)) for line in lines]


def plan_beside_measurement(rows: Sequence[Mapping[str, Any]]) -> Comparison | None:
    """The latest comparison that the run made; None where it had no plan."""
    for row in reversed(rows):
        predicted = as_number(row.get("device_bytes_predicted"))
        measured = as_number(row.get("device_bytes_measured"))
        if predicted and measured:
            return Comparison(predicted=predicted, measured=measured)
    return None


def _fact(name: str, value: str) -> MemoryFact:
    return MemoryFact(name=name, value=value.strip(), meaning=_MEANINGS.get(name, ""))


def _quantised(numbers: Mapping[str, float]) -> list[str]:
    report = QuantizationReport(
        num_layers=int(numbers.get("layers_quantised", 0)),
        num_bytes=int(numbers.get("bytes_quantised", 0)),
        plain_bytes=int(numbers.get("bytes_before_quantisation", 0)),
    )
    return report.lines()


def _gradient(numbers: Mapping[str, float]) -> list[str]:
    stayed = {
        reason: NotOffloadedTensors(num_tensors=int(count), num_bytes=int(numbers.get(f"bytes_{name}", 0)))
        for reason in NotOffloadedReason
        if (count := numbers.get(f"tensors_{(name := f'not_offloaded_{reason.name.lower()}')}", 0))
    }
    return _report(GradientReport, numbers, not_offloaded=stayed).lines()


def _report(kind: type[_Report], numbers: Mapping[str, float], **others: Any) -> _Report:
    """A report of the numbers that were logged of it."""
    logged = {field.name: int(numbers[field.name]) for field in fields(kind) if field.name in numbers}
    return kind(**{**logged, **others})
