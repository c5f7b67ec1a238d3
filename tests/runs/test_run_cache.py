"""Whole runs and their cache: killed while it is filled, and used again without the media."""

from pathlib import Path

import pytest
from processes import wait_for
from tiny_run import TinyRun, checkpoint_tensors, differing, forked, garble_media, tiny_picture

NUM_PICTURES = 200


def entries(run: TinyRun) -> dict[Path, int]:
    """The entries of the cache with their times of change."""
    return {path: path.stat().st_mtime_ns for path in (run.root / "cache").rglob("*.safetensors")}


def test_a_caching_pass_that_was_killed_goes_on_where_it_was(
    tiny_run: TinyRun, caplog: pytest.LogCaptureFixture
) -> None:
    for place in range(5, NUM_PICTURES):
        tiny_picture(64, 40, 10 + place).save(tiny_run.root / "data" / f"{place}.png")
        (tiny_run.root / "data" / f"{place}.txt").write_text("a red circle")
    program = forked(tiny_run, "train.steps=1")
    wait_for(lambda: len(entries(tiny_run)) >= 5)
    program.kill()
    kept = entries(tiny_run)
    assert 5 <= len(kept) < NUM_PICTURES

    assert tiny_run.train("train.steps=1") == 0
    assert f"encoding {NUM_PICTURES - len(kept)} items that the cache does not hold" in caplog.text
    filled = entries(tiny_run)
    assert {path: filled[path] for path in kept} == kept

    caplog.clear()
    assert tiny_run.train("train.steps=1", f"output.dir={tiny_run.root / 'again'}") == 0
    assert "that the cache does not hold" not in caplog.text
    assert entries(tiny_run) == filled


def test_a_second_start_on_cached_pictures_reads_none_of_them(tiny_run: TinyRun) -> None:
    assert tiny_run.train("train.steps=2") == 0
    garble_media(tiny_run.root / "data")
    again = tiny_run.root / "again"
    assert tiny_run.train("train.steps=2", f"output.dir={again}") == 0
    assert differing(checkpoint_tensors(tiny_run.folder, 2), checkpoint_tensors(again, 2)) == []


def test_a_picture_that_changed_is_read_again(tiny_run: TinyRun, caplog: pytest.LogCaptureFixture) -> None:
    assert tiny_run.train("train.steps=1") == 0
    tiny_picture(80, 48, 77).save(tiny_run.root / "data" / "0.png")
    caplog.clear()
    assert tiny_run.train("train.steps=1", f"output.dir={tiny_run.root / 'again'}") == 0
    assert "encoding 1 item that the cache does not hold" in caplog.text
