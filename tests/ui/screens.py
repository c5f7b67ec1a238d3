"""The screen of a workspace: a client that is signed in to it, and a server in a process of its own."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from processes import Program
from starlette.testclient import TestClient

from diffsynth_lite.cli.continuation import continuation
from diffsynth_lite.ui.server import build
from diffsynth_lite.workspace import Workspace

ADDRESS = "http://127.0.0.1:8713"
INLINE = re.compile(r"<script(?! (src|type=.application/json))|<style|\son\w+=|javascript:|style=")
"""A script or a style within a page, which the policy forbids."""


@dataclass(frozen=True)
class Screen:
    """The screen of a workspace as a browser sees it that opened the printed address.

    Attributes:
        cookie: the header with which pages are read.
        secret: the header with which something is changed.
    """

    workspace: Workspace
    client: TestClient
    cookie: dict[str, str]
    secret: dict[str, str]

    def get(self, path: str, **headers: str) -> Any:
        """The answer to a read."""
        return self.client.get(path, headers=self.cookie | headers)

    def post(self, path: str, given: Any = None, **options: Any) -> Any:
        """The answer to a change with a JSON object, or with ``content``."""
        body = {"json": given if given is not None else {}} if "content" not in options else {}
        headers = self.cookie | self.secret | {"origin": ADDRESS} | options.pop("headers", {})
        return self.client.post(path, headers=headers, **body, **options)


def signed_in(workspace: Workspace, *, token: str = "the-token", behind: str | None = None) -> Screen:
    """The screen after the printed address was opened."""
    client = TestClient(
        build(
            workspace, token=token, continuation=partial(continuation, within=workspace.path), behind=behind
        ),
        base_url=ADDRESS,
        follow_redirects=False,
    )
    page = client.get(f"/?token={token}")
    client.cookies.clear()  # Each request states what it sends.
    secret = re.search(r'data-secret="(\w+)"', page.text)
    assert secret is not None
    cookie = {"cookie": page.headers["set-cookie"].partition(";")[0]}
    return Screen(workspace, client, cookie, {"x-diffsynth-secret": secret[1]})


@dataclass
class Started:
    """What a screen started: processes that only sleep, in place of commands.

    Attributes:
        words: of each command, its name first.
        outputs: the file of each, for what it prints.
    """

    words: list[list[str]] = field(default_factory=list)
    outputs: list[Path] = field(default_factory=list)
    children: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def spawn(self, command: list[str], *, log: IO[bytes], **_: object) -> "subprocess.Popen[bytes]":
        self.words.append(command[3:])
        self.outputs.append(Path(log.name))
        # Python would take a signal that comes while it starts for an error of its own.
        self.children.append(subprocess.Popen(["sleep", "600"], start_new_session=True))
        return self.children[-1]

    @property
    def arguments(self) -> str:
        """Those of the latest command."""
        return " ".join(self.words[-1][1:])

    def end(self, printed: str = "", errors: str = "") -> None:
        """End the latest process, with what it has printed."""
        self.outputs[-1].write_text(printed)
        if errors:
            self.outputs[-1].with_suffix(".log").write_text(errors)
        self.kill()

    def kill(self) -> None:
        for child in self.children:
            child.kill()
            child.wait()


@dataclass
class Server:
    """A server in a process of its own.

    Attributes:
        address: that it printed, with the token.
    """

    process: Any
    address: str

    @classmethod
    def of(cls, process: Any, printed: str) -> "Server":
        found = re.search(r"http://\S+", printed)
        assert found is not None
        return cls(process, found[0])

    @property
    def root(self) -> str:
        """The address without the token."""
        return self.address.partition("/?")[0]

    def kill(self) -> None:
        """End it as a power cut does."""
        self.process.kill()
        self.process.wait()


@contextmanager
def server_process(workspace: Path, *, port: int = 0) -> Iterator[Server]:
    """A server on a workspace, and what it starts, forked with the libraries that these import."""
    with TemporaryDirectory() as folder:
        script, arguments = Path(__file__).with_name("forking_ui.py"), [str(workspace), "--no-open"]
        program = Program(script, [*arguments, "--port", str(port)], Path(folder) / "printed")
        program.read_until("ends it.")
        server = Server.of(program, program.printed())
        try:
            yield server
        finally:
            server.kill()


@contextmanager
def server_command(workspace: Path) -> Iterator[Server]:
    """A server on a workspace as the command starts it, which starts commands as it does for a person."""
    command = [sys.executable, "-m", "diffsynth_lite.cli.main", "ui", str(workspace), "--no-open"]
    process = subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        server = Server.of(process, process.stdout.readline())
        try:
            yield server
        finally:
            server.kill()
