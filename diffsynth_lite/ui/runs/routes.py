"""This file shows a run with what can be done about it, and does that."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from diffsynth_lite.errors import UserError
from diffsynth_lite.redaction import redacted
from diffsynth_lite.report.card import RunCard
from diffsynth_lite.report.page import Served
from diffsynth_lite.report.server import RunPages
from diffsynth_lite.run_folder.command import Continuation
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.ui.jobs import REQUESTS, Job, Jobs
from diffsynth_lite.ui.pages import answer, environment, navigation, read_json, refused
from diffsynth_lite.ui.runs.downloads import downloads, zipped
from diffsynth_lite.workspace import Workspace

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
        Route("/runs/{name}/{action}", _act, methods=["POST"]),
    ]


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A run that a request names.

    Attributes:
        job: the process that the screen started for it last.
        job_state: how far that has come.
        state: of the run in a word.
    """

    name: str
    card: RunCard
    job: Job | None
    job_state: str
    state: str

    @classmethod
    def of(cls, request: Request) -> "_Run":
        """The run of the name in the request.

        Raises:
            HTTPException: there is none (404).
        """
        name = request.path_params["name"]
        card = _pages(request).card(name)
        if card is None:
            raise HTTPException(404)
        jobs = _jobs(request)
        job = jobs.of(card.folder)
        return cls(
            name=name,
            card=card,
            job=job,
            job_state="ended" if job is None else jobs.state(job),
            state=jobs.word(card.folder, card.state.name),
        )

    @property
    def is_stopping(self) -> bool:
        """Whether it was asked to stop and has not done so."""
        if self.state == "starting":
            return self.job is not None and self.job.was_signalled
        return self.state == "running" and (self.card.folder / REQUESTS["stop"]).exists()

    def command(self, request: Request) -> Continuation | str | None:
        """How it is continued, or why it cannot be from here; None where there is nothing to continue."""
        if self.state not in _CONTINUED:
            return None
        try:
            found: Continuation = request.app.state.continuation(self.card.folder)
        except UserError as error:
            return str(error)
        return found


def _jobs(request: Request) -> Jobs:
    jobs: Jobs = request.app.state.jobs
    return jobs


def _pages(request: Request) -> RunPages:
    pages: RunPages = request.app.state.run_pages
    return pages


def _show(request: Request) -> Response:
    run = _Run.of(request)
    module = environment().get_template("runs/run.html").make_module(_values(run, request))
    parts = {name: Markup(redacted(str(getattr(module, name)())).strip()) for name in _PARTS}
    shown = _pages(request).page(
        run.name,
        Served(
            navigation=navigation(request),
            state=run.state,
            styles=_STYLES,
            scripts=_SCRIPTS,
            early_scripts=("theme.js",),
            **parts,
        ),
    )
    if shown is None:
        raise HTTPException(404)
    return answer(request, shown.content, "text/html")


def _values(run: _Run, request: Request) -> dict[str, Any]:
    """What the templates show of a run."""
    workspace: Workspace = request.app.state.workspace
    card, folder, command = run.card, RunFolder(run.card.folder), run.command(request)
    failed_start = run.job_state == "did not start" and run.state != "running"
    shown = command.shown if isinstance(command, Continuation) else None
    if isinstance(command, Continuation) and command.working_folder == workspace.path:
        shown = f"cd {shlex.quote(str(workspace.path))} && {shown}"
    path, place = card.folder, workspace.path
    return {
        "name": run.name,
        "state": run.state,
        "folder": str(path.relative_to(place) if path.is_relative_to(place) else path),
        "words": ", ".join(filter(None, [card.model, *card.details])),
        "data_set": card.data if card.data in workspace.data_sets else None,
        "config": run.name if run.name in workspace.configs else None,
        "has_settings": folder.resolved_file.is_file(),
        "is_stopping": run.is_stopping,
        "failed_start": failed_start,
        "was_signalled": run.job is not None and run.job.was_signalled,
        "exit_code": run.job.exit_code if run.job else None,
        "last_line": _lines(run, request, 1) if failed_start else [],
        "has_log": run.job is not None,
        "step": card.state.step,
        "checkpoint": max(map(_step, folder.checkpoints_folder.glob("step-*/COMPLETE")), default=None),
        "downloads": downloads(folder).values(),
        "command": shown,
        "refusal": command if isinstance(command, str) else None,
    }


def _step(manifest: Path) -> int:
    digits = manifest.parent.name.removeprefix("step-")
    return int(digits) if digits.isdecimal() else 0


def _lines(run: _Run, request: Request, num_lines: int) -> list[str]:
    return _jobs(request).log(run.job, num_lines=num_lines) if run.job else []


def _log(request: Request) -> Response:
    text = "\n".join(_lines(_Run.of(request), request, _LOG_LINES))
    return answer(request, text.encode(errors="replace"), "text/plain")


def _preview(request: Request) -> Response:
    name, file = request.path_params["name"], request.path_params["file"]
    found = _pages(request).file(name, f"previews/{file}")
    if found is None:
        raise HTTPException(404)
    return answer(request, found.content, found.kind)


def _download(request: Request) -> Response:
    run = _Run.of(request)
    found = downloads(RunFolder(run.card.folder)).get(request.path_params["file"])
    if found is None:
        raise HTTPException(404)
    name = f"{run.name}-{found.name}"
    if found.path.is_file():
        return FileResponse(found.path, filename=name, media_type="application/octet-stream")
    disposition = f"attachment; filename*=utf-8''{quote(name)}"
    return StreamingResponse(
        zipped(found.path), media_type="application/zip", headers={"content-disposition": disposition}
    )


async def _act(request: Request) -> Response:
    """Do what a button says; what is sent with it is an empty object."""
    await read_json(request)
    try:
        return await run_in_threadpool(_acted, request)
    except UserError as error:
        return refused(str(error))


def _start(request: Request, folder: Path, command: Continuation | Job) -> None:
    place, num_processes = Path(command.working_folder), command.num_processes
    _jobs(request).start(command.arguments, folder, working_folder=place, num_processes=num_processes)


def _acted(request: Request) -> Response:
    run, action = _Run.of(request), request.path_params["action"]
    if action in REQUESTS:
        _jobs(request).ask(run.card.folder, action)
    elif action == "continue":
        _start(request, run.card.folder, request.app.state.continuation(run.card.folder))
    elif action == "again" and run.job is not None:
        _start(request, run.card.folder, run.job)
    else:
        raise HTTPException(404)
    return JSONResponse({})
