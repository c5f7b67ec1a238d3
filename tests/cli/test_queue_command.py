"""The command of the queue: what it prints, what it refuses, and a run that it trains."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import wait_for
from tiny_run import UNWATCHED, make_run

from diffsynth_lite.cli.main import main
from diffsynth_lite.queue.entry import QueuedRun
from diffsynth_lite.queue.folder import Queue
from diffsynth_lite.run_folder.process import Process
from diffsynth_lite.workspace import Workspace, open_workspace

CONFIG = """
model: {family: qwen_image, path: model}
data: {path: data, width: 64, height: 32}
train: {steps: 10}
output: {dir: runs/mine}
"""
GO = "This does: diffsynth-lite queue go"


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """A new workspace, which is the working folder."""
    workspace = open_workspace(tmp_path / "workspace")
    (workspace.configs_folder / "mine.yaml").write_text(CONFIG)
    monkeypatch.chdir(workspace.path)
    # As where the program is installed, whatever the tests run in.
    monkeypatch.setattr("diffsynth_lite.cli.arguments.shutil.which", lambda name, **_: name)
    return workspace


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["queue", *words]) == 0
    return capsys.readouterr().out.splitlines()


def test_variants_are_added_shown_moved_and_removed(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert printed(capsys, "list") == ["Nothing is in the queue."]
    add = ("add", "--config", "configs/mine.yaml", "lora.rank=4,8", "train.steps=5", "--device", "1")
    assert printed(capsys, *add) == [
        "Added: mine-rank4",
        "Added: mine-rank8",
        f"No worker starts what waits (2). {GO}",
        "Side by side: diffsynth-lite report runs/mine-rank4 runs/mine-rank8 --out runs/mine.html",
    ]
    lines = printed(capsys, "move", "mine-rank8", "first")
    assert [line.split()[:4] for line in lines[:3]] == [
        ["state", "name", "config", "device"],
        ["waiting", "mine-rank8", "configs/mine.yaml", "1"],
        ["waiting", "mine-rank4", "configs/mine.yaml", "1"],
    ]
    assert printed(capsys, "pause")[-1] == (
        "Paused, so that nothing more is started. This goes on: diffsynth-lite queue go"
    )
    shown = json.loads("\n".join(printed(capsys, "remove", "mine-rank8", "--json")))
    assert (shown["paused"], shown["is_worked"]) == ("", False)
    (run,) = shown["runs"]
    assert (run["name"], run["state"], run["device"]) == ("mine-rank4", "waiting", "1")
    assert run["settings"] == ["lora.rank=4", "train.steps=5"]


def test_several_are_removed_at_once(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    printed(capsys, "add", "--config", "configs/mine.yaml", "lora.rank=4,8,16")
    assert printed(capsys, "remove", "mine-rank4", "mine-rank16")[1].split()[1] == "mine-rank8"


def test_what_is_added_is_one_json_object_where_that_is_asked_for(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = json.loads("\n".join(printed(capsys, "add", "--config", "configs/mine.yaml", "--json")))
    assert [run["name"] for run in shown["added"]] == ["mine"]
    assert shown["side_by_side"] == ""


def test_outcomes_are_shown_in_a_line_each(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    printed(capsys, "add", "--config", "configs/mine.yaml", "lora.rank=4,8")
    (workspace.configs_folder / "mine.yaml").write_text("train: {step: 3, stepz: 4}\n")
    (workspace.path / "queue" / "waiting" / "1-theirs.json").write_text('{"argv": ["rm"]}')
    printed(capsys, "work")
    lines = printed(capsys, "list")
    assert [line.split()[:2] for line in lines[1:-1]] == [
        ["refused", "theirs"],
        ["done", "mine-rank4"],
        ["done", "mine-rank8"],
    ]
    assert "refused (exit code 2): " in lines[2]
    assert lines[2].endswith("...")
    assert lines[-1] == "Nothing waits."


def test_a_workspace_is_named_or_is_the_working_folder_and_add_makes_one(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["queue", "list"]) == 2
    assert f"{tmp_path}: is not a workspace; go to one, or name one with --workspace" in caplog.text
    assert main(["queue", "list", "--workspace", "new"]) == 2
    assert "new: is not a workspace; this makes one: " in caplog.text
    wrong = ("queue", "add", "--workspace", "new", "--config", "qwen_lora.yaml", "lora.rank=four")
    assert main(wrong) == 2
    assert not (tmp_path / "new").exists()
    add = ("add", "--workspace", "new", "--config", "qwen_lora.yaml", "data.path=data")
    lines = printed(capsys, *add, "lora.rank=1,2", "output.dir=runs/a")
    assert "queue go --workspace new" in lines[2]
    assert lines[3].endswith("report new/runs/a-rank1 new/runs/a-rank2 --out new/runs/qwen_lora.html")
    monkeypatch.chdir(tmp_path)
    assert "queue go --workspace new" in printed(capsys, "list", "--workspace", "new")[-1]
    # A bare name is one of the workspace first; no workspace is made for a config that is not in it.
    monkeypatch.chdir(tmp_path)
    for place in (Path(), Path("new/configs")):
        (place / "mine.yaml").write_text(CONFIG)
    printed(capsys, "add", "--workspace", "new", "--config", "mine.yaml")
    assert not Path("new").exists()  # in the workspace, which is the working folder now
    monkeypatch.chdir(tmp_path)
    assert main(["queue", "add", "--workspace", "other", "--config", "mine.yaml"]) == 2
    assert f"is outside of the workspace {tmp_path / 'other'}; copy it to configs/ there" in caplog.text
    assert not Path("other").exists()
    monkeypatch.chdir(tmp_path / "new")
    assert "a-rank1" in printed(capsys, "list")[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["add", "--config", "configs/mine.yaml", "lora.rank=four"], "got 'four'"),
        (["add", "--config", "configs/none.yaml"], "there is no such file"),
        (["move", "mine", "first"], "mine: is not in the queue, which has nothing"),
        (["remove", "mine"], "mine: is not in the queue, which has nothing"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(
    workspace: Workspace, caplog: pytest.LogCaptureFixture, words: list[str], message: str
) -> None:
    assert main(["queue", *words]) == 2
    assert message in caplog.text
    assert len(caplog.messages) == 1
    assert not (workspace.path / "queue" / "waiting" / "00001000-mine.json").exists()


def test_ctrl_c_ends_a_worker_and_not_the_run(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("diffsynth_lite.queue.worker.time.sleep", interrupt)
    monkeypatch.setattr("diffsynth_lite.queue.worker.Worker._has_ended", lambda *_: False)
    assert main(["queue", "work"]) == 0
    assert not Queue(workspace).is_worked()


def running(queue: Queue) -> QueuedRun | None:
    """The run that has a process."""
    found = [run for run in queue.in_state("running") if run.entry and run.entry.process]
    return found[0] if found else None


@pytest.mark.slow
def test_a_run_is_trained_by_a_worker_and_finished_without_it_and_adopted_by_the_next(
    workspace: Workspace, tiny_model: Path, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", tiny_model)
    config = run.config.read_text().replace(f"{run.root}/run", "runs/tiny")
    (workspace.configs_folder / "tiny.yaml").write_text(config)
    queue = Queue(workspace)
    command = [sys.executable, "-m", "diffsynth_lite.cli.main", "queue"]
    add = [*command, "add", "--config", "configs/tiny.yaml", *UNWATCHED, "train.steps=3", "--go", "--json"]
    done = subprocess.run(add, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["is_worked"]
    wait_for(lambda: running(queue) is not None)
    found = running(queue)
    assert found is not None
    assert found.entry is not None
    process = Process.from_text(found.entry.process)
    assert process is not None
    worker = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: not queue.is_worked())
    assert process.is_alive()
    subprocess.run([*command, "work"], check=True)
    assert not process.is_alive()
    (ended,) = queue.snapshot().runs
    assert ended.entry is not None
    assert (ended.state, ended.entry.outcome, ended.entry.exit_code) == ("done", "finished", 0)
    assert (workspace.path / "runs" / "tiny" / "lora").is_dir()
    assert "step 3/3" in queue.log_file(ended).read_text()
