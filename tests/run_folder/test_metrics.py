"""Numbers of a run: valid json after anything that can happen, progress, and the measured items."""

import errno
import io
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import Program
from rich.console import Console

from diffsynth_lite.errors import RunDivergedError, UserError
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.metrics import MeasuredItem, MetricsFile, read_items, write_items
from diffsynth_lite.run_folder.progress import RunningStatus, StepReport, StepResult, Throughput


@pytest.fixture
def metrics(tmp_path: Path) -> MetricsFile:
    return MetricsFile(tmp_path / "metrics.jsonl")


def steps(metrics: MetricsFile) -> list[int]:
    return [row["step"] for row in metrics.rows()]


def test_each_row_has_its_step_its_time_and_its_values_exactly(metrics: MetricsFile) -> None:
    for step, values in ((1, {"loss": 0.1, "learning_rate": 1e-4 / 3}), (2, {"grad_norm": 3})):
        metrics.append(step, values)
        assert metrics.path.read_bytes().count(b"\n") == step  # when append returns
    first, second = (json.loads(line) for line in metrics.path.read_text().splitlines())
    assert first.pop("time") <= second.pop("time")
    assert first == {"step": 1, "loss": 0.1, "learning_rate": 1e-4 / 3}
    assert second == {"step": 2, "grad_norm": 3}


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
    metrics.cut_back_to(5)
    assert not metrics.path.exists()
    assert metrics.rows() == []
    for step in (0, 0, 1, 5, 9, 10):
        metrics.append(step, {"loss": step / 3})
    kept = metrics.rows()[:4]
    metrics.cut_back_to(5)
    assert metrics.rows() == kept
    metrics.append(6, {"loss": 2.0})
    assert steps(metrics) == [0, 0, 1, 5, 6]
    assert [path.name for path in metrics.path.parent.iterdir()] == ["metrics.jsonl"]


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


CPU = torch.device("cpu")


def result(step: int, *, loss: float = 0.5, seconds: float = 2.0, num_samples: int = 4) -> StepResult:
    return StepResult(
        step=step, loss=loss, grad_norm=1.0, learning_rate=1e-4, num_samples=num_samples, seconds=seconds
    )


class Rows:
    """Metrics that are kept in a list."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.by_noise: dict[str, float] = {}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.by_noise |= {name: value for name, value in values.items() if "by_noise" in name}
        others = {"loss", "grad_norm", "learning_rate", "samples_per_s", "peak_memory_gib"}
        assert values.keys() - self.by_noise.keys() == others
        self.steps.append(step)


def report(folder: Path, *, total_steps: int = 9, **changes: Any) -> StepReport:
    settings = {"device": CPU, "start_step": 0, "every_steps": 10, "status": RunningStatus(RunFolder(folder))}
    return StepReport(metrics=Rows(), total_steps=total_steps, **settings | changes)


def status(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "status.json").read_text())


def test_the_line_of_a_step_has_loss_rate_speed_time_left_and_memory() -> None:
    throughput = Throughput(total_steps=2000)
    throughput.update(result(10))
    text = throughput.describe(result(10), CPU)
    assert text.startswith("loss 0.5000 lr 1.00e-04 2 samples/s left 1:06:20 peak ")
    assert text.endswith(" GiB")


def test_speed_and_loss_are_smoothed() -> None:
    throughput = Throughput(total_steps=10)
    throughput.update(result(1, loss=1.0, seconds=1.0))
    throughput.update(result(2, loss=0.0, seconds=2.0))
    assert throughput.describe(result(2), CPU).startswith("loss 0.9000")
    assert throughput.samples_per_s == pytest.approx(4 / 1.1)


def test_steps_of_different_sizes_count_by_their_samples() -> None:
    throughput = Throughput(total_steps=10)
    for num_samples in (2, 12):
        throughput.update(result(1, seconds=1.0, num_samples=num_samples))
    assert throughput.samples_per_s == pytest.approx(3.0)


def test_without_a_terminal_a_line_is_logged_now_and_then_and_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shown = report(tmp_path, total_steps=25)
    with caplog.at_level(logging.INFO), shown.shown(Console(file=io.StringIO())):
        for step in range(1, 26):
            shown.after_step(result(step))
    assert [message.split()[1] for message in caplog.messages] == ["10/25", "20/25", "25/25"]


def test_in_a_terminal_there_is_one_live_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=160)
    shown = report(tmp_path, total_steps=3)
    with caplog.at_level(logging.INFO), shown.shown(console):
        for step in range(1, 4):
            shown.after_step(result(step))
    assert "3/3" in console.file.getvalue()
    assert "loss 0.5000" in console.file.getvalue()
    assert caplog.messages == []


def test_a_process_that_is_not_the_main_one_shows_no_live_line_and_writes_no_status(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=160)
    shown = report(tmp_path, status=None)
    with shown.shown(console):
        shown.after_step(result(1))
    assert console.file.getvalue() == ""
    assert list(tmp_path.iterdir()) == []


def test_the_first_step_and_every_so_many_have_a_row_of_metrics(tmp_path: Path) -> None:
    shown = report(tmp_path, total_steps=25)
    for step in range(1, 26):
        shown.after_step(result(step))
    assert shown.metrics.steps == [1, 10, 20]
    assert shown.metrics.by_noise == {}


def test_of_a_run_that_diverges_the_last_steps_have_rows_whatever_the_interval(tmp_path: Path) -> None:
    shown = report(tmp_path, every_steps=4)

    def diverge() -> None:
        with shown.shown(Console(file=io.StringIO())):
            for step in range(1, 8):
                shown.after_step(result(step))
            raise RunDivergedError("step 7: not finite")

    with pytest.raises(RunDivergedError, match="step 7"):
        diverge()
    assert shown.metrics.steps == [1, 4, 5, 6, 7]


def test_a_row_has_the_mean_seconds_of_the_steps_since_the_row_before(tmp_path: Path) -> None:
    rows: list[dict[str, float]] = []
    metrics = SimpleNamespace(log=lambda _step, values: rows.append(values))
    shown = StepReport(
        RunningStatus(RunFolder(tmp_path)), metrics, device=CPU, start_step=0, total_steps=9, every_steps=2
    )
    for step in (1, 2, 3, 4):
        shown.after_step(replace(result(step), parts={"data": float(step), "forward": 0.5}))
    assert [row["step_seconds/data"] for row in rows] == [1.0, 2.0, 3.5]
    assert [row["step_seconds/forward"] for row in rows] == [0.5, 0.5, 0.5]


def test_a_step_that_compiled_is_not_compared_with_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shown = report(tmp_path, total_steps=200, every_steps=1000)
    for step in range(2, 58):
        shown.after_step(result(step, seconds=0.1))
    for step in range(58, 98):
        shown.after_step(result(step, seconds=9.0), has_compiled=True)
    assert "slower" not in caplog.text
    for step in range(98, 118):
        shown.after_step(result(step, seconds=9.0))
    assert "Steps have become slower" in caplog.text


def test_the_loss_by_noise_is_a_mean_and_a_tenth_without_samples_has_none(tmp_path: Path) -> None:
    shown = report(tmp_path)
    losses, samples = [3.0, *[0.0] * 8, 0.5], [2.0, *[0.0] * 8, 1.0]
    shown.after_step(replace(result(1), totals_by_noise=[*losses, *samples]))
    assert shown.metrics.by_noise == {
        "loss_by_noise/0.0-0.1": 1.5,
        "loss_by_noise/0.9-1.0": 0.5,
        "samples_by_noise/0.0-0.1": 2,
        "samples_by_noise/0.9-1.0": 1,
    }


def test_the_status_has_step_and_speed_but_not_after_every_step(tmp_path: Path) -> None:
    now = [100.0]
    shown = report(tmp_path, status=RunningStatus(RunFolder(tmp_path), clock=lambda: now[0]))
    shown.after_step(result(4))
    written = status(tmp_path)
    assert (written["state"], written["exit_code"], written["step"]) == ("running", None, 4)
    assert (written["total_steps"], written["samples_per_s"], written["seconds_left"]) == (9, 2.0, 10)
    for step, now[0] in ((5, 102.0), (6, 104.9)):
        shown.after_step(result(step))
    assert status(tmp_path) == written
    now[0] = 105.0
    shown.after_step(result(7))
    assert (status(tmp_path)["step"], status(tmp_path)["seconds_left"]) == (7, 4)
    assert status(tmp_path)["time"] >= written["time"]


def test_the_status_has_the_phase_of_a_run_at_once_and_then_once_a_second(
    tmp_path: Path,
) -> None:
    now = [100.0]
    shown = RunningStatus(RunFolder(tmp_path), clock=lambda: now[0])

    def after(seconds: float, *progress: Any) -> Any:
        now[0] += seconds
        shown.show_phase(*progress)
        written = status(tmp_path)
        return written["step"], written["phase"], written.get("done"), written.get("of")

    assert after(0.0, "encoding", 0, 26) == (0, "encoding", 0, 26)
    assert after(0.9, "encoding", 17, 26) == (0, "encoding", 0, 26)
    assert after(0.1, "encoding", 18, 26) == (0, "encoding", 18, 26)
    assert after(0.0, "loading", 0, 0) == (0, "loading", None, None)
    shown.show_step(1, {"total_steps": 9})
    assert "phase" not in status(tmp_path)
    shown.show_step(2, {"total_steps": 9})
    assert status(tmp_path)["step"] == 1
    assert after(0.0, "generating", 0, 2) == (2, "generating", 0, 2)
    assert status(tmp_path)["total_steps"] == 9


def test_a_status_that_cannot_be_written_stops_no_run_and_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    now = count(0.0, 10.0)
    shown = report(tmp_path, status=RunningStatus(RunFolder(tmp_path), clock=lambda: next(now)))
    with monkeypatch.context() as patch:
        patch.setattr("diffsynth_lite.run_folder.folder.write_json", full)
        shown.after_step(result(4))
        shown.after_step(result(5))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    shown.after_step(result(6))
    assert status(tmp_path)["step"] == 6


def test_the_processs_peak_memory_grows_with_what_it_holds(tmp_path: Path) -> None:
    script = tmp_path / "ballast.py"
    script.write_text(
        "import torch\n"
        "from diffsynth_lite.run_folder.progress import peak_memory_gib\n"
        "before = peak_memory_gib(torch.device('cpu'))\n"
        "ballast = torch.ones(int((before + 0.4) * 2**30), dtype=torch.uint8)\n"
        "assert before + 0.3 < peak_memory_gib(torch.device('cpu')) < 2 * before + 1\n"
    )
    # A process of its own gives the memory back; its peak starts at that of the process that started it.
    program = Program(script, [], tmp_path / "printed")
    assert program.wait() == 0, program.printed()


ITEM = MeasuredItem(
    name="cats/tabby ü.png",
    caption="a cat\u2028on a <b>mat</b>",
    size="512x768",
    noise_levels=[1 / 6, 0.5, 5 / 6],
    measured_by="0f3a",
    thumbnail=None,
)


def test_items_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    assert read_items(path) == []
    items = [ITEM, replace(ITEM, name="b.mp4", thumbnail="data:image/jpeg;base64,AAAA")]
    write_items(path, items)
    assert read_items(path) == items
    write_items(path, [replace(ITEM, caption="hf_" + "a1B2" * 8)])
    assert json.loads(path.read_text())["caption"] == "REDACTED"


@pytest.mark.parametrize("line", ["{", "[]", '{"name": "a"}'])
def test_a_line_that_is_no_item_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "items.jsonl"
    write_items(path, [ITEM])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(UserError, match=r"items\.jsonl line 2"):
        read_items(path)
