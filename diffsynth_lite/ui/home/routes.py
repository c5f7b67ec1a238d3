"""This file shows Home, and takes in what is changed there."""

from collections import Counter
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from diffsynth_lite.errors import UserError
from diffsynth_lite.ui.home.cards import data_set_cards, run_cards
from diffsynth_lite.ui.pages import device, page, read_json, refused
from diffsynth_lite.workspace import Workspace


def routes() -> list[Route]:
    """The routes of this screen."""
    return [
        Route("/", _home),
        Route("/device", _device),
        Route("/add", _add, methods=["POST"]),
    ]


def _home(request: Request) -> Response:
    workspace: Workspace = request.app.state.workspace
    state = request.app.state
    cards = run_cards(state.run_pages.cards(), state.jobs.word)
    ended = [card for card in cards if not card.is_live]
    kinds = Counter(card.kind for card in ended)
    return page(
        request,
        "home/home.html",
        live=[card for card in cards if card.is_live],
        runs=ended,
        kinds=[
            ("all", "All", len(ended)),
            ("finished", "Finished", kinds["finished"]),
            ("continue", "Can continue", kinds["continue"]),
        ],
        sets=data_set_cards(workspace.data_sets),
    )


def _device(request: Request) -> Response:
    return JSONResponse(device())


async def _add(request: Request) -> Response:
    """Show a folder that is elsewhere: {"kind": "data" or "runs", "folder": its whole path}."""
    given = await read_json(request)
    workspace: Workspace = request.app.state.workspace
    kind = str(given.get("kind"))
    if kind not in ("data", "runs"):
        return refused(f"kind: {kind}: give data or runs")
    try:
        workspace.add(kind, Path(str(given.get("folder"))))
    except UserError as error:
        return refused(str(error))
    return JSONResponse({})
