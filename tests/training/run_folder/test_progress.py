"""The progress line: what it says, live and in a log file."""

import io
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from diffsynth_lite.training.run_folder.progress import ProgressLine, StepResult, Throughput

CPU = torch.device("cpu")


def result(step: int, *, loss: float = 0.5, seconds: float = 2.0, num_samples: int = 4) -> StepResult:
    return StepResult(
        step=step, loss=loss, grad_norm=1.0, learning_rate=1e-4, num_samples=num_samples, seconds=seconds
    )


def line(total_steps: int = 100, every_steps: int = 10) -> ProgressLine:
    throughput = Throughput(total_steps=total_steps)
    return ProgressLine(
        throughput, start_step=0, total_steps=total_steps, every_steps=every_steps, device=CPU
    )


def test_it_tells_loss_rate_speed_time_left_and_memory() -> None:
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
    caplog: pytest.LogCaptureFixture,
) -> None:
    shown = line(total_steps=25)
    with caplog.at_level(logging.INFO), shown.shown(Console(file=io.StringIO()), live=False):
        for step in range(1, 26):
            shown.update(result(step))
    assert [message.split()[1] for message in caplog.messages] == ["10/25", "20/25", "25/25"]


def test_in_a_terminal_there_is_one_live_line(caplog: pytest.LogCaptureFixture) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=160)
    shown = line(total_steps=3)
    with caplog.at_level(logging.INFO), shown.shown(console, live=True):
        for step in range(1, 4):
            shown.update(result(step))
    assert "3/3" in console.file.getvalue()
    assert "loss 0.5000" in console.file.getvalue()
    assert caplog.messages == []


def test_the_processs_peak_memory_grows_with_what_it_holds() -> None:
    code = (
        "import torch\n"
        "from diffsynth_lite.training.run_folder.progress import peak_memory_gib\n"
        "before = peak_memory_gib(torch.device('cpu'))\n"
        "ballast = torch.ones(int((before + 0.4) * 2**30), dtype=torch.uint8)\n"
        "assert before + 0.3 < peak_memory_gib(torch.device('cpu')) < 2 * before + 1\n"
    )
    # A process of its own gives the memory back; its peak starts at that of the process that started it.
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])
