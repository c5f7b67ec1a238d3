"""The file of the items that are measured: what is read is what was written, and secrets are masked."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from diffsynth_lite.errors import UserError
from diffsynth_lite.run_folder.metrics import MeasuredItem, read_items, write_items

ITEM = MeasuredItem(
    name="cats/tabby ü.png",
    caption="a cat\u2028on a <b>mat</b>",
    size="512x768",
    noise_levels=[1 / 6, 0.5, 5 / 6],
    measured_by="0f3a",
    thumbnail=None,
)


def test_items_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    assert read_items(path) == []
    items = [ITEM, replace(ITEM, name="b.mp4", thumbnail="data:image/jpeg;base64,AAAA")]
    write_items(path, items)
    assert read_items(path) == items


def test_secrets_in_captions_are_masked(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    write_items(path, [replace(ITEM, caption="hf_" + "a1B2" * 8)])
    assert json.loads(path.read_text())["caption"] == "REDACTED"


@pytest.mark.parametrize("line", ["{", "[]", '{"name": "a"}'])
def test_a_line_that_is_no_item_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "items.jsonl"
    write_items(path, [ITEM])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(UserError, match=r"items\.jsonl line 2"):
        read_items(path)
