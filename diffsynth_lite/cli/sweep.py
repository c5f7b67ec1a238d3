"""Train a run for each combination of values, one after the other, and show which is best."""

import argparse
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from diffsynth_lite.cli.arguments import add_preset_argument, positive_count
from diffsynth_lite.cli.console import print_lines, print_table
from diffsynth_lite.cli.processes import refuse_group
from diffsynth_lite.cli.queue import (
    add_device_arguments,
    add_worker_arguments,
    open_with_entries,
    what_is_left,
    worker_of,
)
from diffsynth_lite.cli.report import write_page_of
from diffsynth_lite.errors import UserError
from diffsynth_lite.queue.entry import Entry
from diffsynth_lite.queue.folder import Queue
from diffsynth_lite.redaction import redacted
from diffsynth_lite.run_folder.folder import REQUEST_FILES, RunFolder

logger = logging.getLogger(__name__)

_LOOK_S = 10.0
"""Between two looks at what the runs have scored."""
_WAIT_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``diffsynth-lite sweep``."""
    parser.add_argument("config", metavar="CONFIG", help="yaml; a bare name is also looked for in configs/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="one with several: lora.rank=4,8")
    add_preset_argument(parser)
    parser.add_argument("--steps", type=positive_count, metavar="N", help="train.steps of all runs")
    parser.add_argument(
        "--workspace",
        type=Path,
        metavar="DIR",
        help="folder with configs/ and runs/, made if need be (default: the working folder, if it is one)",
    )
    add_device_arguments(parser)
    add_worker_arguments(parser)
    parser.add_argument(
        "--stop-worse",
        action="store_true",
        help="with validation.scores: stop a run that is worse than another one at the same step by more "
        "than the interval of their difference; it can be continued",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(parsed: argparse.Namespace) -> None:
    """Train what is not done, in the queue of the workspace, then print the table."""
    from diffsynth_lite.queue.variants import variants

    refuse_group(os.environ, "sweep")
    steps = [] if parsed.steps is None else [f"train.steps={parsed.steps}"]
    settings = [*parsed.overrides, *steps]
    differs = [variant.differs for variant in variants(settings)]
    if len(differs) < 2:
        raise UserError("sweep: no setting has several values; give some, such as lora.rank=4,8,16")
    workspace, entries = open_with_entries(parsed, parsed.config, settings)
    os.chdir(workspace.path)  # Paths in its configs are relative to it.
    folders = [RunFolder(entry.folder_in(workspace)) for entry in entries]
    runs = {folder.path.name: folder for folder in folders}
    left = what_is_left(parsed)
    try:
        _train(parsed, Queue(workspace), dict(zip(runs, entries, strict=True)), runs)
    except KeyboardInterrupt:
        logger.info("Ended; %s. The same command goes on with the others.", left)
        return
    page = folders[0].path.with_name(f"{Path(parsed.config).stem}.html")
    shown, reports = write_page_of(page, {name: folder.path for name, folder in runs.items()})
    from diffsynth_lite.report.sweep import compare_runs

    swept, reason = compare_runs(reports, differs, _messages(Queue(workspace), folders))
    if parsed.json:
        found = {"runs": [asdict(each) for each in swept], "reason": reason, "page": shown}
        print_lines(json.dumps(redacted(found), indent=2))
        return
    lines = [each.line for each in swept]
    print_table(list(lines[0]), lines)
    failures = [f"{each.name}: {each.message}" for each in swept if each.message]
    print_lines(*redacted(failures), reason, f"Side by side: {shown}")


def _train(
    parsed: argparse.Namespace, queue: Queue, entries: Mapping[str, Entry], runs: Mapping[str, RunFolder]
) -> None:
    """Add the runs that are neither done nor in the queue, and work until none of them waits or runs."""
    from diffsynth_lite.report.sweep import worse_runs

    def pending() -> list[str]:
        entered = [each.entry for each in queue.snapshot().runs if each.state != "done" and each.entry]
        places = [entry.folder_in(queue.workspace) for entry in entered]
        return [name for name, run in runs.items() if run.path in places]

    left_out = [*pending(), *(worse_runs(runs) if parsed.stop_worse else [])]
    new = [
        entry
        for name, entry in entries.items()
        if name not in left_out and not _is_done(runs[name], entry, queue)
    ]
    for added in queue.add(new):
        logger.info("Added: %s", added.name)
    look: Callable[[], None] = StopWorse(runs) if parsed.stop_worse else lambda: None
    while queue.is_worked() and pending():
        look()
        time.sleep(_WAIT_S)
    if pending():
        with worker_of(parsed, queue, look=look) as worker:
            worker.work()


def _messages(queue: Queue, folders: Sequence[RunFolder]) -> list[str]:
    """Why each run did not start, or did not finish, as the queue knows it; empty where it did."""
    entries = [each.entry for each in queue.in_state("done") if each.entry]
    known = {entry.folder_in(queue.workspace): entry.message for entry in entries}
    return [known.get(folder.path, "") for folder in folders]


def _is_done(run: RunFolder, entry: Entry, queue: Queue) -> bool:
    status, steps = run.read_status() or {}, entry.load(queue.workspace).config.train.steps
    return status.get("state") == "finished" and int(status.get("step") or 0) >= steps


class StopWorse:
    """Asks runs that train to stop where they are worse than another one, when called, every 10 s at most."""

    def __init__(self, runs: Mapping[str, RunFolder]) -> None:
        self._runs, self._due_at = runs, 0.0

    def __call__(self) -> None:
        from diffsynth_lite.report.sweep import worse_runs

        if time.monotonic() < self._due_at:
            return
        self._due_at = time.monotonic() + _LOOK_S
        for name in worse_runs(self._runs):
            run = self._runs[name]
            if run.trains():
                logger.info("%s scores worse than another run at the same step, and is stopped.", name)
                (run.path / REQUEST_FILES["stop"]).touch()
