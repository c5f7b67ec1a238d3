"""The scores of a run on its page: what is recommended and why, in words, lines and a table."""

import json
from pathlib import Path

import pytest
from run_folders import ATTACK, full_folder, write_run_scores

from diffsynth_lite.report.page import render, results
from diffsynth_lite.report.run_report import RunReport, read_run
from diffsynth_lite.run_folder.folder import RunFolder

BASE = (0.0, 1.0)


def scored(path: Path, *steps: tuple[float, float], **others: object) -> RunReport:
    """A run with such N and K at the steps 10, 20, ..."""
    path.mkdir()
    scores = {10 * place: values for place, values in enumerate([BASE, *steps])}
    write_run_scores(path, scores, **others)
    return read_run(path)


def sentence(report: RunReport) -> str:
    (judgement,) = report.judgements
    return judgement.text


def test_the_recommended_step_and_those_as_good_are_named_and_marked(tmp_path: Path) -> None:
    report = scored(tmp_path / "run", (0.6, 0.9), (0.61, 0.9), (0.2, 0.5))
    assert report.judgements[0].step == 20
    assert sentence(report) == (
        "The highest score is that of step 20. Not distinguishable from it with 8 prompts: step 10."
    )
    assert report.scores is not None
    table = report.scores.table
    assert table.columns[0].title == "step"
    assert [(row[0], row[-1]) for row in table.rows] == [
        ("step 10", "not distinguishable from the recommended one"),
        ("step 20", "recommended"),
        ("step 30", "changes images of other prompts more than another step does"),
    ]
    assert table.rows[1][1].startswith("0.76 ± 0.01")


def test_a_step_that_a_person_chose_is_shown_as_such_and_the_recommendation_stays(tmp_path: Path) -> None:
    run = tmp_path / "run"
    scored(run, (0.2, 0.9), (0.6, 0.9))
    RunFolder(run).chosen_file.write_text(json.dumps({"lora": "lora-00000010"}))
    report = read_run(run)
    assert sentence(report).endswith("Step 10 was chosen by a person, and is used.")
    assert sentence(report).startswith("The highest score is that of step 20.")
    assert report.scores is not None
    assert "chosen by a person" in report.scores.table.rows[0][-1]
    RunFolder(run).chosen_file.write_text("{")
    damaged = read_run(run)
    assert "chosen.json: names no LoRA" in damaged.problems[0]
    assert damaged.scores is not None
    assert damaged.scores.found.best is not None


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ({"num_prompts": 7}, "there are too few prompts; 8 captions of held-out items"),
        ({"are_trained": False}, "the models that compare the images have not learned from images"),
    ],
)
def test_the_reason_is_shown_where_no_step_is_recommended(
    tmp_path: Path, others: dict[str, object], reason: str
) -> None:
    report = scored(tmp_path / "run", (0.6, 0.9), **others)
    assert sentence(report).startswith(f"The scores recommend no step: {reason}")
    assert report.judgements[0].step is None


def test_steps_without_a_lora_or_not_better_than_the_base_are_not_recommended(tmp_path: Path) -> None:
    assert "none is shown to be better than the base" in sentence(scored(tmp_path / "null", (0.0, 1.0)))
    report = scored(tmp_path / "run", (0.6, 0.9))
    (tmp_path / "run" / "checkpoints" / "lora-00000010").rmdir()
    report = read_run(tmp_path / "run")
    assert sentence(report) == "The scores recommend no step: no LoRA of a scored step was kept."
    assert report.scores is not None
    assert report.scores.table.rows[0][-1] == "no LoRA kept"


def test_a_recommended_step_that_repeats_training_images_is_warned_of(tmp_path: Path) -> None:
    taught = {"taught_prompts": ("t",) * 8}
    run = tmp_path / "run"
    scored(run, (0.6, 0.9))
    file = run / "scores.json"
    record = json.loads(file.read_text()) | taught
    for column, likeness in zip(record["columns"], (0.0, 0.9), strict=True):
        column["memory"] = [likeness + each / 100 for each in range(8)]
    file.write_text(json.dumps(record))
    (judgement,) = read_run(run).judgements
    assert judgement.kind == "warn"
    assert judgement.text == "The highest score is that of step 10. It repeats training images."


def test_lines_begin_at_the_base_and_have_both_ends_of_their_intervals(tmp_path: Path) -> None:
    series = scored(tmp_path / "run", (0.6, 0.9), (0.2, 0.8)).series
    assert series["score_total"].points == [*((0, 0.5), (10, pytest.approx(0.75)), (20, pytest.approx(0.5)))]
    assert series["score_kept"].points[0] == (0, 1.0)
    for name in ("total", "new", "kept", "prompt"):
        ends = [series[f"score_{name}{end}"].points[1][1] for end in ("_low", "", "_high")]
        assert ends == sorted(set(ends))


def test_a_damaged_file_of_scores_is_a_problem_on_the_page(tmp_path: Path) -> None:
    run = full_folder(tmp_path / "run")
    (run / "scores.json").write_text('{"columns": 3}')
    report = read_run(run)
    assert report.scores is None
    assert any(problem.startswith("scores.json is damaged: ") for problem in report.problems)
    assert "scores.json is damaged" in render([report])


def test_runs_side_by_side_have_a_row_of_their_best_scores(tmp_path: Path) -> None:
    first = scored(tmp_path / "first", (0.6, 0.9), (0.2, 0.9))
    without = read_run(full_folder(tmp_path / "without"))
    (tmp_path / "without" / "scores.json").unlink()
    row = results([first, read_run(tmp_path / "without")])["score of the best step"]
    assert row[0].endswith(" at step 10")
    assert row[1] == ""
    other = scored(tmp_path / "other", (0.3, 0.9), measure="another")
    assert list(results([first, other])) == ["score of the best step, each measured differently"]
    assert without.scores is not None


def test_names_in_the_scores_are_text_on_the_page(tmp_path: Path) -> None:
    page = render([read_run(full_folder(tmp_path / "run", text=ATTACK))])
    section = page[page.index('id="scores"') :]
    assert "&lt;script&gt;" in section[:2000]
    assert "<script>document.title" not in page
