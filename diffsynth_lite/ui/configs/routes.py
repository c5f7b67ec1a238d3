"""This file shows New run and the configs of a workspace, and takes in what is changed there."""

import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from anyio import CapacityLimiter, to_thread
from starlette.datastructures import State
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from diffsynth_lite.config import ConfigProblem, load_config
from diffsynth_lite.errors import UserError
from diffsynth_lite.files import read_bytes, write_bytes
from diffsynth_lite.ui.configs.draft import MAIN, View, changed, fields, hash_of, view_of
from diffsynth_lite.ui.configs.new import GOALS, copied_text, text_on_recipe
from diffsynth_lite.ui.configs.recipes import cards, needs_of, recipe_named, recipes
from diffsynth_lite.ui.home.cards import data_set_cards
from diffsynth_lite.ui.pages import page, read_json, refused
from diffsynth_lite.workspace import Workspace

_Result = TypeVar("_Result")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_CHANGED_ELSEWHERE = (
    "The file was changed elsewhere meanwhile. This change was not made; its newer text is shown now."
)
_ORDER = ("full", "half", "quarter", "none", "info")
_MOST_BYTES = 1 << 20


def routes() -> list[Route]:
    """The routes of these screens."""
    screen = _ConfigScreen()
    return [
        Route("/new", screen.new),
        Route("/configs", screen.create, methods=["POST"]),
        Route("/configs/fits", screen.fits),
        Route("/configs/{name}/", screen.show),
        Route("/configs/{name}/state", screen.state),
        Route("/configs/{name}/change", screen.change, methods=["POST"]),
        Route("/configs/{name}/start", screen.start, methods=["POST"]),
    ]


class _ConfigScreen:
    def __init__(self) -> None:
        self._changes = CapacityLimiter(1)  # one after the other

    def new(self, request: Request) -> Response:
        """The choices that make a config, ``?data=NAME`` made; ``?from=RUN`` or ``?config=NAME``: a copy."""
        workspace: Workspace = request.app.state.workspace
        source = {key: name for key in ("from", "config") if (name := request.query_params.get(key))}
        if source:
            _source_file(workspace, source)
        chosen = cards()
        fits = _fits(next(iter(chosen)))
        return page(
            request,
            "configs/new.html",
            source=source,
            copied=next(iter(source.values()), ""),
            cards=chosen,
            recipes=sorted(recipes(), key=lambda recipe: _ORDER.index(fits[recipe.recipe]["symbol"])),
            fits=fits,
            sets=data_set_cards(workspace.data_sets),
            goals=GOALS,
            data=request.query_params.get("data"),
        )

    def fits(self, request: Request) -> Response:
        """Which recipes fit a card: ``?gpu=NAME``."""
        return JSONResponse(_fits(request.query_params.get("gpu", "")))

    async def create(self, request: Request) -> Response:
        """Write a config: {"name", "data", "recipe", "goal", "gpu"}; a copy: {"name", "from" or "config"}."""
        given = {key: str(value) for key, value in (await read_json(request)).items()}
        workspace: Workspace = request.app.state.workspace
        name = given.get("name", "").strip()
        path = workspace.configs_folder / f"{name}.yaml"
        try:
            if not _NAME.fullmatch(name):
                raise UserError(
                    f"Name: {name or 'none given'}: use letters, digits, -, _ and ., up to 64 of them"
                )
            if name in workspace.runs or os.path.lexists(workspace.runs_folder / name):
                raise UserError(f"Name: there is a run {name} already; choose another name")
            if os.path.lexists(path):
                raise FileExistsError
            text = await self._run(_new_text, workspace, given, name)
            with path.open("x", encoding="utf-8", newline="") as file:
                file.write(text)
        except FileExistsError:
            return refused(f"Name: there is a config {name} already; choose another name")
        except UserError as error:
            return refused(str(error))
        return JSONResponse({"go": f"/configs/{quote(name)}/"})

    def show(self, request: Request) -> Response:
        """The form and the text of a config."""
        path = _config(request)
        text = _text(path)
        view = view_of(path, text)
        return page(
            request,
            "configs/config.html",
            is_edited=True,
            name=path.stem,
            file=f"configs/{path.name}",
            command=_command(path),
            view=view,
            state=_state(view),
            main=MAIN,
            fields=fields(),
            sections=list(dict.fromkeys(key.partition(".")[0] for key in fields())),
        )

    def state(self, request: Request) -> Response:
        """The same as JSON, for a page that is open."""
        path = _config(request)
        return JSONResponse(_state(view_of(path, _text(path))))

    async def change(self, request: Request) -> Response:
        """Change one setting, {"hash", "key", "value"}, where null takes it out; or all, {"hash", "text"}."""
        path, given = _config(request), await read_json(request)
        return await self._run(_change, path, given)

    async def start(self, request: Request) -> Response:
        """Start the run of a config."""
        return await self._run(_start, request.app.state, _config(request))

    async def _run(self, work: Callable[..., _Result], *given: Any) -> _Result:
        return await to_thread.run_sync(work, *given, limiter=self._changes)


def _config(request: Request) -> Path:
    """The file of the config that an address names."""
    workspace: Workspace = request.app.state.workspace
    path = workspace.configs.get(request.path_params["name"])
    if path is None or not path.resolve().is_relative_to(workspace.configs_folder.resolve()):
        raise HTTPException(404)
    return path


def _command(path: Path) -> str:
    """What starts the run of a config, as it is typed in the workspace."""
    return f"diffsynth-lite train --config {shlex.quote(f'configs/{path.name}')}"


def _text(path: Path) -> str:
    """The text of a config as it is in its file, with its line breaks."""
    try:
        return read_bytes(path, most_bytes=_MOST_BYTES).decode("utf-8")
    except FileNotFoundError:
        raise HTTPException(404) from None
    except (UserError, UnicodeDecodeError):
        raise HTTPException(422, f"{path.name} is too large for a config, or is not UTF-8 text.") from None


def _change(path: Path, given: Mapping[str, Any]) -> Response:
    text = _text(path)
    if given.get("hash") != hash_of(text):
        return refused(_CHANGED_ELSEWHERE, state=_state(view_of(path, text)))
    try:
        if isinstance(new := given.get("text"), str):
            # A browser's text field has one kind of line break.
            new = new.replace("\r\n", "\n")
            new = new.replace("\n", "\r\n") if "\r\n" in text else new
        else:
            value = given.get("value")
            new = changed(text, str(given.get("key")), None if value is None else str(value))
        content = new.encode()
        if len(content) > _MOST_BYTES:
            raise UserError("The text is too long for a config; it was not saved.")
    except (UserError, UnicodeEncodeError) as error:
        return refused(str(error), state=_state(view_of(path, text)))
    if new != text:
        write_bytes(path, content)
    return JSONResponse(_state(view_of(path, new)))


def _start(state: State, path: Path) -> Response:
    try:
        config = load_config(path).config
        for key, name in config.code_of_others.items():
            raise UserError(
                f"{key}: {name} is code that comes with neither diffsynth_lite nor torch; if you know it,"
                f" start it in a terminal: {_command(path)}"
            )
        folder = Path(config.output.dir).expanduser()
        state.jobs.start(["--config", f"configs/{path.name}"], folder)
    except UserError as error:
        return refused(str(error))
    folder = (state.workspace.path / folder).resolve()
    known = {place.resolve(): name for name, place in state.workspace.runs.items()}
    return JSONResponse({"go": f"/runs/{quote(known.get(folder, folder.name))}/"})


def _new_text(workspace: Workspace, given: Mapping[str, str], name: str) -> str:
    if "from" in given or "config" in given:
        return copied_text(_text(_source_file(workspace, given)), name)
    data = workspace.data_sets.get(given.get("data", ""))
    if data is None:
        raise UserError("Data set: choose one, or make one on the screen Data sets first")
    recipe = recipe_named(given.get("recipe", ""))
    gpu = cards().get(given.get("gpu", ""))
    way = (recipe.way_for(gpu) if gpu else None) or next(reversed(recipe.ways), None)
    inside = data.is_relative_to(workspace.path)
    folder = data.relative_to(workspace.path) if inside else data
    return text_on_recipe(recipe, way, name=name, data=folder, goal=given.get("goal", ""))


def _source_file(workspace: Workspace, given: Mapping[str, str]) -> Path:
    """The config of the run or the config that is copied."""
    run, config = workspace.runs.get(given.get("from", "")), workspace.configs.get(given.get("config", ""))
    file, folder = (run / "config.yaml", run) if run else (config, workspace.configs_folder)
    if file is None or not file.is_file() or not file.resolve().is_relative_to(folder.resolve()):
        raise HTTPException(404, "There is no such run with a config.")
    return file


def _fits(name: str) -> dict[str, Any]:
    """What a card can train, by recipe."""
    gpu = cards().get(name)
    if gpu is None:
        raise HTTPException(404)
    return {recipe.recipe: asdict(recipe.verdict(gpu)) for recipe in recipes()}


def _other_file(problem: ConfigProblem, view: View) -> str:
    return "" if problem.file in (None, view.path) else str(problem.file)


def _state(view: View) -> dict[str, Any]:
    """A view for the page's script."""
    return {
        "text": view.text,
        "hash": hash_of(view.text),
        "extends": view.extends,
        "values": {key: asdict(value) for key, value in view.values.items()},
        "problems": [
            # Of another file, such as one that it extends, the name.
            {"key": one.key, "line": one.line, "text": one.text, "file": _other_file(one, view)}
            for one in view.problems
        ],
        "own": view.num_own,
        "needs": needs_of(view),
    }
