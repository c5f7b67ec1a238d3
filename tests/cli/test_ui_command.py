"""The command that serves the screen: what it prints, refuses, and how it ends."""

import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from diffsynth_lite.cli.main import main
from diffsynth_lite.cli.ui import opens_browser

_UI = (sys.executable, "-m", "diffsynth_lite.cli.main", "ui")


def test_it_prints_one_line_with_the_address_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    command = [*_UI, str(tmp_path / "mine"), "--port", "0", "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            address = line.removeprefix("Open ").partition(" ")[0]
            assert line == f"Open {address} in a browser; Ctrl+C ends it.\n"
            assert urllib.request.urlopen(address).status == 200
            process.send_signal(signal.SIGINT)
            rest, log = process.communicate()
        finally:
            process.kill()
    assert (process.returncode, rest) == (0, "")
    assert "Ended; runs that it started continue." in log
    made = {entry.name for entry in (tmp_path / "mine").iterdir()}
    assert made == {".ui", "configs", "data", "runs", "trash"}


def test_what_it_cannot_serve_is_refused_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for arguments, words in (
            (["--port", port], f"--port {port}: Address already in use; give another, or 0"),
            (["--port", "65536"], "--port 65536: give one from 0"),
            (["--behind", "pod.example"], "--behind pod.example: give the address that the browser shows"),
            (["--behind", "https://pod.example/x"], "give the address that the browser shows"),
            ([str(tmp_path / "file")], "cannot be a workspace: Not a directory"),
            ([str(tmp_path)], "is not a workspace"),
        ):
            caplog.clear()
            assert main(["ui", *arguments, "--no-open"]) == 2
            assert words in caplog.text


@pytest.mark.parametrize(
    ("variables", "opens"),
    [
        ({}, False),
        ({"DISPLAY": ":0"}, True),
        ({"WAYLAND_DISPLAY": "wayland-0"}, True),
        ({"DISPLAY": "localhost:10.0", "SSH_CONNECTION": "x"}, False),
    ],
)
def test_a_browser_opens_where_there_is_a_display_and_no_ssh(variables: dict[str, str], opens: bool) -> None:
    assert opens_browser(variables, "linux") is opens
    assert opens_browser({}, "darwin")
