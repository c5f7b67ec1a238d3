"""This file shows the queue on Home, and changes it as its buttons say."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import Route

from diffsynth_lite.queue.entry import QueuedRun
from diffsynth_lite.queue.folder import Queue
from diffsynth_lite.queue.worker import start_worker
from diffsynth_lite.ui.pages import change_route, workspace_of
from diffsynth_lite.ui.queued import QueuedRuns

_LATELY_S = 24 * 60 * 60
_MOST_ENDED = 5


def routes() -> list[Route]:
    """The routes of the buttons."""
    return [change_route("/queue/{action}", _act)]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A run of the queue in few words.

    Attributes:
        key: by which its buttons name it.
        folder: of the run; None where its file is refused.
        word: its state, or how it ended.
        about: what it was given besides its config, or why it did not finish.
    """

    key: str
    name: str
    state: str
    folder: Path | None
    word: str
    about: str

    @classmethod
    def of(cls, run: QueuedRun, queue: Queue) -> "Row":
        """What is shown of an entry."""
        entry, name = run.entry, run.name or run.id
        if entry is None:
            return cls(key=run.id, name=name, state=run.state, folder=None, word="refused", about=run.refusal)
        node = entry.node_in(queue.workspace)
        given = (
            *(entry.config, *entry.settings, f"device {entry.device}" if entry.device else ""),
            f"on {node}" if node else "",
        )
        about = entry.message if run.state == "done" else ", ".join(filter(None, given))
        return cls(
            # Its number changes as it moves.
            key=name if run.state == "waiting" else run.id,
            name=name,
            state=run.state,
            folder=entry.folder_in(queue.workspace),
            word=entry.outcome or run.state,
            about=about,
        )


def queue_shown(runs: QueuedRuns, *, waits_for: str) -> dict[str, Any]:
    """The queue at a moment, for the template; ``ended`` are runs done since yesterday, the latest first.

    Args:
        waits_for: what has the device and is not of the queue; empty for nothing.
    """
    done = reversed(runs.snapshot.in_state("done"))
    lately = [run for run in done if run.ended_at > time.time() - _LATELY_S][:_MOST_ENDED]
    running, waiting = (runs.snapshot.in_state(state) for state in ("running", "waiting"))
    shown = {"running": running, "waiting": waiting, "ended": lately}
    return {
        **{name: [Row.of(run, runs.queue) for run in each] for name, each in shown.items()},
        "num_startable": len(runs.waiting),
        "paused": runs.snapshot.paused,
        "needs_go": runs.needs_go,
        "waits_for": waits_for,
    }


def _act(request: Request, given: dict[str, Any]) -> dict[str, Any]:
    """Do what a button says: {"run": its key} for up, down and remove; go and pause are for all."""
    queue, action, key = Queue(workspace_of(request)), request.path_params["action"], str(given.get("run"))
    if action == "go":
        start_worker(queue)
    elif action == "pause":
        queue.pause()
        return {"message": "Nothing more is started; what runs goes on."}
    elif action == "remove":
        run = queue.remove(key)
        return (
            {"go": "/"} if given.get("is_left") else {"message": f"{run.name or run.id} is out of the queue."}
        )
    elif action in ("up", "down"):
        queue.move(key, action)
        return {"message": f"{key} was moved {action}."}
    else:
        raise HTTPException(404)
    return {}
