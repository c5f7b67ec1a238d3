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
    rows = [line.split("|")[1:-1] for line in result.stdout.splitlines() if "|" in line]
    cells = [[cell.strip() for cell in row] for row in rows]
    assert [row[0] for row in cells if len(row) == 6 and "-" not in row[0]] == ["rows", "10", "40"]
    speeds = {row[0]: row[1] for row in cells if len(row) == 2}
    assert {"safetensors bare", "loader, 0 workers"} < speeds.keys()
    assert min(float(speeds[name]) for name in ("safetensors bare", "loader, 0 workers")) > 0
