"""The folder of the queue: adding, moving, removing, several commands at once, and files of somebody else."""

import json
import os
import random
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from waiting_runs import Waiting

from diffsynth_lite.errors import UserError
from diffsynth_lite.queue import entry as queue_entry
from diffsynth_lite.queue import folder as queue_folder
from diffsynth_lite.queue.folder import Place, Queue, now
from diffsynth_lite.run_folder.process import Process
from diffsynth_lite.workspace import Workspace

ASKED = {"config": "configs/mine.yaml", "folder": "runs/a"}


def test_moves_give_the_order_of_a_list_however_many_they_are(waiting: Waiting) -> None:
    expected = [f"run-{number}" for number in range(5)]
    waiting.add(*expected)
    chance = random.Random(1)
    for _ in range(100):
        name, place = chance.choice(expected), chance.choice(["first", "up", "down", "last"])
        at = expected.index(name)
        expected.remove(name)
        to = {"first": 0, "up": max(0, at - 1), "down": at + 1, "last": len(expected)}
        expected.insert(to[place], name)
        waiting.queue.move(name, place)
        assert waiting.names("waiting") == expected


def test_a_move_never_takes_the_name_of_one_that_is_done(waiting: Waiting) -> None:
    waiting.add("a", "b")
    done = waiting.queue.path / "done" / "00000500-b.json"
    done.write_text(json.dumps(ASKED))
    waiting.queue.move("b", "first")
    assert waiting.names("waiting") == ["b", "a"]
    assert done.name not in {run.file.name for run in waiting.queue.in_state("waiting")}


def test_a_run_is_in_the_queue_once_and_all_or_none_are_added(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting.add("a")
    with pytest.raises(UserError, match=r"runs/a: is in the queue already \(waiting\)"):
        waiting.add("b", "a")
    with pytest.raises(UserError, match=r"runs/c: is in the queue already"):
        waiting.add("c", "c")
    write = queue_folder.write_text

    def write_few(path: Path, text: str) -> None:
        if path.name.endswith("e.json"):
            raise OSError(28, "No space left on device")
        write(path, text)

    monkeypatch.setattr(queue_folder, "write_text", write_few)
    with pytest.raises(UserError, match=r"nothing was added: .*No space left"):
        waiting.add("d", "e")
    assert waiting.names("waiting") == ["a"]


@pytest.mark.parametrize("name", ["../running/00001000-a.json", "00001000-a/b.json", "a.json", "00001000-a"])
def test_what_somebody_else_seems_to_add_goes_nowhere_else(waiting: Waiting, name: str) -> None:
    waiting.add("b")
    adding = waiting.queue.path / ".adding"
    for content in ("{", json.dumps({name: ASKED}), json.dumps({"00001000-a.json": {"argv": ["rm"]}})):
        adding.write_text(content)
        assert waiting.names("waiting") == ["b"]
        assert not adding.exists()
    assert [path.name for path in waiting.queue.path.rglob("*.json")] == ["00001000-b.json"]


def test_of_what_is_done_the_latest_of_each_run_and_what_ended_today_stay(waiting: Waiting) -> None:
    done, logs = waiting.queue.path / "done", waiting.queue.path / "logs"
    waiting.add("quick-a")
    for number, (name, hours) in enumerate((("a", 90), ("a", 60), ("a", 30), ("b", 9), ("quick-a", 9)), 1):
        entry = ASKED | {"folder": f"runs/{name}", "ended_at": now() - 3600 * hours, "outcome": "finished"}
        (done / f"0000000{number}-{name}.json").write_text(json.dumps(entry))
        (logs / f"0000000{number}-{name}.log").touch()
    (done / "mine.json").write_text("{")
    waiting.work()
    kept = ["00000003-a", "00000004-b", "00000005-quick-a", "00001000-quick-a"]
    assert sorted(path.stem for path in done.iterdir()) == [*kept, "mine"]
    assert sorted(path.stem for path in logs.glob("0*.log")) == kept


def test_removing_leaves_the_folder_and_refuses_what_runs(waiting: Waiting) -> None:
    waiting.add("quick-a", "long-b", "quick-c")
    waiting.queue.remove("quick-c")
    with waiting.working():
        waiting.await_start("long-b")
        with pytest.raises(UserError, match="long-b: runs; a file named STOP in runs/long-b stops it"):
            waiting.queue.remove("long-b")
        waiting.end("long-b")
    waiting.queue.remove("quick-a")
    assert waiting.names("done") == ["long-b"]
    assert (waiting.path / "runs" / "quick-a" / "status.json").exists()
    assert [log.name for log in (waiting.queue.path / "logs").iterdir()] == ["00002000-long-b.log"]
    with pytest.raises(UserError, match="quick-a: is not in the queue, which has long-b"):
        waiting.queue.remove("quick-a")
    with pytest.raises(UserError, match="long-b: is not in the queue, which has nothing"):
        waiting.queue.move("long-b", "first")


def test_a_name_is_that_of_the_run_that_waits_before_one_that_is_done(waiting: Waiting) -> None:
    waiting.add("quick-a")
    waiting.work()
    (again,) = waiting.add("quick-a")
    assert waiting.queue.remove("quick-a").id == again.id
    assert waiting.queue.remove("quick-a").state == "done"


def test_folders_of_one_name_and_long_names_get_names_of_their_own(waiting: Waiting, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere" / "a"
    elsewhere.mkdir(parents=True)
    (elsewhere / "status.json").write_text('{"found_at": {}}')
    waiting.queue.workspace.add("runs", elsewhere)
    waiting.add("a", str(elsewhere), "ä" * 120)
    assert waiting.names("waiting") == ["a", "a~2", "ä" * 100]


def test_commands_at_the_same_time_lose_nothing(waiting: Waiting) -> None:
    def add(first: int) -> None:
        for number in range(first, first + 5):
            Waiting(Queue(Workspace(waiting.path))).add(f"run-{number}")

    threads = [threading.Thread(target=add, args=(first,)) for first in range(0, 20, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    runs = waiting.queue.in_state("waiting")
    assert sorted(run.name for run in runs) == sorted(f"run-{number}" for number in range(20))
    assert len({run.number for run in runs}) == 20


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "file: Invalid JSON"),
        ("[]", "file: Input should be an object"),
        ("{}", "config: Field required"),
        ({"argv": ["rm", "-r", "."]}, "argv: Extra inputs are not permitted"),
        ({"num_processes": "2"}, "num_processes: Input should be a valid integer"),
        ({"num_processes": 0}, "num_processes: Input should be greater"),
        ({"num_processes": 10_000}, "num_processes: Input should be less"),
        ({"settings": "lora.rank=3"}, "settings: Input should be a valid"),
        ({"settings": ["--resume=elsewhere"]}, "settings.0: String should match"),
        ({"settings": ["lora.rank"]}, "settings.0: String should match"),
        ({"presets": ["--config"]}, "presets.0: String should match"),
        ({"config": "--help"}, "config: String should match"),
        ({"device": "0;rm"}, "device: String should match"),
        ({"started_at": "yesterday"}, "started_at: Input should be a valid number"),
        ({"config": "../other.yaml"}, "config: ../other.yaml: is outside of"),
        ({"config": "/etc/passwd"}, "config: /etc/passwd: is outside of"),
        ({"config": "configs/link.yaml"}, "config: configs/link.yaml: is outside of"),
        ({"folder": "../runs/a"}, "output.dir: ../runs/a: is not seen in"),
        ({"folder": "data/a"}, "is not seen in"),
        ({"folder": "runs/link"}, "is not seen in"),
        ({"folder": "~nobody-of-that-name/a"}, "home"),
    ],
)
def test_a_file_of_somebody_else_is_refused_by_name_and_never_started(
    waiting: Waiting, tmp_path: Path, content: str | dict[str, object], words: str
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (waiting.path / "configs" / "link.yaml").symlink_to(tmp_path / "elsewhere")
    (waiting.path / "runs" / "link").symlink_to(tmp_path / "elsewhere")
    waiting.add("quick-b")
    text = content if isinstance(content, str) else json.dumps(ASKED | content)
    (waiting.queue.path / "waiting" / "00000001-a.json").write_text(text)
    waiting.work()
    assert [line.split()[0] for line in waiting.started()] == ["quick-b"]
    (run,) = waiting.queue.snapshot().in_state("waiting")
    assert (run.name, run.entry) == ("a", None)
    assert words in run.refusal
    waiting.queue.remove("a")
    assert waiting.names("waiting") == []


@pytest.mark.parametrize("content", ["{", json.dumps(ASKED | {"folder": "~nobody-of-that-name/a"})])
def test_a_file_of_somebody_else_among_those_that_run_or_are_done_is_shown_as_refused(
    waiting: Waiting, content: str
) -> None:
    waiting.add("quick-b")
    for state in ("running", "done"):
        (waiting.queue.path / state / f"0001-{state}.json").write_text(content)
    waiting.work()
    found = {run.name: bool(run.refusal) for run in waiting.queue.snapshot().in_state("done")}
    assert found == {"running": True, "done": True, "quick-b": False}


def test_what_is_done_is_read_once_unless_it_changes(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting.add("quick-a", "quick-b")
    waiting.work()
    read, files = queue_entry.read_bytes, list[str]()

    def noted(path: Path, *, most_bytes: int) -> bytes:
        files.append(path.name)
        return read(path, most_bytes=most_bytes)

    assert len(waiting.names("done")) == 2
    monkeypatch.setattr(queue_entry, "read_bytes", noted)
    assert len(waiting.names("done")) == 2
    assert files == []
    (waiting.queue.path / "done" / "00001000-quick-a.json").write_text("{")
    assert set(waiting.outcomes()) == {"quick-b"}
    assert files == ["00001000-quick-a.json"]


def test_a_file_that_is_none_of_the_queue_stops_nothing(waiting: Waiting) -> None:
    waiting.add("quick-b")
    for state in ("waiting", "running", "done"):
        (waiting.queue.path / state / "notes.json").write_text("my notes")
        (waiting.queue.path / state / "1-folder.json").mkdir()
    waiting.work()
    assert waiting.outcomes() == {"quick-b": ("finished", 0)}


def test_links_in_the_queue_of_somebody_else_lead_nowhere(waiting: Waiting, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes").write_text("precious")
    (run,) = waiting.add("broken")
    waiting.queue.log_file(run).symlink_to(mine / "notes")
    waiting.work()
    assert "it broke" in waiting.queue.log_file(run).read_text()
    assert (mine / "notes").read_text() == "precious"
    (waiting.queue.path / "logs").rename(tmp_path / "logs")
    (waiting.queue.path / "logs").symlink_to(mine)
    with pytest.raises(UserError, match="logs: is a link; put a folder in its place"):
        waiting.queue.snapshot()


def test_whatever_is_called_paused_pauses(waiting: Waiting) -> None:
    waiting.add("quick-a")
    (waiting.queue.path / "PAUSED").mkdir()
    waiting.work()
    assert (waiting.queue.snapshot().paused, waiting.started()) == ("", [])
    with pytest.raises(UserError, match="PAUSED: cannot be removed"):
        waiting.queue.unpause()


def test_a_command_is_train_of_this_installation_with_the_folder_of_the_run(waiting: Waiting) -> None:
    (one,) = waiting.add("a")
    (several,) = waiting.add("b", num_processes=2)
    assert one.entry is not None
    assert several.entry is not None
    arguments = ["--config", "configs/mine.yaml", "output.dir=runs/a"]
    assert one.entry.command()[1:] == ["-m", "diffsynth_lite.cli.main", "train", *arguments]
    assert several.entry.command()[1:6] == [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
    ]
    assert several.entry.command()[6:9] == ["-m", "diffsynth_lite.cli.train", "--config"]


def test_where_no_lock_is_inherited_a_run_is_known_by_its_process(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_folder, "os", SimpleNamespace(name="nt", fsencode=os.fsencode))
    (run,) = waiting.add("a")
    assert run.entry is not None
    mine = run.entry.model_copy(update={"process": Process.current().as_text()})
    run = waiting.queue.put(run, "running", mine)
    assert waiting.names("running") == ["a"]
    gone = mine.model_copy(update={"process": "process 4194999 on nowhere"})
    waiting.queue.put(run, "running", gone)
    assert waiting.outcomes() == {"a": ("did not start", None)}


def test_a_place_that_is_none_and_a_folder_that_cannot_be_written_are_refused(waiting: Waiting) -> None:
    place: Place = "top"  # type: ignore[assignment]
    with pytest.raises(UserError, match="top: is not a place; there are first, up, down, last"):
        waiting.queue.move("a", place)
    waiting.queue.path.write_text("a file")
    with pytest.raises(UserError, match="queue: cannot be written to"):
        waiting.add("a")


def test_a_file_that_is_written_after_a_moment_is_never_older_than_it(waiting: Waiting) -> None:
    """Files are stamped by a clock that is some milliseconds late, and entries say what came after them."""
    for number in range(50):
        before = now()
        file = waiting.path / str(number)
        file.touch()
        assert file.stat().st_mtime >= before
