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
from diffsynth_lite.queue.adding import entry_of_continuation
from diffsynth_lite.redaction import redacted
from diffsynth_lite.report.card import RunCard
from diffsynth_lite.report.page import Served
from diffsynth_lite.report.server import RunPages
from diffsynth_lite.run_folder.command import Continuation
from diffsynth_lite.run_folder.folder import REQUEST_FILES, RunFolder
from diffsynth_lite.ui.pages import answer, change_route, environment, navigation, report_answer, workspace_of
from diffsynth_lite.ui.queued import QueuedRuns
from diffsynth_lite.ui.runs import share, steps
from diffsynth_lite.ui.runs.downloads import downloads, zipped
from diffsynth_lite.ui.tries.request import loras_of
from diffsynth_lite.ui.tries.routes import studio_of

_LOG_LINES = 200
_MOST_COMPARED = 24
_STYLES = ("style.css", "ui.css", "uPlot.min.css", "report.css", "runs.css")
_SCRIPTS = ("live.js", "uPlot.iife.min.js", "compare.js", "report.js", "ui.js", "runs.js")
_PARTS = ("lead", "actions", "notes", "foot")
_CONTINUED = ("interrupted", "killed", "stopped", "diverged", "failed", "not started")
"""States of runs that the same command continues."""


def routes() -> list[Route]:
    """The routes of this screen."""
    return [
        Route("/compare", _compare),
        Route("/runs/{name}/", _show),
        Route("/runs/{name}/log", _log),
        Route("/runs/{name}/previews/{file}", _preview),
        Route("/runs/{name}/download/{file}", _download),
        *steps.routes(),
        *share.routes(),
        change_route("/runs/{name}/{action}", _act),
    ]


class _Run:
    """The run that a request names, and what the queue knows of it.

    Attributes:
        queued: its entry; None for one of a terminal.
        state: of the run in a word.

    Raises:
        HTTPException: there is no such run (404).
    """

    def __init__(self, request: Request) -> None:
        self.workspace = workspace_of(request)
        self.pages: RunPages = request.app.state.run_pages
        self.queue = QueuedRuns(self.workspace)
        self.continuation: Callable[[Path], Continuation] = request.app.state.continuation
        self.name: str = request.path_params["name"]
        card = self.pages.card(self.name)
        if card is None:
            raise HTTPException(404)
        self.card: RunCard = card
        self.folder: Path = card.folder
        self.queued = self.queue.of(self.folder)
        self.state = self.queue.word(self.folder, card.state.name)

    @property
    def is_stopping(self) -> bool:
        """Whether it was asked to stop and has not done so."""
        if self.state == "starting":
            entry = self.queued.entry if self.queued is not None else None
            return entry is not None and entry.was_signalled
        return self.state == "running" and (self.folder / REQUEST_FILES["stop"]).exists()

    def values(self) -> dict[str, Any]:
        """What the templates show of it."""
        card, folder, path, place = self.card, RunFolder(self.folder), self.folder, self.workspace.path
        command = refusal = ""
        report = self.pages.report(self.name)
        held_out = report.series.get("validation_loss") if report is not None else None
        try:
            if self.state in _CONTINUED:
                found = self.continuation(path)
                goes_there = f"cd {shlex.quote(str(place))} && " if found.working_folder == place else ""
                command = f"{goes_there}{found.shown}"
        except UserError as error:
            refusal = str(error)
        return vars(self) | {
            "folder": self.workspace.shown(path),
            "words": ", ".join(filter(None, [card.model, *card.details])),
            "data_set": card.data if card.data in self.workspace.data_sets else None,
            "config": self.name if self.name in self.workspace.configs else None,
            "has_settings": folder.resolved_file.is_file(),
            "is_stopping": self.is_stopping,
            "failed_start": self.queue.failed_start(path),
            "place": self.queue.place(path),
            "num_waiting": len(self.queue.waiting),
            "needs_go": self.queue.needs_go,
            "step": card.state.step,
            "checkpoint": max(map(_step, folder.checkpoints_folder.glob("step-*/COMPLETE")), default=None),
            "downloads": downloads(folder).values(),
            "steps": steps.RunSteps(self.workspace, self.name, path).values(),
            "losses": dict(held_out.points) if held_out is not None else {},
            "scores": report.scores if report is not None else None,
            "share": self._share(),
            "can_be_tried": bool(loras_of(self.folder)),
            "command": command,
            "refusal": refusal,
        }

    def _share(self) -> dict[str, Any]:
        try:
            return share.RunShare(self.workspace, self.name, self.folder).values()
        except (OSError, UserError) as error:  # a run may replace its LoRA meanwhile
            return {"problem": str(error)}


def _step(manifest: Path) -> int:
    digits = manifest.parent.name.removeprefix("step-")
    return int(digits) if digits.isdecimal() else 0


def _show(request: Request) -> Response:
    run = _Run(request)
    module = environment().get_template("runs/run.html").make_module(run.values())
    parts = {name: Markup(redacted(str(getattr(module, name)())).strip()) for name in _PARTS}
    served = _served(request, state=run.state, **parts)
    return report_answer(request, run.pages.page(run.name, served))


def _compare(request: Request) -> Response:
    """Runs side by side: ``?run=NAME&run=NAME``."""
    names = list(dict.fromkeys(request.query_params.getlist("run")))
    if not 1 < len(names) <= _MOST_COMPARED:
        raise UserError(f"Choose from 2 to {_MOST_COMPARED} runs, of which {len(names)} were given")
    return report_answer(request, request.app.state.run_pages.several(names, _served(request)))


def _served(request: Request, **parts: Any) -> Served:
    return Served(
        navigation=navigation(request),
        styles=_STYLES,
        scripts=_SCRIPTS,
        early_scripts=("theme.js",),
        **parts,
    )


def _preview(request: Request) -> Response:
    name, file = request.path_params["name"], request.path_params["file"]
    return report_answer(request, request.app.state.run_pages.file(name, f"previews/{file}"))


def _log(request: Request) -> Response:
    run = _Run(request)
    text = "\n".join(run.queue.log(run.folder, num_lines=_LOG_LINES))
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
    if action in REQUEST_FILES:
        run.queue.ask(run.folder, action)
    elif action == "continue":
        run.queue.add([entry_of_continuation(run.workspace, run.folder, run.continuation(run.folder))])
        studio_of(request).end()
    elif action == "again" and run.queued is not None and run.state == "did not start":
        run.queue.start_again(run.queued)
        studio_of(request).end()
    else:
        raise HTTPException(404)
    return {}
