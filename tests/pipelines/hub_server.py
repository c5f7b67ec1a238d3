"""A hub of one's own: the few answers that the real client of the hub needs, over HTTP on this machine."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from huggingface_hub import close_session, constants, file_download

REPOSITORY = "owner/name"


class Hub:
    """A repository with one branch, and what was asked of it.

    Attributes:
        files: of the branch, by path.
        fetched: paths of the files whose content was sent, whole or not.
        broken: paths of files that break off in the middle.
        requests: all of them.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.fetched: list[str] = []
        self.broken: set[str] = set()
        self.requests: list[str] = []
        self._commits: dict[str, dict[str, bytes]] = {}

    @property
    def commit(self) -> str:
        """The commit that the branch is now."""
        names = sorted((name, hashlib.sha1(content).hexdigest()) for name, content in self.files.items())
        commit = hashlib.sha1(repr(names).encode()).hexdigest()
        self._commits[commit] = dict(self.files)
        return commit

    def at(self, revision: str) -> dict[str, bytes]:
        return self._commits.get(revision, self.files)


class _Server(ThreadingHTTPServer):
    def __init__(self, hub: Hub) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = hub


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub = self.server.hub
        hub.requests.append(f"{self.command} {self.path}")
        path = self.path.partition("?")[0].removeprefix("/api/models").removeprefix(f"/{REPOSITORY}/")
        kind, _, rest = path.partition("/")
        revision, _, name = rest.partition("/")
        files = hub.at(revision)
        if kind == "revision":
            self.answer(json.dumps({"id": REPOSITORY, "sha": hub.commit, "siblings": []}).encode())
        elif kind == "tree":
            entries = [
                {"type": "file", "path": path, "size": len(content), "oid": _identity(content)}
                for path, content in files.items()
            ]
            self.answer(json.dumps(entries).encode())
        elif name in files:
            self.answer(files[name], name, revision)
        else:
            self.send_error(404)

    def answer(self, content: bytes, name: str | None = None, revision: str = "") -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{_identity(content)}"')
        self.send_header("X-Repo-Commit", revision)
        self.end_headers()
        if self.command == "HEAD":
            return
        if name:
            self.server.hub.fetched.append(name)
        if name in self.server.hub.broken:
            content, self.close_connection = content[: len(content) // 2], True
        self.wfile.write(content)


def _identity(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def serving(hub: Hub, cache: Path) -> Iterator[None]:
    """Answer for a hub on this machine, and have the hub's client ask there.

    Args:
        cache: where the client keeps what it fetched.
    """
    with _Server(hub) as server, pytest.MonkeyPatch.context() as patch:
        Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        patch.setattr(constants, "ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(file_download.time, "sleep", lambda _: None)  # between its attempts
        close_session()
        yield
        server.shutdown()
    close_session()
