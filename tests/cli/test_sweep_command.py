"""The command of a sweep: what it trains, what it leaves as it is, and what it prints."""

import json
from pathlib import Path

import pytest
from run_folders import write_run_scores

from diffsynth_lite.cli import sweep
from diffsynth_lite.cli.main import main
from diffsynth_lite.queue.entry import Entry
from diffsynth_lite.queue.folder import Queue
from diffsynth_lite.queue.worker import Worker
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.workspace import Workspace, open_workspace

CONFIG = """
model: {family: qwen_image, path: model}
data: {path: data, width: 64, height: 32}
train: {steps: 10}
output: {dir: runs/mine}
"""
SWEEP = ("sweep", "mine.yaml", "lora.rank=4,16", "--steps", "7")
TRAIN = """
[ $RANK = 3 ] && echo "lora.rank: 3 is odd" && exit 2
echo $RANK >>started; mkdir -p $RUN
echo '{"step": 7, "time": 1, "validation_loss": 0.'$RANK'}' >$RUN/metrics.jsonl
case $RANK$(cat $RUN/status.json) in 16) STATE=interrupted CODE=75;; *) STATE=finished CODE=0;; esac
echo '{"state": "'$STATE'", "exit_code": '$CODE', "step": 7, "message": "", "found_at": {}}' >$RUN/status.json
exit $CODE
"""
"""A program in place of ``train``: its loss is 0.4 or 0.16; rank 16 is interrupted once, rank 3 refused."""


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """A new workspace, which is the working folder, with a worker that waits for nothing."""

    def command(entry: Entry) -> list[str]:
        rank = entry.settings[0].removeprefix("lora.rank=")
        return ["sh", "-c", f"RUN={entry.folder}; RANK={rank}; {TRAIN}"]

    workspace = open_workspace(tmp_path / "workspace")
    (workspace.configs_folder / "mine.yaml").write_text(CONFIG)
    monkeypatch.chdir(workspace.path)
    for name, value in (("command", command), ("poll_s", 0.01)):
        monkeypatch.setitem(Worker.__init__.__kwdefaults__, name, value)
    return workspace


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(words) == 0
    return capsys.readouterr().out.splitlines()


def interrupted(workspace: Workspace, name: str, new: float) -> RunFolder:
    """A run with such an N at step 5, where it was interrupted."""
    run = RunFolder(workspace.runs_folder / name)
    run.path.mkdir()
    write_run_scores(run.path, {0: (0.0, 1.0), 5: (new, 0.9)})
    run.status_file.write_text('{"state": "interrupted", "step": 5, "found_at": {}}')
    return run


def test_a_sweep_trains_each_combination_and_goes_on_with_what_is_not_done(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(capsys, *SWEEP)
    assert lines[0].split() == ["lora.rank", "state", "loss", "on", "held-out", "data", "result"]
    assert [line.split() for line in lines[1:3]] == [
        ["4", "finished", "0.4", "at", "step", "7"],
        ["16", "interrupted", "0.16", "at", "step", "7", "best"],
    ]
    assert lines[-1] == f"Side by side: {workspace.runs_folder / 'mine.html'}"
    assert "2 runs side by side" in (workspace.runs_folder / "mine.html").read_text()
    found = json.loads("\n".join(printed(capsys, *SWEEP, "--json")))
    assert (workspace.path / "started").read_text().split() == ["4", "16", "16"]
    assert [(run["name"], run["state"], run["result"]) for run in found["runs"]] == [
        ("mine-rank4", "finished", ""),
        ("mine-rank16", "finished", "best"),
    ]
    assert found["runs"][0]["differs"] == {"lora.rank": "4"}


def test_the_reason_why_a_run_did_not_start_is_printed(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(capsys, "sweep", "mine.yaml", "lora.rank=4,3", "--steps", "7")
    assert lines[2].split() == ["3", "not", "started"]
    assert lines[3] == "mine-rank3: lora.rank: 3 is odd"


def test_what_waits_in_the_queue_is_trained_once_and_stopped_runs_stay_stopped_while_they_are_worse(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted(workspace, "mine-rank4", 0.9)
    interrupted(workspace, "mine-rank16", 0.2)
    printed(capsys, "queue", "add", "--config", "mine.yaml", "lora.rank=4,16", "train.steps=7")
    Queue(workspace).remove("mine-rank16")
    printed(capsys, *SWEEP, "--stop-worse")
    assert (workspace.path / "started").read_text().split() == ["4"]
    printed(capsys, *SWEEP)
    assert (workspace.path / "started").read_text().split() == ["4", "16"]


def test_a_run_that_trains_is_asked_to_stop_where_it_is_worse(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = {name: interrupted(workspace, name, new) for name, new in (("good", 0.9), ("worse", 0.2))}
    monkeypatch.setattr(RunFolder, "trains", lambda _: True)
    look = sweep.StopWorse(runs)
    look()
    assert [name for name, run in runs.items() if (run.path / "STOP").exists()] == ["worse"]
    (runs["worse"].path / "STOP").unlink()
    look()  # not again at once: the run may only just have seen it
    assert not (runs["worse"].path / "STOP").exists()


def test_a_sweep_of_one_run_is_refused(workspace: Workspace, caplog: pytest.LogCaptureFixture) -> None:
    assert main(["sweep", "mine.yaml", "lora.rank=4"]) == 2
    assert "no setting has several values; give some, such as lora.rank=4,8,16" in caplog.text
    assert list((workspace.path / "runs").iterdir()) == []
