"""Home: runs by their state, data sets by their captions, and what an empty workspace offers."""

import json
import os
from pathlib import Path
from urllib.parse import quote

import pytest
from screens import INLINE, Screen
from waiting_runs import Waiting

from diffsynth_lite.queue.entry import Entry
from diffsynth_lite.queue.folder import Queue
from diffsynth_lite.run_folder.process import Process
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
    assert screen.post("/queue/up", {"run": "<b>third"}).json() == {"said": "<b>third was moved up."}
    assert screen.post("/queue/down", {"run": "first"}).status_code == 200
    assert waiting.names("waiting") == ["<b>third", "first", "second"]
    assert screen.post("/queue/remove", {"run": "first"}).json() == {"said": "first is out of the queue."}
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
    assert screen.post("/queue/remove", {"run": done[1]}).json() == {"said": "refused is out of the queue."}
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
