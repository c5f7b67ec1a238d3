"""Home: runs by their state, data sets by their captions, and what an empty workspace offers."""

import json
import os
from pathlib import Path
from urllib.parse import quote

import pytest
from screens import Screen

from diffsynth_lite.run_folder.process import Process


def make_run(screen: Screen, name: str, **status: object) -> Path:
    """The folder of a run at a step, with a preview."""
    folder = screen.workspace.runs_folder / name
    (folder / "previews").mkdir(parents=True)
    (folder / "previews" / "step-00000020-prompt-00-a5f44a.png").touch()
    (folder / "resolved.yaml").write_text(
        "model:\n  path: models/mini\nlora:\n  rank: 8\ntrain:\n  steps: 100\n"
    )
    written = {"state": "finished", "exit_code": 0, "step": 100, "message": "", "found_at": {}} | status
    (folder / "status.json").write_text(json.dumps(written))
    return folder


def test_an_empty_workspace_says_how_to_begin(screen: Screen) -> None:
    text = screen.get("/").text
    assert "Teach a model something of yours" in text
    assert text.count("New data set") == 1
    assert str(screen.workspace.path) in text


def test_runs_are_shown_by_their_state_with_what_can_be_done_now(screen: Screen) -> None:
    make_run(screen, "done")
    make_run(screen, "gone", state="running", exit_code=None, step=40)
    live = make_run(screen, "live", state="running", exit_code=None, step=40, seconds_left=600)
    (screen.workspace.runs_folder / "gone" / ".lock").write_text("process 4194400 on " + os.uname().nodename)
    (live / ".lock").write_text(f"{Process.current().as_text()}\n")
    text = screen.get("/").text
    for shown in (
        "10 min 0 s left",
        'aria-label="Steps of live"',
        'data-post="/runs/live/stop" aria-label="Stop live"',
        f"touch {live}/STOP",
        'data-post="/runs/gone/continue" aria-label="Continue gone"',
        "40 of 100 steps",
        "mini, rank 8",
        'src="/runs/done/previews/step-00000020-prompt-00-a5f44a.png"',
        'aria-label="All 2"',
        'aria-label="Can continue 1"',
    ):
        assert shown in text, shown
    assert "Stop gone" not in text
    assert "Continue done" not in text


def test_data_sets_are_counted_with_those_that_lack_a_caption(screen: Screen) -> None:
    names = ("a.png", "b.jpg", "c.mp4", "a.txt", "c.caption", ".hidden.png", "notes.md")
    for name in names:
        (screen.workspace.data_folder / "mine").mkdir(exist_ok=True)
        (screen.workspace.data_folder / "mine" / name).touch()
    (screen.workspace.data_folder / "none").mkdir()
    text = screen.get("/").text
    assert "2 images, 1 clip" in text
    assert "1 without a caption" in text
    assert '<p class="small quiet-text">empty</p>' in text


@pytest.mark.parametrize("name", [os.fsdecode(b"caf\xe9"), "a${b}"])
def test_a_folder_with_a_name_that_no_config_can_hold_is_shown_with_the_reason(
    screen: Screen, name: str
) -> None:
    (screen.workspace.data_folder / name).mkdir()
    for address in ("/", "/new"):
        assert screen.get(address).status_code == 200, address
    assert "no run can read this folder: its path must not contain" in screen.get("/").text
    address = f"/data/{quote(os.fsencode(name))}/"
    assert screen.get(address).status_code == (200 if name.isascii() else 404)
