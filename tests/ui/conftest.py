"""The screen of a new workspace, for all tests of screens."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from screens import Screen, Started, signed_in

from diffsynth_lite.queue.folder import Queue
from diffsynth_lite.workspace import open_workspace


@pytest.fixture
def screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Screen:
    """The screen of a new workspace, which is the working folder as it is the server's."""
    workspace = open_workspace(tmp_path / "workspace")
    monkeypatch.chdir(workspace.path)
    return signed_in(workspace)


@pytest.fixture
def no_worker(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The workspaces whose queue a screen had go on; no worker is started."""
    started: list[Path] = []

    def go(queue: Queue) -> None:
        queue.unpause()
        started.append(queue.workspace.path)

    for module in ("queued", "home.queue"):
        monkeypatch.setattr(f"diffsynth_lite.ui.{module}.start_worker", go)
    return started


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    """What the screen starts, which only sleeps."""
    started = Started()
    monkeypatch.setattr("diffsynth_lite.ui.jobs.start_detached", started.spawn)
    yield started
    started.kill()
