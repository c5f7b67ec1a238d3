"""This file shows a data set, and takes in what is changed there."""

from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from anyio import CapacityLimiter, to_thread
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from diffsynth_lite.captioning.contents import Contents, Item, read_contents
from diffsynth_lite.captioning.report import CaptionReport, is_by_model
from diffsynth_lite.config import Config, load_config
from diffsynth_lite.data.folder import usable_file
from diffsynth_lite.data.records import Source, is_image, is_video
from diffsynth_lite.errors import UserError
from diffsynth_lite.ui.data_sets.captioning import (
    CHOICES,
    MODELS,
    Captioning,
    from_form,
    goal_of,
    preview_of,
    replaced_by,
)
from diffsynth_lite.ui.data_sets.changes import CaptionChange, DataSetEditor
from diffsynth_lite.ui.data_sets.examining import Examination, remedies
from diffsynth_lite.ui.data_sets.items import (
    configs_with,
    findings,
    home_of,
    prefix_of,
    source_of,
    thumbnail,
    trigger_of,
)
from diffsynth_lite.ui.data_sets.uploads import named_few, receive, receive_new
from diffsynth_lite.ui.jobs import Jobs
from diffsynth_lite.ui.pages import change_route, digest, page, workspace_of
from diffsynth_lite.workspace import new_name

_SIDES = {"cell": 360, "panel": 1024}
"""Pixels of thumbnails by where they are shown; on most displays a pixel of the page is two."""
_NO_PREVIEW = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 20 20" fill="#868686">'
    '<path d="M5.5 5.5l9 9m0-9l-9 9" stroke="#868686" stroke-width=".4"/>'
    '<text x="10" y="18" font-family="sans-serif" font-size="1.1" text-anchor="middle">{}</text></svg>'
)
"""In place of what cannot be read, with the reason, which the header may not show."""
_REASON_LETTERS = 34
_CLIP_TYPES = {".webm": "video/webm", ".mkv": "video/x-matroska", ".avi": "video/x-msvideo"}
_FOR_GOOD = "private, max-age=31536000, immutable"


def routes() -> list[Route]:
    """The routes of this screen."""
    one_by_one, examining = CapacityLimiter(1), CapacityLimiter(1)
    decoding = CapacityLimiter(2)  # each thumbnail holds a decoded image
    return [
        change_route("/data", _create),
        Route("/data/zip", _create_from_zip, methods=["POST"]),
        Route("/data/{name}/", _show),
        Route("/data/{name}/items", _items),
        Route("/data/{name}/findings", _findings),
        Route("/data/{name}/examined", partial(_examined, examining)),
        change_route("/data/{name}/examine", _examine, limiter=examining),
        Route("/data/{name}/thumbnails/{file:path}", partial(_thumbnail, decoding)),
        Route("/data/{name}/clips/{file:path}", _clip),
        Route("/data/{name}/add", _add, methods=["POST"]),
        change_route("/data/{name}/captions", _write, limiter=one_by_one),
        change_route("/data/{name}/captioning", _caption, limiter=one_by_one),
        change_route("/data/{name}/forget", _forget, limiter=one_by_one),
        change_route("/data/{name}/trash", _move_to_trash, limiter=one_by_one),
        change_route("/data/{name}/undo", _undo, limiter=one_by_one),
    ]


def _create(request: Request, given: dict[str, Any]) -> dict[str, Any]:
    """Make an empty data set: {"name": of letters, digits, "-", "_" and "."}."""
    folder = _new_folder(request, given.get("name"))
    folder.mkdir(parents=True)
    return {"go": f"/data/{folder.name}/"}


async def _create_from_zip(request: Request) -> Response:
    """Make a data set of a zip, the body of the request: ``?name=`` of it, and ``?file=`` of the zip."""
    folder, file = (
        _new_folder(request, request.query_params.get("name")),
        request.query_params.get("file", ""),
    )
    try:
        num_bytes = int(request.headers.get("content-length", 0))
        found = await receive_new(request.stream(), folder, file, num_bytes=num_bytes)
    except ClientDisconnect:
        return Response(status_code=400)
    count = len(found["added"])
    message = f"{count:,} {'file' if count == 1 else 'files'} of {file} added{named_few(found['unread'])}."
    return JSONResponse({"go": f"/data/{folder.name}/", "message": message})


def _new_folder(request: Request, given: object) -> Path:
    """The folder of a data set that is not there yet, by the name that it is given."""
    name, workspace = new_name(given), workspace_of(request)
    if name in workspace.data_sets or (workspace.data_folder / name).exists():
        raise UserError(f"Name: there is a data set {name} already")
    return workspace.data_folder / name


def _show(request: Request) -> Response:
    workspace = workspace_of(request)
    configs = configs_with(_folder(request), workspace.configs)
    shown = _Shown(request)
    if len(configs) == 1 and "config" not in request.query_params:
        only = _Shown(request, configs[0])
        shown = only if only.config is not None else shown
    return page(
        request,
        "data_sets/data_set.html",
        is_edited=True,
        name=shown.name,
        is_elsewhere=not shown.folder.is_relative_to(workspace.path),
        configs=configs,
        chosen=shown.chosen,
        choices=CHOICES,
        models=MODELS,
        others=[name for name in workspace.data_sets if name != shown.name],
        trigger=trigger_of(shown.folder, [workspace.configs[name] for name in configs]),
        data={"name": shown.name, "config": shown.chosen, **shown.as_json()},
    )


def _forget(request: Request, _: dict[str, Any]) -> dict[str, Any]:
    """Take a folder elsewhere off the screen."""
    folder = _folder(request)
    workspace_of(request).forget(folder)
    return {"go": "/#data-sets", "message": f"{folder} is shown no more; it stays as it is."}


def _items(request: Request) -> Response:
    """The items as they are now."""
    return JSONResponse(_Shown(request).as_json())


def _findings(request: Request) -> Response:
    """What the files themselves show, such as sizes; it takes a while, so the page does not wait for it."""
    return JSONResponse(findings(_Shown(request).contents))


async def _examined(limiter: CapacityLimiter, request: Request) -> Response:
    """What the doctor found for the config in the query, and whether it looks now."""

    def read() -> dict[str, Any]:
        shown, workspace = _Shown(request), workspace_of(request)
        if shown.chosen not in workspace.configs:
            return {"state": "none"}
        known = Examination(shown.name, shown.chosen, workspace).as_json(settings=shown.settings)
        latest = Captioning.of(shown.folder, request.app.state.jobs).arguments
        return known | {"remedies": remedies(known.get("kinds", {}), shown.folder, latest, workspace)}

    return JSONResponse(await to_thread.run_sync(read, limiter=limiter))


def _examine(request: Request, given: dict[str, Any]) -> dict[str, Any]:
    """Have the doctor look: {"config": as seen by which, "do": "start" or "stop"}."""
    shown = _Shown(request, str(given.get("config", "")))
    examination = Examination(shown.name, shown.chosen, workspace_of(request))
    if given.get("do") == "stop":
        examination.stop()
    elif shown.config is None:
        raise UserError("\n".join(shown.problems) or "As seen by: choose a config")
    else:
        items = shown.as_json()["items"]
        examination.start(
            {item["file"]: (item["version"], item["caption"]) for item in items},
            goal=shown.goal,
            settings=shown.settings,
            prefix=prefix_of(shown.folder, shown.config),
        )
    return {}


async def _thumbnail(limiter: CapacityLimiter, request: Request) -> Response:
    """A small image of an item, or of a mask or another file that belongs to one."""
    path = _media_file(request)
    version = _version(path)
    headers = {"etag": f'"{version}"'}
    if request.query_params.get("version") == version:
        headers["cache-control"] = _FOR_GOOD
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    side = _SIDES.get(request.query_params.get("for", "cell"), _SIDES["cell"])
    try:
        made = await to_thread.run_sync(lambda: thumbnail(path, side=side), limiter=limiter)
    except UserError as error:
        reason = str(error).removeprefix(f"{path}: ")[:_REASON_LETTERS]
        return Response(_NO_PREVIEW.format(escape(reason)), media_type="image/svg+xml", headers=headers)
    return Response(made, media_type="image/jpeg", headers=headers)


def _clip(request: Request) -> Response:
    """A clip, to play it; in pieces where the browser asks for some."""
    path = _media_file(request)
    if not is_video(path.name):
        raise HTTPException(404)
    return FileResponse(path, media_type=_CLIP_TYPES.get(path.suffix.lower(), "video/mp4"))


async def _add(request: Request) -> Response:
    """Add a file, the body of the request, under the name in the query; a zip is unpacked."""
    name = request.query_params.get("name", "")
    try:
        num_bytes = int(request.headers.get("content-length", 0))
        return JSONResponse(await receive(request.stream(), _folder(request), name, num_bytes=num_bytes))
    except ClientDisconnect:
        return Response(status_code=400)


def _write(request: Request, given: dict[str, Any]) -> dict[str, Any]:
    """Write captions: {"changes": [{"file", "was", "caption"}]}.

    Returns:
        Those that changed meanwhile, ``stale``, and ``by`` which models those are that are there now.
    """
    wanted = [
        CaptionChange(
            file=str(each.get("file")), before=str(each.get("was", "")), after=str(each.get("caption", ""))
        )
        for each in _list(given, "changes")
        if isinstance(each, dict)
    ]
    stale = _editor(request).write(wanted)
    rows = CaptionReport(_folder(request)).rows()
    now = {change.file: stale.get(change.file, change.after or "") for change in wanted}
    by = {file: row.model for file in now if is_by_model(row := rows.get(file), now[file]) and row}
    return {"stale": stale, "by": by}


def _caption(request: Request, given: dict[str, Any]) -> dict[str, Any]:
    """Have a model write captions: {"do", and the fields of the form}.

    "command" only returns the command, "write" and "preview" start it, "go on" starts the
    latest one again, "again" writes those of "files" as that did, and "stop" ends it.
    """
    jobs: Jobs = request.app.state.jobs
    workspace, folder, do = workspace_of(request), _folder(request), given.get("do")
    latest = Captioning.of(folder, jobs)
    form = {key: value for key, value in given.items() if isinstance(value, str)}
    if do == "command":
        return preview_of(form, folder, workspace)
    if do == "stop":
        jobs.stop(folder)
        return {}
    if do == "again":
        arguments = latest.again([str(file) for file in _list(given, "files")], workspace)
    else:
        arguments = latest.same(workspace) if do == "go on" else from_form(form, folder, workspace)
    contents = read_contents(source_of(folder, None))
    with _editor(request).replaced_by_model(replaced_by(arguments, contents, CaptionReport(folder).rows())):
        jobs.start(arguments, folder, free_device=request.app.state.studio.end)
    return {}


def _move_to_trash(request: Request, given: dict[str, Any]) -> dict[str, Any]:
    """Move items to the trash: {"files": their names, "config": as seen by which}."""
    names = {str(name) for name in _list(given, "files")}
    shown = _Shown(request, str(given.get("config", "")))
    chosen = [item for item in shown.contents.items if item.file in names]
    return {"message": _editor(request).move_to_trash(chosen)}


def _undo(request: Request, given: dict[str, Any]) -> dict[str, Any]:
    """Take the last change back."""
    return {"message": _editor(request).undo()}


class _Shown:
    """A data set as one config sees it, or as a config with defaults would.

    Args:
        chosen: name of the config; None takes that of the query.
    """

    def __init__(self, request: Request, chosen: str | None = None) -> None:
        workspace = workspace_of(request)
        self.name: str = request.path_params["name"]
        self.folder = _folder(request)
        self._folders = {name: path.resolve() for name, path in workspace.data_sets.items()}
        self.chosen = request.query_params.get("config", "") if chosen is None else chosen
        self.config: Config | None = None
        problems = []
        source: Source | None = None
        if (file := workspace.configs.get(self.chosen)) is not None:
            try:
                config = load_config(file).config
                source = source_of(self.folder, config)
                self.config = config
            except UserError as error:
                problems.append(f"{self.chosen}: {error}")
        try:
            self.contents = read_contents(source or source_of(self.folder, None))
        except UserError as error:
            self.contents = Contents(items=[], problems=[str(error)])
        skipped = [f"skipped files: {each}" for each in self.contents.skipped]
        self.problems = [*problems, *self.contents.problems, *skipped]
        self._rows = CaptionReport(self.folder).rows()
        self._captioning = Captioning.of(self.folder, request.app.state.jobs)

    @property
    def goal(self) -> str:
        """For which a model wrote captions, if one did."""
        return goal_of(self._captioning.arguments)

    @property
    def settings(self) -> str:
        """What changes with the config."""
        return digest(self.config.model_dump_json().encode()) if self.config else ""

    def as_json(self) -> dict[str, Any]:
        """What the page's script takes."""
        items = [self._item(item) for item in self.contents.items]
        return {"items": items, "problems": self.problems, "captioning": self._captioning.as_json()}

    def _item(self, item: Item) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "file": item.file,
            "caption": "\n\n".join(item.captions),
            "version": _version(item.path) if item.path else "",  # without one it has no thumbnail
        }
        if is_video(item.file):
            shown["is_clip"] = True
        if (row := self._rows.get(item.file)) is not None and is_by_model(row, shown["caption"]):
            shown["by"] = row.model
        if item.is_locked:
            shown["locked"] = f"Captions are in {', '.join(item.caption_files)}"
        if item.problem:
            shown["problem"] = item.problem
        if item.companions:
            shown["companions"] = [self._companion(setting, path) for setting, path in item.companions]
        return shown

    def _companion(self, setting: str, path: Path) -> dict[str, str]:
        """A file that belongs to an item: what it is, where, and its thumbnail if it is in a data set."""
        shown = {"what": setting.replace("_", " ").capitalize(), "where": str(path)}
        if (home := home_of(path, self._folders)) is None:
            return shown
        return shown | {"where": "/".join(home), "set": home[0], "file": home[1], "version": _version(path)}


def _folder(request: Request) -> Path:
    """Folder of the data set in the address."""
    if (folder := workspace_of(request).data_sets.get(request.path_params["name"])) is None:
        raise HTTPException(404)
    return folder


def _editor(request: Request) -> DataSetEditor:
    _folder(request)
    return DataSetEditor(request.path_params["name"], workspace_of(request))


def _media_file(request: Request) -> Path:
    """The image or clip in the address, if a run would read it."""
    name = request.path_params["file"]
    path = usable_file(_folder(request), name) if is_image(name) or is_video(name) else None
    if path is None:
        raise HTTPException(404)
    return path


def _list(given: dict[str, Any], key: str) -> list[Any]:
    value = given.get(key)
    return value if isinstance(value, list) else []


def _version(path: Path) -> str:
    """What changes with the content of a file."""
    try:
        status = path.stat()
    except OSError:
        return ""
    return f"{status.st_mtime_ns:x}-{status.st_size:x}"
