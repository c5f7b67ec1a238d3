"""This file lets in nobody but the person who started the server, whatever other pages their browser shows.

- The request calls this machine by its name. The page of another site could have its name resolve to this
  machine (DNS rebinding), but then the browser's requests have that name.
- It has the cookie that the printed address gave, which browsers do not send with requests of other sites.
- What changes something comes from a page of this server and has a second secret in a header. Cookies know no
  ports: another server on this machine that the person visits receives ours, and could send it here.
"""

import hashlib
import hmac
import html
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from starlette.datastructures import Headers
from starlette.responses import HTMLResponse, PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = "127.0.0.1"
SECRET_HEADER = "x-diffsynth-secret"
_NAMES_OF_LOOPBACK = (LOOPBACK, "localhost")
_READS = ("GET", "HEAD")
_HEADERS = {
    b"cache-control": b"no-cache",  # A browser asks each time, and gets no content if nothing has changed.
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-resource-policy": b"same-origin",
    b"cross-origin-opener-policy": b"same-origin",
    b"content-security-policy": (
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
        b"media-src 'self'; connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
    ),
}
_SIGN_IN = (
    '<!doctype html><html lang="en" data-secret="{secret}" data-target="{target}"><meta charset="utf-8">'
    '<title>diffsynth_lite</title><link rel="icon" href="data:,"><script src="/static/sign_in.js"></script>'
    "<noscript>This page needs JavaScript.</noscript>"
)
_NOT_SIGNED_IN = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><title>Not signed in</title>'
    "<h1>Not signed in</h1><p>Open the address that the command printed in the terminal."
)


class Guard:
    """An application behind the rules above.

    Args:
        token: of the printed address. None lets in everybody on this machine, who may then only look.
        behind: address of a proxy through which the browser reaches this server, such as
            ``https://name.example``; None where it reaches it directly or through a tunnel.
    """

    def __init__(self, app: ASGIApp, *, token: str | None, behind: str | None = None) -> None:
        self._app = app
        self._token = token
        self._behind = behind
        # Neither leads back to the token, so a stolen cookie only reads, until the token is replaced.
        self._cookie, self._secret = (_derived(token or "", purpose) for purpose in ("read", "change"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message["headers"]}
                added = [pair for pair in _HEADERS.items() if pair[0] not in given]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = self._foreign(scope) or self._sign_in(scope) or self._stranger(scope) or self._app
        await answer(scope, receive, send_with_headers)

    def _foreign(self, scope: Scope) -> PlainTextResponse | None:
        """The refusal of a request that calls another machine, or was made by a page of another server."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        proxy_host = urlsplit(self._behind).netloc if self._behind else None
        if _host_name(host) not in _NAMES_OF_LOOPBACK and host != proxy_host:
            return PlainTextResponse("This server answers only to 127.0.0.1 and localhost.", 403)
        site = headers.get("sec-fetch-site", "same-origin")
        if scope["method"] in _READS:
            is_shown = headers.get("sec-fetch-mode", "navigate") == "navigate"
            is_ours = site in ("same-origin", "none") or is_shown
        else:
            known = (f"http://{host}", self._behind or ())
            is_ours = site == "same-origin" and headers.get("origin") in known
        return None if is_ours else PlainTextResponse("Only pages of this server may ask for this.", 403)

    def _sign_in(self, scope: Scope) -> HTMLResponse | None:
        """The page that gives a browser its cookie and its tab the second secret, then goes on.

        It is not a redirect: a browser does not send a strict cookie along a redirect that began elsewhere,
        such as in a mail or a notebook.
        """
        query = parse_qsl(scope["query_string"].decode("latin-1"))
        given = dict(query).get("token")
        if self._token is None or given is None or scope["method"] not in _READS:
            return None
        if not _equal(given, self._token):
            return None
        rest = urlencode([pair for pair in query if pair[0] != "token"])
        # One slash: two would make the path's first part the name of a server.
        target = "/" + quote(scope["path"]).lstrip("/") + (f"?{rest}" if rest else "")
        page = HTMLResponse(_SIGN_IN.format(secret=self._secret, target=html.escape(target)))
        page.headers["cache-control"] = "no-store"
        name, is_secure = _cookie_name(scope), self._behind is not None
        page.set_cookie(name, self._cookie, httponly=True, samesite="strict", secure=is_secure)
        return page

    def _stranger(self, scope: Scope) -> HTMLResponse | PlainTextResponse | None:
        """The refusal of a request without the cookie, or of a change without the second secret."""
        if self._token is None:
            is_read = scope["method"] in _READS
            return None if is_read else PlainTextResponse("This server only shows runs.", 405)
        headers = Headers(scope=scope)
        if not _equal(_cookie_of(headers, _cookie_name(scope)), self._cookie):
            return HTMLResponse(_NOT_SIGNED_IN, 403)
        if scope["method"] not in _READS and not _equal(headers.get(SECRET_HEADER, ""), self._secret):
            return PlainTextResponse(
                "This tab may only look: open the address that the command printed.", 403
            )
        return None


def _derived(token: str, purpose: str) -> str:
    return hmac.digest(token.encode(), purpose.encode(), hashlib.sha256).hex()


def _equal(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), wanted.encode())


def _cookie_name(scope: Scope) -> str:
    """With the port, as browsers send a cookie to all ports: two servers would overwrite each other's."""
    return f"diffsynth_lite_{(scope.get('server') or ('', 0))[1]}"


def _cookie_of(headers: Headers, name: str) -> str:
    try:
        cookies = SimpleCookie(headers.get("cookie", ""))
    except CookieError:
        return ""
    return cookies[name].value if name in cookies else ""


def _host_name(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None
