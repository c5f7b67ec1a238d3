"""The benchmark of the data layer runs, at its least size."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_benchmark_prints_a_row_for_each_size_and_a_speed_for_each_reader() -> None:
    sizes = ["--rows", "10", "40", "--batches", "5", "--files", "8", "--side", "4", "--workers", "0"]
    result = subprocess.run(
        [sys.executable, "-W", "error", ROOT / "scripts" / "benchmarks" / "data.py", *sizes],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [line[0] for line in lines if "|" in line] == ["rows", "10", "40"]
    speeds = {" ".join(line[:-2]): float(line[-2]) for line in lines if line and line[-1] == "samples/s"}
    assert set(speeds) == {"safetensors bare", "loader, 0 workers"}
    assert min(speeds.values()) > 0
