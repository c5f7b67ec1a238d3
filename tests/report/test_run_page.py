"""The page of a run: complete, by itself, and safe whatever a run folder holds."""

import json
from pathlib import Path

import pytest

from diffsynth_lite.report.page import render, write_report
from diffsynth_lite.report.run_report import read_run
from diffsynth_lite.run_folder.folder import RunFolder

ATTACK = "</script><script>alert(1)</script> & \" ' {{ 7 * 7 }}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run that was killed in its 40th step."""
    run = tmp_path / "mine"
    run.mkdir()
    RunFolder(run).write_status("running", exit_code=None, step=30, message="training")
    rows = [{"step": step, "time": 100.0, "loss": 1 / step, "learning_rate": 0.1} for step in (10, 20, 40)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 50, "lo')
    (run / "resolved.yaml").write_text("train: {steps: 300}\n")
    return run


def test_a_run_is_shown_as_far_as_it_came(folder: Path) -> None:
    text = write_report(folder).read_text()
    assert "Step 40 of 300" in text
    assert "0.1 at step 10, 0.1 at step 40" in text
    assert read_run(folder).problems == []


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", "3\n", '{"step": "x"}\n{"loss": 1}\n', "\0\n\xff\n"])
def test_any_content_of_any_file_gives_a_page(folder: Path, content: str) -> None:
    for name in ("status.json", "metrics.jsonl", "resolved.yaml", "lineage.json", ".lock"):
        (folder / name).write_text(content, encoding="latin-1")
    assert "Not started" in render([read_run(folder)])


def test_a_folder_that_is_not_there_gives_a_page(tmp_path: Path) -> None:
    assert "Not started" in render([read_run(tmp_path / "none")])
