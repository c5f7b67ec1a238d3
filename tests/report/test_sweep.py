"""The runs of a sweep: which is best, by what, and which of those that train are worse."""

from pathlib import Path

from run_folders import write_rows, write_run_scores

from diffsynth_lite.report.run_report import read_run
from diffsynth_lite.report.sweep import Sweep, compare_runs, worse_runs

BASE = {0: (0.0, 1.0)}


def compared(*folders: Path) -> Sweep:
    return compare_runs([read_run(each) for each in folders], [{"lora.rank": each.name} for each in folders])


def results(sweep: Sweep) -> dict[str, str]:
    return {run.name: run.result for run in sweep.runs}


def with_scores(path: Path, **steps: tuple[float, float]) -> Path:
    """A run with N and K by step."""
    path.mkdir()
    write_run_scores(path, BASE | {int(name.removeprefix("at_")): each for name, each in steps.items()})
    return path


def with_losses(path: Path, *losses: float) -> Path:
    path.mkdir()
    rows = [{"step": 10 * place, "validation_loss": loss} for place, loss in enumerate(losses)]
    write_rows(path / "metrics.jsonl", [*rows, {"step": 30, "peak_memory_gib": 1.5}])
    return path


def test_the_best_steps_of_runs_are_compared_by_scores(tmp_path: Path) -> None:
    runs = (
        with_scores(tmp_path / "base", at_10=(0.6, 0.9), at_20=(0.1, 0.9)),
        with_scores(tmp_path / "b", at_10=(0.1, 0.9), at_20=(0.61, 0.9)),
        with_scores(tmp_path / "c", at_10=(0.3, 0.9)),
        with_losses(tmp_path / "d", 0.1),
    )
    sweep = compared(*runs)
    assert results(sweep) == {"base": "not distinguishable", "b": "best", "c": "", "d": ""}
    assert "Compared by the score of the best step" in sweep.reason
    first, second = sweep.runs[0].line(), sweep.runs[3].line()
    assert (first["lora.rank"], first["loss on held-out data"]) == ("base", "")
    assert first["score"].startswith("0.75 ± 0.0")
    assert first["score"].endswith(" at step 10")
    assert (second["score"], second["memory"]) == ("", "1.5 GiB")


def test_scores_of_runs_that_cannot_be_compared_name_no_best(tmp_path: Path) -> None:
    runs = [with_scores(tmp_path / name, at_10=(0.0, 1.0)) for name in ("a", "b")]
    sweep = compared(*runs)
    assert results(sweep) == {"a": "", "b": ""}
    assert "none is shown to be better than the base" in sweep.reason
    write_run_scores(runs[1], BASE | {10: (0.9, 0.9)}, measure="another")
    assert results(compared(*runs)) == {"a": "", "b": ""}
    assert "measured in different ways" in compared(*runs).reason


def test_without_scores_the_lowest_loss_is_best_and_its_doubt_is_shown(tmp_path: Path) -> None:
    runs = with_losses(tmp_path / "a", 0.5, 0.2, 0.3), with_losses(tmp_path / "b", 0.5, 0.4, 0.25)
    sweep = compared(*runs)
    assert results(sweep) == {"a": "best", "b": ""}
    assert sweep.runs[0].line()["loss on held-out data"] == "0.2 at step 10"
    assert "has no interval" in sweep.reason
    neither = with_losses(tmp_path / "c"), with_losses(tmp_path / "d")
    assert results(compared(*neither)) == {"c": "", "d": ""}
    assert "No run is best" in compared(*neither).reason


def test_only_what_is_worse_at_the_same_step_beyond_the_interval_is_worse(tmp_path: Path) -> None:
    folders = {
        "good": with_scores(tmp_path / "good", at_10=(0.6, 0.9), at_20=(0.9, 0.9)),
        "as_good": with_scores(tmp_path / "as_good", at_5=(0.1, 0.9), at_10=(0.599, 0.9)),
        "worse": with_scores(tmp_path / "worse", at_10=(0.3, 0.9)),
        "further": with_scores(tmp_path / "further", at_30=(0.1, 0.9)),
        "by_loss": with_losses(tmp_path / "by_loss", 9.0),
    }
    assert worse_runs(folders) == ["worse"]
    (folders["good"] / "scores.json").write_text("{")
    assert worse_runs(folders) == ["worse"]
    write_run_scores(folders["as_good"], BASE | {10: (0.6, 0.9)}, measure="another")
    assert worse_runs(folders) == []
