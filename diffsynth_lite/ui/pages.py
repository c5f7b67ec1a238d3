"""This file makes answers: pages from templates, files of the package, and JSON in both directions."""

import hashlib
import json
import time
from collections.abc import Callable
from functools import cache, lru_cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeAlias

from anyio import CapacityLimiter, to_thread
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from diffsynth_lite.doctor.machine import ask_driver
from diffsynth_lite.redaction import redacted
from diffsynth_lite.report.card import RunCard
from diffsynth_lite.report.page import FILTERS
from diffsynth_lite.report.server import Answer
from diffsynth_lite.workspace import Workspace

_STATIC_FOLDERS = (
    "ui/static",
    "ui/home",
    "ui/runs",
    "ui/data_sets",
    "ui/configs",
    "ui/tries",
    "report",
    "report/vendor",
)
_STATIC_KINDS = {".css": "text/css", ".js": "text/javascript"}
_MAX_JSON_BYTES = 32 << 20
_DRIVER_EVERY_S = 5.0
_GIB_IN_MIB = 1024

Work: TypeAlias = Callable[[Request, dict[str, Any]], dict[str, Any]]
"""Takes a request and the JSON object in it, and returns that of the answer."""


def change_route(path: str, work: Work, *, limiter: CapacityLimiter | None = None) -> Route:
    """The route of a change that is asked for in JSON.

    Args:
        work: done in a thread.
        limiter: of such threads.
    """

    async def change(request: Request) -> Response:
        given = await read_json(request)
        return JSONResponse(await to_thread.run_sync(work, request, given, limiter=limiter))

    return Route(path, change, methods=["POST"])


def workspace_of(request: Request) -> Workspace:
    """The workspace that the server shows."""
    workspace: Workspace = request.app.state.workspace
    return workspace


def run_folder(request: Request) -> Path:
    """Folder of the run that an address names.

    Raises:
        HTTPException: there is no such run (404).
    """
    card: RunCard | None = request.app.state.run_pages.card(request.path_params["name"])
    if card is None:
        raise HTTPException(404)
    return card.folder


def page(request: Request, template: str, *, is_edited: bool = False, **values: Any) -> Response:
    """A page of the screen.

    Args:
        template: its name with its folder, such as ``home/home.html``.
        is_edited: whether the person edits texts in it. These are shown as they are: the mask of a secret
            would be saved over their file. Other pages are masked.
    """
    text = environment().get_template(template).render(**values, **_shell(request))
    return answer(request, (text if is_edited else redacted(text)).encode(errors="replace"), "text/html")


def navigation(request: Request) -> Markup:
    """What surrounds the content of a page, for one that is not made by :func:`page`."""
    return Markup(redacted(environment().get_template("static/side.html").render(**_shell(request))))


def _shell(request: Request) -> dict[str, Any]:
    """The values of the navigation."""
    return {"workspace": workspace_of(request), "device": device(), "path": request.url.path}


def answer(request: Request, content: bytes, media_type: str) -> Response:
    """A content with its tag; without content where the browser has it already."""
    tag = f'"{digest(content)}"'
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"etag": tag})
    return Response(content, media_type=media_type, headers={"etag": tag})


def digest(content: bytes) -> str:
    """What changes with a content."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def report_answer(request: Request, found: Answer | None) -> Response:
    """An answer of the pages of runs; 404 for none."""
    if found is None:
        raise HTTPException(404)
    return answer(request, found.content, found.kind)


def static_file(request: Request) -> Response:
    """A script or a style sheet of the package."""
    file = _static_files().get(request.path_params["name"])
    if file is None:
        raise HTTPException(404)
    return answer(request, file.read_bytes(), _STATIC_KINDS[file.name[file.name.rindex(".") :]])


async def read_json(request: Request) -> dict[str, Any]:
    """The JSON object that a request holds.

    Raises:
        HTTPException: it holds something else (400), of another type (415), or too much (413).
    """
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        raise HTTPException(415, "This takes application/json.")
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > _MAX_JSON_BYTES:
            raise HTTPException(413, "This is too long.")
    try:
        given = json.loads(content)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise HTTPException(400, "This is not a JSON object.")
    return given


def refused(text: str) -> JSONResponse:
    """The answer to a change that was not made, with the reason for the person."""
    # Half a character, as JSON may hold it, cannot be sent.
    return JSONResponse({"error": redacted(text).encode(errors="replace").decode()}, 422)


def device() -> dict[str, Any] | None:
    """Name, memory in GiB and temperature of the first GPU; None without one whose driver answers."""
    lines = _driver_lines(int(time.monotonic() / _DRIVER_EVERY_S))
    values = [part.strip() for part in lines[0].split(",")] if lines else []
    if len(values) != 4 or not all(value.isdecimal() for value in values[1:3]):
        return None
    used, total = (int(value) / _GIB_IN_MIB for value in values[1:3])
    return {
        "name": values[0].removeprefix("NVIDIA ").removeprefix("GeForce "),
        "used": used,
        "total": total,
        "words": f"{used:.1f} of {total:.1f} GiB",
        "celsius": values[3],
    }


@cache
def environment() -> Environment:
    """The templates of the screen, and those of the report that it shares."""
    made = Environment(
        loader=ChoiceLoader(
            [PackageLoader("diffsynth_lite.ui", ""), PackageLoader("diffsynth_lite.report", "")]
        ),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= FILTERS
    return made


@cache
def _static_files() -> dict[str, Traversable]:
    """Scripts and style sheets by name: a name of a browser is looked up, no path is made of it."""
    folders = [files("diffsynth_lite").joinpath(folder) for folder in _STATIC_FOLDERS]
    return {
        file.name: file
        for folder in folders
        for file in folder.iterdir()
        if file.name.endswith(tuple(_STATIC_KINDS))
    }


@lru_cache(maxsize=1)
def _driver_lines(number: int) -> list[str]:
    """What the driver answers, asked again for another number."""
    return ask_driver("name,memory.used,memory.total,temperature.gpu")
