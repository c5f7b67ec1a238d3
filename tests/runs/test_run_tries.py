"""What the screen generates with a real run."""

import shlex
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from screens import signed_in
from tiny_run import TinyRun

from diffsynth_lite.cli.main import main
from diffsynth_lite.workspace import open_workspace


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
def test_what_the_page_generates_has_the_bytes_of_the_command_that_it_shows(
    finished_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = open_workspace(tmp_path / "studio")
    monkeypatch.chdir(workspace.path)
    for name in ("mine", "other"):
        shutil.copytree(finished_run.folder, workspace.runs_folder / name)
    screen, samples = signed_in(workspace), workspace.runs_folder / "mine" / "samples"
    requests: list[dict[str, Any]] = [
        {"prompt": "a red circle", "scale": "0.7", "lora": "4", "negative": "blurry", "steps": "3"},
        {"prompt": "@a `$(cat)` ünd\na dog", "others": [{"run": "other", "weight": "0.5"}], "size": "48x32"},
    ]
    commands = []
    for number, request in enumerate(requests, start=1):
        answer = screen.post("/runs/mine/try", {"do": "generate"} | request)
        commands.append(answer.json()["command"])
        while (state := screen.get("/runs/mine/try/state").json())["state"] == "working":
            time.sleep(0.3)  # Each request takes time that the process needs.
        assert (state["state"], state.get("number")) == ("done", f"{number:04d}"), state
        assert state["results"][0]["prompt"] == request["prompt"]
    screen.client.app._app.state.studio.end()  # type: ignore[attr-defined]
    for number, command in enumerate(commands, start=1):
        assert main(shlex.split(command)[1:]) == 0
        by_page, by_command = samples / f"{number:04d}", samples / f"{number + 2:04d}"
        assert files_in(by_page) == files_in(by_command)
        assert len(files_in(by_page)) == 3  # the base model, the LoRA, and both side by side
