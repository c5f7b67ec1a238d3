"""This file shows a run with what can be done about it, and does that."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route

from diffsynth_lite.errors import UserError
from diffsynth_lite.redaction import redacted
from diffsynth_lite.report.card import RunCard
from diffsynth_lite.report.page import Served
from diffsynth_lite.report.server import RunPages
from diffsynth_lite.run_folder.command import Continuation
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.ui.jobs import REQUESTS, Job, Jobs
from diffsynth_lite.ui.pages import answer, change_route, environment, navigation, report_answer, workspace_of
from diffsynth_lite.ui.runs.downloads import downloads, zipped

_LOG_LINES = 200
_STYLES = ("style.css", "ui.css", "uPlot.min.css", "report.css", "runs.css")
_SCRIPTS = ("live.js", "uPlot.iife.min.js", "report.js", "ui.js", "runs.js")
_PARTS = ("lead", "actions", "notes", "foot")
_CONTINUED = ("interrupted", "killed", "stopped", "diverged", "failed", "not started")
"""States of runs that the same command continues."""


def routes() -> list[Route]:
    """The routes of this screen."""
    return [
        Route("/runs/{name}/", _show),
        Route("/runs/{name}/log", _log),
        Route("/runs/{name}/previews/{file}", _preview),
        Route("/runs/{name}/download/{file}", _download),
        change_route("/runs/{name}/{action}", _act),
    ]


class _Run:
    """The run that a request names, and the process that the screen started for it last.

    Attributes:
        job_state: how far the process has come.
        state: of the run in a word.

    Raises:
        HTTPException: there is no such run (404).
    """

    def __init__(self, request: Request) -> None:
        self.workspace = workspace_of(request)
        self.pages: RunPages = request.app.state.run_pages
        self.jobs: Jobs = request.app.state.jobs
        self.continuation: Callable[[Path], Continuation] = request.app.state.continuation
        self.name: str = request.path_params["name"]
        card = self.pages.card(self.name)
        if card is None:
            raise HTTPException(404)
        self.card: RunCard = card
        self.folder: Path = card.folder
        self.job = self.jobs.of(self.folder)
        self.job_state = "ended" if self.job is None else self.jobs.state(self.job)
        self.state = self.jobs.word(self.folder, card.state.name)

    @property
    def is_stopping(self) -> bool:
        """Whether it was asked to stop and has not done so."""
        if self.state == "starting":
            return self.job is not None and self.job.was_signalled
        return self.state == "running" and (self.folder / REQUESTS["stop"]).exists()

    def lines(self, num_lines: int) -> list[str]:
        """The last lines of its log."""
        return self.jobs.log(self.job, num_lines=num_lines) if self.job else []

    def start(self, command: Continuation | Job) -> None:
        """Start it again, or continue it."""
        place, num_processes = Path(command.working_folder), command.num_processes
        self.jobs.start(command.arguments, self.folder, working_folder=place, num_processes=num_processes)

    def values(self) -> dict[str, Any]:
        """What the templates show of it."""
        card, folder, path, place = self.card, RunFolder(self.folder), self.folder, self.workspace.path
        failed_start = self.job_state == "did not start" and self.state != "running"
        command = refusal = ""
        try:
            if self.state in _CONTINUED:
                found = self.continuation(path)
                goes_there = f"cd {shlex.quote(str(place))} && " if found.working_folder == place else ""
                command = f"{goes_there}{found.shown}"
        except UserError as error:
            refusal = str(error)
        return vars(self) | {
            "folder": str(path.relative_to(place) if path.is_relative_to(place) else path),
            "words": ", ".join(filter(None, [card.model, *card.details])),
            "data_set": card.data if card.data in self.workspace.data_sets else None,
            "config": self.name if self.name in self.workspace.configs else None,
            "has_settings": folder.resolved_file.is_file(),
            "is_stopping": self.is_stopping,
            "failed_start": failed_start,
            "last_line": self.lines(1) if failed_start else [],
            "step": card.state.step,
            "checkpoint": max(map(_step, folder.checkpoints_folder.glob("step-*/COMPLETE")), default=None),
            "downloads": downloads(folder).values(),
            "command": command,
            "refusal": refusal,
        }


def _step(manifest: Path) -> int:
    digits = manifest.parent.name.removeprefix("step-")
    return int(digits) if digits.isdecimal() else 0


def _show(request: Request) -> Response:
    run = _Run(request)
    module = environment().get_template("runs/run.html").make_module(run.values())
    parts = {name: Markup(redacted(str(getattr(module, name)())).strip()) for name in _PARTS}
    served = Served(
        navigation=navigation(request),
        state=run.state,
        styles=_STYLES,
        scripts=_SCRIPTS,
        early_scripts=("theme.js",),
        **parts,
    )
    return report_answer(request, run.pages.page(run.name, served))


def _preview(request: Request) -> Response:
    name, file = request.path_params["name"], request.path_params["file"]
    return report_answer(request, request.app.state.run_pages.file(name, f"previews/{file}"))


def _log(request: Request) -> Response:
    text = "\n".join(_Run(request).lines(_LOG_LINES))
    return answer(request, text.encode(errors="replace"), "text/plain")


def _download(request: Request) -> Response:
    run = _Run(request)
    found = downloads(RunFolder(run.folder)).get(request.path_params["file"])
    if found is None:
        raise HTTPException(404)
    name = f"{run.name}-{found.name}"
    if found.path.is_file():
        return FileResponse(found.path, filename=name, media_type="application/octet-stream")
    disposition = f"attachment; filename*=utf-8''{quote(name)}"
    return StreamingResponse(
        zipped(found.path), media_type="application/zip", headers={"content-disposition": disposition}
    )


def _act(request: Request, given: dict[str, Any]) -> dict[str, Any]:
    """Do what a button says; what is sent with it is an empty object."""
    run, action = _Run(request), request.path_params["action"]
    if action in REQUESTS:
        run.jobs.ask(run.folder, action)
    elif action == "continue":
        run.start(run.continuation(run.folder))
    elif action == "again" and run.job is not None:
        run.start(run.job)
    else:
        raise HTTPException(404)
    return {}
