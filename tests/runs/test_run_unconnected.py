"""Runs on local files need no network, and do not try to use one."""

import subprocess
import sys

import pytest
from tiny_run import LOG_LINE, TinyRun
from unconnected_train import SCRIPT, train_unconnected

CONNECT = """
import socket, sys
from pathlib import Path
from unconnected_train import refuse_connections
refuse_connections(Path(sys.argv[1]))
socket.create_connection((sys.argv[2], 9))
"""


def test_a_run_on_local_files_opens_no_connection(watched_run: TinyRun) -> None:
    notes = watched_run.root / "notes"
    settings = ("train.steps=1", "output.checkpoint_every_steps=1")
    # In a process of its own: also while the libraries are imported.
    done = train_unconnected(notes, *watched_run.arguments, *settings, is_offline=False)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if not LOG_LINE.match(line)] == []
    assert not notes.exists()
    assert (watched_run.folder / "previews" / "grid.png").is_file()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_connection_is_seen_and_refused(tiny_run: TinyRun, host: str) -> None:
    notes = tiny_run.root / "notes"
    command = [sys.executable, "-c", CONNECT, str(notes), host]
    done = subprocess.run(command, cwd=SCRIPT.parent, capture_output=True, text=True, check=False)
    assert "no network in this process" in done.stderr
    assert notes.read_text().startswith("socket.")
