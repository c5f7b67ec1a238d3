"""The metrics file: valid json after anything that can happen to a run."""

import json
import math
from pathlib import Path

import pytest

from diffsynth_lite.errors import UserError
from diffsynth_lite.run_folder.metrics import MetricsFile


@pytest.fixture
def metrics(tmp_path: Path) -> MetricsFile:
    return MetricsFile(tmp_path / "metrics.jsonl")


def steps(metrics: MetricsFile) -> list[int]:
    return [row["step"] for row in metrics.rows()]


def test_each_row_has_its_step_its_time_and_its_values_exactly(metrics: MetricsFile) -> None:
    metrics.append(1, {"loss": 0.1, "learning_rate": 1e-4 / 3})
    metrics.append(2, {"grad_norm": 3})
    first, second = (json.loads(line) for line in metrics.path.read_text().splitlines())
    assert first.pop("time") <= second.pop("time")
    assert first == {"step": 1, "loss": 0.1, "learning_rate": 1e-4 / 3}
    assert second == {"step": 2, "grad_norm": 3}


def test_a_row_is_in_the_file_when_append_returns(metrics: MetricsFile) -> None:
    for step in range(3):
        metrics.append(step, {})
        assert metrics.path.read_bytes().count(b"\n") == step + 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_null_so_that_the_file_stays_json(
    metrics: MetricsFile, value: float
) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not json")

    metrics.append(1, {"loss": value, "losses": [0.5, value], "updates": {"layer": value, "other": 2.0}})
    row = json.loads(metrics.path.read_text(), parse_constant=refuse)
    assert row["loss"] is None
    assert row["losses"] == [0.5, None]
    assert row["updates"] == {"layer": None, "other": 2.0}


@pytest.mark.parametrize("name", ["step", "time"])
def test_a_metric_cannot_hide_the_step_or_the_time(metrics: MetricsFile, name: str) -> None:
    with pytest.raises(AssertionError, match=name):
        metrics.append(1, {name: 3.0})


def test_cutting_back_removes_exactly_the_later_steps(metrics: MetricsFile) -> None:
    for step in (0, 0, 1, 5, 9, 10):
        metrics.append(step, {"loss": step / 3})
    kept = metrics.rows()[:4]
    metrics.cut_back_to(5)
    assert metrics.rows() == kept
    metrics.append(6, {"loss": 2.0})
    assert steps(metrics) == [0, 0, 1, 5, 6]
    assert [path.name for path in metrics.path.parent.iterdir()] == ["metrics.jsonl"]


def test_cutting_back_a_file_that_is_not_there_does_nothing(metrics: MetricsFile) -> None:
    metrics.cut_back_to(5)
    assert not metrics.path.exists()
    assert metrics.rows() == []


def test_a_torn_last_line_is_dropped_wherever_it_was_torn(metrics: MetricsFile) -> None:
    for step in (1, 2):
        metrics.append(step, {"loss": 0.5, "note_ü": 1.0})
    whole = metrics.path.read_bytes()
    second_line = whole.index(b"\n") + 1
    for length in range(second_line, len(whole)):
        metrics.path.write_bytes(whole[:length])
        assert steps(metrics) == [1]
        metrics.cut_back_to(10)
        metrics.append(3, {})
        assert steps(metrics) == [1, 3]


@pytest.mark.parametrize("line", ["", "loss: 3", "[1]", '{"loss": 3}', '{"step": "1"}', "\0\0\0"])
def test_a_line_that_is_not_a_row_is_named(metrics: MetricsFile, line: str) -> None:
    metrics.path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    before = metrics.path.read_bytes()
    with pytest.raises(UserError, match=r"metrics\.jsonl line 2"):
        metrics.cut_back_to(1)
    assert metrics.path.read_bytes() == before
