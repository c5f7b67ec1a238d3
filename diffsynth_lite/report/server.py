"""This file shows runs live in a browser on this machine: their pages, and the previews in these.

A path that a browser asks for opens nothing: it is compared with the names of the runs that there are, and of
the previews that their pages show.
"""

import hashlib
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote_to_bytes, urlsplit

from diffsynth_lite.errors import UserError
from diffsynth_lite.report.charts import NO_TABLE
from diffsynth_lite.report.page import render
from diffsynth_lite.report.run_report import RunReport, read_any_run
from diffsynth_lite.run_folder.folder import RunFolder, find_runs
from diffsynth_lite.run_folder.reading import read_run_file

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
_NAMES_OF_LOOPBACK = (LOOPBACK, "localhost")
_RUN_PATH = re.compile(r"/runs/([^/]+)/(.*)")
_TYPES = {".png": "image/png", ".mp4": "video/mp4"}
_HEADERS = {
    # A browser asks each time, and gets no content when nothing has changed.
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "frame-ancestors 'none'",
}
_WAITED_MULTIPLE = 10
"""Times as long as a run took to read, it is not read again: a trainer may need the processor."""
_IDLE_S = 30.0
"""A browser opens connections that it may never use."""


@dataclass(frozen=True)
class Answer:
    """The answer to a path.

    Attributes:
        kind: media type of the content.
    """

    content: bytes
    kind: str

    @property
    def tag(self) -> str:
        """Another one for other content."""
        return f'"{hashlib.blake2b(self.content, digest_size=16).hexdigest()}"'


@dataclass(frozen=True, kw_only=True)
class _Read:
    """A run as it was read.

    Attributes:
        state: of its folder, then.
        good_until: when it may be read again.
    """

    state: object
    report: RunReport
    good_until: float


class RunPages:
    """The pages of the runs in some places, made again where a run folder has changed.

    Args:
        places: run folders, and folders that hold them; runs that start there later are found.
        clock: seconds, from any beginning on.
    """

    def __init__(self, places: Sequence[Path], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._places = places
        self._clock = clock
        self._lock = threading.Lock()
        self._runs: dict[str, _Read] = {}
        self._pages: dict[str, tuple[list[RunReport], Answer]] = {}

    def answer(self, path: str) -> Answer | None:
        """The content at a path, as a browser writes it; None where there is none."""
        with self._lock:
            folders = find_runs(self._places)
            self._runs = {name: self._up_to_date(name, folder) for name, folder in folders.items()}
            if path == "/":
                return self._page(path, list(self._runs))
            match = _RUN_PATH.fullmatch(path)
            name, file = (os.fsdecode(unquote_to_bytes(match[1])), match[2]) if match else ("", "")
            if name not in self._runs:
                return None
            if file == "":
                return self._page(path, [name])
            previews = [each for prompt in self._runs[name].report.prompts for each in prompt.previews]
            shown = {file for preview in previews for file in (preview.image, preview.video)}
            return _file(folders[name] / file) if file in shown else None

    def _up_to_date(self, name: str, folder: Path) -> _Read:
        state, known, began_at = RunFolder(folder).changes(), self._runs.get(name), self._clock()
        if known is not None and (known.state == state or began_at < known.good_until):
            return known
        report = read_any_run(folder, base=f"/runs/{quote(os.fsencode(name), safe='')}/")
        # Its other files are not shown, so they are not listed either.
        report = replace(report, name=name, files=NO_TABLE)
        now = self._clock()
        return _Read(state=state, report=report, good_until=now + _WAITED_MULTIPLE * (now - began_at))

    def _page(self, path: str, names: Sequence[str]) -> Answer:
        runs = [self._runs[name].report for name in names]
        shown, answer = self._pages.get(path, ([], None))
        # By identity: comparing their content takes long.
        if answer is None or list(map(id, runs)) != list(map(id, shown)):
            answer = Answer(render(runs, is_served=True).encode(), "text/html; charset=utf-8")
            self._pages[path] = (runs, answer)
        return answer


class ReportServer(ThreadingHTTPServer):
    """Answers on the loopback address only, and to requests that use its name.

    A page of somebody else may have a name that comes to lead to this machine (DNS rebinding), and could then
    read what is here; its browser calls this server by that name, though.

    Args:
        port: 0 for any that is free.

    Raises:
        OSError: the port is taken.
    """

    daemon_threads = True

    def __init__(self, pages: RunPages, port: int) -> None:
        self.pages = pages
        # The secrets to mask are known here, and threads do not inherit them.
        self._context = copy_context()
        super().__init__((LOOPBACK, port), _Handler)

    @property
    def address(self) -> str:
        """What to open in a browser."""
        return f"http://{LOOPBACK}:{self.server_port}/"

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer with the context that the server was made in."""
        self._context.copy().run(super().process_request_thread, request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error; a browser that went away is none."""
        if not isinstance(sys.exception(), ConnectionError):
            logger.exception("A page could not be shown.")


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer
    server_version = "diffsynth_lite"
    sys_version = ""
    timeout = _IDLE_S

    def do_GET(self) -> None:
        if not self._is_called_by_name():
            self.send_error(HTTPStatus.FORBIDDEN, "This server answers only to 127.0.0.1 and localhost")
            return
        answer = self.server.pages.answer(self.path.partition("?")[0])
        if answer is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        is_known = self.headers.get("If-None-Match") == answer.tag
        self.send_response(HTTPStatus.NOT_MODIFIED if is_known else HTTPStatus.OK)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("ETag", answer.tag)
        self.send_header("Content-Type", answer.kind)
        self.send_header("Content-Length", str(len(answer.content)))
        self.end_headers()
        if not is_known:
            self.wfile.write(answer.content)

    def log_message(self, format: str, *arguments: Any) -> None:
        logger.debug(format, *arguments)

    def _is_called_by_name(self) -> bool:
        """Whether the browser was sent to this machine; the port is another one through a tunnel."""
        try:
            return urlsplit(f"//{self.headers.get('Host', '')}").hostname in _NAMES_OF_LOOPBACK
        except ValueError:
            return False


def _file(path: Path) -> Answer | None:
    try:
        return Answer(read_run_file(path), _TYPES[path.suffix])
    except (OSError, UserError):  # The run has removed it, or somebody has put something else there.
        return None
