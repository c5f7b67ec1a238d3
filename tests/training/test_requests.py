"""What a run is asked for between its steps."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diffsynth_lite.training.requests import Asked, Requests, remove_old_requests

NOTHING = Asked(stop=False, save=False, evaluate=False)


def requests_of(folder: Path, *, minutes: float | None = None, **process: Any) -> Requests:
    """The requests of a run in ``folder``, whose signals ask for nothing yet."""
    accelerator = SimpleNamespace(**({"num_processes": 1, "is_main_process": True} | process))
    return Requests(folder, SimpleNamespace(asked=False), accelerator, minutes)


@pytest.mark.parametrize(("name", "what"), [("SAVE", "save"), ("SAMPLE", "evaluate"), ("STOP", "stop")])
def test_a_file_asks_once_and_is_gone(tmp_path: Path, name: str, what: str) -> None:
    requests = requests_of(tmp_path)
    assert requests.gather() == NOTHING
    (tmp_path / name).write_text("please")
    assert requests.gather() == NOTHING._replace(**{what: True})
    assert requests.gather() == NOTHING
    assert list(tmp_path.iterdir()) == []


def test_a_signal_stops(tmp_path: Path) -> None:
    requests = requests_of(tmp_path)
    requests.signals.asked = True
    assert requests.gather() == NOTHING._replace(stop=True)


def test_files_from_before_the_start_ask_for_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "STOP").touch()
    (tmp_path / "other").touch()
    remove_old_requests(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    assert "STOP was there before this start" in caplog.text


def test_a_folder_of_that_name_is_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "SAVE").mkdir()
    assert requests_of(tmp_path).gather() == NOTHING
    assert "so it is no request" in caplog.text


@pytest.mark.parametrize(("planned", "saved_after"), [((), [3, 6]), ((2, 4, 6), [2, 4, 6])])
def test_time_without_a_save_asks_for_one_and_a_planned_save_counts_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planned: Sequence[int], saved_after: list[int]
) -> None:
    now = [1000.0]
    monkeypatch.setattr("diffsynth_lite.training.requests.time.monotonic", lambda: now[0])
    requests = requests_of(tmp_path, minutes=2)
    saves = []
    for step in range(1, 8):
        now[0] += 50
        if requests.gather().save or step in planned:
            saves.append(step)
            requests.note_save()
    assert saves == saved_after


def test_any_process_that_is_asked_to_stop_stops_all_and_only_the_main_one_looks_at_files(
    tmp_path: Path,
) -> None:
    (tmp_path / "SAVE").touch()
    sent = []

    def reduce(flags: Any, reduction: str) -> Any:
        sent.append((flags.tolist(), reduction))
        return flags + flags.new_tensor([1, 0, 1])  # what another process adds

    requests = requests_of(tmp_path, num_processes=2, is_main_process=False, device="cpu", reduce=reduce)
    assert requests.gather() == Asked(stop=True, save=False, evaluate=True)
    assert sent == [([0, 0, 0], "sum")]
    assert (tmp_path / "SAVE").exists()
