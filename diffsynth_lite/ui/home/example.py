"""This file trains the mini model of a clone on its small data set, so that who is new sees a run first."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from anyio import CapacityLimiter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import Route

from diffsynth_lite.config.files import schema_file
from diffsynth_lite.errors import UserError
from diffsynth_lite.files import write_text
from diffsynth_lite.queue.adding import entries_of
from diffsynth_lite.ui.pages import change_route, workspace_of
from diffsynth_lite.ui.queued import QueuedRuns, is_running
from diffsynth_lite.workspace import Workspace

NAME = "example"
"""Of the data set, the config and the run."""
_MAKER, _MODEL = "make_data.py", "mini_qwen_image"
_CONFIG = """extends: quickstart.yaml

model:
  path: {model}

data:
  path: data/{name}

output:
  dir: runs/{name}
"""


def routes() -> list[Route]:
    """The route of the button."""
    return [change_route("/example", _train, limiter=CapacityLimiter(1))]


def example_folder() -> Path | None:
    """Where a clone has the mini model and what makes its data set; None without a clone."""
    folder = schema_file().resolve().parents[1] / "examples" / "quickstart"
    return folder if (folder / _MAKER).is_file() and (folder / _MODEL).is_dir() else None


def _train(request: Request, given: dict[str, Any]) -> dict[str, Any]:
    """Make what is missing of data set and config, and put the run into the queue unless it is there."""
    folder, workspace = example_folder(), workspace_of(request)
    if folder is None:
        raise HTTPException(404)
    config, run = workspace.configs_folder / f"{NAME}.yaml", workspace.runs_folder / NAME
    if not (data := workspace.data_folder / NAME).exists():
        _make_data(folder / _MAKER, data, workspace)
    if not config.exists():
        write_text(config, _CONFIG.format(model=json.dumps(str(folder / _MODEL)), name=NAME))
    queued = QueuedRuns(workspace)
    known = queued.of(run)
    if not is_running(run) and (known is None or known.state == "done"):
        queued.add(entries_of(workspace, config))
        request.app.state.studio.end()
    return {"go": f"/runs/{NAME}/"}


def _make_data(maker: Path, data: Path, workspace: Workspace) -> None:
    """Make the data set, which appears as a whole.

    Raises:
        UserError: it cannot be made.
    """
    unfinished = workspace.settings_file.with_name(f"{NAME}_data")
    shutil.rmtree(unfinished, ignore_errors=True)
    command = [sys.executable, str(maker), "--output", str(unfinished)]
    made = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if made.returncode:
        raise UserError(f"{maker} failed: {' '.join(made.stderr.split()[-20:])}")
    unfinished.rename(data)
