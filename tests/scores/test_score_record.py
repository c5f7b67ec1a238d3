"""The file with scores: it comes back as written, and what does not fit is refused by name."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError
from run_folders import score_record

from diffsynth_lite.errors import UserError
from diffsynth_lite.scores.record import ScoredColumn, ScoreRecord, read_scores, write_scores

RECORD = score_record({0: (0.1, 1.0), 10: (0.5, 0.5)}, num_prompts=(2, 1, 3))
BASE, TEN = RECORD.columns


def column(name: str, step: int | None, value: float = 0.5) -> ScoredColumn:
    return TEN.model_copy(update={"column": name, "step": step, "kept": (value,)})


def record(*columns: ScoredColumn) -> ScoreRecord:
    return ScoreRecord(**{**dict(RECORD), "columns": columns})


def test_a_record_comes_back_bit_equal_and_none_is_there_before(tmp_path: Path) -> None:
    path = tmp_path / "scores.json"
    assert read_scores(path) is None
    kept = record(BASE, TEN, column("film.safetensors", None, 1e-9))
    write_scores(path, kept)
    assert read_scores(path) == kept


def test_a_column_takes_its_place_by_its_step_and_replaces_one_of_its_name() -> None:
    grown = record(BASE, TEN).with_column(column("other", None)).with_column(column("5", 5))
    again = grown.with_column(column("10", 10, 0.9))
    assert [one.column for one in again.columns] == ["base", "5", "10", "other"]
    assert (grown.columns[2].kept, again.columns[2].kept) == (TEN.kept, (0.9,))
    assert (ScoredColumn.name(0), ScoredColumn.name(40)) == ("base", "40")


def test_columns_that_cannot_be_compared_are_refused() -> None:
    for columns, problem in (
        ((TEN,), "has to be the base"),
        ((BASE, column("again", 0)), "has to be the base"),
        ((BASE, TEN, column("10", None)), "the same name"),
        ((BASE, TEN.model_copy(update={"prompt": (0.5,)})), "column 10 does not have one value for each"),
    ):
        with pytest.raises(ValidationError, match=problem):
            record(*columns)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"held_out_contrast": float("nan")}, "held_out_contrast: "),
        ({"columns": [{"column": "base", "step": 0}]}, "columns.0.likeness: "),
        ({"unknown": 1}, "unknown: "),
        ({"other_seed": [0.5, 0.5]}, "other_seed does not have one value"),
        ({"new_prompts": ["a"]}, "column base does not have one value"),
    ],
)
def test_a_damaged_file_is_refused_with_its_place_and_a_remedy(
    change: dict[str, object], problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "scores.json"
    for content in (json.dumps({**record(BASE).model_dump(mode="json"), **change}), "[]", "[" * 100_000):
        path.write_text(content)
        with pytest.raises(UserError) as failed:
            read_scores(path)
        assert str(path) in str(failed.value)
        assert "remove it to score again" in str(failed.value)
        assert problem in str(failed.value) or content.startswith("[")
