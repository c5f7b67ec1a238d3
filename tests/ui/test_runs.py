"""The screen of a run: started, stopped, killed and continued it gives the LoRA of a run without a break."""

import io
import json
import os
import shutil
import signal
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from forked_commands import ForkedCommand
from processes import wait_for
from run_folders import full_folder
from screens import INLINE, Screen
from tiny_run import UNWATCHED, make_run
from waiting_runs import Waiting

from diffsynth_lite.config import load_config
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines.qwen_image import tiny
from diffsynth_lite.queue.entry import Entry
from diffsynth_lite.queue.folder import Queue
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.process import Process
from diffsynth_lite.ui.queued import QueuedRuns

CONFIG = "model: {family: qwen_image, path: m}\ndata: {path: d}\noutput: {dir: runs/mine}\n"
LORA = "lora/pytorch_lora_weights.safetensors"


def state_of(screen: Screen, name: str) -> str:
    """The word in the head of a run's page."""
    page = screen.get(f"/runs/{name}/").text
    return page.partition('<span class="pill ')[2].partition("</svg>")[2].partition("<")[0]


def num_rows(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def add(screen: Screen, folder: str, *settings: str) -> None:
    """Queue a run of ``configs/mine.yaml`` by a server that is gone when the next requests come."""
    entry = Entry(config="configs/mine.yaml", folder=folder, settings=settings)
    QueuedRuns(screen.workspace).add([entry])


def await_end(screen: Screen, name: str) -> None:
    """Until the process that was started last has ended, and the queue knows how."""
    queue = Queue(screen.workspace)
    wait_for(lambda: not any(queue.in_state(state) for state in ("waiting", "running")))
    state_of(screen, name)


def process_of(folder: Path) -> Process:
    process = Process.from_text((folder / ".lock").read_text())
    assert process is not None
    return process


@pytest.mark.slow
def test_a_run_that_is_stopped_and_killed_and_continued_by_buttons_gives_the_lora_of_one_without_a_break(
    screen: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny().save_pretrained(tmp_path / "model")
    few = ("train.steps=80", "train.global_batch_size=1", "train.micro_batch_size=1")
    whole = replace(make_run(tmp_path / "whole", tmp_path / "model"), settings=(*UNWATCHED, *few))
    assert whole.train() == 0
    AcceleratorState._reset_state(reset_partial_state=True)
    shutil.copy(whole.config, screen.workspace.configs_folder / "mine.yaml")
    folder = screen.workspace.runs_folder / "mine"
    add(screen, "runs/mine", *whole.settings)
    wait_for(lambda: state_of(screen, "mine") == "Starting")
    assert 'aria-label="Stop mine"' in screen.get("/").text
    refusal = screen.post("/runs/mine/save")
    assert (refusal.status_code, refusal.json()["error"]) == (422, "mine is still starting")
    wait_for(lambda: num_rows(folder) > 0)
    process = process_of(folder)
    assert os.getsid(process.pid) == process.pid  # what ends the server does not reach it
    assert state_of(screen, "mine") == "Running"
    full_folder(screen.workspace.runs_folder / "other")
    add(screen, "runs/other", *whole.settings)
    assert state_of(screen, "other") == "Waiting"
    assert "number 1 of 1" in screen.get("/runs/other/").text
    assert screen.post("/queue/remove", {"run": "other", "is_left": True}).json() == {"go": "/"}
    assert state_of(screen, "other") == "Failed"  # as it was before
    assert screen.post("/runs/mine/continue").json()["error"] == "mine runs already"
    assert screen.post("/runs/mine/stop").status_code == 200
    screen.post("/runs/mine/stop")  # once more is not a second signal
    await_end(screen, "mine")
    assert state_of(screen, "mine") == "Interrupted"
    num_before = num_rows(folder)
    assert 0 < num_before < 80

    monkeypatch.setattr("subprocess.Popen", ForkedCommand)  # the first one was started as for a person
    assert screen.post("/runs/mine/continue").status_code == 200
    wait_for(lambda: num_rows(folder) > num_before)
    os.kill(process_of(folder).pid, signal.SIGKILL)
    await_end(screen, "mine")
    assert state_of(screen, "mine") == "Killed"
    page = screen.get("/runs/mine/").text
    assert "Nothing that was saved is lost: Continue goes on from the checkpoint of step" in page
    assert json.loads((folder / "status.json").read_text())["state"] == "running"

    assert screen.post("/runs/mine/continue").status_code == 200
    await_end(screen, "mine")
    assert state_of(screen, "mine") == "Finished", screen.get("/runs/mine/log").text
    assert (folder / LORA).read_bytes() == (whole.folder / LORA).read_bytes()
    assert "step 80/80" in screen.get("/runs/mine/log").text
    shutil.rmtree(folder)
    assert screen.get("/runs/mine/").status_code == 404


@pytest.fixture
def waiting(screen: Screen, no_worker: list[Path]) -> Waiting:
    """The queue of the screen, whose runs are small programs that a worker of the test starts."""
    (screen.workspace.configs_folder / "mine.yaml").write_text(CONFIG)
    return Waiting(Queue(screen.workspace))


def test_a_process_that_ends_before_it_trains_says_why_and_can_be_started_again(
    screen: Screen, waiting: Waiting, no_worker: list[Path]
) -> None:
    waiting.add("refused-b")
    waiting.work()
    page = screen.get("/runs/refused-b/").text
    assert state_of(screen, "refused-b") == "Did not start"
    assert "ended before it came to training, with exit code 2." in page
    assert "<p>lora.rank: is wrong</p>" in page
    assert "lora.rank: is wrong" in screen.get("/runs/refused-b/log").text
    assert 'aria-label="Start refused-b again"' in screen.get("/").text
    assert screen.post("/runs/refused-b/stop").json()["error"] == "refused-b does not run"
    assert screen.post("/runs/refused-b/continue").status_code == 422
    (screen.workspace.configs_folder / "mine.yaml").write_text("train: {step: 3}\n")
    assert "did you mean 'steps'?" in screen.post("/runs/refused-b/again").json()["error"]
    (screen.workspace.configs_folder / "mine.yaml").write_text(CONFIG)
    assert screen.post("/runs/refused-b/again").status_code == 200
    assert no_worker == [screen.workspace.path]
    assert state_of(screen, "refused-b") == "Waiting"
    assert (waiting.names("waiting"), waiting.names("done")) == (["refused-b"], [])


def test_a_run_that_is_still_starting_gets_one_signal(screen: Screen, waiting: Waiting) -> None:
    waiting.add("starting")
    thread = waiting.in_thread()
    wait_for(lambda: state_of(screen, "starting") == "Starting" and waiting.started() != [])
    assert 'aria-label="Stop starting"' in screen.get("/").text
    assert screen.post("/runs/starting/save").json()["error"] == "starting is still starting"
    assert screen.post("/runs/starting/stop").status_code == 200
    assert screen.post("/runs/starting/stop").status_code in (200, 422)  # it may have ended meanwhile
    thread.join()
    assert waiting.outcomes() == {"starting": ("did not start", -signal.SIGINT)}
    assert "It was stopped before it came to training. Start again" in screen.get("/runs/starting/").text


def test_a_run_that_is_still_starting_gets_its_signal_where_the_disk_is_full(
    screen: Screen, waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting.add("starting")
    worker = waiting.in_thread()
    wait_for(lambda: state_of(screen, "starting") == "Starting" and waiting.started() != [])

    def full(path: Path, _: str) -> None:
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patched:
        patched.setattr("diffsynth_lite.queue.folder.write_text", full)
        assert screen.post("/runs/starting/stop").status_code == 200
        worker.join()
    assert waiting.names("done") == ["starting"]


def test_a_run_that_was_begun_elsewhere_goes_on_there_by_the_settings_in_its_folder(
    screen: Screen, waiting: Waiting, tmp_path: Path
) -> None:
    project = tmp_path / "project"
    (project / "outputs").mkdir(parents=True)
    run = full_folder(project / "outputs" / "theirs")
    loaded = load_config(screen.workspace.configs_folder / "mine.yaml", ["output.dir=outputs/theirs"])
    (run / "resolved.yaml").write_text(loaded.resolved_yaml)
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps(status | {"state": "interrupted", "exit_code": 75}))
    assert screen.post("/add", {"kind": "runs", "folder": str(run)}).status_code == 200
    assert f"cd {project} &amp;&amp; " in screen.get("/runs/theirs/").text
    assert screen.post("/runs/theirs/continue").status_code == 200
    (queued,) = waiting.queue.in_state("waiting")
    assert queued.entry is not None
    assert queued.entry.place(screen.workspace) == project
    assert queued.entry.arguments() == ["--config", f"{run}/resolved.yaml", f"output.dir={run}"]
    # Such a folder is for what the person has added only.
    other = queued.entry.model_copy(update={"config": "configs/mine.yaml"})
    with pytest.raises(UserError, match="is outside of"):
        other.require_inside(screen.workspace)


def test_a_run_of_a_terminal_is_asked_by_files_and_its_log_is_there(screen: Screen) -> None:
    run = RunFolder(full_folder(screen.workspace.runs_folder / "theirs"))
    run.write_status("running", exit_code=None, step=200, message="training")
    page = screen.get("/runs/theirs/").text
    assert "started in a terminal; its log is there" in page
    assert screen.get("/runs/theirs/log").text == ""
    for action, name in (("save", "SAVE"), ("sample", "SAMPLE"), ("stop", "STOP")):
        assert f"Writes the file {name} into runs/theirs" in screen.get("/runs/theirs/").text
        assert screen.post(f"/runs/theirs/{action}").status_code == 200
        assert (run.path / name).read_bytes() == b""
    assert "Stopping</button>" in screen.get("/runs/theirs/").text
    assert screen.post("/runs/theirs/again").status_code == 404
    assert screen.post("/runs/nobodys/stop").status_code == 404


def test_what_a_run_left_is_downloaded_and_nothing_else(screen: Screen) -> None:
    run = full_folder(screen.workspace.runs_folder / "mine")
    for folder in (run / "lora" / "images", run / "checkpoints" / "lora-00000100"):
        folder.mkdir(parents=True)
        (folder.parent if folder.name == "images" else folder).joinpath("a.safetensors").write_bytes(
            b"weights"
        )
    (run / "lora" / "images" / "1.png").write_bytes(b"\0" * 3_000_000)
    os.utime(run / "lora" / "images" / "1.png", (0, 0))  # before the first date that a zip can have
    (run / "lora" / "link").symlink_to("/etc/passwd")
    page = screen.get("/runs/mine/").text
    names = ("lora.safetensors", "lora.zip", "lora-00000100.safetensors", "metrics.jsonl", "resolved.yaml")
    assert all(f'aria-label="Download {name}"' in page for name in names)
    assert screen.get("/runs/mine/download/lora-00000100.safetensors").content == b"weights"
    archive = zipfile.ZipFile(io.BytesIO(screen.get("/runs/mine/download/lora.zip").content))
    assert archive.testzip() is None
    assert sorted(archive.namelist()) == ["lora/a.safetensors", "lora/images/1.png"]
    assert archive.read("lora/images/1.png") == b"\0" * 3_000_000
    for other in (".lock", "status.json", "..%2fmine%2fmetrics.jsonl", "checkpoints.zip", "config.yaml"):
        assert screen.get(f"/runs/mine/download/{other}").status_code == 404
    assert not INLINE.search(page)


def test_a_continuation_that_is_refused_says_why_until_the_run_has_gone_on(
    screen: Screen, waiting: Waiting
) -> None:
    run = full_folder(screen.workspace.runs_folder / "refused")
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps(status | {"state": "interrupted", "exit_code": 75}))
    waiting.add("refused")
    assert state_of(screen, "refused") == "Waiting"
    waiting.work()
    assert state_of(screen, "refused") == "Interrupted"
    assert "with exit code 2" in screen.get("/runs/refused/").text
    later = time.time() + 1
    os.utime(run / "status.json", (later, later))
    assert "with exit code 2" not in screen.get("/runs/refused/").text
