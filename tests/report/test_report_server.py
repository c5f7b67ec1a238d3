"""Runs shown live: what is answered and what is not, and that an open page takes over what is new."""

import http.client
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import uvicorn
from browser import Browser
from run_folders import ATTACK, full_folder
from safetensors.numpy import save_file

from diffsynth_lite.redaction import Redactor, in_force
from diffsynth_lite.report.run_report import RunReport, read_run
from diffsynth_lite.report.server import RunPages
from diffsynth_lite.run_folder.folder import RunFolder, find_runs
from diffsynth_lite.ui.guard import LOOPBACK
from diffsynth_lite.ui.server import build_report, listen, server_of

PREVIEW_IMAGE = "previews/step-00000000-prompt-00-aa0.png"
SECRET = "swordfish-4711"


@dataclass(frozen=True)
class Server:
    """A server on a port of this machine."""

    server: uvicorn.Server
    port: int

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.port}/"

    def stop(self) -> None:
        self.server.should_exit = True


@contextmanager
def served(*places: Path) -> Iterator[Server]:
    guard = build_report(RunPages(partial(find_runs, places), clock=lambda: 0.0))
    with listen(0) as bound:
        server = Server(server_of(guard), bound.getsockname()[1])
        context = copy_context()  # with the secrets that are masked
        thread = threading.Thread(target=context.run, args=(server.server.run, [bound]))
        thread.start()
        try:
            yield server
        finally:
            server.stop()
            thread.join()


def ask(
    server: Server, path: str, *, method: str = "GET", **headers: str
) -> tuple[http.client.HTTPResponse, bytes]:
    """An answer and its content; the path goes out as it is."""
    connection = http.client.HTTPConnection(LOOPBACK, server.port, timeout=60)
    try:
        connection.putrequest(method, path, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs, one with a secret, the other with a hard name, and with something else."""
    folder = tmp_path_factory.mktemp("runs")
    full_folder(folder / "first", text=SECRET)
    full_folder(folder / "a b&%2e#", text=ATTACK)
    (folder / "data").mkdir()
    (folder / "secret.txt").write_text("outside")
    (folder / "first" / "previews" / "step-00000300-prompt-00-aa0.png").symlink_to(folder / "secret.txt")
    return folder


@pytest.fixture(scope="module")
def server(runs: Path) -> Iterator[Server]:
    with in_force(Redactor({"MY_PASSWORD": SECRET})), served(runs) as server:
        yield server


def test_the_runs_their_pages_and_their_previews_are_shown(server: Server, runs: Path) -> None:
    answer, page = ask(server, "/")
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert b"2 runs side by side" in page
    name = "/runs/a%20b%26%252e%23/"
    assert f'href="{name}"'.encode() in page
    for run in ("/runs/first/", name):
        assert ask(server, run)[0].status == 200
    image = f"{name}{PREVIEW_IMAGE}"
    assert f'src="{image}"'.encode() in ask(server, name)[1]
    assert ask(server, image)[1] == (runs / "first" / PREVIEW_IMAGE).read_bytes()


def test_secrets_are_masked_in_what_is_served(server: Server) -> None:
    page = ask(server, "/runs/first/")[1].decode()
    assert SECRET not in page
    assert page.count("REDACTED") > 5


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/runs/first/status.json",
            "/runs/first/config.yaml",
            "/runs/first/checkpoints/",
            "/runs/",
            "/runs",
        ),
        *("/runs/first", "/secret.txt", "/runs/secret.txt/", "/runs/data/", "/runs//", "*", "/favicon.ico"),
        *("/runs/../secret.txt", "/../secret.txt", "/runs/first/../../secret.txt", "/runs/%2e%2e/secret.txt"),
        *("/runs/first%2f..%2fsecret.txt/", "/runs/first/previews/../status.json", "/runs/first//etc/passwd"),
        *("/runs/first/previews/", "/runs/first/previews/%2e%2e/status.json", "/runs/first\\..\\secret.txt"),
        *(
            "/runs/first/./" + PREVIEW_IMAGE,
            "/runs/first/" + PREVIEW_IMAGE + "%00",
            "/runs/first/" + PREVIEW_IMAGE + "/",
        ),
        "/runs/first/previews/step-00000300-prompt-00-aa0.png",
    ],
)
def test_nothing_else_is_answered(server: Server, path: str) -> None:
    answer, content = ask(server, path)
    assert answer.status == 404
    assert b"outside" not in content


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8712", "127.0.0.1.evil.example", "", "[", "10.0.0.7"]
)
def test_a_page_that_calls_this_machine_by_another_name_is_refused(server: Server, host: str) -> None:
    answer, content = ask(server, "/", Host=host)
    assert answer.status == 403
    assert b"side by side" not in content


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9000", "127.0.0.1:1"])
def test_a_tunnel_may_have_another_port(server: Server, host: str) -> None:
    assert ask(server, "/", Host=host)[0].status == 200


def test_one_can_only_look(server: Server) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        headers = {"Origin": server.address.removesuffix("/")}
        assert ask(server, "/", method=method, **headers)[0].status == 405


def test_what_has_not_changed_is_not_sent_again(tmp_path: Path) -> None:
    run = full_folder(tmp_path / "mine")
    pages = RunPages(partial(find_runs, [tmp_path]), clock=lambda: 0.0)
    before = pages.answer("/")
    assert before is pages.answer("/")
    with served(tmp_path) as server:
        tag = ask(server, "/")[0].headers["ETag"]
        answer, nothing = ask(server, "/", If_None_Match=tag)
        assert (answer.status, nothing) == (304, b"")
    (run / "report.html").write_text("our own page")
    assert before is pages.answer("/")
    RunFolder(run).write_status("finished", exit_code=0, step=300, message="finished")
    assert b"Finished" in pages.answer("/").content
    shutil.rmtree(run)
    assert b"No run yet" in pages.answer("/").content
    assert pages.answer("/runs/mine/") is None


def test_a_list_shows_the_little_of_each_run_however_long_it_is(tmp_path: Path) -> None:
    run = full_folder(tmp_path / "mine", text=ATTACK)
    settings = (
        "model:\n  path: 'Qwen/Qwen-Image'\n  quantize: int8\nlora:\n  rank: 16\ndata:\n  path: /all/mug\n"
    )
    (run / "resolved.yaml").write_text(settings + "train:\n  steps: 9000\nvalidation:\n  path: no\n")
    (run / "lora_best").mkdir()
    weights = {"a": np.zeros(1)}
    save_file(weights, run / "lora_best" / "a.safetensors", {"diffsynth_lite.step": "100"})
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(f'{{"step": {step}, "loss": {10_000 - step}}}\n' for step in range(300, 9_001))
    RunFolder(run).write_status("running", exit_code=None, step=8_990, message="training")
    pages = RunPages(partial(find_runs, [tmp_path]))
    card = pages.cards()["mine"]
    assert (card.model, card.data, card.details, card.best_step) == (
        *("Qwen-Image", "mug", ["rank 16", "int8"]),
        100,
    )
    assert (card.state.name, card.state.step, card.state.total_steps) == ("running", 9_000, 9_000)
    assert card.preview == "previews/step-00000200-prompt-00-aa0.png"
    assert pages.file("mine", card.preview) is not None
    assert len(card.course) == 40
    assert card.course[5:] == sorted(card.course[5:], reverse=True)
    assert 1_000 < card.loss < 1_600
    assert pages.cards()["mine"] is card


def test_of_many_runs_only_those_looked_at_last_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def note_and_read(folder: Path, *, base: str) -> RunReport:
        read.append(folder.name)
        return read_run(folder, base=base)

    monkeypatch.setattr("diffsynth_lite.report.server.read_any_run", note_and_read)
    monkeypatch.setattr("diffsynth_lite.report.server._KEPT_RUNS", 2)
    names = ("a", "b", "a", "c", "a", "b")
    for name in sorted(set(names)):
        RunFolder(tmp_path / name).path.mkdir()
        RunFolder(tmp_path / name).write_status("finished", exit_code=0, step=1, message="finished")
    pages = RunPages(partial(find_runs, [tmp_path]))
    assert all(pages.page(name) for name in names)
    assert read == ["a", "b", "c", "b"]


def test_a_run_that_takes_long_to_read_is_read_for_a_tenth_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, now = full_folder(tmp_path / "mine"), [0.0]

    def read_slowly(folder: Path, *, base: str) -> RunReport:
        now[0] += 3.0
        return read_run(folder, base=base)

    monkeypatch.setattr("diffsynth_lite.report.server.read_any_run", read_slowly)
    pages = RunPages(partial(find_runs, [tmp_path]), clock=lambda: now[0])
    assert b"Failed" in pages.answer("/").content
    RunFolder(run).write_status("finished", exit_code=0, step=300, message="finished")
    now[0] += 29.0
    assert b"Failed" in pages.answer("/").content
    now[0] += 2.0
    assert b"Finished" in pages.answer("/").content


def test_an_open_page_takes_over_what_is_new_and_keeps_what_was_chosen(
    tmp_path: Path, browser: Browser
) -> None:
    place = tmp_path / "runs"
    place.mkdir()
    with served(place) as server, browser.page(server.address) as page:
        # As when the reader comes back to the page; it asks every two seconds by itself.
        come_back = "document.dispatchEvent(new Event('visibilitychange'))"
        assert "No run yet" in page.text()
        run = full_folder(tmp_path / "first").rename(place / "first")
        page.click("#theme")
        page.evaluate(come_back)
        page.wait_for("document.querySelector('.viewer label')")
        assert page.evaluate("[...document.querySelector('main').children].map(part => part.className)") == [
            *("index", "", "previews", "scores", "charts", "items", "hard", "noise", "layers", "memory"),
            *("settings", "starts", "skipped", ""),
        ]
        page.click("#theme")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        page.click(".prompt a[data-step='100']")
        page.evaluate("document.querySelector('.starts details').open = true")
        page.evaluate("scrollTo(0, 300)")
        page.evaluate("window.viewer = document.querySelector('.viewer')")
        RunFolder(run).write_status("interrupted", exit_code=75, step=200, message="asked to stop")
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 250, "time": 500.0, "validation_loss": 0.125}) + "\n")
        page.evaluate(come_back)
        page.wait_for("document.body.innerText.includes('0.125 at step 250')")
        assert "asked to stop" in page.text("header")
        assert page.evaluate("scrollY") == 300
        assert page.evaluate("window.viewer.isConnected")
        assert page.evaluate("document.querySelector('.starts details').open")
        assert page.text(".viewer .label-after") == "step 100"
        assert page.evaluate("document.querySelectorAll('.plot canvas').length") == 12
        full_folder(tmp_path / "second", text="a square").rename(place / "second")
        page.wait_for("document.querySelector('.side-by-side')")
        assert page.evaluate("document.title") == "first, second"
        page.click("[href='/runs/first/']")
        page.wait_for("document.querySelector('td.bar-cell')?.style.getPropertyValue('--share') === '100.0%'")
        page.evaluate("document.querySelector('meta[name=generator]').content = 'another version'")
        RunFolder(place / "first").write_status("finished", exit_code=0, step=300, message="finished")
        page.evaluate(come_back)
        page.wait_for(
            "!document.querySelector('[content^=another]') && document.querySelector('.share[style]')"
        )
        assert [each for each in page.complaints if "media" not in each.lower()] == []
        assert all(each.startswith(server.address) for each in page.requests)
        server.stop()
        page.evaluate(come_back)
        page.wait_for("!document.getElementById('lost').hidden")
