"""Atomic files: the old text or the new one, on the disk, with nothing left next to it."""

import errno
import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from disk_model import crash_states, read_tree, record

from diffsynth_lite.files import (
    free_disk_bytes,
    is_unfinished,
    replacing,
    set_aside,
    temporary_path,
    write_json,
    write_synced,
    write_text,
)


def test_text_is_written_and_replaced_as_utf_8_with_the_line_breaks_given(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    for text in ("name: ünï\r\n", "", "seed: 1\n"):
        write_text(path, text)
        assert path.read_bytes() == text.encode()
    assert list(tmp_path.iterdir()) == [path]


def test_a_power_cut_leaves_the_old_text_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text(tmp_path / "status.json", "old")
    before = read_tree(tmp_path)
    operations = record(monkeypatch, lambda: write_text(tmp_path / "status.json", "the new one"))
    for done in range(len(operations) + 1):
        texts = {state["status.json"] for state in crash_states(tmp_path, before, operations[:done])}
        assert texts <= {b"old", b"the new one"}
    assert texts == {b"the new one"}


def test_a_disk_that_fails_at_any_call_leaves_the_old_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "status.json"
    write_text(path, "old")
    for name in ("write", "fsync", "replace"):

        def fail(*_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            with pytest.raises(OSError, match="No space left"):
                write_text(path, "new")
        assert path.read_text() == "old"
        assert list(tmp_path.iterdir()) == [path]


def test_a_file_written_in_many_short_writes_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_write = os.write
    sizes = itertools.cycle([1, 3, 2])
    monkeypatch.setattr(os, "write", lambda descriptor, data: real_write(descriptor, data[: next(sizes)]))
    write_synced(tmp_path / "file", bytes(range(100)))
    assert (tmp_path / "file").read_bytes() == bytes(range(100))


def test_a_durable_file_never_replaces_another(tmp_path: Path) -> None:
    write_synced(tmp_path / "file", b"first")
    with pytest.raises(FileExistsError):
        write_synced(tmp_path / "file", b"second")
    assert (tmp_path / "file").read_bytes() == b"first"


def test_json_is_readable_by_people_and_machines(tmp_path: Path) -> None:
    write_json(tmp_path / "status.json", {"message": "größer", "step": 3})
    text = (tmp_path / "status.json").read_text(encoding="utf-8")
    assert "größer" in text
    assert text.endswith("}\n")
    assert json.loads(text) == {"message": "größer", "step": 3}


def test_json_without_a_way_to_write_a_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "status.json", {"loss": float("nan")})
    assert not list(tmp_path.iterdir())


def test_a_file_replaced_in_a_block_is_the_old_one_until_its_end(tmp_path: Path) -> None:
    path = tmp_path / "grid.png"
    path.write_text("old")
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
        assert is_unfinished(temporary.name)
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def write_half(path: Path, error: type[BaseException]) -> None:
    with replacing(path) as temporary:
        temporary.write_text("half of it")
        raise error


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_block_that_fails_leaves_the_old_file_alone(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "grid.png"
    path.write_text("old")
    with pytest.raises(error):
        write_half(path, error)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_only_names_that_a_writer_makes_count_as_unfinished(tmp_path: Path) -> None:
    assert is_unfinished(temporary_path(tmp_path / "step-00000002").name)
    assert not any(is_unfinished(name) for name in ("status.json", ".tmp-mine", ".tmp-status.json", ".tmp"))


def test_the_free_disk_of_a_folder_that_is_not_there_yet_is_its_parents(tmp_path: Path) -> None:
    assert free_disk_bytes(tmp_path / "not" / "there") == pytest.approx(
        shutil.disk_usage(tmp_path).free, abs=2**30
    )


def test_what_is_set_aside_takes_a_number_that_is_free(tmp_path: Path) -> None:
    for text in ("first", "second", "third"):
        folder = tmp_path / "lora_best"
        folder.mkdir()
        (folder / "a").write_text(text)
        aside = set_aside(folder, "left")
        if text == "first":
            removed = aside
        if text == "second":
            (removed / "a").unlink()
            removed.rmdir()
    texts = {path.name: (path / "a").read_text() for path in tmp_path.iterdir()}
    assert texts == {".left-lora_best-1": "third", ".left-lora_best-2": "second"}
