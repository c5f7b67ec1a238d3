"""Home: runs by their state, data sets by their captions, and what an empty workspace offers."""

import io
import json
import os
import re
import zipfile
from pathlib import Path
from urllib.parse import quote

import pytest
from browser import PHONE_PX, Browser
from screens import INLINE, Screen, server_process
from waiting_runs import Waiting

from diffsynth_lite.queue.entry import Entry
from diffsynth_lite.queue.folder import Queue
from diffsynth_lite.run_folder.process import Process
from diffsynth_lite.ui.home import run_list
from diffsynth_lite.ui.queued import QueuedRuns

CONFIG = "model: {family: qwen_image, path: m}\ndata: {path: d}\noutput: {dir: runs/mine}\n"


def make_run(screen: Screen, name: str, **status: object) -> Path:
    """The folder of a run at a step, with a preview."""
    folder = screen.workspace.runs_folder / name
    (folder / "previews").mkdir(parents=True)
    (folder / "previews" / "step-00000020-prompt-00-a5f44a.png").touch()
    (folder / "resolved.yaml").write_text(
        "model:\n  path: models/mini\nlora:\n  rank: 8\ntrain:\n  steps: 100\n"
    )
    written = {"state": "finished", "exit_code": 0, "step": 100, "message": "", "found_at": {}} | status
    (folder / "status.json").write_text(json.dumps(written))
    return folder


def test_an_empty_workspace_says_how_to_begin(screen: Screen) -> None:
    text = screen.get("/").text
    assert "Teach a model something of yours" in text
    assert text.count("New data set") == 1
    assert str(screen.workspace.path) in text


def test_runs_are_shown_by_their_state_with_what_can_be_done_now(screen: Screen) -> None:
    make_run(screen, "done")
    make_run(screen, "gone", state="running", exit_code=None, step=40)
    live = make_run(screen, "live", state="running", exit_code=None, step=40, seconds_left=600)
    (screen.workspace.runs_folder / "gone" / ".lock").write_text("process 4194400 on " + os.uname().nodename)
    (live / ".lock").write_text(f"{Process.current().as_text()}\n")
    text = screen.get("/").text
    for shown in (
        "10 min 0 s left",
        'aria-label="Steps of live"',
        'data-post="/runs/live/stop" aria-label="Stop live"',
        f"touch {live}/STOP",
        'data-post="/runs/gone/continue" aria-label="Continue gone"',
        "40 of 100 steps",
        "mini, rank 8",
        'src="/runs/done/previews/step-00000020-prompt-00-a5f44a.png"',
        'aria-label="All 2"',
        'aria-label="Can continue 1"',
    ):
        assert shown in text, shown
    assert "Stop gone" not in text
    assert "Continue done" not in text


def test_data_sets_are_counted_with_those_that_lack_a_caption(screen: Screen) -> None:
    names = ("a.png", "b.jpg", "c.mp4", "a.txt", "c.caption", ".hidden.png", "notes.md")
    for name in names:
        (screen.workspace.data_folder / "mine").mkdir(exist_ok=True)
        (screen.workspace.data_folder / "mine" / name).touch()
    (screen.workspace.data_folder / "none").mkdir()
    text = screen.get("/").text
    assert "2 images, 1 clip" in text
    assert "1 without a caption" in text
    assert '<p class="small quiet-text">empty</p>' in text


@pytest.mark.parametrize("name", [os.fsdecode(b"caf\xe9"), "a${b}"])
def test_a_folder_with_a_name_that_no_config_can_hold_is_shown_with_the_reason(
    screen: Screen, name: str
) -> None:
    (screen.workspace.data_folder / name).mkdir()
    for address in ("/", "/new"):
        assert screen.get(address).status_code == 200, address
    assert "no run can read this folder: its path must not contain" in screen.get("/").text
    given = json.dumps({"name": "new", "data": name, "recipe": "qwen_lora.yaml"}).encode()
    made = screen.post("/configs", content=given, headers={"content-type": "application/json"})
    assert made.status_code == 422
    assert screen.workspace.configs == {}
    address = f"/data/{quote(os.fsencode(name))}/"
    assert screen.get(address).status_code == (200 if name.isascii() else 404)


@pytest.fixture
def waiting(screen: Screen, no_worker: list[Path]) -> Waiting:
    (screen.workspace.configs_folder / "mine.yaml").write_text(CONFIG)
    return Waiting(Queue(screen.workspace))


def test_the_queue_is_shown_in_its_order_and_changed_by_buttons(
    screen: Screen, waiting: Waiting, no_worker: list[Path]
) -> None:
    assert 'id="queue"' not in screen.get("/").text
    waiting.add("first", "second", "<b>third")
    text = screen.get("/").text
    assert "3 runs are waiting and nobody starts them" in text
    assert "Go on starts all" in text
    assert text.index(">first<") < text.index(">second<") < text.index(">&lt;b&gt;third<")
    for shown in (
        """data-body='{"run": "second"}' aria-label="Move second up" title="Move second up">""",
        'aria-label="Move first up" title="Move first up" disabled',
        'aria-label="Move &lt;b&gt;third down" title="Move &lt;b&gt;third down" disabled',
        'aria-label="Take second out of the queue"',
        ">Start no more</button>",
    ):
        assert shown in text, shown
    assert not INLINE.search(text)
    assert screen.post("/queue/up", {"run": "<b>third"}).json() == {"message": "<b>third was moved up."}
    assert screen.post("/queue/down", {"run": "first"}).status_code == 200
    assert waiting.names("waiting") == ["<b>third", "first", "second"]
    assert screen.post("/queue/remove", {"run": "first"}).json() == {"message": "first is out of the queue."}
    assert waiting.names("waiting") == ["<b>third", "second"]
    assert screen.post("/queue/pause").status_code == 200
    assert waiting.queue.paused() == ""
    assert "Nothing more is started; what runs goes on." in screen.get("/").text
    assert "Start no more" not in screen.get("/").text
    assert screen.post("/queue/go").status_code == 200
    assert (waiting.queue.paused(), no_worker) == (None, [screen.workspace.path])
    for action, given in (("up", {"run": "nobody"}), ("remove", {"run": "../x"}), ("down", {"run": ["x"]})):
        assert "is not in the queue" in screen.post(f"/queue/{action}", given).json()["error"]
    assert screen.post("/queue/burn").status_code == 404


def test_what_ended_and_what_is_refused_say_why(screen: Screen, waiting: Waiting) -> None:
    waiting.add("quick", "refused")
    waiting.work()
    waiting.add("next")
    (waiting.queue.path / "waiting" / "00000001-odd.json").write_text('{"config": "<b>", "run": "rm"}')
    text = screen.get("/").text
    assert "1 run is waiting" in text
    assert "Ended lately, 2" in text
    assert '<p class="small quiet-text about">lora.rank: is wrong</p>' in text
    assert "Extra inputs are not permitted" in text or "Field required" in text
    assert "Move odd" not in text
    assert screen.post("/queue/remove", {"run": "00000001-odd"}).status_code == 200
    assert waiting.names("waiting") == ["next"]
    done = [run.id for run in waiting.queue.in_state("done")]
    assert screen.post("/queue/remove", {"run": done[1]}).json() == {
        "message": "refused is out of the queue."
    }
    assert waiting.names("done") == ["quick"]


def test_a_run_that_is_added_is_started_unless_others_are_found_waiting(
    screen: Screen, waiting: Waiting, no_worker: list[Path]
) -> None:
    """Entries of before a restart of the machine, or of a workspace that somebody else made."""
    entry = Entry(config="configs/mine.yaml", folder="runs/quick-a")
    QueuedRuns(screen.workspace).add([entry])
    assert len(no_worker) == 1
    QueuedRuns(screen.workspace).add([entry.model_copy(update={"folder": "runs/quick-b"})])
    assert len(no_worker) == 1
    text = screen.get("/runs/quick-b/").text
    assert "number 2 of 2" in text
    assert "Nobody starts what waits until Go on" in text
    assert 'data-post="/queue/go"' in text
    waiting.work()
    waiting.queue.pause()
    QueuedRuns(screen.workspace).add([entry.model_copy(update={"folder": "runs/quick-c"})])
    assert (len(no_worker), waiting.queue.paused()) == (2, None)


def test_runs_are_chosen_and_shown_side_by_side_by_their_names(screen: Screen) -> None:
    for name in ("one", "two & three"):
        make_run(screen, name)
    assert 'value="two &amp; three" aria-label="Choose two &amp; three"' in screen.get("/").text
    page = screen.get("/compare?run=one&run=two+%26+three")
    assert "2 runs side by side" in page.text
    assert 'aria-label="Main"' in page.text
    assert not INLINE.search(page.text)
    for query in ("run=one&run=nobody", "run=one&run=..%2Fone"):
        assert screen.get(f"/compare?{query}").status_code == 404
    for query in ("", "run=one", "run=one&run=one", "&".join(f"run={number}" for number in range(30))):
        assert screen.get(f"/compare?{query}").status_code == 422


def shown(screen: Screen, query: str = "") -> list[str]:
    """Names of the runs that have a card, in their order."""
    return re.findall(r'aria-label="Choose ([^"]+)"', screen.get(f"/{query}").text)


def make_runs(screen: Screen) -> None:
    """Of some states and families, each newer than the one before."""
    rows = "cat-a finished flux, cat-b failed wan, dog finished wan, odd ? sdxl"
    for number, row in enumerate(rows.split(", "), 1):
        name, state, family = row.split()
        settings = make_run(screen, name, state=state, time=1000.0 * number) / "resolved.yaml"
        settings.write_text(settings.read_text().replace("path:", f"family: {family}\n  path:"))


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("", ["odd", "dog", "cat-b", "cat-a"]),
        ("?q=CAT", ["cat-b", "cat-a"]),
        ("?q=wan+mini&show=finished", ["dog"]),
        ("?q=failed", ["cat-b"]),
        ("?show=continue", ["cat-b"]),
        ("?show=nothing", ["odd", "dog", "cat-b", "cat-a"]),
        ("?show=archived", []),
        ("?q=<b>", []),
    ],
)
def test_runs_are_found_by_words_and_by_state_the_newest_first(
    screen: Screen, query: str, names: list[str]
) -> None:
    make_runs(screen)
    assert shown(screen, query) == names
    text = screen.get(f"/{query}").text
    assert not INLINE.search(text)
    assert ("No run is like this." in text) == (not names)


def test_many_runs_are_shown_a_page_at_a_time(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_list, "_A_PAGE", 2)
    make_runs(screen)
    for query, names, count in (
        ("", ["odd", "dog"], "1 to 2 of 4"),
        ("?page=2", ["cat-b", "cat-a"], "3 to 4 of 4"),
        ("?page=999999", ["cat-b", "cat-a"], "3 to 4 of 4"),
        ("?page=-1", ["odd", "dog"], "1 to 2 of 4"),
        ("?page=\u00b2", ["odd", "dog"], "1 to 2 of 4"),
        ("?q=o&page=1", ["odd", "dog"], None),
        ("?q=t&show=all&page=2", ["cat-a"], "3 to 3 of 3"),
    ):
        assert shown(screen, query) == names, query
        found = re.search(r"\d+ to \d+ of \d+", screen.get(f"/{query}").text)
        assert (found and found[0]) == count, query
    last = screen.get("/?q=t&show=all&page=2").text
    assert 'href="?q=t&amp;show=all&amp;page=1#runs">Newer runs' in last
    assert "Older runs" not in last
    assert 'aria-label="All 4"' in screen.get("/?page=2").text


def test_an_archived_run_is_left_out_until_it_is_taken_out_or_goes_on(screen: Screen) -> None:
    make_runs(screen)
    folder = screen.workspace.runs_folder / "dog"
    before = {path: path.stat().st_mtime_ns for path in (folder, *folder.rglob("*"))}
    assert 'data-post="/runs/dog/archive"' in screen.get("/").text
    for name in ("dog", "cat-a"):
        assert "is archived" in screen.post(f"/runs/{name}/archive", {"is_archived": True}).json()["message"]
    assert before == {path: path.stat().st_mtime_ns for path in (folder, *folder.rglob("*"))}
    assert (shown(screen), shown(screen, "?show=archived")) == (["odd", "cat-b"], ["dog", "cat-a"])
    assert 'aria-label="Take dog out of the archive"' in screen.get("/?show=archived").text
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps(status | {"time": 99_000.0}))
    assert shown(screen) == ["dog", "odd", "cat-b"]
    assert screen.post("/runs/cat-a/archive", {"is_archived": False}).status_code == 200
    assert shown(screen, "?show=archived") == []
    assert screen.post("/runs/..%2Fdog/archive").status_code == 404
    screen.workspace.settings_file.write_text("{")
    assert "mend or remove the file" in screen.get("/").json()["error"]


def test_a_run_that_runs_or_waits_is_not_archived(
    screen: Screen, waiting: Waiting, no_worker: list[Path]
) -> None:
    folders = [make_run(screen, name, state="interrupted", time=1.0) for name in ("live", "next")]
    for folder in folders:
        assert screen.post(f"/runs/{folder.name}/archive").status_code == 200
    (folders[0] / ".lock").write_text(f"{Process.current().as_text()}\n")
    (folders[0] / "status.json").write_text('{"state": "running", "step": 4, "time": 1.0, "found_at": {}}')
    waiting.add("next")
    assert shown(screen) == ["live", "next"]
    assert "archive" not in screen.get("/").text.partition('id="found"')[2]
    for name, word in (("live", "running"), ("next", "waiting")):
        assert f"{name} is {word}" in screen.post(f"/runs/{name}/archive").json()["error"]


def test_a_run_whose_trainer_dies_and_one_that_goes_on_are_shown_so_by_the_next_look(screen: Screen) -> None:
    run = make_run(screen, "mine", state="running", exit_code=None)
    (run / ".lock").write_text(f"{Process.current().as_text()}\n")
    assert 'aria-label="Stop mine"' in screen.get("/").text
    (run / ".lock").write_text("process 4194400 on " + os.uname().nodename)
    assert 'aria-label="Continue mine"' in screen.get("/").text
    (run / "previews" / "step-00000040-prompt-00-a5f44a.png").touch()
    assert "/runs/mine/previews/step-00000040-" in screen.get("/").text


def test_filter_archive_and_a_zip_in_the_browser(browser: Browser, screen: Screen) -> None:
    make_runs(screen)
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("a.txt", "a cat")
    with (
        server_process(screen.workspace.path) as server,
        browser.page(server.address, width=PHONE_PX) as page,
    ):
        page.wait_for("document.getElementById('find') && document.readyState === 'complete'")
        page.fill("searchbox", "Find runs", "cat")
        page.await_control("radio", "Finished 1")
        assert page.evaluate("[location.search, document.activeElement.id]") == ["?q=cat", "find"]
        page.evaluate("document.querySelector('[aria-label=\"Archive cat-b\"]').focus()")
        (screen.workspace.data_folder / "mug").mkdir()
        page.press("button", "Archive cat-b")
        page.wait_for("document.querySelector('.nav [href=\"/#data-sets\"] .count').innerText === '1'")
        page.wait_for("document.activeElement.ariaLabel === 'Archive cat-a'")
        page.press("radio", "Archived 1")
        page.await_control("button", "Take cat-b out of the archive")
        assert page.evaluate("location.search") == "?q=cat&show=archived"
        assert page.overflow_px() == 0
        page.press("DisclosureTriangle", "New data set")
        page.fill("textbox", "Name", "cup")
        page.evaluate(
            "{ const given = new DataTransfer(); given.items.add(new File([new Uint8Array("
            f"{list(zipped.getvalue())})], 'set.zip')); "
            "document.querySelector('[name=zip]').files = given.files }"
        )
        page.press("button", "Make the data set")
        page.wait_for("location.pathname === '/data/cup/' && document.getElementById('message')?.innerText")
        assert page.text("#message") == "1 file of set.zip added."
        assert page.nameless() == []
        assert page.complaints == []
    assert (screen.workspace.data_folder / "cup" / "a.txt").read_text() == "a cat"
