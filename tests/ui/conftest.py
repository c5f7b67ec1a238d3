"""The screen of a new workspace, for all tests of screens."""

from pathlib import Path

import pytest
from screens import Screen, signed_in

from diffsynth_lite.workspace import open_workspace


@pytest.fixture
def screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Screen:
    """The screen of a new workspace, which is the working folder as it is the server's."""
    workspace = open_workspace(tmp_path / "workspace")
    monkeypatch.chdir(workspace.path)
    return signed_in(workspace)
