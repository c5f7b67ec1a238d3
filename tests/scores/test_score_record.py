"""The file with scores: it comes back as written, and what does not fit is refused by name."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from diffsynth_lite.errors import UserError
from diffsynth_lite.scores.record import ScoredColumn, ScoreRecord, read_scores, write_scores


def column(name: str, step: int | None, value: float = 0.5) -> ScoredColumn:
    new, plain, taught = (value, value / 3), (value,), (value, -value, value)
    by_new = {"likeness": new, "contrast": new, "prompt": new}
    return ScoredColumn(column=name, step=step, kept=plain, plain_prompt=plain, memory=taught, **by_new)


def record(*columns: ScoredColumn) -> ScoreRecord:
    return ScoreRecord(
        measure="of this test",
        models=("images", "prompts"),
        held_out_contrast=0.3,
        new_prompts=("a", "b"),
        plain_prompts=("c",),
        taught_prompts=("d", "e", "f"),
        num_seeds=2,
        columns=columns or (column("base", 0), column("10", 10)),
    )


def test_a_record_comes_back_bit_equal_and_none_is_there_before(tmp_path: Path) -> None:
    path = tmp_path / "scores.json"
    assert read_scores(path) is None
    kept = record(column("base", 0, 0.1), column("20", 20, 0.7), column("film.safetensors", None, 1e-9))
    write_scores(path, kept)
    assert read_scores(path) == kept
    assert [item.name for item in tmp_path.iterdir()] == ["scores.json"]


def test_a_column_takes_its_place_by_its_step_and_replaces_one_of_its_name() -> None:
    grown = record().with_column(column("other", None)).with_column(column("5", 5))
    assert [one.column for one in grown.columns] == ["base", "5", "10", "other"]
    again = grown.with_column(column("10", 10, 0.9))
    assert [one.column for one in again.columns] == ["base", "5", "10", "other"]
    assert again.columns[2].kept == (0.9,)
    assert grown.columns[2].kept == (0.5,)
    assert (ScoredColumn.name(0), ScoredColumn.name(40)) == ("base", "40")


def test_columns_that_cannot_be_compared_are_refused() -> None:
    short = column("10", 10).model_copy(update={"prompt": (0.5,)})
    for columns, problem in (
        ((column("10", 10),), "has to be the base"),
        ((column("base", 0), column("again", 0)), "has to be the base"),
        ((column("base", 0), column("10", 10), column("10", None)), "the same name"),
        ((column("base", 0), short), "column 10 does not have one value for each prompt"),
    ):
        with pytest.raises(ValidationError, match=problem):
            record(*columns)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"measure": ""}, "measure: "),
        ({"num_seeds": 0}, "num_seeds: "),
        ({"held_out_contrast": float("nan")}, "held_out_contrast: "),
        ({"columns": []}, "columns: "),
        ({"columns": [{"column": "base", "step": 0}]}, "columns.0.likeness: "),
        ({"unknown": 1}, "unknown: "),
        ({"new_prompts": ["a"]}, "column base does not have one value"),
    ],
)
def test_a_damaged_file_is_refused_with_its_place_and_a_remedy(
    change: dict[str, object], problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "scores.json"
    path.write_text(json.dumps({**record().model_dump(mode="json"), **change}))
    with pytest.raises(UserError) as failed:
        read_scores(path)
    assert str(path) in str(failed.value)
    assert problem in str(failed.value)
    assert "remove it to score again" in str(failed.value)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_what_is_no_record_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "scores.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match="is damaged"):
        read_scores(path)
