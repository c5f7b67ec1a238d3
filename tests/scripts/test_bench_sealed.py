"""The benchmark of starts runs, at its least size and in one process."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import pytest
import sealed


def test_the_benchmark_prints_a_row_for_each_size(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    results: list[dict[str, float]] = []

    def measured(
        parts: Sequence[str], folder: Path, rows: int, arguments: argparse.Namespace
    ) -> list[dict[str, float]]:
        results.clear()
        of_part = argparse.Namespace(**{**vars(arguments), "rows": [rows]})
        for part in parts:
            {"seal": sealed.seal, "start": sealed.start}[part](folder, of_part)
        return list(results)

    memory = {"own_mib": 1.0, "mib": 2.0}
    monkeypatch.setattr(sealed, "measured", measured)
    monkeypatch.setattr(sealed, "told", lambda found, before: results.append({**found, **memory}))
    sizes = ["--rows", "40", "90", "--batches", "5", "--folder", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["sealed.py", *sizes])
    sealed.main()
    lines = [line.split("|") for line in capsys.readouterr().out.splitlines() if "|" in line]
    assert [line[1].strip() for line in lines] == ["rows", lines[1][1].strip(), "40", "90"]
    assert [line[4].strip() for line in lines[2:]] == ["6", "6"]
    assert list(tmp_path.iterdir()) == []
