"""This file shows which steps of a run have a LoRA, generates their grid, and notes which one is chosen."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from diffsynth_lite.errors import UserError
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.loras import choose, chosen_copy, lora_copies
from diffsynth_lite.ui.jobs import Jobs, command_line
from diffsynth_lite.ui.pages import change_route, run_folder, workspace_of
from diffsynth_lite.workspace import Workspace


def routes() -> list[Route]:
    """The routes of this part of a run's screen."""
    return [
        Route("/runs/{name}/steps.png", _grid),
        change_route("/runs/{name}/choose", _choose),
        change_route("/runs/{name}/compare-steps", _compare),
        change_route("/runs/{name}/stop-comparing", _stop),
    ]


class RunSteps:
    """The LoRAs of a run by step, and the latest process that generates their grid."""

    def __init__(self, workspace: Workspace, name: str, folder: Path) -> None:
        self._workspace, self._name, self._run = workspace, name, RunFolder(folder)
        self._jobs = Jobs(workspace)

    @classmethod
    def of(cls, request: Request) -> "RunSteps":
        """Those of the run that a request names."""
        return cls(workspace_of(request), request.path_params["name"], run_folder(request))

    @property
    def grid(self) -> Path | None:
        """The newest grid of steps."""
        for grid in sorted(self._run.samples_folder.glob("*/grid.png"), reverse=True):
            is_ours = grid.is_file() and not (grid.is_symlink() or grid.parent.is_symlink())
            if is_ours and any(grid.parent.glob("*-step-*.png")):
                return grid
        return None

    def values(self) -> dict[str, Any]:
        """What the template shows of it."""
        copies, problem, chosen = lora_copies(self._run.checkpoints_folder), "", None
        try:
            chosen = chosen_copy(self._run)
        except UserError as error:
            problem = str(error)
        if chosen is not None and not chosen.path.is_dir():
            problem = f"Step {chosen.step} was chosen, and its LoRA is gone. Choose another."
        grid, job = self.grid, self._jobs.of(self._run.path, "sample")
        return {
            "loras": [(copy.step, copy.path.name, copy == chosen) for copy in copies],
            "chosen": chosen.step if chosen is not None and not problem else None,
            "problem": problem,
            "grid": grid and f"{grid.parent.name}-{grid.stat().st_mtime_ns}",
            "is_generating": job.is_alive,
            "last_line": job.log(1),
            "command": command_line(["sample", *self._arguments]),
        }

    def choose(self, name: object) -> None:
        """Write down that a LoRA is the one to use, by the name of its folder."""
        known = {copy.path.name: copy for copy in lora_copies(self._run.checkpoints_folder)}
        if not isinstance(name, str) or name not in known:
            raise UserError(f"{self._name} has no LoRA of that step (any more)")
        choose(self._run, known[name])

    def compare(self, *, free_device: Callable[[], None]) -> None:
        """Start the command that generates the grid; what keeps a model on the device is ended before."""
        self._jobs.start(self._arguments, self._run.path, command="sample", free_device=free_device)

    def stop(self) -> None:
        """Have the command stop."""
        self._jobs.stop(self._run.path, command="sample")

    @property
    def _arguments(self) -> tuple[str, ...]:
        return f"--lora={self._workspace.shown(self._run.path)}", "--every-checkpoint"


def _grid(request: Request) -> Response:
    if (grid := RunSteps.of(request).grid) is None:
        raise HTTPException(404)
    return FileResponse(grid, media_type="image/png")


def _choose(request: Request, given: dict[str, Any]) -> dict[str, Any]:
    RunSteps.of(request).choose(given.get("lora"))
    return {}


def _compare(request: Request, given: dict[str, Any]) -> dict[str, Any]:
    RunSteps.of(request).compare(free_device=request.app.state.studio.end)
    return {}


def _stop(request: Request, given: dict[str, Any]) -> dict[str, Any]:
    RunSteps.of(request).stop()
    return {}
