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
from diffsynth_lite.cli.queue import add_device_arguments, open_with_entries
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
    folders = {Path(entry.folder).name: entry.folder_in(workspace) for entry in entries}
    queue = Queue(workspace)
    try:
        _train(queue, entries, folders, stops=parsed.stop_worse)
    except KeyboardInterrupt:
        logger.info("Ended; a run that it started goes on. The same command goes on with the others.")
        return
    page = next(iter(folders.values())).with_name(f"{Path(parsed.config).stem}.html")
    shown, reports = write_page_of(page, folders)
    from diffsynth_lite.report.sweep import compare_runs

    sweep = compare_runs(reports, differs)
    if parsed.json:
        print_lines(json.dumps(redacted({**asdict(sweep), "page": shown}), indent=2))
        return
    print_table(sweep.columns, [each.line() for each in sweep.runs])
    print_lines(sweep.reason, f"Side by side: {shown}")


def _train(queue: Queue, entries: Sequence[Entry], folders: dict[str, Path], *, stops: bool) -> None:
    """Add the runs that are neither done nor in the queue, and work until none of them waits or runs."""
    from diffsynth_lite.queue.worker import Worker
    from diffsynth_lite.report.sweep import worse_runs
    from diffsynth_lite.ui.jobs import Jobs

    pending, ours = _pending(queue), set(folders.values())
    left_out = worse_runs(folders) if stops else []
    new = [
        entry
        for (name, folder), entry in zip(folders.items(), entries, strict=True)
        if not (folder in pending or name in left_out or _is_done(entry, queue))
    ]
    for run in queue.add(new):
        logger.info("Added: %s", run.name)
    look: Callable[[], None] = StopWorse(folders) if stops else lambda: None
    while queue.is_worked() and _pending(queue) & ours:
        look()
        time.sleep(_WAIT_S)
    if _pending(queue) & ours:
        Worker(queue, holders=Jobs(queue.workspace).holders, look=look).work()


def _pending(queue: Queue) -> set[Path]:
    """The folders of the runs that wait or run."""
    runs = [run for run in queue.snapshot().runs if run.state != "done"]
    return {run.entry.folder_in(queue.workspace) for run in runs if run.entry}


def _is_done(entry: Entry, queue: Queue) -> bool:
    status = RunFolder(entry.folder_in(queue.workspace)).read_status() or {}
    steps = entry.load(queue.workspace).config.train.steps
    return status.get("state") == "finished" and int(status.get("step") or 0) >= steps


class StopWorse:
    """Asks runs that train to stop where they are worse than another one, each time that it is called, but
    at most every ten seconds.

    Args:
        folders: of the runs that are compared, by name.
    """

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self._folders = folders
        self._due_at = 0.0

    def __call__(self) -> None:
        from diffsynth_lite.report.sweep import worse_runs

        if time.monotonic() < self._due_at:
            return
        self._due_at = time.monotonic() + _LOOK_S
        for name in worse_runs(self._folders):
            run = RunFolder(self._folders[name])
            if run.trains_here():
                logger.info("%s scores worse than another run at the same step, and is stopped.", name)
                (run.path / REQUEST_FILES["stop"]).touch()
