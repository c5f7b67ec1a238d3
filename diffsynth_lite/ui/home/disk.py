"""This file shows what runs, caches and models take of the disk, and frees what a person wants freed."""

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from anyio import CapacityLimiter
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from diffsynth_lite.config import Config, load_config
from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.errors import UserError
from diffsynth_lite.queue.entry import QueueState
from diffsynth_lite.queue.folder import Queue
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.ui.home.models import Model, bytes_in, delete_model, folder_of, models
from diffsynth_lite.ui.jobs import Job, Jobs, command_line
from diffsynth_lite.ui.pages import change_route, page, workspace_of
from diffsynth_lite.ui.queued import is_running
from diffsynth_lite.workspace import Workspace

WOULD_DELETE = "Would delete"
"""With which ``cache prune --dry-run`` begins where there is something to delete."""
_LOG_LINES = 5
_DRY = "--dry-run"
_COUNT_EVERY_S = 30.0
_PAUSE_MULTIPLE = 20
"""Pause between two counts, in times of the last one's duration."""

_Count = TypeVar("_Count")


class Counted(Generic[_Count]):
    """What takes long to count: counted in a thread when somebody looks, at most every 30 s."""

    def __init__(self, count: Callable[[], _Count]) -> None:
        self._count, self._lock = count, threading.Lock()
        self._latest: _Count | None = None
        self._due_at, self._is_counting, self._is_old = 0.0, False, False

    def latest(self) -> _Count | None:
        """The last count; None before the first one is there."""
        with self._lock:
            if time.monotonic() >= self._due_at and not self._is_counting:
                self._is_counting = True
                threading.Thread(target=self._renew, daemon=True).start()
            return self._latest

    def forget(self) -> None:
        """Count again at the next look, also what is being counted now."""
        self._due_at, self._is_old = 0.0, True

    def _renew(self) -> None:
        started, self._is_old = time.monotonic(), False
        try:
            with suppress(UserError):  # of damaged settings, which the page that reads them names
                self._latest = self._count()
        finally:
            ended = time.monotonic()
            pause = max(_COUNT_EVERY_S, _PAUSE_MULTIPLE * (ended - started))
            self._due_at = 0.0 if self._is_old else ended + pause
            self._is_counting = False


@dataclass(frozen=True)
class Cache:
    """A folder of encoded data, and the names of the configs that use it."""

    folder: Path
    num_bytes: int
    configs: list[str]

    @property
    def words(self) -> list[str]:
        """The command that looks what of it none of them needs."""
        words = [word for name in self.configs for word in ("--config", f"configs/{name}.yaml")]
        return ["cache", "prune", *words, _DRY]


class DiskUse:
    """What a workspace takes of the disk, as far as it has been counted.

    Attributes:
        runs: bytes of each run folder.
        others: caches, and models or why there is no list of them.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._sizes: dict[Path, tuple[object, int]] = {}
        self.runs = Counted(self._count_runs)
        self.others = Counted(lambda: (self.caches(), *self._models()))

    def caches(self) -> list[Cache]:
        """The caches of all configs."""
        users: dict[Path, list[str]] = {}
        for name, config in readable(self._workspace)[0].items():
            if config.data.cache:
                folder = folder_of(config.data.cache_dir, self._workspace.path)
                users.setdefault(folder, []).append(name)
        return [Cache(folder, bytes_in(folder), names) for folder, names in users.items()]

    def pruning(self, cache: Cache) -> Job:
        """The ``cache prune`` that was started last for a cache."""
        return Job.of(self._workspace, "prune", cache.folder)

    def prune(self, folder: str, *, is_dry: bool) -> None:
        """Start ``cache prune`` for a cache, which deletes nothing while a run trains.

        Raises:
            UserError: it may take what somebody needs, or runs already.
        """
        cache = next((cache for cache in self.caches() if str(cache.folder) == folder), None)
        if cache is None:
            raise UserError("No config uses this cache any more; look again")
        if problems := readable(self._workspace)[1]:
            raise UserError(f"{problems[0]}. What that config needs is not known: mend or remove it first")
        job, workspace = self.pruning(cache), self._workspace
        seen = {name: workspace.configs[name].stat().st_mtime_ns for name in cache.configs}
        if is_dry:
            job.start(cache.words, workspace, note=seen)
            return
        if not finds_some(job) or job.note != seen:
            raise UserError(f"{cache.folder}: what would be deleted is not as it was shown; look again")
        with Queue(workspace).changing():  # No worker starts a run meanwhile; then it waits for this.
            if busy := _busy(workspace, "running"):
                raise UserError(f"{busy[0][0]} runs, and may need what would be deleted; stop it or wait")
            job.start([*cache.words[:-1], "--yes"], workspace)

    def _models(self) -> tuple[list[Model], str]:
        try:
            return models(readable(self._workspace)[0], self._workspace.path), ""
        except OSError as error:  # of the hub's cache, such as a folder of another user
            return [], f"{error.filename or 'The cache of models'}: {error.strerror or error}"

    def _count_runs(self) -> dict[Path, int]:
        """Only folders that have changed since the last count are walked."""
        now = {folder: RunFolder(folder).changes() for folder in self._workspace.runs.values()}
        for folder, changes in now.items():
            if self._sizes.get(folder, (None,))[0] != changes:
                self._sizes[folder] = changes, bytes_in(folder)
        self._sizes = {folder: self._sizes[folder] for folder in now}
        return {folder: size for folder, (_, size) in self._sizes.items()}


def routes() -> list[Route]:
    """The routes of this screen."""
    one_by_one = CapacityLimiter(1)
    return [
        Route("/disk", _show),
        change_route("/disk/prune", _prune, limiter=one_by_one),
        change_route("/disk/delete", _delete, limiter=one_by_one),
    ]


def readable(workspace: Workspace) -> tuple[dict[str, Config], list[str]]:
    """The configs of a workspace, and what is wrong with those that cannot be read."""
    configs, problems = {}, []
    for name, path in workspace.configs.items():
        try:
            configs[name] = load_config(path).config
        except UserError as error:
            problems.append(f"configs/{path.name}: {str(error).splitlines()[0].removeprefix(f'{path}: ')}")
    return configs, problems


def finds_some(job: Job) -> bool:
    """Whether a ``cache prune`` has found something to delete, which is still there."""
    has_looked = _DRY in job.words and not job.is_alive
    return has_looked and any(WOULD_DELETE in line for line in job.log(_LOG_LINES))


def _show(request: Request) -> Response:
    disk: DiskUse = request.app.state.disk
    caches, models, problem = disk.others.latest() or (None, None, "")
    return page(
        request,
        "home/disk.html",
        runs=disk.runs.latest(),
        caches=caches,
        models=models,
        problem=problem,
        pruning=disk.pruning,
        command_line=command_line,
        finds_some=finds_some,
        bytes=format_bytes,
    )


def _prune(request: Request, given: dict[str, Any]) -> dict[str, Any]:
    """Look what of a cache no config needs: {"cache": its folder, "do": "look"}; "delete" deletes that."""
    disk: DiskUse = request.app.state.disk
    disk.prune(str(given.get("cache")), is_dry=given.get("do") != "delete")
    disk.others.forget()
    return {}


def _delete(request: Request, given: dict[str, Any]) -> dict[str, Any]:
    """Delete a model from the hub's cache: {"model": its id}."""
    state, workspace, model = request.app.state, workspace_of(request), str(given.get("model"))
    jobs: Jobs = state.jobs
    with Queue(workspace).changing():  # No worker starts a run meanwhile, nor a screen captions.
        if holders := jobs.holders():
            raise UserError(f"{holders[0]}: may use it; stop that first, or wait until it has ended")
        busy = _busy(workspace, "running", "waiting")
        state.studio.end()
        freed = delete_model(model, busy, workspace.path)
    state.disk.others.forget()
    return {"message": f"{model} is deleted: {format_bytes(freed)} are free."}


def _busy(workspace: Workspace, *states: QueueState) -> list[tuple[str, Config]]:
    """The runs that train, and those of the queue in these states, with their configs.

    Raises:
        UserError: the settings of a run that trains cannot be read.
    """
    queue, found = Queue(workspace), list[tuple[str, Config]]()
    for run in (run for state in states for run in queue.in_state(state)):
        with suppress(UserError) if run.state == "waiting" else nullcontext():  # that one cannot start
            found += [(run.name, run.entry.load(workspace).config)] if run.entry else []
    running = [(name, RunFolder(folder)) for name, folder in workspace.runs.items() if is_running(folder)]
    return found + [(name, load_config(run.resolved_file).config) for name, run in running]
