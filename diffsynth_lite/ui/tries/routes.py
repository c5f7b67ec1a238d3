"""This file shows the page on which the LoRA of a run is tried, and has its requests generated."""

import json
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from diffsynth_lite.errors import UserError
from diffsynth_lite.redaction import redacted
from diffsynth_lite.report.server import RunPages
from diffsynth_lite.sampling.request import FILES
from diffsynth_lite.ui.pages import answer, change_route, page, run_folder, workspace_of
from diffsynth_lite.ui.tries.request import FILE_WORDS, command, config_of, loras_of, partners, request_of
from diffsynth_lite.ui.tries.results import result_file, results_of
from diffsynth_lite.ui.tries.studio import IDLE_MINUTES, Studio

_LONGEST_LIST = 200


def routes() -> list[Route]:
    """The routes of this screen."""
    return [
        Route("/runs/{name}/try", _show),
        change_route("/runs/{name}/try", _act),
        Route("/runs/{name}/try/state", _state),
        Route("/runs/{name}/samples/{number}/{file}", _file),
    ]


def studio_of(request: Request) -> Studio:
    """The process that generates; whatever starts and needs the device ends it first."""
    studio: Studio = request.app.state.studio
    return studio


def _show(request: Request) -> Response:
    name, folder = request.path_params["name"], run_folder(request)
    pages: RunPages = request.app.state.run_pages
    config, refusal = None, ""
    try:
        config = config_of(folder)
    except UserError as error:
        refusal = str(error)
    validation = config and config.validation
    width, height = config.data.first_size if config else (0, 0)
    return page(
        request,
        "tries/try.html",
        is_edited=True,
        name=name,
        loras=loras_of(folder),
        partners=partners(name, pages.cards())[:_LONGEST_LIST],
        data_sets=list(workspace_of(request).data_sets),
        files=FILE_WORDS,
        needs_files=validation and any(getattr(validation, setting) for setting in FILES.values()),
        validation=validation,
        least_scale=-2 if config and config.objective.slider else 0,
        size=validation and f"{validation.width or width}x{validation.height or height}",
        refusal=redacted(refusal),
        idle_minutes=IDLE_MINUTES,
        data=_shown(request),
    )


def _shown(request: Request) -> dict[str, Any]:
    folder = run_folder(request)
    return {**studio_of(request).state(folder), "results": results_of(folder)}


def _state(request: Request) -> Response:
    return answer(request, redacted(json.dumps(_shown(request))).encode(), "application/json")


def _file(request: Request) -> Response:
    found = result_file(run_folder(request), request.path_params["number"], request.path_params["file"])
    if found is None:
        raise HTTPException(404)
    return FileResponse(found)


def _act(request: Request, given: dict[str, Any]) -> dict[str, Any]:
    """Generate, or what else ``do`` says: {"do", and the fields of the form}.

    "command" only returns the command, "generate" has it done, and "cancel" ends that.
    """
    folder, do = run_folder(request), given.get("do")
    if do == "cancel":
        studio_of(request).cancel()
        return {}
    pages: RunPages = request.app.state.run_pages
    try:
        asked = request_of(given, request.path_params["name"], pages.cards(), workspace_of(request))
    except UserError as error:
        if do == "command":
            return {"wrong": redacted(str(error))}
        raise
    if do == "generate":
        studio_of(request).generate(folder, asked)
    return {"command": command(asked, config_of(folder))}
