"""This file joins the screens to one application, and serves it."""

import socket
from collections.abc import Callable, Iterable
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from diffsynth_lite.errors import UserError
from diffsynth_lite.report.server import RunPages
from diffsynth_lite.run_folder.command import Continuation
from diffsynth_lite.ui.configs import routes as configs
from diffsynth_lite.ui.configs.live_plan import LivePlan
from diffsynth_lite.ui.data_sets import routes as data_sets
from diffsynth_lite.ui.guard import LOOPBACK, Guard
from diffsynth_lite.ui.home import routes as home
from diffsynth_lite.ui.home.disk import DiskUse
from diffsynth_lite.ui.jobs import Jobs
from diffsynth_lite.ui.pages import refused, report_answer, static_file
from diffsynth_lite.ui.queued import QueuedRuns
from diffsynth_lite.ui.runs import routes as runs
from diffsynth_lite.ui.tries import routes as tries
from diffsynth_lite.ui.tries.studio import Studio, device_holders
from diffsynth_lite.workspace import Workspace

MAX_PORT = 65535
_ALL_ADDRESSES = "0.0.0.0"


def build(
    workspace: Workspace,
    *,
    token: str,
    continuation: Callable[[Path], Continuation],
    behind: str | None = None,
) -> Guard:
    """The screen of a workspace, behind its guard.

    Args:
        continuation: how the run in a folder is continued; a ``UserError`` where it cannot be.
    """
    screens = (home, configs, data_sets, tries, runs)
    routes = [route for screen in screens for route in screen.routes()]
    application = Starlette(
        routes=[*routes, Route("/static/{name}", static_file)],
        exception_handlers={UserError: _reason, OSError: _reason},
    )
    application.state.workspace = workspace
    application.state.jobs = Jobs(workspace)
    application.state.disk = DiskUse(workspace)
    application.state.run_pages = RunPages(lambda: QueuedRuns(workspace).without_run() | workspace.runs)
    application.state.studio = Studio(workspace, lambda: device_holders(workspace))
    application.state.live_plan = LivePlan.of(workspace.path)
    application.state.continuation = continuation
    return Guard(application, token=token, behind=behind)


def _reason(request: Request, error: Exception) -> Response:
    """The answer where a file or folder of the person cannot be read or written."""
    if isinstance(error, OSError) and error.strerror:
        return refused(f"{error.filename or 'The disk'}: {error.strerror}")
    return refused(str(error))


def build_report(pages: RunPages) -> Guard:
    """The pages of runs, only to look at."""

    def show(request: Request) -> Response:
        # As it was sent: a name may hold a slash, or bytes that are not text.
        return report_answer(request, pages.answer(request.scope["raw_path"].decode("latin-1")))

    routes = [Route("/static/{name}", static_file), Route("/{path:path}", show)]
    return Guard(Starlette(routes=routes), token=None)


def listen(port: int, *, behind: str | None = None) -> socket.socket:
    """A socket on the loopback address; on all addresses where a proxy comes from another machine.

    Args:
        port: 0 for any that is free.

    Raises:
        UserError: the port is taken, or is none.
    """
    if not 0 <= port <= MAX_PORT:
        raise UserError(f"--port {port}: give one from 0, for any that is free, to {MAX_PORT}")
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((_ALL_ADDRESSES if behind else LOOPBACK, port))
        bound.listen()  # A browser that comes before the server is ready waits, and is not refused.
    except OSError as error:
        bound.close()
        raise UserError(f"--port {port}: {error.strerror}; give another, or 0 for any that is free") from None
    return bound


def serve(guard: Guard, sockets: Iterable[socket.socket]) -> None:
    """Answer until Ctrl+C."""
    server_of(guard).run(sockets=list(sockets))


def server_of(guard: Guard) -> uvicorn.Server:
    """The server that answers."""
    config = uvicorn.Config(
        guard,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="off",
        # Open polls of pages would hold up the end.
        timeout_graceful_shutdown=1,
    )
    return uvicorn.Server(config)
