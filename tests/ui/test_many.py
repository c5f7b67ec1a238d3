"""Five hundred runs and two thousand images: all of them are there, and one button changes all."""

import json
import os
import re
from pathlib import Path

from PIL import Image
from screens import Screen

SETTINGS = "model:\n  path: models/mini\nlora:\n  rank: 8\ntrain:\n  steps: 100\n"
STATUS = {"state": "finished", "exit_code": 0, "step": 100, "message": "", "found_at": {}}


def test_all_of_five_hundred_runs_are_found_page_by_page(screen: Screen) -> None:
    first = screen.workspace.runs_folder / "run-000"
    first.mkdir()
    (first / "resolved.yaml").write_text(SETTINGS)
    (first / "status.json").write_text(json.dumps(STATUS))
    names = {f"run-{number:03}" for number in range(500)}
    for name in names - {first.name}:
        link_all(first, first.with_name(name))
    found: list[str] = []
    for number in range(1, 501):
        shown = re.findall(r'aria-label="Choose (run-\d+)"', screen.get(f"/?page={number}").text)
        if set(shown) <= set(found):
            break
        found += shown
    assert len(found) == 500
    assert set(found) == names
    assert 'aria-label="All 500"' in screen.get("/").text
    assert "run-417" in screen.get("/?q=run-417").text


def test_captions_of_two_thousand_images_are_shown_changed_and_taken_back(screen: Screen) -> None:
    folder = screen.workspace.data_folder / "many"
    folder.mkdir()
    Image.new("RGB", (8, 8)).save(folder / "0000.png")
    (folder / "0000.txt").write_text("a mug\n")
    for number in range(1, 2000):
        for ending in ("png", "txt"):
            os.link(folder / f"0000.{ending}", folder / f"{number:04}.{ending}")
    items = screen.get("/data/many/items").json()["items"]
    assert [item["file"] for item in items] == [f"{number:04}.png" for number in range(2000)]
    assert {item["caption"] for item in items} == {"a mug"}
    page = screen.get("/data/many/").text
    assert '"1999.png"' in page
    changes = [{"file": item["file"], "was": "a mug", "caption": f"mug {item['file']}"} for item in items]
    assert screen.post("/data/many/captions", {"changes": changes}).json()["stale"] == {}
    assert (folder / "1234.txt").read_text() == "mug 1234.png\n"
    assert len({file.read_text() for file in folder.glob("*.txt")}) == 2000
    assert screen.post("/data/many/undo").json()["message"] == "2,000 captions as before."
    assert {file.read_text() for file in folder.glob("*.txt")} == {"a mug\n"}
    assert not list(folder.glob(".*"))


def link_all(source: Path, target: Path) -> None:
    target.mkdir()
    for file in source.iterdir():
        os.link(file, target / file.name)
