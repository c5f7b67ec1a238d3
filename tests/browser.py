"""A headless Chromium for tests of pages, driven over a pipe by its own protocol.

No package is needed: with ``--remote-debugging-pipe`` Chromium reads commands as json, each ended by a zero
byte, from file descriptor 3, and writes answers and events to 4
(https://chromedevtools.github.io/devtools-protocol).
"""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

LIMIT_S = 120.0
"""How long a test waits for the browser; only to end one that hangs."""

PHONE_PX = 390
DESKTOP_PX = 1280

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_ON_3_AND_4 = (
    "import os, sys; read, write = os.dup(int(sys.argv[1])), os.dup(int(sys.argv[2])); "
    "os.dup2(read, 3); os.dup2(write, 4); os.set_inheritable(3, True); os.set_inheritable(4, True); "
    "os.execv(sys.argv[3], sys.argv[3:])"
)
"""A program that runs another one with its pipes where Chromium looks for them."""
_OPERATED = (
    *("button", "checkbox", "combobox", "DisclosureTriangle", "link", "meter", "progressbar", "radio"),
    *("searchbox", "slider", "spinbutton", "textbox"),
)
"""Roles of controls; a page has to name each."""
_CHOOSE_OPTION = """function(text) {
  const option = !this.options ? { value: text } : [...this.options].find((each) => each.text === text);
  if (!option) throw new Error(`no option ${text}`);
  this.value = option.value;
  this.dispatchEvent(new Event("input", { bubbles: true }));
  this.dispatchEvent(new Event("change", { bubbles: true }));
}"""
"""Chooses an option of a select by its text, as a person does; one of suggestions is typed in."""
_NAVIGATED = "Inspected target navigated"
_GONE = "Could not find node"
"""What Chromium answers of a document that another one has replaced meanwhile."""
_TWO_FRAMES = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"


def _look_for(look: Callable[[], T], missing: str) -> T:
    """What is looked for, once it is there: less and less often, because each look takes the page's time."""
    end, pause_s = time.monotonic() + LIMIT_S, 0.02
    while not (found := look()):
        assert time.monotonic() < end, missing
        time.sleep(pause_s)
        pause_s = min(1.3 * pause_s, 0.3)
    return found


def chromium() -> str | None:
    """The program named by CHROMIUM, or the first that is installed."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)


@dataclass
class Page:
    """A page that is open in the browser, and what it asked for and complained about since.

    Attributes:
        width: of the window, in pixels.
        requests: URLs of what was asked for, the page itself first; data URLs are left out.
        complaints: errors and warnings on its console, uncaught exceptions, and requests that failed.
    """

    session: str
    browser: "Browser"
    width: int
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    _is_loaded: bool = False
    _file_input: int | None = None

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, which json can express; of a promise, what it becomes."""
        result = self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True
        )
        if "exceptionDetails" in result:
            raise AssertionError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until a JavaScript expression is true, on the page that is loaded meanwhile if one is."""
        _look_for(lambda: self._is_true(expression), f"{expression} is still not true")

    def _is_true(self, expression: str) -> bool:
        try:
            return bool(self.evaluate(f"Boolean({expression})"))
        except AssertionError as error:
            if _NAVIGATED not in str(error):
                raise
            return False

    def html(self) -> str:
        """The document as the page's scripts have made it."""
        return str(self.evaluate("document.documentElement.outerHTML"))

    def text(self, selector: str = "body") -> str:
        """What a reader sees of the first element that a selector names."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, selector: str) -> None:
        """Click on the first element that a selector names."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def press(self, role: str, name: str) -> None:
        """Click on the control that has a role and an accessible name."""
        self._do(role, name, "function() { this.scrollIntoView({ block: 'center' }); this.click(); }")

    def fill(self, role: str, name: str, text: str) -> None:
        """Replace the text of a field, as who selects it and types; choose an option by its text."""
        if role == "combobox":
            self._do(role, name, _CHOOSE_OPTION, text)
            return
        self._do(role, name, "function() { this.focus(); this.select(); }")
        self._call("Input.insertText", text=text)

    def value(self, role: str, name: str) -> Any:
        """What a field holds."""
        return self._do(role, name, "function() { return this.value; }")

    def key(self, key: str, *, ctrl: bool = False, shift: bool = False) -> None:
        """Press a key where the focus is."""
        modifiers = 2 * ctrl + 8 * shift
        for kind in ("rawKeyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key, modifiers=modifiers)

    def upload(self, role: str, name: str, files: Sequence[Path]) -> None:
        """Press a control, and choose files in the dialog that it opens."""
        self._call("Page.setInterceptFileChooserDialog", enabled=True)
        self.press(role, name)
        while self._file_input is None:
            self.browser.read()
        chosen = [str(file) for file in files]
        self._call("DOM.setFileInputFiles", files=chosen, backendNodeId=self._file_input)
        self._file_input = None

    def has(self, role: str, name: str) -> bool:
        """Whether there is a control with a role and an accessible name."""
        return bool(self._found(role, name))

    def await_control(self, role: str, name: str) -> int:
        """Wait until there is one, and return its node."""
        return _look_for(lambda: self._found(role, name), f"there is still no {role} {name!r}")[0]

    def _do(self, role: str, name: str, function: str, *arguments: str) -> Any:
        resolved = self._call("DOM.resolveNode", backendNodeId=self.await_control(role, name))["object"][
            "objectId"
        ]
        given = [{"value": argument} for argument in arguments]
        options = {"objectId": resolved, "functionDeclaration": function, "arguments": given}
        result = self._call("Runtime.callFunctionOn", **options, returnByValue=True, userGesture=True)
        assert "exceptionDetails" not in result, f"{role} {name}: {result['exceptionDetails']}"
        return result["result"].get("value")

    def _found(self, role: str, name: str) -> list[int]:
        document = self._call("DOM.getDocument", depth=0)["root"]["nodeId"]
        query = {"nodeId": document, "accessibleName": name, "role": role}
        try:
            nodes = self._call("Accessibility.queryAXTree", **query)["nodes"]
        except AssertionError as error:
            if _GONE not in str(error):
                raise
            return []
        return [node["backendDOMNodeId"] for node in nodes if not node["ignored"]]

    def nameless(self) -> list[str]:
        """The roles of what can be operated and has no name for those who do not see it."""
        nodes = self._call("Accessibility.getFullAXTree")["nodes"]
        roles = [
            (node["role"]["value"], node.get("name", {}).get("value"))
            for node in nodes
            if not node["ignored"]
        ]
        return [role for role, name in roles if role in _OPERATED and not name]

    def overflow_px(self) -> int:
        """How much wider than the window the page is, which makes a phone scroll sideways."""
        return int(self.evaluate("document.documentElement.scrollWidth")) - self.width

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Write a PNG of the window, or of the whole page below it, too."""
        answer = self._call("Page.captureScreenshot", captureBeyondViewport=whole, **self._clip(whole))
        path.write_bytes(base64.b64decode(answer["data"]))

    def note(self, method: str, event: dict[str, Any]) -> None:
        """Take in an event."""
        if method == "Page.loadEventFired":
            self._is_loaded = True
        elif method == "Page.fileChooserOpened":
            self._file_input = event["backendNodeId"]
        elif method == "Network.requestWillBeSent":
            if not event["request"]["url"].startswith("data:"):
                self.requests.append(event["request"]["url"])
        elif method == "Network.loadingFailed" and not event.get("canceled"):  # as by a click on a link
            self.complaints.append(f"request failed: {event['errorText']}")
        elif method == "Network.responseReceived" and event["response"]["status"] >= 400:
            self.complaints.append(f"{event['response']['url']}: {event['response']['status']}")
        elif method == "Runtime.exceptionThrown":
            details = event["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and event["type"] in ("error", "warning", "assert"):
            words = [str(each.get("value", each.get("description"))) for each in event["args"]]
            self.complaints.append(" ".join(words))
        elif method == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning"):
            self.complaints.append(event["entry"]["text"])

    def load(self, url: str, *, height: int, dark: bool) -> None:
        """Go to an address, and wait until its first image is painted."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        size = {"width": self.width, "height": height, "deviceScaleFactor": 1}
        self._call("Emulation.setDeviceMetricsOverride", **size, mobile=self.width <= PHONE_PX)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Emulation.setFocusEmulationEnabled", enabled=True)  # also behind another tab
        answer = self._call("Page.navigate", url=url)
        assert not answer.get("errorText"), f"{url}: {answer['errorText']}"
        while not self._is_loaded:
            self.browser.read()
        self.evaluate(_TWO_FRAMES)

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        return self.browser.call(method, session=self.session, **arguments)

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}


class Browser:
    """A Chromium that runs without a window, and reaches this machine only.

    Args:
        program: its path.
        profile: an empty folder.
    """

    def __init__(self, program: str, profile: Path) -> None:
        read_commands, self._write = os.pipe()
        self._read, write_answers = os.pipe()
        command = [
            program,
            "--headless=new",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
            # Nothing but the page is to ask for anything, and the page for nothing elsewhere.
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            *("--disable-background-networking", "--disable-component-update", "--no-first-run"),
            *("--disable-extensions", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
            # A page behind another tab is as awake as the one in front.
            *("--disable-background-timer-throttling", "--disable-renderer-backgrounding"),
            # Chromium's sandbox refuses root, as which containers run; the pages are ours.
            *(["--no-sandbox"] if os.geteuid() == 0 else []),
        ]
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", _ON_3_AND_4, str(read_commands), str(write_answers), *command],
            pass_fds=(read_commands, write_answers),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_commands)
        os.close(write_answers)
        self._unread = b""
        self._last_id = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._pages: dict[str, Page] = {}

    @contextlib.contextmanager
    def page(
        self, place: Path | str, *, width: int = DESKTOP_PX, height: int = 900, dark: bool = False
    ) -> Iterator[Page]:
        """Open a file or an address.

        Args:
            width: of the window, in pixels; up to ``PHONE_PX`` it is a phone's.
            dark: whether the reader prefers dark pages.
        """
        url = place.resolve().as_uri() if isinstance(place, Path) else place
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(session, self, width)
        try:
            page.load(url, height=height, dark=dark)
            yield page
        finally:
            self.call("Target.closeTarget", targetId=target)

    def call(self, method: str, *, session: str | None = None, **arguments: Any) -> dict[str, Any]:
        """Send a command and wait for its result."""
        self._last_id = number = self._last_id + 1
        message = {"id": number, "method": method, "params": arguments}
        text = json.dumps(message | ({"sessionId": session} if session else {}))
        os.write(self._write, text.encode() + b"\0")
        while number not in self._answers:
            self.read()
        answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return dict(answer["result"])

    def read(self) -> None:
        """Wait for what the browser says next, and take it in."""
        ready, _, _ = select.select([self._read], [], [], LIMIT_S)
        assert ready, f"Chromium has not answered for {LIMIT_S:.0f} s"
        data = os.read(self._read, 1 << 20)
        assert data, "Chromium has ended"
        *texts, self._unread = (self._unread + data).split(b"\0")
        for message in map(json.loads, texts):
            if "id" in message:
                self._answers[message["id"]] = message
            elif page := self._pages.get(message.get("sessionId")):
                page.note(message["method"], message["params"])

    def close(self) -> None:
        """End the browser."""
        with contextlib.suppress(AssertionError, OSError):
            self.call("Browser.close")
        for descriptor in (self._read, self._write):
            os.close(descriptor)
        try:
            self._process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser for all tests that open pages. Where there is none they are skipped; in CI they fail."""
    program = chromium()
    if program is None:
        missing = "no Chromium: install one, or name it in CHROMIUM"
        pytest.fail(missing) if os.environ.get("CI") else pytest.skip(missing)
    browser = Browser(program, tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()
