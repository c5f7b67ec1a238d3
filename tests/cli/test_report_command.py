"""The pages of runs as a command: what it writes, what it refuses, and that it ends."""

from collections.abc import Sequence
from pathlib import Path
from socket import socket

import pytest

from diffsynth_lite.cli.main import main
from diffsynth_lite.run_folder.folder import RunFolder, find_runs
from diffsynth_lite.ui.guard import LOOPBACK, Guard


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with two runs of one name, and with another folder."""
    for place in ("a/mine", "b/mine"):
        (tmp_path / place).mkdir(parents=True)
        RunFolder(tmp_path / place).write_status("finished", exit_code=0, step=7, message="finished")
    (tmp_path / "a" / "data").mkdir()
    return tmp_path


def test_runs_are_found_where_they_are_and_have_different_names(runs: Path) -> None:
    assert list(find_runs([runs / "a"])) == ["mine"]
    assert list(find_runs([runs / "b", runs / "a" / "mine", runs / "a"])) == ["b/mine", "a/mine"]
    assert find_runs([runs]) == {}


def test_each_run_gets_its_page_and_several_one_more(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(runs)
    assert main(["report", "a", "a/data", "b/mine"]) == 0
    assert capsys.readouterr().out.split() == [
        *("Page:", "a/mine/report.html", "Page:", "b/mine/report.html", "Page:", "report.html")
    ]
    assert "Step</dt><dd>7" in (runs / "a" / "mine" / "report.html").read_text()
    assert 'href="a/mine/report.html">a/mine</a>' in (runs / "report.html").read_text()


def test_a_page_may_be_written_elsewhere(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "[x]:abc:").mkdir()
    assert main(["report", str(runs / "a"), "--out", str(runs / "[x]:abc:" / "one.html")]) == 0
    assert capsys.readouterr().out.strip().endswith("[x]:abc:/one.html")
    (runs / "[x]:abc:" / "one.html").rename(runs / "b" / "one.html")
    assert 'href="../a/mine/status.json"' in (runs / "b" / "one.html").read_text()
    assert not (runs / "a" / "mine" / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: no such folder"),
        (["a/data"], "no run in a/data"),
        (["a", "--port", "80"], "--port has no effect without --serve"),
        (["a", "--serve", "--out", "x.html"], "--out has no effect with --serve"),
        (["a", "--serve", "--port", "65536"], "--port 65536: give one from 0"),
        (["a", "--out", "a/data"], "a/data: cannot be written: Is a directory"),
    ],
)
def test_what_cannot_be_is_an_error_in_one_line(
    runs: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(runs)
    assert main(["report", *arguments]) == 2
    [line] = caplog.messages
    assert message in line


def test_it_prints_where_it_serves_until_ctrl_c(
    runs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def press_ctrl_c(guard: Guard, sockets: Sequence[socket]) -> None:
        assert main(["report", str(runs), "--serve", "--port", str(sockets[0].getsockname()[1])]) == 2
        raise KeyboardInterrupt

    monkeypatch.setattr("diffsynth_lite.ui.server.serve", press_ctrl_c)
    assert main(["report", str(runs / "a"), "--serve", "--port", "0"]) == 0
    assert f"Open http://{LOOPBACK}:" in capsys.readouterr().out
    assert "Address already in use; give another, or 0 for any that is free" in caplog.text
