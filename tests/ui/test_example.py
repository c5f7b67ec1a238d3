"""The first page of an empty workspace, and the example that it trains by one button."""

from pathlib import Path

import pytest
from screens import INLINE, Screen

from diffsynth_lite.config import load_config
from diffsynth_lite.queue.folder import Queue
from diffsynth_lite.ui.home import example

BUTTON = 'data-post="/example"'


def test_one_button_makes_the_example_once_and_completes_what_a_kill_left(
    screen: Screen, no_worker: list[Path]
) -> None:
    workspace, queue = screen.workspace, Queue(screen.workspace)
    assert screen.get("/").text.count(BUTTON) == 1
    unfinished = workspace.path / ".ui" / "example_data"
    unfinished.mkdir()
    (unfinished / "teal_circle_on_white.png").write_bytes(b"torn")
    data, config = workspace.data_folder / "example", workspace.configs_folder / "example.yaml"
    for _ in range(2):
        assert screen.post("/example").json() == {"go": "/runs/example/"}
        assert [run.name for run in queue.in_state("waiting")] == ["example"]
    assert len(list(data.glob("*.png"))) == len(list(data.glob("*.txt"))) == 32
    assert not unfinished.exists()
    assert load_config(config).config.model.path == str(example.example_folder() / "mini_qwen_image")
    assert BUTTON not in screen.get("/").text
    queue.remove("example")
    config.unlink()
    text = screen.get("/").text
    assert text.count(BUTTON) == 1
    assert "Teach a model" not in text
    assert not INLINE.search(text)
    screen.post("/example")
    assert (config.is_file(), len(queue.in_state("waiting")), len(no_worker)) == (True, 1, 2)


def test_without_a_clone_the_page_says_so_and_begins_with_a_data_set(
    screen: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "site-packages" / "diffsynth_lite" / "configs" / "schema.json"
    monkeypatch.setattr(example, "schema_file", lambda: installed)
    text = screen.get("/").text
    assert "is in a clone of the repository, and not in this installation" in text
    assert text.count("New data set") == 1
    assert 'href="/new"' in text
    assert BUTTON not in text
    assert screen.post("/example").status_code == 404
    assert list(screen.workspace.data_folder.iterdir()) == []


def test_what_cannot_be_made_leaves_nothing(
    screen: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "make_data.py").write_text("raise SystemExit('no Pillow here')")
    (tmp_path / "mini_qwen_image").mkdir()
    monkeypatch.setattr(example, "example_folder", lambda: tmp_path)
    refusal = screen.post("/example")
    assert (refusal.status_code, "no Pillow here" in refusal.json()["error"]) == (422, True)
    assert list(screen.workspace.data_folder.iterdir()) == []
    assert list(screen.workspace.configs_folder.iterdir()) == []
