"""The runs of a sweep: which is best, by what, and which of those that train are worse."""

from pathlib import Path

import pytest
from run_folders import write_rows, write_run_scores

from diffsynth_lite.report.run_report import read_run
from diffsynth_lite.report.sweep import SweptRun, compare_runs, worse_runs
from diffsynth_lite.run_folder.folder import RunFolder

BASE = {0: (0.0, 1.0)}


def compared(*runs: RunFolder) -> tuple[list[SweptRun], str]:
    reports, differs = [read_run(run.path) for run in runs], [{"lora.rank": run.path.name} for run in runs]
    return compare_runs(reports, differs, [""] * len(runs))


def results(*runs: RunFolder) -> list[str]:
    return [run.result for run in compared(*runs)[0]]


def with_scores(path: Path, **steps: tuple[float, float]) -> RunFolder:
    """A run with N and K by step."""
    path.mkdir()
    write_run_scores(path, BASE | {int(name.removeprefix("at_")): each for name, each in steps.items()})
    return RunFolder(path)


def with_losses(path: Path, *losses: float) -> RunFolder:
    path.mkdir()
    rows = [{"step": 10 * place, "validation_loss": loss} for place, loss in enumerate(losses)]
    write_rows(path / "metrics.jsonl", [*rows, {"step": 30, "peak_memory_gib": 1.5}])
    return RunFolder(path)


def test_the_best_steps_of_runs_are_compared_by_scores(tmp_path: Path) -> None:
    runs, reason = compared(
        with_scores(tmp_path / "base", at_10=(0.6, 0.9), at_20=(0.1, 0.9)),
        with_scores(tmp_path / "b", at_10=(0.1, 0.9), at_20=(0.61, 0.9)),
        with_scores(tmp_path / "c", at_10=(0.3, 0.9)),
        with_losses(tmp_path / "d", 0.1),
    )
    assert [run.result for run in runs] == ["not distinguishable", "best", "worse", ""]
    assert "Compared by the score of the best step" in reason
    assert runs[0].line["lora.rank"] == "base"
    assert runs[0].line["score"] == "0.75 ± 0.01 at step 10"
    assert (runs[3].line["score"], runs[3].line["memory"]) == ("", "1.5 GiB")


def test_scores_of_runs_that_cannot_be_compared_name_no_best(tmp_path: Path) -> None:
    runs = [with_scores(tmp_path / name, at_10=(0.0, 1.0)) for name in ("a", "b")]
    assert (results(*runs), compared(*runs)[1]) == (
        ["", ""],
        "No run is best: the one with the highest score is not shown to be better than the base.",
    )
    write_run_scores(runs[1].path, BASE | {10: (0.9, 0.9)}, measure="another")
    assert results(*runs) == ["", ""]
    assert "measured in different ways" in compared(*runs)[1]


@pytest.mark.parametrize(
    ("losses", "expected", "reason"),
    [
        (((0.5, 0.2, 0.3), (0.5, 0.4, 0.25)), ["best", ""], "has no interval"),
        (((), (0.5,)), ["", "best"], "has no interval"),
        (((), ()), ["", ""], "No run is best"),
    ],
)
def test_without_scores_the_lowest_loss_is_best_and_its_doubt_is_shown(
    tmp_path: Path, losses: tuple[tuple[float, ...], ...], expected: list[str], reason: str
) -> None:
    runs = [with_losses(tmp_path / str(place), *each) for place, each in enumerate(losses)]
    assert results(*runs) == expected
    assert reason in compared(*runs)[1]


def test_only_what_is_worse_at_the_same_step_beyond_the_interval_is_worse(tmp_path: Path) -> None:
    runs = {
        "good": with_scores(tmp_path / "good", at_10=(0.6, 0.9), at_20=(0.9, 0.9)),
        "as_good": with_scores(tmp_path / "as_good", at_5=(0.1, 0.9), at_10=(0.599, 0.9)),
        "worse": with_scores(tmp_path / "worse", at_10=(0.3, 0.9)),
        "further": with_scores(tmp_path / "further", at_30=(0.1, 0.9)),
        "base": with_scores(tmp_path / "base"),
        "by_loss": with_losses(tmp_path / "by_loss", 9.0),
    }
    assert worse_runs(runs) == ["worse"]
    runs["good"].scores_file.write_text("{")
    assert worse_runs(runs) == ["worse"]
    write_run_scores(tmp_path / "as_good", BASE | {10: (0.6, 0.9)}, measure="another")
    assert worse_runs(runs) == []
