"""Queue runs of a workspace, one config or many variants of it, and have them trained one after the other."""

import argparse
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from diffsynth_lite.cli.arguments import add_config_arguments, command, positive_count
from diffsynth_lite.cli.cluster import (
    add_training_arguments,
    default_gpus,
    ray_words,
    refuse_without_ray,
)
from diffsynth_lite.cli.console import print_lines, print_table
from diffsynth_lite.cli.processes import refuse_group
from diffsynth_lite.cluster.session import HERE, connected
from diffsynth_lite.config import find_config_file
from diffsynth_lite.errors import UserError
from diffsynth_lite.queue.entry import Entry, QueuedRun
from diffsynth_lite.queue.folder import Place, Queue, Snapshot
from diffsynth_lite.redaction import redacted
from diffsynth_lite.workspace import Workspace, is_workspace, open_workspace

if TYPE_CHECKING:
    from diffsynth_lite.queue.worker import Worker

logger = logging.getLogger(__name__)

_COLUMNS = ("state", "name", "config", "device", "node", "time", "outcome")
_LONGEST_OUTCOME = 100
_AT_ONCE = 32
"""Each is a process here, of about 200 MiB, that waits for its nodes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A subcommand of ``diffsynth-lite queue`` for each thing that is done to one."""
    tasks = parser.add_subparsers(title="tasks", required=True, metavar="TASK")
    for name, task, example in (
        ("add", _add, "--config my.yaml lora.rank=4,8,16 --go"),
        ("list", _list, "--json"),
        ("move", _move, "my-rank8 first"),
        ("remove", _remove, "my-rank8"),
        ("pause", _pause, "--workspace my_workspace"),
        ("go", _go, "--workspace my_workspace"),
        ("work", _work, "--workspace my_workspace"),
    ):
        summary = (task.__doc__ or "").splitlines()[0]
        sub = tasks.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        sub.epilog = f"Example: {sub.prog} {example}"
        sub.set_defaults(task=task)
        sub.add_argument(
            "--workspace",
            type=Path,
            metavar="DIR",
            help="folder with configs/ and runs/; add makes it (default: the working folder, if it is one)",
        )
        sub.add_argument("--json", action="store_true", help="print one JSON object")
        if task is _add:
            add_config_arguments(sub)
            add_device_arguments(sub)
            sub.add_argument("--go", action="store_true", help="have a worker start it, as queue go does")
        if task is _work:
            add_worker_arguments(sub)
        if task in (_move, _remove):
            several = "+" if task is _remove else 1
            sub.add_argument("names", nargs=several, metavar="NAME", help="of the run, as list shows it")
        if task is _move:
            sub.add_argument("place", choices=get_args(Place), help="where to")


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """``--device`` and ``--processes``, of each run."""
    parser.add_argument(
        "--device",
        default="",
        metavar="N",
        help="as in CUDA_VISIBLE_DEVICES, such as 1 or 0,1; a cluster chooses by itself (default: any)",
    )
    parser.add_argument(
        "--processes",
        type=positive_count,
        default=1,
        metavar="N",
        help="that train together, a device each (default: 1)",
    )
    parser.add_argument(
        "--nodes",
        type=positive_count,
        default=1,
        metavar="N",
        help="with so many processes each, for a worker with --ray (default: 1)",
    )


def add_worker_arguments(parser: argparse.ArgumentParser) -> None:
    """What :func:`worker_of` needs to know."""
    add_training_arguments(parser, run=False)
    parser.add_argument(
        "--at-once",
        type=positive_count,
        metavar="N",
        help=f"with --ray: runs that are handed to the cluster (default: {_AT_ONCE})",
    )


def run(parsed: argparse.Namespace) -> None:
    """Do one thing to the queue of a workspace."""
    parsed.here = Path.cwd()
    if parsed.task is _add:
        workspace, parsed.entries = open_with_entries(parsed, parsed.config, parsed.overrides)
    else:
        workspace = open_workspace(_place(parsed.workspace))
    os.chdir(workspace.path)  # Paths in its configs are relative to it.
    queue = Queue(workspace)
    parsed.task(parsed, queue)
    if parsed.task is not _add and (parsed.task is not _work or parsed.json):
        _show(parsed, queue)


def open_with_entries(
    parsed: argparse.Namespace, config: str, settings: Sequence[str]
) -> tuple[Workspace, list[Entry]]:
    """The workspace, which is made if it was named, and the entries of a config in it, none of them added.

    No workspace is made for what would not start.

    Args:
        config: a bare name is looked for in the workspace first.
        settings: that may list several values.
    """
    from diffsynth_lite.queue.adding import entries_of, name_in

    workspace = Workspace(_place(parsed.workspace, makes_one=True))
    own = workspace.configs_folder / config
    file = (own if Path(config).name == config and own.is_file() else find_config_file(config)).resolve()
    name_in(workspace, file)
    if workspace.path.is_dir():
        os.chdir(workspace.path)
    entries = entries_of(
        workspace,
        file,
        settings,
        presets=parsed.presets,
        device=parsed.device,
        num_processes=parsed.processes,
        num_nodes=parsed.nodes,
    )
    return open_workspace(workspace.path), entries


def _place(given: Path | None, *, makes_one: bool = False) -> Path:
    """The whole path of the workspace that was named, or that is the working folder."""
    path = Path.cwd() if given is None else given.expanduser()
    if is_workspace(path) or (given is not None and makes_one):
        return path.resolve()
    makes = command("queue", "add", "--workspace", "my_workspace", "--config", "FILE")
    hint = "" if given else "go to one, or name one with --workspace; "
    raise UserError(f"{path}: is not a workspace; {hint}this makes one: {makes}")


def _add(parsed: argparse.Namespace, queue: Queue) -> None:
    """Add the run of a config, or one for each combination of values: key=1,2 key=[a],[b] key='"a, b",c'."""
    entries = parsed.entries
    added = queue.add(entries)
    folders = [entry.folder for entry in entries]
    seen_from = parsed.workspace or Path()
    page = Path(folders[0]).with_name(f"{Path(parsed.config).stem}.html")
    words = *(str(seen_from / folder) for folder in folders), "--out", str(seen_from / page)
    side_by_side = command("report", *words, here=parsed.here) if len(folders) > 1 else ""
    if parsed.go:
        _start(queue)
    snapshot = queue.snapshot()
    if parsed.json:
        ids = {run.id for run in added}
        now = [_as_json(run, queue.workspace) for run in snapshot.runs if run.id in ids]
        _print_json(snapshot, queue.workspace, added=now, side_by_side=side_by_side)
        return
    print_lines(*(f"Added: {run.name}" for run in added), _worked(parsed, snapshot))
    if side_by_side:
        print_lines(f"Side by side: {side_by_side}")


def _list(parsed: argparse.Namespace, queue: Queue) -> None:
    """Show what runs, what waits, and how it went with what is done."""


def _move(parsed: argparse.Namespace, queue: Queue) -> None:
    """Change the place of a run that waits."""
    queue.move(parsed.names[0], parsed.place)


def _remove(parsed: argparse.Namespace, queue: Queue) -> None:
    """Take runs that wait, or are done, out of the queue; their folders stay as they are."""
    for name in parsed.names:
        queue.remove(name)


def _pause(parsed: argparse.Namespace, queue: Queue) -> None:
    """Start no more; what runs goes on."""
    queue.pause()


def _go(parsed: argparse.Namespace, queue: Queue) -> None:
    """Start what waits, in the background: the runs go on when this terminal is closed."""
    _start(queue)


def _start(queue: Queue) -> None:
    from diffsynth_lite.queue.worker import start_worker

    refuse_group(os.environ, "queue go")
    start_worker(queue)


def _work(parsed: argparse.Namespace, queue: Queue) -> None:
    """Start what waits, one run a device, until nothing does: what go does, in this terminal or job."""
    refuse_group(os.environ, "queue work")
    left = what_is_left(parsed)
    with worker_of(parsed, queue) as worker:
        try:
            worker.work()
        except KeyboardInterrupt:
            logger.info("Ended; %s.", left)


def what_is_left(parsed: argparse.Namespace) -> str:
    """What becomes of a run when its worker ends, asked before that has started Ray."""
    return "a run that it started " + ("ends with its Ray" if parsed.ray == HERE else "goes on")


@contextmanager
def worker_of(
    parsed: argparse.Namespace, queue: Queue, *, look: Callable[[], None] = lambda: None
) -> Iterator["Worker"]:
    """Scope of a worker, which has the runs trained here, or on the cluster that the arguments name.

    Args:
        look: called at each look at the queue.
    """
    from diffsynth_lite.queue.worker import Worker
    from diffsynth_lite.ui.jobs import Jobs

    if parsed.ray is None:
        refuse_without_ray(parsed, "gpus_per_node", "max_failures", "at_once")
        yield Worker(queue, holders=Jobs(queue.workspace).holders, look=look)
        return
    with ExitStack() as joined:
        ray = joined.enter_context(connected(parsed.ray))
        if parsed.gpus_per_node is None:
            parsed.gpus_per_node = int(default_gpus(ray, parsed))
        if parsed.ray == HERE:  # one cluster for all of them
            logger.info("Ray was started here, and ends with this worker, as its runs then do.")
            parsed.ray = ray.get_runtime_context().gcs_address
        else:
            joined.close()  # Its errors are known before any run is started.
        words = ray_words(parsed)
        yield Worker(
            queue,
            command=lambda entry: entry.command_on_cluster(words),
            look=look,
            at_once=parsed.at_once or _AT_ONCE,
        )


def _show(parsed: argparse.Namespace, queue: Queue) -> None:
    snapshot = queue.snapshot()
    if parsed.json:
        _print_json(snapshot, queue.workspace)
        return
    rows = [_row(run, queue.workspace) for run in snapshot.runs]
    if rows:
        print_table(_COLUMNS, rows)
    print_lines(_worked(parsed, snapshot) if rows else "Nothing is in the queue.")


def _print_json(snapshot: Snapshot, workspace: Workspace, **more: Any) -> None:
    facts = {"paused": snapshot.paused, "is_worked": snapshot.is_worked}
    runs = [_as_json(run, workspace) for run in snapshot.runs]
    print_lines(json.dumps(redacted({**facts, "runs": runs, **more}), indent=2))


def _as_json(run: QueuedRun, workspace: Workspace) -> dict[str, Any]:
    entry = run.entry.model_dump() | {"node": run.entry.node_in(workspace)} if run.entry else {}
    return {"id": run.id, "name": run.name or run.id, "state": _state(run), "refusal": run.refusal, **entry}


def _state(run: QueuedRun) -> str:
    return "refused" if run.refusal else run.state


def _row(run: QueuedRun, workspace: Workspace) -> dict[str, str]:
    from diffsynth_lite.report.page import duration

    entry = run.entry
    begin = entry.started_at if entry and run.state != "waiting" else 0.0
    end = run.ended_at if run.state == "done" else time.time()
    code = f" (exit code {entry.exit_code})" if entry and entry.exit_code else ""
    outcome = run.refusal or (f"{entry.outcome}{code}: {entry.message}".rstrip(": ") if entry else "")
    lines = redacted(outcome).splitlines() or [""]
    is_cut = len(lines) > 1 or len(lines[0]) > _LONGEST_OUTCOME
    return {
        "state": _state(run),
        "name": run.name or run.id,
        "config": entry.config if entry else "",
        "device": entry.device if entry else "",
        "node": entry.node_in(workspace) if entry else "",
        "time": duration(max(0.0, end - (begin or run.changed_at))),
        "outcome": lines[0][:_LONGEST_OUTCOME] + "..." * is_cut,
    }


def _worked(parsed: argparse.Namespace, snapshot: Snapshot) -> str:
    """Whether what waits will be started, and what would do so."""
    waiting = sum(not run.refusal for run in snapshot.in_state("waiting"))
    there = ("--workspace", str(parsed.workspace)) if parsed.workspace else ()
    go = command("queue", "go", *there, here=parsed.here)
    if snapshot.paused is not None:
        reason = f": {snapshot.paused}" if snapshot.paused else ""
        return f"Paused, so that nothing more is started{reason}. This goes on: {go}"
    if snapshot.is_worked:
        return f"A worker starts what waits ({waiting}), one run a device."
    return f"No worker starts what waits ({waiting}). This does: {go}" if waiting else "Nothing waits."
