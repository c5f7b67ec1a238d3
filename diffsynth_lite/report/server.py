"""This file serves the pages of runs, and the previews in these, to a browser on this machine.

A requested path is never opened: it is compared with the names of the known runs and of the previews on their
pages.
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
    # A browser asks each time, and gets no content if nothing has changed.
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "frame-ancestors 'none'",
}
_WAITED_MULTIPLE = 10
"""Pause before a run is read again, in times of the last reading's duration: a trainer may need the CPU."""
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
        """Entity tag, different for different content."""
        return f'"{hashlib.blake2b(self.content, digest_size=16).hexdigest()}"'


@dataclass(frozen=True, kw_only=True)
class _Read:
    """A run as it was read.

    Attributes:
        state: of its folder at that time.
        good_until: when it may be read again.
    """

    state: object
    report: RunReport
    good_until: float


class RunPages:
    """The pages of the runs in some places, made again where a run folder has changed.

    Args:
        places: run folders, and folders that hold them; runs that start there later are found, too.
        clock: returns seconds.
    """

    def __init__(self, places: Sequence[Path], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._places = places
        self._clock = clock
        self._lock = threading.Lock()
        self._runs: dict[str, _Read] = {}
        self._pages: dict[str, tuple[list[RunReport], Answer]] = {}

    def answer(self, path: str) -> Answer | None:
        """The content at the path of a request; None if there is none."""
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
    """Answers on the loopback address only, and only to requests with its name.

    Another web page could have its name resolve to this machine (DNS rebinding) and then read the pages here;
    but then the browser's requests have that name.

    Args:
        port: 0 for any free port.

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
        """URL of the server."""
        return f"http://{LOOPBACK}:{self.server_port}/"

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer in the context in which the server was made."""
        self._context.copy().run(super().process_request_thread, request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error, except that a browser closed its connection."""
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
        """Whether the request names this machine; the port may differ, because of a tunnel."""
        try:
            return urlsplit(f"//{self.headers.get('Host', '')}").hostname in _NAMES_OF_LOOPBACK
        except ValueError:
            return False


def _file(path: Path) -> Answer | None:
    try:
        return Answer(read_run_file(path), _TYPES[path.suffix])
    except (OSError, UserError):  # The run has removed it, or somebody has put something else there.
        return None
