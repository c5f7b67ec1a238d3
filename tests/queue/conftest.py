"""A workspace with a config, and small programs in place of ``train``."""

from pathlib import Path

import pytest
from waiting_runs import Waiting

from diffsynth_lite.queue.folder import Queue
from diffsynth_lite.workspace import open_workspace

CONFIG = """
model: {family: qwen_image, path: model}
data: {path: data, width: 64, height: 32}
train: {steps: 10}
output: {dir: runs/mine}
"""


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Waiting:
    """A new workspace, which is the working folder as it is the worker's."""
    workspace = open_workspace(tmp_path / "workspace")
    monkeypatch.chdir(workspace.path)
    (workspace.configs_folder / "mine.yaml").write_text(CONFIG)
    return Waiting(Queue(workspace))
