"""What a run is asked for between its steps."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diffsynth_lite.training.requests import Requests, every, remove_old_requests


def never(step: int) -> bool:
    return False


class Asked:
    """The requests of a run in ``folder``, and what was done for them."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.done: list[tuple[str, int]] = []
        self.signals = SimpleNamespace(asked=False)
        self.requests = Requests(
            folder=folder,
            signals=self.signals,
            accelerator=SimpleNamespace(num_processes=1, is_main_process=True),
            save=lambda step: self.done.append(("save", step)),
            sample=lambda step: self.done.append(("sample", step)),
            **({"save_every_minutes": None, "saves_at": never, "samples_at": never} | settings),
        )

    def after(self, step: int) -> list[tuple[str, int]]:
        self.done.clear()
        self.requests.after_step(SimpleNamespace(step=step))
        return list(self.done)


@pytest.mark.parametrize("name", ["SAVE", "SAMPLE"])
def test_a_file_asks_once_and_is_gone(tmp_path: Path, name: str) -> None:
    asked = Asked(tmp_path)
    assert asked.after(1) == []
    (tmp_path / name).write_text("please")
    assert asked.after(2) == [(name.lower(), 2)]
    assert asked.after(3) == []
    assert list(tmp_path.iterdir()) == []
    assert not asked.requests.stop


def test_previews_come_before_the_checkpoint_that_may_be_the_best(tmp_path: Path) -> None:
    for name in ("SAVE", "SAMPLE"):
        (tmp_path / name).touch()
    assert Asked(tmp_path).after(1) == [("sample", 1), ("save", 1)]


def test_what_is_planned_and_asked_for_at_one_step_is_done_once_the_evaluation_first(tmp_path: Path) -> None:
    asked = Asked(tmp_path, saves_at=every(2, last_step=5), samples_at=every(None, last_step=5))
    (tmp_path / "SAMPLE").touch()
    (tmp_path / "SAVE").touch()
    assert asked.after(1) == [("sample", 1), ("save", 1)]
    (tmp_path / "SAMPLE").touch()
    assert asked.after(2) == [("sample", 2), ("save", 2)]
    assert asked.after(3) == []
    (tmp_path / "SAVE").touch()
    assert asked.after(4) == [("save", 4)]
    assert asked.after(5) == [("sample", 5), ("save", 5)]


def test_a_file_or_a_signal_stops(tmp_path: Path) -> None:
    by_file, by_signal = Asked(tmp_path), Asked(tmp_path)
    (tmp_path / "STOP").touch()
    by_file.after(1)
    by_signal.after(1)
    assert (by_file.requests.stop, by_signal.requests.stop) == (True, False)
    by_signal.signals.asked = True
    by_signal.after(2)
    assert by_signal.requests.stop


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
    assert Asked(tmp_path).after(1) == []
    assert "so it is no request" in caplog.text


def test_time_without_a_save_asks_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("diffsynth_lite.training.requests.time.monotonic", lambda: now[0])
    asked = Asked(tmp_path, save_every_minutes=2)
    seen = []
    for step in range(1, 8):
        now[0] += 50
        seen += asked.after(step)
    assert seen == [("save", 3), ("save", 6)]


def test_a_planned_save_counts_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("diffsynth_lite.training.requests.time.monotonic", lambda: now[0])
    asked = Asked(tmp_path, save_every_minutes=2, saves_at=every(2, last_step=9))
    seen = []
    for step in range(1, 8):
        now[0] += 50
        seen += asked.after(step)
    assert seen == [("save", 2), ("save", 4), ("save", 6)]


def test_any_process_that_is_asked_to_stop_stops_all_and_only_the_main_one_looks_at_files(
    tmp_path: Path,
) -> None:
    (tmp_path / "SAVE").touch()
    asked = Asked(tmp_path)
    sent = []

    def reduce(flags: Any, reduction: str) -> Any:
        sent.append((flags.tolist(), reduction))
        return flags + flags.new_tensor([1, 0, 1])  # what another process adds

    asked.requests.accelerator = SimpleNamespace(
        num_processes=2, is_main_process=False, device="cpu", reduce=reduce
    )
    assert asked.after(4) == [("sample", 4)]
    assert asked.requests.stop
    assert sent == [([0, 0, 0], "sum")]
    assert (tmp_path / "SAVE").exists()
