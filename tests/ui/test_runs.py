"""The screen of a run: started, stopped, killed and continued it gives the LoRA of a run without a break."""

import io
import json
import os
import shutil
import signal
import subprocess
import zipfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from processes import wait_for
from run_folders import full_folder
from screens import INLINE, Screen
from tiny_run import UNWATCHED, make_run

from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines.qwen_image import tiny
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.process import Process
from diffsynth_lite.ui.jobs import Job, Jobs

LORA = "lora/pytorch_lora_weights.safetensors"


def state_of(screen: Screen, name: str) -> str:
    """The word in the head of a run's page."""
    page = screen.get(f"/runs/{name}/").text
    return page.partition('<span class="pill ')[2].partition("</svg>")[2].partition("<")[0]


def num_rows(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def await_end(screen: Screen, name: str) -> None:
    """Until the process that was started last has ended, and its server knows it."""
    process = Process.from_text(Jobs(screen.workspace).all()[name].process)
    wait_for(lambda: not process.is_alive())
    state_of(screen, name)


def process_of(folder: Path) -> Process:
    process = Process.from_text((folder / ".lock").read_text())
    assert process is not None
    return process


@pytest.mark.slow
def test_a_run_that_is_stopped_and_killed_and_continued_by_buttons_gives_the_lora_of_one_without_a_break(
    screen: Screen, tmp_path: Path
) -> None:
    tiny().save_pretrained(tmp_path / "model")
    few = ("train.steps=80", "train.global_batch_size=1", "train.micro_batch_size=1")
    whole = replace(make_run(tmp_path / "whole", tmp_path / "model"), settings=(*UNWATCHED, *few))
    assert whole.train() == 0
    AcceleratorState._reset_state(reset_partial_state=True)
    shutil.copy(whole.config, screen.workspace.configs_folder / "mine.yaml")
    folder = screen.workspace.runs_folder / "mine"
    # By a server that is gone when the next requests come: the screen finds the process by its file.
    earlier = Jobs(screen.workspace)
    job = earlier.start(["--config", "configs/mine.yaml", *whole.settings, "output.dir=runs/mine"], folder)
    assert state_of(screen, "mine") == "Starting"
    assert 'aria-label="Stop mine"' in screen.get("/").text
    refusal = screen.post("/runs/mine/save")
    assert (refusal.status_code, refusal.json()["error"]) == (422, "mine is still starting")
    wait_for(lambda: num_rows(folder) > 0)
    process = process_of(folder)
    assert os.getsid(process.pid) == process.pid  # what ends the server does not reach it
    assert state_of(screen, "mine") == "Running"
    other = full_folder(screen.workspace.runs_folder / "other")
    with pytest.raises(UserError, match="mine trains on this device; stop it first"):
        earlier.start(["--config", "configs/mine.yaml"], other)
    assert screen.post("/runs/mine/stop").status_code == 200
    screen.post("/runs/mine/stop")  # once more is not a second signal
    await_end(screen, "mine")
    assert state_of(screen, "mine") == "Interrupted"
    num_before = num_rows(folder)
    assert 0 < num_before < 80
    wait_for(lambda: earlier.state(job) == "ended")

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


def test_a_process_that_ends_before_it_trains_says_why_and_can_be_started_again(screen: Screen) -> None:
    (screen.workspace.configs_folder / "wrong.yaml").write_text("train: {step: 3}\n")
    earlier = Jobs(screen.workspace)
    arguments = ["--config", "configs/wrong.yaml", "output.dir=runs/wrong"]
    with pytest.raises(
        UserError, match="elsewhere: is not seen here; give one in runs/, such as runs/elsewhere"
    ):
        earlier.start(arguments, Path("elsewhere"))
    job = earlier.start(arguments, Path("runs/wrong"))
    wait_for(lambda: earlier.state(job) == "did not start")
    assert state_of(screen, "wrong") == "Did not start"
    assert "did you mean 'steps'?" in screen.get("/runs/wrong/log").text
    assert screen.post("/runs/wrong/again").status_code == 200
    wait_for(lambda: state_of(screen, "wrong") == "Did not start")
    assert 'aria-label="Start wrong again"' in screen.get("/").text
    page = screen.get("/runs/wrong/").text
    assert "ended before it came to training, with exit code 2." in page
    assert "data.path: is required" in page
    assert screen.post("/runs/wrong/stop").json()["error"] == "wrong does not run"
    assert screen.post("/runs/wrong/again").status_code == 200
    assert screen.post("/runs/wrong/stop").status_code == 200
    await_end(screen, "wrong")
    assert "It was stopped before it came to training. Start again" in screen.get("/runs/wrong/").text


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


def test_a_process_of_another_machine_or_a_refused_continuation_is_not_mistaken(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that is gone leaves its jobs on the volume; they neither train here nor get a signal."""
    started = []

    def spawn(job: Job, log: int) -> subprocess.Popen[bytes]:
        started.append(job)
        child = subprocess.Popen(["true"])
        child.wait()
        return child

    monkeypatch.setattr("diffsynth_lite.ui.jobs._spawn", spawn)
    jobs = Jobs(screen.workspace)
    folders = [screen.workspace.runs_folder / name for name in ("mine", "n" * 252)]
    for folder in folders:
        full_folder(folder)
    elsewhere = jobs.start(["--config", "x.yaml"], folders[0])
    file = screen.workspace.logs_folder / "mine.json"
    file.write_text(json.dumps(asdict(elsewhere) | {"process": "process 1 on another, started x/1"}))
    with pytest.raises(UserError, match="does not run"):
        jobs.ask(folders[0], "stop")
    long_name = jobs.start(["--config", "x.yaml"], folders[1])  # nothing trains here
    assert len(started) == 2
    assert len(long_name.name) < 200
    assert screen.get("/").status_code == 200

    (folders[0] / "status.json").write_text('{"state": "interrupted", "step": 3, "found_at": {}}')
    (screen.workspace.logs_folder / "mine.log").write_text("the model is gated\n")
    file.write_text(json.dumps(asdict(elsewhere) | {"exit_code": 2, "has_come": True}))
    page = screen.get("/runs/mine/").text
    assert "with exit code 2" in page
    assert "the model is gated" in page
    (folders[0] / "STOP").mkdir()
    assert "cannot be removed" in screen.post("/runs/mine/again").json()["error"]
