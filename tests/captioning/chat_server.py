"""A server of OpenAI's chat protocol on this machine, which answers as a test wants it to."""

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Behaviour = Callable[["Handler"], None]


def chat(
    text: str | None = "A cat.", *, finish: str | None = "stop", num_tokens: int = 3, **message: Any
) -> bytes:
    """The body of an answer."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text, **message},
        "finish_reason": finish,
    }
    return json.dumps({"choices": [choice], "usage": {"completion_tokens": num_tokens}}).encode()


def reply(body: bytes | str = b"", status: int = 200, **headers: str) -> Behaviour:
    """A complete reply."""

    def behave(handler: "Handler") -> None:
        content = body.encode() if isinstance(body, str) else body
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(content)

    return behave


def name_image(handler: "Handler") -> None:
    """Answers with words that differ with the image, and are the same for the same one."""
    seen = hashlib.sha256(json.dumps(handler.asked.body["messages"]).encode()).hexdigest()
    reply(chat(f"A house with the number {int(seen[:6], 16)}."))(handler)


def hang_up(handler: "Handler") -> None:
    """Closes the connection without a word."""
    handler.close_connection = True
    handler.connection.close()


@dataclass
class Received:
    """A request."""

    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class ChatServerDouble:
    """What the server answers next, then always, and what it was asked.

    Attributes:
        next: behaviours for the following requests, in their order.
        always: for those after them.
    """

    next: list[Behaviour] = field(default_factory=list)
    always: Behaviour = field(default_factory=lambda: reply(chat()))
    received: list[Received] = field(default_factory=list)
    port: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"


class Handler(BaseHTTPRequestHandler):
    """Answers by the double."""

    protocol_version = "HTTP/1.1"
    double: ChatServerDouble
    asked: Received

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.asked = Received(self.path, dict(self.headers), json.loads(body) if body else None)
        with self.double.lock:
            self.double.received.append(self.asked)
            behave = self.double.next.pop(0) if self.double.next else self.double.always
        try:
            behave(self)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the client has read enough

    do_GET = do_POST

    def log_message(self, *_: Any) -> None: ...


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None: ...  # of connections that a test closed


@contextmanager
def running() -> Iterator[ChatServerDouble]:
    """The server, on a free port, in a thread."""
    double = ChatServerDouble()
    server = _Server(("127.0.0.1", 0), type("OwnHandler", (Handler,), {"double": double}))
    double.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield double
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
