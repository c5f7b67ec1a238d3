"""Runs on local files need no network, and do not try to use one."""

import os
import subprocess
import sys

import pytest
from accelerate.commands import launch
from tiny_run import LOG_LINE, TinyRun, forked
from unconnected_train import SCRIPT

CONNECT = """
import socket, sys
from pathlib import Path
from unconnected_train import refuse_connections
refuse_connections(Path(sys.argv[1]))
socket.create_connection((sys.argv[2], 9))
"""


LAUNCH = ("--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no")


def test_accelerate_launches_a_run_on_local_files_which_opens_no_connection(
    watched_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = watched_run.root / "notes"
    settings = ("train.steps=1", "output.checkpoint_every_steps=1")
    for name in (name for name in os.environ if name.startswith("HF_")):
        monkeypatch.delenv(name)
    # It starts the command in an interpreter of its own: also while the libraries are imported.
    program = forked(watched_run, *settings, script=(launch.__file__, *LAUNCH, SCRIPT, notes))
    assert program.wait() == 0, program.printed()
    assert [line for line in program.printed().splitlines() if not LOG_LINE.match(line)] == []
    assert not notes.exists()
    assert (watched_run.folder / "previews" / "grid.png").is_file()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_connection_is_seen_and_refused(tiny_run: TinyRun, host: str) -> None:
    notes = tiny_run.root / "notes"
    command = [sys.executable, "-c", CONNECT, str(notes), host]
    done = subprocess.run(command, cwd=SCRIPT.parent, capture_output=True, text=True, check=False)
    assert "no network in this process" in done.stderr
    assert notes.read_text().startswith("socket.")
