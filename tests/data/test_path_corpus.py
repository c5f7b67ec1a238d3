"""Whatever text data give as the name of a file, nothing outside their folder is reached."""

import json
import os

import pytest
from audit_watch import AuditWatch, watched_files
from path_corpus import (
    DATASETS,
    NO_PATHS,
    OUTSIDE,
    ROWS,
    THROUGH_LINKS,
    can_hold,
    escapes,
    plant,
    secrets,
    written_out,
)

from diffsynth_lite.data.records import Source
from diffsynth_lite.data.sources import find_records
from diffsynth_lite.errors import UserError

TEXTS = (*OUTSIDE, *THROUGH_LINKS, *NO_PATHS)


@pytest.fixture(scope="module")
def watch() -> AuditWatch:
    return watched_files()


def test_there_are_more_than_a_hundred_different_ones() -> None:
    assert len(set(TEXTS)) == len(TEXTS) > 100


@pytest.mark.parametrize("place", [*ROWS, *DATASETS])
def test_nothing_outside_is_named_opened_or_fetched(tmp_path, watch: AuditWatch, place: str) -> None:
    read = (ROWS | DATASETS)[place]
    plant(tmp_path)
    outside = {os.path.realpath(path) for path in secrets(tmp_path)}
    texts = [written_out(text, tmp_path) for text in TEXTS if can_hold(place, text)]
    with watch.on() as opened:
        escaped = [t for t in texts if escapes(read, tmp_path, t, may_be_inside=place in DATASETS)]
        noted = [str(path) for path, *_ in opened]
    assert escaped == []
    assert noted
    reached = [path for path in noted if "\0" not in path and os.path.realpath(path) in outside]
    assert reached == []
    assert not [path for path in noted if path.startswith(("/etc/passwd", "/proc/self/environ", "/dev/zero"))]
    assert not [path for path in noted if "socket" in path or path in ("host", "127.0.0.1", "bucket")]


@pytest.mark.parametrize("place", [*ROWS, *DATASETS])
def test_the_check_sees_a_path_that_is_let_out(tmp_path, monkeypatch, place: str) -> None:
    monkeypatch.setattr("diffsynth_lite.data.folder.Folder.find", lambda self, name: (name, self.path / name))
    monkeypatch.setattr("diffsynth_lite.data.stored_dataset._MediaStore._named", lambda _self, path: path)
    plant(tmp_path)
    read = (ROWS | DATASETS)[place]
    text = "../secret.mp4" if "frame" not in place and "clip" in place else "../secret.png"
    assert escapes(read, tmp_path, text, may_be_inside=place in DATASETS)


def test_where_the_outside_is_allowed_paths_lead_there_and_nothing_else_leads_anywhere(tmp_path) -> None:
    data = plant(tmp_path)
    found: dict[str, list[str]] = {}
    for text in TEXTS:
        row = json.dumps({"file_name": written_out(text, tmp_path), "text": "x"})
        (tmp_path / "rows.jsonl").write_text(row)
        source = Source(path=data, metadata=tmp_path / "rows.jsonl", allow_outside=True)
        try:
            [record] = find_records([source], media_store=tmp_path / "store").require_all()
            found[text] = os.path.relpath(os.path.realpath(record.target), tmp_path)
        except UserError as error:
            assert "\n" not in str(error)  # noqa: PT017
    assert found.keys().isdisjoint(NO_PATHS)
    assert set(found.values()) == {"secret.png", "data-2/secret.png", "data/a.png"}
    assert len(found) > 15
