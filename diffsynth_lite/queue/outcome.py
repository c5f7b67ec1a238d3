"""This file finds out how a run of the queue ended: by its exit code, its folder and its log."""

import errno
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from diffsynth_lite.files import DISK_FULL, free_disk_bytes
from diffsynth_lite.queue.entry import Entry
from diffsynth_lite.redaction import redacted
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.workspace import Workspace

_EXIT_REFUSED = 2
_TAIL_BYTES = 64 * 1024
_LONGEST_MESSAGE = 2000
_NUM_LINES = 100
_LEAST_FREE_BYTES = 1 << 20
_TIME = re.compile(r"^\d\d:\d\d:\d\d ")
"""Begins a line of the log."""
_FULL_WORDS = ("no space left", *(os.strerror(number).lower() for number in (errno.ENOSPC, *DISK_FULL[1:])))


def ended(entry: Entry, workspace: Workspace, *, exit_code: int | None, log: Path, at: float) -> Entry:
    """The entry of a run that has ended, with how.

    Args:
        exit_code: of its process; None where nobody knows it.
        at: when, as far as that is known, in seconds since 1970.
    """
    run = RunFolder(entry.folder_in(workspace))
    status = (run.read_status() or {}) if written_at(run.status_file) >= entry.started_at else {}
    if exit_code is None or entry.num_processes > 1:  # A launcher's own is 1, whatever the run's was.
        known = status.get("exit_code")
        exit_code = known if isinstance(known, int) else exit_code
    outcome = _outcome(status, exit_code)
    message = "" if outcome in ("finished", "killed") else str(status.get("message", ""))
    if outcome in ("refused", "did not start"):
        message = _last_words(log, is_launched=entry.num_processes > 1)
    return entry.model_copy(
        update={
            "ended_at": at,
            "exit_code": exit_code,
            "outcome": outcome,
            "message": redacted(message)[:_LONGEST_MESSAGE],
        }
    )


def shows_full_disk(entry: Entry, workspace: Workspace) -> bool:
    """Whether a run ended as its disk is full, so that the next one would do so, too."""
    if entry.outcome == "finished":
        return False
    is_named = any(words in entry.message.lower() for words in _FULL_WORDS)
    return is_named or free_disk_bytes(entry.folder_in(workspace)) < _LEAST_FREE_BYTES


def log_lines(log: Path, *, num_lines: int) -> list[str]:
    """The last lines of a log, with secrets masked; none of one that is a link."""
    if log.is_symlink():
        return []
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        text = file.read(_TAIL_BYTES).decode(errors="replace").replace("\r\n", "\n")
        lines = [line.rpartition("\r")[2] for line in text.splitlines()]
        return [redacted(line) for line in lines if line.strip()][-num_lines:]
    return []


def _last_words(log: Path, *, is_launched: bool) -> str:
    """The last line of a log; a launcher prints a summary of its own below what ``train`` logged."""
    lines = log_lines(log, num_lines=_NUM_LINES)
    logged = [line for line in lines if _TIME.match(line)] if is_launched else []
    return _TIME.sub("", (logged or lines or [""])[-1])


def _outcome(status: dict[str, Any], exit_code: int | None) -> str:
    state = str(status.get("state", ""))
    if exit_code == 0:
        return "finished"
    # A continuation that was refused has left the status of before, written again.
    if exit_code == _EXIT_REFUSED and state != "failed":
        return "refused"
    if not state:
        return "did not start"
    return "killed" if state == "running" else state


def written_at(file: Path) -> float:
    """When a file was changed last, in seconds since 1970; 0 where there is none."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
