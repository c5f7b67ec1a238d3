"""This file shows New run and the configs of a workspace, and takes in what is changed there."""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from anyio import CapacityLimiter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from diffsynth_lite.config import load_config
from diffsynth_lite.errors import UserError
from diffsynth_lite.files import read_bytes, write_bytes, write_new
from diffsynth_lite.queue.adding import entries_of
from diffsynth_lite.queue.entry import Entry
from diffsynth_lite.queue.variants import names, variants
from diffsynth_lite.redaction import redacted
from diffsynth_lite.ui.configs.draft import MAIN, changed, fields, sources_of, view_of
from diffsynth_lite.ui.configs.live_plan import LivePlan, host_gib
from diffsynth_lite.ui.configs.recipes import GOALS, cards, needs_of, recipe_named, text_on_recipe, verdicts
from diffsynth_lite.ui.home.routes import data_set_cards
from diffsynth_lite.ui.pages import answer, change_route, digest, environment, page, workspace_of
from diffsynth_lite.ui.queued import QueuedRuns
from diffsynth_lite.workspace import Workspace, new_name

_HUB_ID = re.compile(r"\w[\w.-]{0,95}(/\w[\w.-]{0,95})?", re.ASCII)
_CHANGED_ELSEWHERE = (
    "The file was changed elsewhere meanwhile. This change was not made; its newer text is shown now."
)
_MOST_BYTES = 1 << 20


def routes() -> list[Route]:
    """The routes of these screens."""
    changes = CapacityLimiter(1)  # one after the other
    return [
        Route("/new", _new),
        change_route("/configs", _create, limiter=changes),
        Route("/configs/{name}/", _show),
        change_route("/configs/{name}/change", _change, limiter=changes),
        change_route("/configs/{name}/start", _start, limiter=changes),
        change_route("/configs/{name}/variants", _variants, limiter=changes),
        change_route("/configs/{name}/plan", _ask, limiter=CapacityLimiter(1)),
        Route("/configs/{name}/plan", _plan),
    ]


def _new(request: Request) -> Response:
    """The choices that make a config, for a card: ``?gpu=NAME``.

    ``?data=NAME`` is chosen already; ``?from=RUN`` or ``?config=NAME`` makes a copy.
    """
    workspace, query = workspace_of(request), request.query_params
    source = {key: name for key in ("from", "config") if (name := query.get(key))}
    if source:
        _source_file(workspace, source)
    known = cards()
    gpu = known.get(query.get("gpu", "")) or next(iter(known.values()))
    return page(
        request,
        "configs/new.html",
        source=source,
        copied=next(iter(source.values()), ""),
        cards=known,
        chosen=gpu.name,
        recipes=verdicts(gpu),
        sets=data_set_cards(workspace.data_sets),
        goals=GOALS,
        data=query.get("data"),
    )


def _create(request: Request, given: dict[str, Any]) -> dict[str, Any]:
    """Write a config: {"name", "data" or "dataset", "recipe", "goal", "gpu"}.

    A copy: {"name", "from" or "config"}.
    """
    workspace, given = workspace_of(request), {key: str(value) for key, value in given.items()}
    name = new_name(given.get("name"))
    path = workspace.configs_folder / f"{name}.yaml"
    if name in workspace.runs or os.path.lexists(workspace.runs_folder / name):
        raise UserError(f"Name: there is a run {name} already; choose another name")
    if os.path.lexists(path):
        raise UserError(f"Name: there is a config {name} already; choose another name")
    if "from" in given or "config" in given:
        text = changed(_text(_source_file(workspace, given)), "output.dir", f"runs/{name}")
    else:
        text = _text_of_choices(workspace, given, name)
    write_new(path, _encoded(text))
    return {"go": f"/configs/{quote(name)}/"}


def _text_of_choices(workspace: Workspace, given: Mapping[str, str], name: str) -> str:
    data = workspace.data_sets.get(given.get("data", ""))
    hub_id = given.get("dataset", "").strip()
    if data is None and not hub_id:
        raise UserError("Data set: choose one, or make one on Home first")
    if data is None and not _HUB_ID.fullmatch(hub_id):
        raise UserError(f"Data set: {hub_id}: is not an id of the hub, such as user/name")
    recipe = recipe_named(given.get("recipe", ""))
    gpu = cards().get(given.get("gpu", ""))
    way = (recipe.way_for(gpu) if gpu else None) or next(reversed(recipe.ways), None)
    source = hub_id if data is None else Path(workspace.shown(data))
    return text_on_recipe(recipe, way, name=name, data=source, goal=given.get("goal", ""))


def _source_file(workspace: Workspace, given: Mapping[str, str]) -> Path:
    """The config of the run or the config that is copied."""
    run, config = workspace.runs.get(given.get("from", "")), workspace.configs.get(given.get("config", ""))
    file, folder = (run / "config.yaml", run) if run else (config, workspace.configs_folder)
    if file is None or not file.is_file() or not file.resolve().is_relative_to(folder.resolve()):
        raise HTTPException(404, "There is no such run with a config.")
    return file


def _show(request: Request) -> Response:
    """The form and the text of a config."""
    path, workspace = _config(request), workspace_of(request)
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
        hash=digest(text.encode()),
        needs=needs_of(view),
        cards=cards(),
        host_gib=host_gib(),
        main=MAIN,
        fields=fields(),
        sources_of=sources_of,
        sets=[workspace.shown(folder) for folder in workspace.data_sets.values()],
        sections=list(dict.fromkeys(key.partition(".")[0] for key in fields())),
    )


def _change(request: Request, given: dict[str, Any]) -> dict[str, Any]:
    """Change one setting, {"hash", "key", "value"}, where null takes it out; or all, {"hash", "text"}.

    {"hash", "plan"} writes the settings that fit, by the plan of that number.
    """
    path = _config(request)
    text, new, value = _text(path), given.get("text"), given.get("value")
    if given.get("hash") != digest(text.encode()):
        raise UserError(_CHANGED_ELSEWHERE)
    if isinstance(new, str):
        # A browser's text field has one kind of line break.
        new = new.replace("\r\n", "\n")
        new = new.replace("\n", "\r\n") if "\r\n" in text else new
    elif "plan" in given:
        new = request.app.state.live_plan.fitting(given["plan"], path, text)
    else:
        new = changed(text, str(given.get("key")), None if value is None else str(value))
    content = _encoded(new)
    if new != text:
        write_bytes(path, content)
    return {}


def _encoded(text: str) -> bytes:
    try:
        content = text.encode()
    except UnicodeEncodeError as error:
        raise UserError(str(error)) from None
    if len(content) > _MOST_BYTES:
        raise UserError("The text is too long for a config; it was not saved.")
    return content


def _ask(request: Request, given: dict[str, Any]) -> dict[str, Any]:
    """Ask for the plan of a config as it is now: {"gpu", "host_gib"}; returns the number of the plan."""
    path = _config(request)
    gpu = cards().get(str(given.get("gpu"))) or next(iter(cards().values()))
    plans: LivePlan = request.app.state.live_plan
    return {"number": plans.ask(path, _text(path), gpu, str(given.get("host_gib", "")))}


def _plan(request: Request) -> Response:
    """What is known so far of a plan: ``?number=``."""
    path = _config(request)
    plans: LivePlan = request.app.state.live_plan
    plan = plans.plan(request.query_params.get("number", ""), path)
    text = environment().get_template("configs/plan.html").render(plan=plan, file=f"configs/{path.name}")
    return answer(request, redacted(text).encode(errors="replace"), "text/html")


def _start(request: Request, given: dict[str, Any]) -> dict[str, Any]:
    """Put the run of a config into the queue, and have it started."""
    entries = entries_of(workspace_of(request), _config(request))
    return {"go": f"/runs/{quote(_add(request, entries)[0])}/"}


def _variants(request: Request, given: dict[str, Any]) -> dict[str, Any]:
    """Runs of a config with several values: {"settings": ["key=value,value", ...], "do": "name" or "add"}.

    Returns their names, or what is wrong; added ones have the address where they are side by side, too.
    """
    path, workspace = _config(request), workspace_of(request)
    listed = given.get("settings")
    settings = [str(each) for each in listed] if isinstance(listed, list) else []
    if given.get("do") == "add":
        added = _add(request, entries_of(workspace, path, settings))
        return {"names": added, "compare": f"/compare?{urlencode([('run', name) for name in added])}"}
    try:
        several = variants(settings)
        base = Path(load_config(path, several[0].settings).config.output.dir).name
        return {"names": names(base, several) if len(several) > 1 else []}
    except UserError as error:
        return {"names": [], "wrong": str(error)}


def _add(request: Request, entries: Sequence[Entry]) -> list[str]:
    """Put entries into the queue, and have them started; returns the names by which their runs are shown."""
    workspace = workspace_of(request)
    QueuedRuns(workspace).add(entries)
    request.app.state.studio.end()  # The run has to import its libraries before it takes the device.
    known = QueuedRuns(workspace).without_run() | workspace.runs
    shown = {folder.resolve(): name for name, folder in known.items()}
    folders = [entry.folder_in(workspace) for entry in entries]
    return [shown.get(folder, folder.name) for folder in folders]


def _config(request: Request) -> Path:
    """The file of the config that an address names."""
    workspace = workspace_of(request)
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
