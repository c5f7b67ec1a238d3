"""A hub of one's own: the few answers that the real client of the hub needs, over HTTP on this machine."""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from huggingface_hub import close_session, constants, file_download

REPOSITORY = "owner/name"
LARGE = (".safetensors", ".png", ".mp4")
"""Ends of the names of files that it keeps separately, as the real one does."""


class Hub:
    """A repository with one branch, and what was asked of it.

    Attributes:
        files: of the branch, by path.
        fetched: paths of the files whose content was sent, whole or not.
        broken: paths of files that break off in the middle.
        gate: the error code with which nobody is let in to the files, with 401; None lets all in.
        requests: all of them.
        exists: whether the repository is there; it is made when a client asks for that.
        is_private: whether only its owner sees it.
        token: that a client must show to write.
        commits: paths of the files that each commit wrote.
        card_errors: what it finds wrong with a card's header.
        refuses_uploads: whether large files are not taken.
        uploaded: large files, which a commit may name, by their sha256.
        others: further repositories, by name, which are only read.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.fetched: list[str] = []
        self.broken: set[str] = set()
        self.gate: str | None = None
        self.requests: list[str] = []
        self.exists, self.is_private, self.token = True, False, "hf_token"
        self.commits: list[list[str]] = []
        self.card_errors: list[str] = []
        self.refuses_uploads = False
        self.uploaded: dict[str, bytes] = {}
        self.others: dict[str, Hub] = {}
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
        path = self.path.partition("?")[0].removeprefix("/api/models")
        name = "/".join(path.split("/")[1:3])
        hub = {REPOSITORY: self.server.hub, **self.server.hub.others}.get(name)
        if hub is None:
            self.answer_missing("RepoNotFound")
            return
        hub.requests.append(f"{self.command} {self.path}")
        if self.path == f"/api/models/{name}":
            self.answer_json({"id": name, "sha": hub.commit, "private": hub.is_private, "siblings": []})
            return
        path = path.removeprefix(f"/{name}/")
        kind, _, rest = path.partition("/")
        revision, _, name = rest.partition("/")
        files = hub.at(revision)
        if kind == "auth-check" and hub.gate is not None:
            self.answer_missing(hub.gate, status=401)
        elif kind == "auth-check":
            self.answer_json({})
        elif kind == "revision":
            self.answer(json.dumps({"id": REPOSITORY, "sha": hub.commit, "siblings": []}).encode())
        elif kind == "tree":
            entries = [
                {"type": "file", "path": path, "size": len(content), "oid": _identity(content)}
                for path, content in files.items()
            ]
            self.answer(json.dumps(entries).encode())
        elif name in files:
            self.answer(files[name], name, revision, hub=hub)
        else:
            self.answer_missing("EntryNotFound")

    def answer_missing(self, code: str, *, status: int = 404) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_PUT(self) -> None:
        """A large file, at the address that it was given."""
        hub, content = self.server.hub, self._body()
        hub.requests.append(f"PUT {self.path}")
        if hub.refuses_uploads:
            self.send_error(400)
            return
        hub.uploaded[hashlib.sha256(content).hexdigest()] = content
        self.answer(b"")

    def do_POST(self) -> None:
        """What an upload asks for, in the order in which it does."""
        hub, content = self.server.hub, self._body()
        hub.requests.append(f"POST {self.path}")
        steps = {
            "/api/repos/create": self._create,
            "/api/validate-yaml": self._validate,
            f"/api/models/{REPOSITORY}/preupload/main": self._tell_modes,
            f"/{REPOSITORY}.git/info/lfs/objects/batch": self._tell_places,
            f"/api/models/{REPOSITORY}/commit/main": self._commit,
        }
        if self.headers["Authorization"] != f"Bearer {hub.token}":
            self.answer_json({"error": "no rights"}, status=403)
        else:
            steps[self.path](content)

    def _create(self, content: bytes) -> None:
        hub, asked = self.server.hub, json.loads(content)
        status = 409 if hub.exists else 200
        if not hub.exists:
            hub.exists, hub.is_private = True, asked.get("visibility") == "private"
        self.answer_json({"url": f"{self._address}/{REPOSITORY}"}, status=status)

    def _validate(self, _content: bytes) -> None:
        errors = [{"message": error} for error in self.server.hub.card_errors]
        self.answer_json({"errors": errors, "warnings": []}, status=400 if errors else 200)

    def _tell_modes(self, content: bytes) -> None:
        hub, answers = self.server.hub, []
        for file in json.loads(content)["files"]:
            mode = "lfs" if file["path"].endswith(LARGE) else "regular"
            answers.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False})
            if file["path"] in hub.files:
                answers[-1]["oid"] = _identity_in_git(hub.files[file["path"]], mode)
        self.answer_json({"files": answers})

    def _tell_places(self, content: bytes) -> None:
        place = f"{self._address}/upload/"
        objects = [
            {**one, "actions": {"upload": {"href": place + one["oid"]}}}
            for one in json.loads(content)["objects"]
        ]
        self.answer_json({"transfer": "basic", "objects": objects})

    def _commit(self, content: bytes) -> None:
        hub, written = self.server.hub, {}
        for line in map(json.loads, content.splitlines()):
            kind, value = line["key"], line["value"]
            if kind == "file":
                written[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                written[value["path"]] = hub.uploaded[value["oid"]]
        hub.files |= written
        hub.commits.append(sorted(written))
        self.answer_json(
            {"commitUrl": f"{self._address}/{REPOSITORY}/commit/{hub.commit}", "commitOid": hub.commit}
        )

    @property
    def _address(self) -> str:
        return f"http://{self.headers['Host']}"

    def _body(self) -> bytes:
        if "Content-Length" in self.headers:
            return self.rfile.read(int(self.headers["Content-Length"]))
        parts = []
        while size := int(self.rfile.readline(), 16):  # chunked
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def answer_json(self, value: dict[str, Any], *, status: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def answer(
        self, content: bytes, name: str | None = None, revision: str = "", hub: Hub | None = None
    ) -> None:
        hub = hub or self.server.hub
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{_identity(content)}"')
        self.send_header("X-Repo-Commit", revision)
        self.end_headers()
        if self.command == "HEAD":
            return
        if name:
            hub.fetched.append(name)
        if name in hub.broken:
            content, self.close_connection = content[: len(content) // 2], True
        self.wfile.write(content)


def _identity(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _identity_in_git(content: bytes, mode: str) -> str:
    if mode == "lfs":
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


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
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(file_download.time, "sleep", lambda _: None)  # between its attempts
        close_session()
        yield
        server.shutdown()
    close_session()
