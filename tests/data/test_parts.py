"""Parts of the records: each in one part, whose files alone are read."""

import json
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from diffsynth_lite.data.captions import CaptionFiles
from diffsynth_lite.data.records import Part, Source, part_index
from diffsynth_lite.data.sources import FoundRecords, find_records

NUM_ITEMS = 24


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for place in range(NUM_ITEMS):
        Image.new("RGB", (8, 6), (place, 0, 0)).save(folder / f"{place}.png")
        (folder / f"{place}.txt").write_text(f"number {place}")
    return folder


def read(source: Source, part: Part, *others: Source) -> FoundRecords:
    return find_records([source, *others], media_store=Path("unused"), part=part)


def test_parts_are_near_equal_and_depend_on_names_alone() -> None:
    sizes = Counter(part_index(f"{name}.png", 16) for name in range(10_000))
    assert sorted(sizes) == list(range(16))
    assert max(sizes.values()) < 1.2 * min(sizes.values())
    assert [Part(index, 3).owns("cat.png") for index in range(3)] == [True, False, False]


def test_each_record_of_a_folder_is_in_one_part_and_no_part_reads_captions_of_another(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    captions_of = CaptionFiles.of

    def noting(files: CaptionFiles, target: str) -> tuple[str, ...]:
        opened.append(target)
        return captions_of(files, target)

    monkeypatch.setattr(CaptionFiles, "of", noting)
    source = Source(path=folder)
    whole = read(source, Part(0, 1)).require_all()
    opened.clear()
    parts = [read(source, Part(index, 5)).require_all() for index in range(5)]
    assert len(opened) == NUM_ITEMS
    assert sorted((record for part in parts for record in part), key=lambda record: record.name) == whole


@pytest.mark.parametrize("sources", [1, 2])
def test_each_row_of_a_table_is_in_one_part(
    folder: Path, sources: int, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"file_name": f"{place}.png", "text": "one"} for place in range(NUM_ITEMS - 1)]
    table = folder.parent / "rows.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [Source(path=folder, metadata=table)] * sources
    parts = [read(given[0], Part(index, 3), *given[1:]) for index in range(3)]
    assert caplog.text == ""  # that a file has no row, only all rows tell
    names = sorted(name for part in parts for name in part.names)
    whole = read(given[0], Part(0, 1), *given[1:])
    assert names == sorted(whole.names)
    assert "1 of 24 files have no row" in caplog.text
