"""The scores of a run on its page: what is recommended and why, in words, lines and a table."""

import json
from pathlib import Path
from typing import get_args

import pytest
from run_folders import ATTACK, full_folder, write_run_scores

from diffsynth_lite.report.page import render, results
from diffsynth_lite.report.run_report import RunReport, read_run
from diffsynth_lite.report.scores import MARKS, REASONS, with_interval
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.scores.recommendation import Interval, Mark, Reason

BASE = (0.0, 1.0)


def scored(path: Path, *steps: tuple[float, float], **others: object) -> RunReport:
    """A run with such N and K at the steps 10, 20, ..."""
    path.mkdir(exist_ok=True)
    write_run_scores(path, {10 * place: each for place, each in enumerate([BASE, *steps])}, **others)
    return read_run(path)


def remarks(report: RunReport) -> list[tuple[str, str]]:
    assert report.scores is not None
    return [(row[0], row[-1]) for row in report.scores.table.rows]


def test_the_recommended_step_and_those_as_good_are_named_next_to_what_a_person_chose(tmp_path: Path) -> None:
    report = scored(tmp_path, (0.6, 0.9), (0.61, 0.9), (0.2, 0.9))
    (judgement,) = report.judgements
    assert (judgement.kind, judgement.step) == ("good", 20)
    text = "The highest score is that of step 20. Not distinguishable from it with 8 prompts: step 10."
    assert judgement.text == text
    as_good = "not distinguishable from the recommended one"
    assert remarks(report) == [("step 10", as_good), ("step 20", "recommended"), ("step 30", "")]
    assert report.scores is not None
    assert report.scores.table.rows[1][1] == "0.76 ± 0.01"
    assert with_interval(Interval(value=-0.001, low=None, high=None)) == "0.00"
    RunFolder(tmp_path).chosen_file.write_text('{"lora": "lora-00000010"}')
    report = read_run(tmp_path)
    assert report.judgements[0].text == f"{text} Step 10 was chosen by a person, and is used."
    assert remarks(report)[0] == ("step 10", f"chosen by a person; {as_good}")


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        (
            {"num_prompts": (7, 8, 0)},
            "it takes 8 captions of held-out items, and as many prompts without the subject",
        ),
        ({"loras": False}, "no LoRA of a scored step was kept"),
    ],
)
def test_the_reason_is_shown_where_no_step_is_recommended(
    tmp_path: Path, others: dict[str, object], reason: str
) -> None:
    report = scored(tmp_path, (0.6, 0.9), **others)
    (judgement,) = report.judgements
    assert (judgement.kind, judgement.step) == ("info", None)
    assert judgement.text == f"The scores recommend no step: {reason}."
    assert ("no LoRA kept" in remarks(report)[0][1]) == ("loras" in others)


def test_all_marks_and_reasons_have_words_and_what_repeats_training_images_is_warned_of(
    tmp_path: Path,
) -> None:
    assert (set(MARKS), set(REASONS)) == (set(get_args(Mark)), set(get_args(Reason)))
    scored(tmp_path, (0.6, 0.9))
    file = tmp_path / "scores.json"
    record = json.loads(file.read_text()) | {"taught_prompts": ["t"] * 8}
    for column, likeness in zip(record["columns"], (0.0, 0.9), strict=True):
        column["memory"] = [likeness + each / 100 for each in range(8)]
    file.write_text(json.dumps(record))
    (judgement,) = read_run(tmp_path).judgements
    assert judgement.kind == "warn"
    assert judgement.text == "The highest score is that of step 10. It repeats training images."


def test_lines_begin_at_the_base_and_have_both_ends_of_their_intervals(tmp_path: Path) -> None:
    series = scored(tmp_path, (0.6, 0.9), (0.2, 0.8)).series
    points = [(0, 0.5), (10, pytest.approx(0.75)), (20, pytest.approx(0.5))]
    assert series["score_total_value"].points == points
    for name in ("total", "new", "kept", "prompt"):
        ends = [series[f"score_{name}_{end}"].points[1][1] for end in ("low", "value", "high")]
        assert ends == sorted(set(ends))


def test_damaged_scores_are_a_problem_on_the_page_and_names_in_whole_ones_are_text(tmp_path: Path) -> None:
    run = full_folder(tmp_path / "run", text=ATTACK)
    page = render([read_run(run)])
    assert "&lt;script&gt;" in page[page.index('id="scores"') :][:2000]
    assert "<script>document.title" not in page
    (run / "scores.json").write_text('{"columns": 3}')
    report = read_run(run)
    assert report.scores is None
    assert "<li>scores.json is damaged: " in render([report])


def test_runs_side_by_side_have_a_row_of_their_best_scores(tmp_path: Path) -> None:
    first, other = scored(tmp_path / "first", (0.6, 0.9), (0.2, 0.9)), scored(tmp_path / "other")
    row = results([first, other])["score of the best step"]
    assert (row[0].endswith(" at step 10"), row[1]) == (True, "")
    other = scored(tmp_path / "other", (0.3, 0.9), measure="another")
    assert list(results([first, other])) == ["score of the best step, each measured differently"]
