"""This file asks a server of OpenAI's chat protocol, such as LM Studio, Ollama, vLLM or one in the cloud.

A connection has 10 s and an answer 300 s. What may pass (429, 500, 502, 503, 504, a lost connection, a time
limit) is tried 4 times, after 1, 4 and 16 s, or after what the server asks for, up to 60 s.
"""

import contextvars
import ipaddress
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

from diffsynth_lite.captioning.captioner import Answer, Question
from diffsynth_lite.captioning.cleaning import shortened
from diffsynth_lite.errors import UserError, join_names
from diffsynth_lite.files import parse_json
from diffsynth_lite.media import jpeg_url
from diffsynth_lite.redaction import Redactor

logger = logging.getLogger(__name__)

_CONNECT_S = 10.0
_ANSWER_S = 300.0
_PAUSES_S = (1.0, 4.0, 16.0)
_LONGEST_PAUSE_S = 60.0
_MOST_BYTES = 1 << 20
_PASSING = (408, 429, 500, 502, 503, 504, 529)
_OF_THE_ITEM = (400, 413, 415, 422)
_MOST_UNANSWERED = 3  # questions in a row
_THINKING_TOKENS = 4096
_LONGEST_REASON = 200  # characters
_NUMBER = re.compile(r"^\[Errno -?\d+\] ")


@dataclass(frozen=True, slots=True)
class _Reply:
    status: int
    body: bytes
    retry_after_s: float


class _Unanswered(Exception):
    """An item that gets no answer, though others may."""


class ChatServer:
    """Asks a server; a ``Captioner``. The same questions get the same answers if the server keeps to that.

    Where the server refuses ``temperature`` or ``seed``, they are left out from then on. A model that thinks
    until the limit of tokens gets 4096 more.

    Args:
        endpoint: as :func:`api_address` takes it.
        model: its name on the server; None takes the only one that the server has.
        key: is sent as a bearer token; empty where the server needs none.
        key_variable: the environment variable that the key is from, for messages.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        model: str | None = None,
        key: str = "",
        key_variable: str = "OPENAI_API_KEY",
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.batch_size = 4  # requests at once
        self.address = api_address(endpoint)
        self._key_variable = key_variable
        self._sleep, self._clock = sleep, clock
        self._redactor = Redactor({"KEY": key})
        self._left_out: set[str] = set()
        self._extra_tokens = 0
        self._num_unanswered = 0
        self._logged: dict[str, int] = {}  # by the first of the threads with that to log
        if not key.isascii() or not key.isprintable():
            raise UserError(f"{key_variable}: has characters that no key has, such as a line break")
        is_here = is_this_machine(endpoint)
        if not is_here and self.address.startswith("http:"):
            logger.warning("%s: images and the key are sent there without encryption", self.address)
        self._client = httpx2.Client(
            headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {}),
            timeout=httpx2.Timeout(_ANSWER_S, connect=_CONNECT_S),
            trust_env=not is_here,  # a proxy does not reach this machine
        )
        try:
            self._model = model or self._only_model()
        except UserError:
            self._client.close()
            raise
        self.name = f"{self._model} at {httpx2.URL(self.address).netloc.decode()}"

    def __enter__(self) -> "ChatServer":
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    def answer(self, questions: Sequence[Question], *, max_tokens: int) -> list[Answer]:
        """See :class:`Captioner`."""
        found: dict[int, Answer] = {}
        self._logged = {}

        def ask(place: int, question: Question) -> None:
            try:
                found[place] = self._ask(question, max_tokens)
            except _Unanswered as error:
                found[place] = Answer(problem=str(error))
            except UserError as error:
                found[place] = Answer(problem=str(error), is_last=True)
            except RuntimeError:
                if not self._client.is_closed:
                    raise
                found[place] = Answer(problem="the command ended before the answer came")

        # Daemons: at Ctrl+C nothing waits for a slow server. Each has the redactor that is in force here.
        threads = [
            threading.Thread(target=contextvars.copy_context().run, args=(ask, *each), daemon=True)
            for each in enumerate(questions)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [found[place] for place in range(len(questions))]

    def _ask(self, question: Question, max_tokens: int) -> Answer:
        images = [{"type": "image_url", "image_url": {"url": jpeg_url(one)}} for one in question.images]
        content = [*images, {"type": "text", "text": question.instruction}]
        messages = [{"role": "user", "content": content}]
        while True:
            extra, left_out = self._extra_tokens, set(self._left_out)
            fields = {"temperature": 0, "seed": 0, "max_tokens": max_tokens + extra}
            sent = {name: value for name, value in fields.items() if name not in left_out}
            if "max_tokens" in left_out:  # as newer models of OpenAI do
                sent["max_completion_tokens"] = max_tokens + extra
            reply = self._reply("chat/completions", {"model": self._model, "messages": messages, **sent})
            if reply.status == 400 and (name := _unsupported(self._reason(reply), left_out)):
                self._left_out.add(name)
                continue
            self._require_ok(reply)
            answer = self._parsed(reply.body)
            if answer is None and not extra:
                self._extra_tokens = _THINKING_TOKENS
                continue
            return answer or Answer(problem="the model thought until the limit of tokens")

    def _require_ok(self, reply: _Reply) -> None:
        if reply.status == 200:
            return
        reason = self._reason(reply)
        if reply.status in _OF_THE_ITEM:
            raise _Unanswered(f"the server refused it: {reason}")
        remedy = "check --endpoint, which mostly ends with /v1"
        if reply.status in (401, 403):
            remedy = f"set {self._key_variable} to a key of this server, or name another with --key-variable"
        elif reply.status == 404:
            remedy += ", and --model"
        raise UserError(f"{self.address}: {reason}; {remedy}")

    def _only_model(self) -> str:
        try:
            reply = self._reply("models")
            self._require_ok(reply)
            names = [str(model["id"]) for model in parse_json(reply.body)["data"]]
        except UserError:
            raise
        except (_Unanswered, ValueError, TypeError, LookupError):
            names = []
        if not names:
            raise UserError(f"{self.address}: does not list its models; name one with --model")
        # LM Studio lists one of these with any other model.
        describing = [name for name in names if "embed" not in name.lower()]
        if len(describing) != 1:
            listed = self._line(join_names(sorted(describing or names)), 2000)
            raise UserError(f"--model: name one that reads images; {self.address} has: {listed}")
        return describing[0]

    def _reply(self, path: str, body: Any = None) -> _Reply:
        """The reply, whatever its status is, unless that may pass."""
        for pause_s in (*_PAUSES_S, None):
            is_gone, asked_s = False, 0.0
            try:
                reply = self._one_reply(path, body)
                if reply.status not in _PASSING:
                    self._num_unanswered = 0
                    return reply
                reason, asked_s = self._reason(reply), reply.retry_after_s
                is_gone = reply.status == 429
            except httpx2.TransportError as error:
                detail = _NUMBER.sub("", str(error)).strip()
                what = _WHAT_FAILED.get(type(error), "the connection was lost")
                reason = self._line(f"{what} ({detail})" if detail else what)
                is_gone = isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.ProxyError)
            if pause_s is not None:
                wait_s = min(max(pause_s, asked_s), _LONGEST_PAUSE_S)
                line = f"{self.address}: {reason}; trying again in {wait_s:.0f} s"
                if self._logged.setdefault(line, threading.get_ident()) == threading.get_ident():
                    logger.warning("%s", line)
                self._sleep(wait_s)
        self._num_unanswered += 1
        if is_gone or self._num_unanswered >= _MOST_UNANSWERED:
            raise UserError(f"{self.address}: {reason}, {len(_PAUSES_S) + 1} times; the same command goes on")
        raise _Unanswered(f"{reason}, {len(_PAUSES_S) + 1} times")

    def _one_reply(self, path: str, body: Any) -> _Reply:
        started = self._clock()
        method = "GET" if body is None else "POST"
        with self._client.stream(method, f"{self.address}/{path}", json=body) as response:
            read = b""
            for chunk in response.iter_raw():
                read += chunk
                if len(read) > _MOST_BYTES:
                    raise _Unanswered("the answer is longer than 1 MiB")
                # The client's own limit is one of each piece.
                if self._clock() - started > _ANSWER_S:
                    raise httpx2.ReadTimeout("")
        after = response.headers.get("Retry-After", "")
        return _Reply(response.status_code, read, float(after) if after.isdecimal() else 0.0)

    def _parsed(self, body: bytes) -> Answer | None:
        """The answer; None where the model thought until the limit of tokens."""
        try:
            values = parse_json(body)
            choice = values["choices"][0]
            message, ending = choice["message"], choice.get("finish_reason")
            text = message.get("content") or ""
            is_empty, is_unfinished = not text.strip(), ending == "length"
            refusal = message.get("refusal")
            thought = message.get("reasoning_content") or message.get("reasoning")
            num_tokens = (values.get("usage") or {}).get("completion_tokens")
        except (ValueError, TypeError, LookupError, AttributeError):
            raise _Unanswered(f"the server's answer is not one of a chat: {self._excerpt(body)}") from None
        if ending == "content_filter":
            raise _Unanswered("the server's content filter withheld the answer")
        if refusal:
            raise _Unanswered(f"refused: {self._line(str(refusal))}")
        if is_empty and thought and is_unfinished:
            return None
        if is_empty:
            raise _Unanswered("the answer is empty")
        num_tokens = num_tokens if type(num_tokens) is int else None
        return Answer(text=self._redactor.text(text), num_tokens=num_tokens, is_unfinished=is_unfinished)

    def _reason(self, reply: _Reply) -> str:
        return f"{reply.status} {self._excerpt(reply.body)}"

    def _excerpt(self, body: bytes) -> str:
        """The message of an error, or the beginning of what came instead."""
        text = body[:_MOST_BYTES].decode(errors="replace")
        try:
            values = parse_json(text)
            error = values.get("error") or values.get("detail") or values.get("message")
            text = str(error.get("message") if isinstance(error, dict) else error or text)
        except (ValueError, AttributeError):
            pass  # such as HTML
        return self._line(text) or "(nothing)"

    def _line(self, text: str, most: int = _LONGEST_REASON) -> str:
        """One printable line, without the key."""
        text = self._redactor.text(text[: 4 * most])
        return shortened("".join(one if one.isprintable() else " " for one in text), most)


_WHAT_FAILED: dict[type[Exception], str] = {
    httpx2.ConnectError: "the server cannot be reached",
    httpx2.ConnectTimeout: "the server cannot be reached within 10 s",
    httpx2.ReadTimeout: "no answer within 300 s",
    httpx2.ProxyError: "the proxy cannot be reached",
}


def api_address(endpoint: str) -> str:
    """The address that the protocol's paths follow, such as ``http://localhost:1234/v1``.

    Args:
        endpoint: with or without ``/v1`` or ``/chat/completions``.

    Raises:
        UserError: it is not the address of a server.
    """
    given, example = endpoint.strip(), "as in http://localhost:1234/v1"
    try:
        url = httpx2.URL(given)
    except (httpx2.InvalidURL, ValueError) as error:
        raise UserError(f"--endpoint: is not an address ({error}); give one {example}") from None
    if url.userinfo or url.query or url.fragment:
        raise UserError(
            "--endpoint: leave out the user, the password, and what follows ? or #; the key comes from an "
            "environment variable"
        )
    is_host = bool(url.host) and "%" not in url.host and (url.port or 0) < 65_536
    if url.scheme not in ("http", "https") or not is_host:
        raise UserError(f"--endpoint {given}: must be http:// or https:// and a host, {example}")
    path = url.path.rstrip("/").removesuffix("/chat/completions")
    return str(url.copy_with(path=path or "/v1"))


def is_this_machine(endpoint: str) -> bool:
    """Whether a server is on this machine, so that images do not leave it.

    Raises:
        UserError: it is not the address of a server.
    """
    host = httpx2.URL(api_address(endpoint)).host.lower().rstrip(".")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or address.is_unspecified


def _unsupported(reason: str, left_out: set[str]) -> str:
    """The field that a server does not take, of those that can be left out; empty where it is none."""
    if not any(word in reason.lower() for word in ("support", "unrecognized", "unknown", "not permitted")):
        return ""
    fields = ("temperature", "seed", "max_tokens")
    return next((name for name in fields if name in reason and name not in left_out), "")
