"""This file shows Home, with a card of each run and data set, and takes in folders that are elsewhere."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

from anyio import CapacityLimiter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.data.captions import CaptionFiles
from diffsynth_lite.data.folder import is_unicode, list_folder
from diffsynth_lite.data.records import is_video
from diffsynth_lite.data.sources import METADATA_FILES, find_records
from diffsynth_lite.errors import UserError
from diffsynth_lite.report.card import RunCard
from diffsynth_lite.ui.data_sets.items import source_of
from diffsynth_lite.ui.home.disk import routes as disk_routes
from diffsynth_lite.ui.home.example import example_folder
from diffsynth_lite.ui.home.example import routes as example_routes
from diffsynth_lite.ui.home.queue import queue_shown
from diffsynth_lite.ui.home.queue import routes as queue_routes
from diffsynth_lite.ui.home.run_list import KINDS, PENDING, NamedCard, RunList
from diffsynth_lite.ui.jobs import captions_in
from diffsynth_lite.ui.pages import change_route, device, page, workspace_of
from diffsynth_lite.ui.queued import QueuedRuns
from diffsynth_lite.workspace import Workspace

_SHOWN = 4


def routes() -> list[Route]:
    """The routes of this screen."""
    one_by_one = CapacityLimiter(1)  # Each rewrites a file.
    return [
        Route("/", _home),
        Route("/side", _side),
        *queue_routes(),
        *example_routes(),
        *disk_routes(),
        change_route("/add", _add, limiter=one_by_one),
        change_route("/runs/{name}/archive", _archive, limiter=one_by_one),
    ]


def _home(request: Request) -> Response:
    state, workspace = request.app.state, workspace_of(request)
    queued, runs = QueuedRuns(workspace), workspace.runs
    cards = _named(workspace, state.run_pages.cards(queued.without_run() | runs), queued)
    others = (f"{card.name} trains" for card in cards if card.is_live and queued.of(card.run.folder) is None)
    waits_for = next(chain(state.jobs.holders(), others), "")
    # One that has not begun is in the queue only.
    begun = [card for card in cards if (card.word, card.state.name) != ("waiting", "not started")]
    return page(
        request,
        "home/home.html",
        runs=RunList.of(begun, request.query_params),
        kinds=KINDS,
        num_runs=len(runs),
        sizes=state.disk.runs.latest() or {},
        bytes=format_bytes,
        sets=data_set_cards(workspace.data_sets),
        queue=queue_shown(queued, waits_for=waits_for),
        places={queued.resolve(card.run.folder): f"/runs/{quote(card.name)}/" for card in cards},
        has_example=example_folder() is not None,
    )


def _named(workspace: Workspace, runs: Mapping[str, RunCard], queued: QueuedRuns) -> list[NamedCard]:
    archived = workspace.archived_at()
    return [
        NamedCard(
            name=name,
            run=run,
            word=(word := queued.word(run.folder, run.state.name)),
            is_archived=word not in PENDING
            and _seen_at(run) <= archived.get(workspace.shown(run.folder), -1),
        )
        for name, run in runs.items()
    ]


def _seen_at(run: RunCard) -> float:
    return run.state.seen_at or 0.0


def _archive(request: Request, given: dict[str, Any]) -> dict[str, Any]:
    """Leave a run out of Home, until it goes on: {"is_archived": false} brings it back."""
    workspace, name = workspace_of(request), request.path_params["name"]
    run = request.app.state.run_pages.card(name)
    if run is None:
        raise HTTPException(404)
    if given.get("is_archived") is False:
        workspace.archive(run.folder, None)
        return {"message": f"{name} is on Home again."}
    if (word := QueuedRuns(workspace).word(run.folder, run.state.name)) in PENDING:
        raise UserError(f"{name} is {word}; stop it or take it out of the queue first")
    workspace.archive(run.folder, _seen_at(run))
    return {"message": f"{name} is archived: its folder stays as it is, and the filter Archived shows it."}


def _side(request: Request) -> Response:
    """What changes next to every page: the numbers of the navigation in their order, and the first GPU."""
    found = workspace_of(request)
    counts = [len(each) for each in (found.data_sets, found.configs, found.runs)]
    return JSONResponse({"counts": counts, "gpu": device()})


def _add(request: Request, given: dict[str, Any]) -> dict[str, Any]:
    """Show a folder that is elsewhere: {"kind": "data" or "runs", "folder": its whole path}."""
    workspace_of(request).add(str(given.get("kind")), Path(str(given.get("folder"))))
    return {}


@dataclass(frozen=True, kw_only=True)
class DataSetCard:
    """A data set in few words, by the names of its files; none is opened.

    Attributes:
        count: of images and clips, in words.
        uncaptioned: those without a caption file; none where a table has the captions.
        shown: names of the first ones.
        writing: how far the command is that writes captions here; empty where none does.
    """

    name: str
    count: str
    uncaptioned: int = 0
    shown: Sequence[str] = ()
    problem: str = ""
    writing: str = ""


def data_set_cards(data_sets: Mapping[str, Path]) -> list[DataSetCard]:
    """A card for each data set."""
    return [_data_set_card(name, folder) for name, folder in data_sets.items()]


def _data_set_card(name: str, path: Path) -> DataSetCard:
    if not is_unicode(name):  # No address can hold it as it is.
        name = name.encode(errors="backslashreplace").decode()
    try:
        source = source_of(path, None).model_copy(update={"captions": "none", "trigger": "-"})
        found = find_records([source], media_store=path, on_bad_item="skip", logs_skipped=False)
        folder = list_folder(path, allow_outside=False)
    except UserError as error:
        return DataSetCard(name=name, count="", problem=str(error))
    names = [record.name for record in found.records]
    has_table = any(table in folder.files for table in METADATA_FILES)
    captions = CaptionFiles(folder, names)
    return DataSetCard(
        name=name,
        count=_count(names),
        uncaptioned=0 if has_table else sum(not captions.names_of(each) for each in names),
        shown=names[:_SHOWN],
        writing=_writing(path),
    )


def _writing(path: Path) -> str:
    status = captions_in(path)
    if status is None:
        return ""
    if status.preview or status.phase != "captioning":
        return "Writing captions"
    return f"Writing captions {status.done:,} of {status.total:,}"


def _count(names: Sequence[str]) -> str:
    clips = sum(map(is_video, names))
    counts = ((len(names) - clips, "image"), (clips, "clip"))
    return ", ".join(f"{count:,} {noun}{'s' * (count != 1)}" for count, noun in counts if count) or "empty"
