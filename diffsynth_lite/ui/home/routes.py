"""This file shows Home, with a card of each run and data set, and takes in folders that are elsewhere."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from diffsynth_lite.data.captions import CaptionFiles
from diffsynth_lite.data.folder import is_unicode, list_folder
from diffsynth_lite.data.records import is_video
from diffsynth_lite.data.sources import METADATA_FILES, find_records
from diffsynth_lite.errors import UserError
from diffsynth_lite.report.card import RunCard
from diffsynth_lite.report.page import duration
from diffsynth_lite.report.record import RunState
from diffsynth_lite.ui.data_sets.items import source_of
from diffsynth_lite.ui.home.example import example_folder
from diffsynth_lite.ui.home.example import routes as example_routes
from diffsynth_lite.ui.home.queue import QueueList
from diffsynth_lite.ui.home.queue import routes as queue_routes
from diffsynth_lite.ui.jobs import captions_in
from diffsynth_lite.ui.pages import change_route, device, page, workspace_of
from diffsynth_lite.ui.queued import QueuedRuns

_SHOWN = 4
_CAN_CONTINUE = ("killed", "interrupted", "stopped", "failed")


def routes() -> list[Route]:
    """The routes of this screen."""
    return [
        Route("/", _home),
        Route("/device", _device),
        *queue_routes(),
        *example_routes(),
        change_route("/add", _add),
    ]


def _home(request: Request) -> Response:
    state = request.app.state
    queued = QueuedRuns(state.workspace)
    cards = [
        NamedCard(name=name, run=run, word=queued.word(run.folder, run.state.name))
        for name, run in state.run_pages.cards().items()
    ]
    cards.sort(key=lambda card: -(card.state.seen_at or math.inf))
    others = (f"{card.name} trains" for card in cards if card.is_live and queued.of(card.run.folder) is None)
    waits_for = state.jobs.captioning() or next(others, "")
    return page(
        request,
        "home/home.html",
        # One that has not begun is in the queue only.
        cards=[card for card in cards if (card.word, card.state.name) != ("waiting", "not started")],
        sets=data_set_cards(state.workspace.data_sets),
        queue=QueueList.of(queued, waits_for=waits_for),
        places={card.run.folder.resolve(): f"/runs/{quote(card.name)}/" for card in cards},
        has_example=example_folder() is not None,
    )


def _device(request: Request) -> Response:
    return JSONResponse(device())


def _add(request: Request, given: dict[str, Any]) -> dict[str, Any]:
    """Show a folder that is elsewhere: {"kind": "data" or "runs", "folder": its whole path}."""
    workspace_of(request).add(str(given.get("kind")), Path(str(given.get("folder"))))
    return {}


@dataclass(frozen=True, kw_only=True)
class NamedCard:
    """A run in few words.

    Attributes:
        name: in the workspace.
        headline: what the person wants to know of a run that trains.
        steps: how far it got, or which of its steps is the best.
        word: the state of the run, or of its process where that has not come to it.
        kind: "finished", "continue" for one that can be continued, or "other".
    """

    name: str
    run: RunCard
    word: str

    @property
    def state(self) -> RunState:
        return self.run.state

    @property
    def is_live(self) -> bool:
        return self.word in ("running", "starting")

    @property
    def about(self) -> str:
        return ", ".join(filter(None, (self.run.model, *self.run.details)))

    @property
    def headline(self) -> str:
        left = self.state.seconds_left
        if self.state.phase:
            return self.state.title
        return "Starting" if left is None else f"{duration(left)} left"

    @property
    def steps(self) -> str:
        total, best = self.state.total_steps, self.run.best_step
        if self.state.name == "finished":
            return f"{self.state.step:,} steps" + (f", best {best:,}" if best is not None else "")
        return f"{self.state.step:,} of {total:,} steps" if total else f"{self.state.step:,} steps"

    @property
    def kind(self) -> str:
        if self.state.name == "finished":
            return "finished"
        return "continue" if self.state.name in _CAN_CONTINUE else "other"


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
