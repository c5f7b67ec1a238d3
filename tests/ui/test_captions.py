"""Captions by a model on the screen: the command of the form, how far it is, and what it may write over."""

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from PIL import Image
from processes import wait_for
from run_folders import full_folder
from screens import INLINE, Screen, Started
from waiting_runs import Waiting

from diffsynth_lite.captioning.cleaning import CaptionFormat
from diffsynth_lite.captioning.instructions import CaptionLength, Goal
from diffsynth_lite.captioning.report import CaptioningStatus, CaptionReport, CaptionRow, caption_hash
from diffsynth_lite.errors import UserError
from diffsynth_lite.queue.folder import Queue
from diffsynth_lite.run_folder.process import Process
from diffsynth_lite.ui.data_sets.captioning import CHOICES
from diffsynth_lite.ui.jobs import Jobs

MODEL = "Qwen/Qwen3-VL-4B-Instruct"
CONFIG = "model: {family: qwen_image, path: m}\ndata: {path: d}\noutput: {dir: runs/mine}\n"


@pytest.fixture
def mug(screen: Screen) -> Path:
    """Four images: one without a caption, one of a person, and two of a model, of which one was changed."""
    folder = screen.workspace.data_folder / "mug"
    folder.mkdir()
    for name, caption in (("a", ""), ("b", "mine"), ("c", "theirs"), ("d", "theirs, changed")):
        Image.new("RGB", (64, 64), "teal").save(folder / f"{name}.png")
        if caption:
            (folder / f"{name}.txt").write_text(f"{caption}\n")
    for name in ("c", "d"):
        wrote(folder, f"{name}.png", "theirs")
    return folder


def wrote(folder: Path, file: str, caption: str) -> None:
    """A model's caption in the report."""
    row = CaptionRow(file=file, hash=caption_hash(caption), model=MODEL, instruction="Describe.", seconds=1.0)
    CaptionReport(folder).add(row)


def write_status(folder: Path, state: str = "running", process: Process | None = None, **values: Any) -> None:
    """The status of a command in a data set; without a process, that of one which is gone."""
    gone = f"process 4194400 on {os.uname().nodename}"
    status = CaptioningStatus(
        state="running",
        process=process.as_text() if process else gone,
        arguments=("data/mug", "--model", MODEL),
    )
    CaptionReport(folder).write_status(replace(status, state=state, **values))
    later = time.time() + 1  # Clocks of file systems are behind by some milliseconds.
    os.utime(CaptionReport(folder).status_file, (later, later))


def ask(screen: Screen, do: str, **given: Any) -> Any:
    return screen.post("/data/mug/captioning", {"do": do} | given)


def captioning(screen: Screen) -> dict[str, Any]:
    return dict(screen.get("/data/mug/items").json()["captioning"])


def undo(screen: Screen) -> str:
    return str(screen.post("/data/mug/undo").json()["message"])


@pytest.mark.parametrize(
    ("form", "command"),
    [
        ({"model": MODEL}, f"data/mug --model {MODEL}"),
        (
            {"model": "models/tiny", "goal": "likeness", "trigger": "ohwx mug", "length": "short"},
            "data/mug --model models/tiny --goal likeness --trigger 'ohwx mug' --length short",
        ),
        (
            {"model": "m", "format": "tags", "language": "German", "quantize": "nf4", "replace": "all"},
            "data/mug --model m --format tags --language German --quantize nf4 --replace all",
        ),
        (
            {"model": "q", "endpoint": "http://localhost:1234/v1", "quantize": "int8", "replace": ""},
            "data/mug --model q --endpoint http://localhost:1234/v1",
        ),
        ({"model": "m", "goal": "edit", "inputs": "old"}, "data/mug --model m --goal edit --inputs data/old"),
        ({"model": "m", "config": "mine"}, "data/mug --model m --config configs/mine.yaml"),
        ({"model": "m", "config": "none"}, "data/mug --model m"),
        ({"model": "m", "trigger": "--replace"}, "data/mug --model m --trigger=--replace"),
        ({"model": "m", "trigger": "$(x); `y`"}, "data/mug --model m --trigger '$(x); `y`'"),
    ],
)
def test_the_form_is_a_command_to_copy(screen: Screen, mug: Path, form: dict[str, str], command: str) -> None:
    (screen.workspace.data_folder / "old").mkdir()
    (screen.workspace.configs_folder / "mine.yaml").touch()
    assert ask(screen, "command", **form).json() == {
        "command": f"diffsynth-lite caption {command}",
        "host": "",
    }


def test_a_server_elsewhere_is_named_before_images_leave(screen: Screen, mug: Path) -> None:
    answer = ask(screen, "command", model="m", endpoint="https://api.example.org/v1").json()
    assert answer["host"] == "api.example.org"


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({"model": " "}, "Model: give its name"),
        ({"model": "m" * 501}, "Model: give one line"),
        ({"model": "m", "trigger": "a\nb"}, "Trigger: give one line"),
        ({"model": "m", "goal": "fame"}, "Goal: fame: is not one of the choices"),
        ({"model": "m", "goal": "edit", "inputs": "../secret"}, "Inputs: choose the data set"),
        ({"endpoint": "localhost"}, "must be http:// or https:// and a host"),
        ({"endpoint": "file:///etc/passwd"}, "must be http:// or https:// and a host"),
        ({"endpoint": "http://[x"}, "must be http:// or https:// and a host"),
        ({"endpoint": "https://me:sk-123@api.example.org"}, "the key comes from an environment variable"),
    ],
)
def test_a_form_that_makes_no_command_is_refused_with_the_reason(
    screen: Screen, mug: Path, started: Started, form: dict[str, str], reason: str
) -> None:
    assert reason in ask(screen, "command", **form).json()["wrong"]
    answer = ask(screen, "write", **form)
    assert (answer.status_code, reason in answer.json()["error"]) == (422, True)
    assert started.words == []


def test_the_page_has_the_trigger_of_a_config_and_no_script_of_its_own(screen: Screen, mug: Path) -> None:
    (screen.workspace.configs_folder / "bad.yaml").write_text("data: {path: data/mug, x: 1}\n")
    (screen.workspace.configs_folder / "mine.yaml").write_text(
        'extends: qwen_lora.yaml\ndata:\n  path: data/mug\n  trigger: "ohwx <mug>"\n'
    )
    page = screen.get("/data/mug/").text
    assert 'name="trigger" value="ohwx &lt;mug&gt;"' in page
    assert "OPENAI_API_KEY" in page
    assert not INLINE.search(page)


def test_a_caption_is_by_a_model_while_it_has_the_text_of_the_report(screen: Screen, mug: Path) -> None:
    items = screen.get("/data/mug/items").json()["items"]
    assert {item["file"]: item.get("by") for item in items} == {
        "a.png": None,
        "b.png": None,
        "c.png": MODEL,
        "d.png": None,
    }
    changes = [
        {"file": "c.png", "was": "theirs", "caption": "mine, too"},
        {"file": "d.png", "was": "theirs, changed", "caption": "theirs"},
    ]
    answer = screen.post("/data/mug/captions", {"changes": changes})
    assert answer.json() == {"stale": {}, "by": {"d.png": MODEL}}
    # One that a model wrote while the person typed is named as such: theirs then goes before it.
    wrote(mug, "a.png", "now")
    (mug / "a.txt").write_text("now\n")
    late = [{"file": "a.png", "was": "", "caption": "typed"}]
    answer = screen.post("/data/mug/captions", {"changes": late})
    assert answer.json() == {"stale": {"a.png": "now"}, "by": {"a.png": MODEL}}


def test_captions_by_a_model_and_runs_have_the_device_by_turns(
    screen: Screen, mug: Path, started: Started
) -> None:
    jobs, queue = Jobs(screen.workspace), Waiting(Queue(screen.workspace))
    other = screen.workspace.data_folder / "other"
    other.mkdir()
    (screen.workspace.configs_folder / "mine.yaml").write_text(CONFIG)
    assert ask(screen, "write", model=MODEL).status_code == 200
    assert captioning(screen)["state"] == "starting"
    assert captioning(screen)["command"] == f"diffsynth-lite caption data/mug --model {MODEL}"
    queue.add("long-run")
    worker = threading.Thread(target=queue.work_as_the_command_does, daemon=True)
    worker.start()
    wait_for(queue.queue.is_worked)
    with pytest.raises(UserError, match="this device is in use: captions of mug; stop that first"):
        jobs.start(["data/other", "--model", MODEL], other)
    assert "being written already" in ask(screen, "write", model=MODEL).json()["error"]
    assert "being written already" in ask(screen, "write", endpoint="http://localhost/v1").json()["error"]
    jobs.start(["data/other", "--endpoint", "http://localhost/v1"], other)
    assert "The next run waits: captions of mug on this device" in screen.get("/").text
    assert queue.started() == []
    started.children[0].kill()
    wait_for(lambda: captioning(screen)["state"] == "did not start")
    queue.await_start("long-run")  # captions of a server are in nobody's way
    assert "this device is in use: long-run trains" in ask(screen, "write", model=MODEL).json()["error"]
    assert ask(screen, "write", endpoint="http://localhost/v1").status_code == 200
    queue.end("long-run")
    worker.join()
    for child in started.children:
        child.kill()
        child.wait()
    run = full_folder(screen.workspace.runs_folder / "mine")
    (run / ".lock").write_text(f"{Process.current().as_text()}\n")
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps(status | {"state": "running"}))
    assert "this device is in use: mine trains" in ask(screen, "write", model=MODEL).json()["error"]


def test_captions_of_a_terminal_are_shown_and_have_the_device(
    screen: Screen, mug: Path, started: Started
) -> None:
    write_status(mug, process=Process.current(), phase="captioning", done=8, total=26, seconds_per_item=2.0)
    shown = captioning(screen)
    assert (shown["state"], shown["done"], shown["total"], shown["seconds_per_item"]) == (
        "running",
        8,
        26,
        2.0,
    )
    assert shown["options"] == {"model": MODEL}
    assert "Writing captions 8 of 26" in screen.get("/").text
    assert Jobs(screen.workspace).holders() == ["captions of mug"]
    elsewhere = replace(Process.current(), host="another")
    write_status(mug, process=elsewhere)
    assert Jobs(screen.workspace).holders() == []


def test_stop_sends_one_signal_to_the_command_whoever_started_it(
    screen: Screen, mug: Path, started: Started
) -> None:
    assert "no captions of mug are being written" in ask(screen, "stop").json()["error"]
    ask(screen, "write", model=MODEL)
    assert ask(screen, "stop").status_code == 200
    # 1 where Python was still starting.
    assert started.children[0].wait(timeout=60) in (-signal.SIGINT, 1)
    shown = captioning(screen)
    assert (shown["state"], shown["log"]) == ("did not start", [])
    with (mug / "a.txt").open("wb") as log:
        child = started.spawn([], log=log)  # as from a terminal
    write_status(mug, process=Process.of(child.pid))
    assert ask(screen, "stop").status_code == 200
    assert child.wait(timeout=60) == -signal.SIGINT
    assert captioning(screen)["state"] == "killed"


def test_a_stop_arrives_where_the_disk_is_full(
    screen: Screen, mug: Path, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(screen, "write", model=MODEL)

    def full(path: Path, _: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("diffsynth_lite.ui.jobs.write_json", full)
    assert ask(screen, "stop").status_code == 200
    assert started.children[0].wait(timeout=60) == -signal.SIGINT


def test_a_command_that_did_not_start_says_why_and_goes_on_as_it_was(
    screen: Screen, mug: Path, started: Started
) -> None:
    ask(screen, "write", model="none", goal="style")
    (job,) = screen.workspace.logs_folder.glob("caption-mug-*.json")
    job.with_suffix(".log").write_text("first\nnone: no such <model>\n")
    started.children[0].kill()
    wait_for(lambda: captioning(screen)["state"] == "did not start")
    assert captioning(screen)["log"][-1] == "none: no such <model>"
    assert ask(screen, "go on").status_code == 200
    assert started.arguments == "data/mug --model none --goal style"


def test_a_log_that_is_a_link_is_neither_followed_nor_read(
    screen: Screen, mug: Path, started: Started, tmp_path: Path
) -> None:
    ask(screen, "write", model="m")
    started.children[0].kill()
    wait_for(lambda: captioning(screen)["state"] == "did not start")
    (log,) = screen.workspace.logs_folder.glob("caption-mug-*.log")
    (tmp_path / "theirs").write_text("precious\n")
    log.unlink()
    log.symlink_to(tmp_path / "theirs")
    assert captioning(screen)["log"] == []
    assert ask(screen, "write", model="m").status_code == 200
    assert not log.is_symlink()
    assert (tmp_path / "theirs").read_text() == "precious\n"


def test_what_was_stopped_goes_on_with_the_same_words_in_this_folder(
    screen: Screen, mug: Path, started: Started
) -> None:
    assert "Nothing was written" in ask(screen, "go on").json()["error"]
    words = ("--batch", "2", str(mug), "--model", MODEL, "--replace", "model")
    for given, expected in (
        (words, " ".join(words)),
        (
            ("../mug", "--keep=lists", "--dry-run", "--model", "m"),
            "data/mug --keep lists --dry-run --model m",
        ),
    ):
        write_status(mug, "stopped", arguments=given, done=3, total=9)
        assert captioning(screen)["state"] == "stopped"
        assert ask(screen, "go on").status_code == 200
        assert started.arguments == expected
        started.children[-1].kill()
        started.children[-1].wait()


def test_captions_that_are_written_over_come_back_and_those_of_a_person_since_stay(
    screen: Screen, mug: Path, started: Started
) -> None:
    write_status(
        mug, "finished", arguments=("data/mug", "--model", MODEL, "--goal", "style", "--dry-run", "3")
    )
    assert ask(screen, "again", files=["b.png", "c.png"]).status_code == 200
    only = "--only b.png --only c.png --replace all"
    assert started.arguments == f"data/mug --model {MODEL} --goal style {only}"
    write_status(mug, process=Process.current())
    assert "being written now" in screen.post("/data/mug/undo").json()["error"]
    write_status(mug, "finished")
    for name in ("b", "c"):
        wrote(mug, f"{name}.png", "again")
        (mug / f"{name}.txt").write_text("again\n")
    (mug / "c.txt").write_text("mine since\n")
    assert undo(screen) == "1 caption as before. 1 caption changed since and left alone."
    assert [(mug / f"{name}.txt").read_text() for name in "bcd"] == [
        "mine\n",
        "mine since\n",
        "theirs, changed\n",
    ]
    assert undo(screen) == "Nothing to undo."


def test_a_model_s_caption_that_comes_back_is_by_that_model(
    screen: Screen, mug: Path, started: Started
) -> None:
    write_status(mug, "finished")
    assert ask(screen, "again", files=["c.png"]).status_code == 200
    wrote(mug, "c.png", "again")
    (mug / "c.txt").write_text("again\n")
    assert undo(screen) == "1 caption as before."
    items = screen.get("/data/mug/items").json()["items"]
    assert [(item["caption"], item["by"]) for item in items if item["file"] == "c.png"] == [("theirs", MODEL)]


@pytest.mark.parametrize(
    ("form", "kept"),
    [
        ({"do": "write", "replace": "all"}, {"b.png": "mine", "c.png": "theirs", "d.png": "theirs, changed"}),
        ({"do": "write", "replace": "model"}, {"c.png": "theirs"}),
        ({"do": "write"}, None),
        ({"do": "preview", "replace": "all"}, None),
        ({"do": "write", "replace": "all", "goal": "fame"}, None),
    ],
)
def test_only_captions_that_may_be_written_over_are_kept_for_undo(
    screen: Screen, mug: Path, started: Started, form: dict[str, str], kept: dict[str, str] | None
) -> None:
    ask(screen, **form, model=MODEL)
    entries = [*(screen.workspace.path / ".ui" / "undo" / "mug").glob("*.json")]
    found = [
        {change["file"]: change["before"] for change in json.loads(path.read_text())["captions"]}
        for path in entries
    ]
    assert found == ([kept] if kept else [])
    is_dry = "--dry-run 3" in started.arguments if started.words else False
    assert is_dry == (form["do"] == "preview")


def test_a_start_that_is_refused_leaves_nothing_to_undo(screen: Screen, mug: Path, started: Started) -> None:
    ask(screen, "write", endpoint="http://localhost/v1")
    assert ask(screen, "write", endpoint="http://localhost/v1", replace="all").status_code == 422
    assert undo(screen) == "Nothing to undo."


def test_hostile_answers_stay_text(screen: Screen, mug: Path) -> None:
    markup = "</script><script>pwned()</script>"
    write_status(mug, "finished", preview={"a.png": markup}, failed={markup: markup}, message=markup)
    assert "<script>pwned" not in screen.get("/data/mug/").text
    assert captioning(screen)["preview"] == {"a.png": markup}
    (mug / ".captions" / "status.json").write_text(json.dumps({"state": ["x"], "process": 3}))
    assert screen.get("/data/mug/").status_code == 200
    assert screen.get("/").status_code == 200


def test_the_form_has_the_choices_of_the_command() -> None:
    choices = {"goal": Goal, "length": CaptionLength, "format": CaptionFormat}
    for name, values in choices.items():
        # The empty one is the default, for which the command has no flag.
        assert {*CHOICES[name]} <= {"", *get_args(values)}
        assert {*get_args(values)} - {*CHOICES[name]} <= {"medium", "prose"}
