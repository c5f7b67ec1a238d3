"""The worker of the queue: order, devices, and what becomes of runs that are killed with it or without."""

import errno
import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import wait_for
from waiting_runs import Waiting, fake_command

from diffsynth_lite.errors import UserError
from diffsynth_lite.queue import folder as queue_folder
from diffsynth_lite.queue import worker as queue_worker
from diffsynth_lite.queue.folder import Queue
from diffsynth_lite.queue.worker import Worker, start_worker
from diffsynth_lite.run_folder.folder import RunFolder


def test_runs_are_started_in_their_order_and_none_that_fails_stops_the_rest(waiting: Waiting) -> None:
    waiting.add("quick-a", "refused", "broken", "failed", "stopped", "quick-b")
    waiting.queue.move("quick-b", "up")
    waiting.queue.move("refused", "first")
    waiting.work()
    order = ["refused", "quick-a", "broken", "failed", "quick-b", "stopped"]
    assert [line.split()[0] for line in waiting.started()] == order
    assert waiting.outcomes() == {
        "refused": ("refused", 2),
        "quick-a": ("finished", 0),
        "broken": ("did not start", 1),
        "failed": ("failed", 1),
        "quick-b": ("finished", 0),
        "stopped": ("interrupted", 75),
    }
    messages = {run.name: run.entry.message for run in waiting.queue.in_state("done") if run.entry}
    assert messages == {
        "refused": "lora.rank: is wrong",
        "quick-a": "",
        "broken": "it broke",
        "failed": "a bug",
        "quick-b": "",
        "stopped": "stopped by STOP",
    }
    assert not waiting.queue.is_worked()


def test_a_paused_queue_starts_nothing_and_what_runs_goes_on(waiting: Waiting) -> None:
    waiting.add("quick-a")
    waiting.queue.pause("lunch")
    waiting.work()
    assert (waiting.started(), waiting.queue.snapshot().paused) == ([], "lunch")
    waiting.queue.unpause()
    waiting.add("long-b", "quick-c")
    with waiting.working():
        waiting.await_start("long-b")
        waiting.queue.pause()
        waiting.end("long-b")
        wait_for(lambda: "long-b" in waiting.names("done"))
    assert waiting.names("waiting") == ["quick-c"]
    assert waiting.outcomes() == {"quick-a": ("finished", 0), "long-b": ("finished", 0)}


def test_a_run_outlives_its_worker_and_the_next_one_waits_for_it(waiting: Waiting) -> None:
    waiting.add("long-a", "quick-b")
    with waiting.working() as worker:
        waiting.await_start("long-a")
        (run,) = waiting.queue.in_state("running")
        worker.kill()
        worker.join()
        snapshot = waiting.queue.snapshot()
        assert (waiting.names("running"), snapshot.is_worked) == (["long-a"], False)
        assert waiting.is_alive(run)
        with waiting.working():
            assert waiting.names("waiting") == ["quick-b"]
            with pytest.raises(UserError, match="another worker"):
                waiting.work()
            assert len(waiting.started()) == 1
            waiting.end("long-a")
    assert waiting.outcomes() == {"long-a": ("finished", 0), "quick-b": ("finished", 0)}
    (done, _) = waiting.queue.in_state("done")
    assert done.entry is not None
    assert done.entry.ended_at >= done.entry.started_at > 0


def test_a_run_that_is_killed_is_known_to_be_and_the_next_is_started(waiting: Waiting) -> None:
    waiting.add("long-a", "quick-b")
    with waiting.working():
        waiting.await_start("long-a")
        (run,) = waiting.queue.in_state("running")
        assert run.entry is not None
        wait_for(lambda: bool(waiting.queue.in_state("running")[0].entry.process))
        (run,) = waiting.queue.in_state("running")
        pid = int(run.entry.process.split()[1])
        assert os.getsid(pid) == pid  # what ends the worker's terminal does not reach it
        waiting.kill_runs()
    assert waiting.outcomes() == {"long-a": ("killed", -9), "quick-b": ("finished", 0)}


def test_nothing_is_started_by_itself_after_both_are_killed(waiting: Waiting) -> None:
    waiting.add("long-a", "quick-b")
    with waiting.working() as worker:
        waiting.await_start("long-a")
        wait_for(lambda: bool(waiting.queue.in_state("running")[0].entry.process))
        worker.kill()
        worker.join()
        waiting.kill_runs()
    assert waiting.outcomes() == {"long-a": ("killed", None)}
    assert (waiting.names("waiting"), waiting.queue.is_worked()) == (["quick-b"], False)


def test_after_a_reboot_a_run_is_over_although_its_number_is_given_again(waiting: Waiting) -> None:
    (run,) = waiting.add("quick-a")
    entry = {"process": f"process {os.getpid()} on here, started before", "started_at": 5.0}
    content = json.loads(run.file.read_text()) | entry
    file = waiting.queue.path / "running" / run.file.name
    file.write_text(json.dumps(content))
    run.file.unlink()
    waiting.queue.log_file(run).write_text("step 3\n")
    folder = RunFolder(waiting.path / "runs" / "quick-a")
    with folder.lock():
        folder.write_status("running", exit_code=None, step=3, message="training")
    assert waiting.outcomes() == {"quick-a": ("killed", None)}
    assert waiting.queue.in_state("running") == []


def test_a_worker_that_is_killed_while_it_starts_a_run_leaves_it_to_the_person(waiting: Waiting) -> None:
    (run,) = waiting.add("quick-a")
    waiting.queue.put(run, "running")
    assert waiting.outcomes() == {"quick-a": ("did not start", None)}


def test_a_full_disk_pauses_the_queue_in_place_of_burning_through_it(
    waiting: Waiting, caplog: pytest.LogCaptureFixture
) -> None:
    waiting.add("full", "quick-b")
    waiting.work()
    assert waiting.names("waiting") == ["quick-b"]
    reason = "the disk is full, as full found; make room, then add it again"
    assert (waiting.queue.snapshot().paused, waiting.outcomes()) == (reason, {"full": ("stopped", 3)})
    assert reason in caplog.text


@pytest.mark.parametrize("num_writes", [0, 2])
def test_a_full_disk_under_the_queue_loses_no_entry(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch, num_writes: int
) -> None:
    waiting.add("quick-a", "quick-b")
    left, write_text = [None] * num_writes, queue_folder.write_text

    def fill(path: Path, text: str) -> None:
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        left.pop()
        write_text(path, text)

    with monkeypatch.context() as patch:
        patch.setattr(queue_folder, "write_text", fill)
        waiting.work()
        with pytest.raises(UserError, match=r"nothing was added: .*No space left"):
            waiting.add("quick-c")
    assert waiting.queue.paused() == ""
    began = ["quick-a"] if num_writes else []
    assert [name.split()[0] for name in waiting.started()] == began
    assert waiting.names("done") == began
    assert waiting.names("waiting") == [name for name in ("quick-a", "quick-b") if name not in began]
    waiting.queue.unpause()
    waiting.work()
    assert waiting.names("done") == ["quick-a", "quick-b"]


def test_each_device_has_one_run_and_one_without_a_device_runs_by_itself(waiting: Waiting) -> None:
    waiting.add("long-a", device="0")
    waiting.add("quick-b", device="1,0")
    waiting.add("long-c", device="2")
    waiting.add("quick-d", device="1")  # would overtake quick-b
    waiting.add("quick-e")
    with waiting.working():
        waiting.await_start("long-a", "long-c")
        waiting.end("long-a")
        wait_for(lambda: "quick-d" in waiting.names("done"))
        assert waiting.names("running") == ["long-c"]
        assert waiting.names("waiting") == ["quick-e"]
        waiting.end("long-c")
    assert sorted(waiting.started()[:2]) == ["long-a 0", "long-c 2"]
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    assert waiting.started()[2:] == ["quick-b 1,0", "quick-d 1", f"quick-e {devices}".strip()]


def test_nothing_is_started_next_to_a_run_of_a_terminal(
    waiting: Waiting, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    waiting.add("quick-a")
    theirs = RunFolder(waiting.path / "runs" / "theirs")
    with theirs.lock():
        theirs.write_status("running", exit_code=None, step=1, message="training")
        worker = waiting.in_thread()
        wait_for(lambda: "Waits for theirs" in caplog.text)
        assert (waiting.started(), waiting.queue.is_worked()) == ([], True)
        assert caplog.text.count("Waits for") == 1
        theirs.write_status("finished", exit_code=0, step=1, message="finished")
    worker.join()
    assert waiting.outcomes() == {"quick-a": ("finished", 0)}


def test_the_outcome_of_several_processes_is_in_the_folder_and_not_the_launcher_s(waiting: Waiting) -> None:
    waiting.add("stopped", num_processes=2)
    program = "echo 12:34:56 lora.rank: is wrong; echo ======; exit 1"
    Worker(waiting.queue, command=lambda _: ["sh", "-c", program], poll_s=0.01).work()
    assert waiting.outcomes() == {"stopped": ("did not start", 1)}
    (run,) = waiting.queue.in_state("done")
    assert run.entry is not None
    assert run.entry.message == "lora.rank: is wrong"
    waiting.queue.remove("stopped")
    (run,) = waiting.add("stopped", num_processes=2)
    assert run.entry is not None
    (waiting.path / "program").write_text(fake_command(run.entry)[2])
    Worker(waiting.queue, command=lambda _: ["sh", "-c", "sh program; exit 1"], poll_s=0.01).work()
    assert waiting.outcomes() == {"stopped": ("interrupted", 75)}


def test_what_asked_an_earlier_run_to_stop_does_not_stop_the_next(waiting: Waiting) -> None:
    waiting.add("quick-a")
    (waiting.path / "runs" / "quick-a").mkdir()
    (waiting.path / "runs" / "quick-a" / "STOP").touch()
    waiting.work()
    assert not (waiting.path / "runs" / "quick-a" / "STOP").exists()


def test_a_program_that_cannot_be_started_is_over(waiting: Waiting) -> None:
    waiting.add("quick-a")
    Worker(waiting.queue, command=lambda _: ["./no-such-program"], poll_s=0.01).work()
    assert waiting.outcomes() == {"quick-a": ("did not start", None)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train: {step: 3}\n", "did you mean 'steps'?"),
        ("model: {family: theirs.model, path: m}\ndata: {path: d}\n", "theirs.model is code that comes with"),
        (None, "there is no such file"),
    ],
)
def test_a_config_that_is_wrong_or_names_code_of_others_is_never_started(
    waiting: Waiting, text: str | None, words: str
) -> None:
    waiting.add("quick-a")
    config = waiting.path / "configs" / "mine.yaml"
    config.unlink() if text is None else config.write_text(text)
    waiting.work()
    assert (waiting.started(), waiting.outcomes()) == ([], {"quick-a": ("refused", 2)})
    (run,) = waiting.queue.in_state("done")
    assert run.entry is not None
    assert words in run.entry.message


def test_a_run_is_started_from_a_queue_that_the_working_folder_is_not_in(
    waiting: Waiting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    waiting.add("quick-a")
    Worker(Queue(waiting.queue.workspace), command=fake_command, poll_s=0.01).work()
    assert waiting.outcomes() == {"quick-a": ("finished", 0)}


def test_going_on_starts_a_worker_unless_there_is_one_and_says_why_it_ended(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = waiting.path / "program"
    program.write_text("#!/bin/sh\necho $6 is not a workspace\nexit 2\n")
    program.chmod(0o755)
    monkeypatch.setattr(queue_worker, "sys", SimpleNamespace(executable=str(program)))
    waiting.add("long-a")
    with waiting.working():
        waiting.await_start("long-a")
        waiting.queue.pause()
        start_worker(waiting.queue)
        assert waiting.queue.paused() is None
        waiting.end("long-a")
    with pytest.raises(
        UserError, match=f"ended at once: {waiting.path} is not a workspace; see .*worker.log"
    ):
        start_worker(waiting.queue)
