"""What runs on a node: a command, how it ends, and what a node lacks; no cluster is started."""

import socket
import sys
import threading
from pathlib import Path

import psutil
import pytest
from processes import FORKED, wait_for

from diffsynth_lite import __version__
from diffsynth_lite.cluster.node import Ended, TaskFailedError, look, run_command, start
from diffsynth_lite.cluster.training import error_of, free_port, raise_as_it_ended, wait_for_lock
from diffsynth_lite.errors import RunInterrupted, RunStoppedError, UserError
from diffsynth_lite.queue.locks import take_lock


def shell(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Have a node start a script in place of Python."""
    file = folder / "python"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(file))


def test_a_command_is_run_in_its_folder_and_what_it_prints_and_logs_last_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shell(tmp_path, monkeypatch, 'pwd; echo "$@"; echo first >&2; echo last >&2; echo >&2')
    ended = run_command("3/8", ["cache", "fill"], str(tmp_path))
    assert ended.output.splitlines() == [str(tmp_path), "-m diffsynth_lite.cli.main cache fill"]
    assert (ended.name, ended.exit_code, ended.last_line) == ("3/8", 0, "last")
    assert "3/8: first\n3/8: last" in capsys.readouterr().err


def test_a_command_does_not_take_itself_for_one_of_those_that_ray_was_started_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    shell(tmp_path, monkeypatch, 'echo "$SLURM_STEP_NUM_TASKS${SLURM_PROCID-}"')
    assert run_command("0/2", [], str(tmp_path)).output == "4\n"


def test_wrong_input_is_an_answer_and_everything_else_may_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell(tmp_path, monkeypatch, "echo 3.png: is damaged >&2; exit 2")
    assert run_command("0/2", [], str(tmp_path)).exit_code == 2
    with pytest.raises(TaskFailedError, match="does not see /gone; mount"):
        run_command("0/2", [], "/gone")
    for script, code in (("exit 3", 3), ("kill -9 $$", -9)):
        shell(tmp_path, monkeypatch, f"echo out of memory >&2; {script}")
        with pytest.raises(TaskFailedError, match=f"exit code {code} on .*: out of memory"):
            run_command("0/2", [], str(tmp_path))


def start_and_wait(number: Path) -> None:
    """A task, which writes the number of what it started into a file."""
    survive = "import time; time.sleep(60); open('survived', 'w').close()"
    child = start(["timeit", "-n1", "-r1", survive], str(number.parent))
    number.write_text(str(child.pid))
    child.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no signal for it")
def test_what_a_task_started_is_killed_with_it(tmp_path: Path) -> None:
    number = tmp_path / "child"
    process = FORKED.Process(target=start_and_wait, args=(number,))
    process.start()
    wait_for(lambda: number.exists() and number.read_text())
    child = psutil.Process(int(number.read_text()))
    process.kill()
    process.join()
    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    assert not (tmp_path / "survived").exists()


def test_a_node_names_the_folders_that_are_not_the_same_there(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a")
    same = {str(tmp_path / "token"): "a"}
    assert look([str(tmp_path)], same) == ([], __version__)
    assert look([str(tmp_path / "data")], same) == ([str(tmp_path / "data")], __version__)
    other, gone = {str(tmp_path / "token"): "b"}, {str(tmp_path / "cache" / "token"): "a"}
    assert look([], other | gone) == ([str(tmp_path), str(tmp_path / "cache")], __version__)


def test_a_run_ends_here_as_it_ended_there(tmp_path: Path) -> None:
    def ended(code: int) -> Ended:
        return Ended(name="run", node="node-7", exit_code=code, last_line="the disk is full")

    raise_as_it_ended(ended(0))
    for code, kind in ((2, UserError), (3, RunStoppedError), (75, RunInterrupted)):
        with pytest.raises(kind, match="node-7: the disk is full"):
            raise_as_it_ended(ended(code))
    file = tmp_path / "error.json"
    assert error_of(file) == ""
    file.write_text('{"message": {"message": "a\\nlast"}}')
    assert error_of(file) == "last"
    file.write_text('{"message": "cut')
    assert error_of(file) == ""


def test_processes_meet_at_a_free_port_that_no_connection_is_given() -> None:
    with socket.socket() as taken:
        taken.bind(("", free_port()))
        others = {free_port() for _ in range(20)}
        assert taken.getsockname()[1] not in others
        assert len(others) > 1
        assert max(others) < 32_768


def test_a_start_waits_for_the_lock_of_the_one_before_it_and_not_for_ever(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    wait_for_lock(lock, 60)
    with lock.open("w") as held:
        assert take_lock(held)
        wait_for_lock(lock, 0)
        threading.Timer(0.3, held.close).start()
        wait_for_lock(lock, 60)
        assert held.closed
