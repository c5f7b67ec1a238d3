"""This file knows where things are in a workspace.

A name that a browser sends is looked up among the names that are there; no path is made of it.
"""

import os
import re
import secrets
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from diffsynth_lite.errors import UserError
from diffsynth_lite.files import parse_json, replacing, write_json
from diffsynth_lite.run_folder.folder import find_runs

_FOLDERS = ("data", "configs", "runs", ".ui")
_PRIVATE = 0o700


_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,62}[A-Za-z0-9_-])?")
_OF_WINDOWS = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)
"""Names of its devices, which are no files there."""


def new_name(given: object) -> str:
    """The name of a config or data set that is made, which every system takes as that of a file.

    Raises:
        UserError: it has letters that not every system takes, or too many.
    """
    name = str(given or "").strip()
    if not _NAME.fullmatch(name):
        raise UserError(
            f"Name: {name or 'none given'}: use a to z, digits, -, _ and ., up to 64 of them; the first is a "
            "letter or digit, and the last is not ."
        )
    if _OF_WINDOWS.fullmatch(name):
        raise UserError(f"Name: {name}: is the name of a device on Windows; choose another")
    return name


class Workspace:
    """A folder with ``data``, ``configs`` and ``runs``; what it holds is read at each access.

    Attributes:
        data_folder: where new data sets are made.
        configs_folder: where configs are written.
        runs_folder: where runs that the screen starts have their folders.
        trash_folder: where files go that were removed from a data set.
        logs_folder: of the processes that the screen started.
        settings_file: has :attr:`settings`, and with them the folders elsewhere that were added.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data_folder = path / "data"
        self.configs_folder = path / "configs"
        self.runs_folder = path / "runs"
        self.trash_folder = path / "trash"
        self.logs_folder = path / ".ui" / "logs"
        self.settings_file = path / ".ui" / "settings.json"
        self._setting = threading.Lock()

    @property
    def data_sets(self) -> dict[str, Path]:
        """Folders of images and clips, by name."""
        return _by_name([*_inner_folders(self.data_folder), *self._added("data")])

    @property
    def configs(self) -> dict[str, Path]:
        """Config files, by their names without the ending."""
        files = sorted(self.configs_folder.glob("*.yaml"))
        return _shown({file.stem: file for file in files if file.is_file() and file.name[0] != "."})

    @property
    def runs(self) -> dict[str, Path]:
        """Folders of runs, by name, wherever they were started."""
        found = find_runs([self.runs_folder, *self._added("runs")])
        return _shown({name.replace("/", "~"): folder for name, folder in found.items()})

    def add(self, kind: str, folder: Path) -> None:
        """Show a folder elsewhere, too.

        Args:
            kind: "data" for a folder of images and clips; "runs" for a run folder, or one that holds some.

        Raises:
            UserError: there is no such kind or folder, or the folder is not of this kind, or holds the
                workspace.
        """
        if kind not in ("data", "runs"):
            raise UserError(f"kind: {kind}: give data or runs")
        folder = folder_here(folder)
        if self.path.is_relative_to(folder.resolve()):  # Home reads all that is in it, each time.
            raise UserError(f"{folder}: holds this workspace, too; give a folder with nothing but {kind}")
        if kind == "runs" and not find_runs([folder]):
            raise UserError(f"{folder}: holds no run; give the output.dir of a run, or a folder of such")
        self.set(kind, list(dict.fromkeys([*self._listed(kind), str(folder)])))

    def forget(self, folder: Path) -> None:
        """Show a data set elsewhere no more, in which nothing is changed.

        Raises:
            UserError: it was not added, as it is in the workspace.
        """
        listed = self._listed("data")
        if str(folder) not in listed:
            raise UserError(
                f"{folder}: is in this workspace; only folders elsewhere can be taken off the screen"
            )
        self.set("data", [one for one in listed if one != str(folder)])

    @property
    def settings(self) -> dict[str, Any]:
        """What the person has set for this workspace, by name; somebody else may have written the file.

        Raises:
            UserError: it is damaged.
        """
        try:
            read = parse_json(self.settings_file.read_bytes())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise UserError(f"{self.settings_file}: {error}; mend or remove the file") from None
        return read if isinstance(read, dict) else {}

    def set(self, name: str, value: Any) -> None:
        """Write a setting, which json can express; all others stay as they are."""
        with self._setting:
            write_json(self.settings_file, self.settings | {name: value})

    def archived_at(self) -> dict[str, float]:
        """When the runs that were archived had gone on last, in seconds since 1970, by their marks."""
        marks = self.settings.get("archived")
        marks = marks if isinstance(marks, dict) else {}
        return {mark: float(at) for mark, at in marks.items() if isinstance(at, int | float)}

    def shown(self, path: Path) -> str:
        """A path as it is given here: what is in this workspace has the same one when that is moved."""
        return (path.relative_to(self.path) if path.is_relative_to(self.path) else path).as_posix()

    def archive(self, folder: Path, at: float | None) -> None:
        """Archive the run in a folder, in which nothing is changed.

        Args:
            at: when it has gone on last: one that goes on later is archived no more. None takes it out.
        """
        marks = self.archived_at()
        marks.pop(self.shown(folder), None)
        self.set("archived", marks if at is None else marks | {self.shown(folder): at})

    def token(self) -> str:
        """What the printed address carries; made once, so that pages stay valid when the server restarts."""
        file = self.path / ".ui" / "token"
        # One without a text, as a full disk leaves it, would let in everybody.
        if not file.exists() or not file.read_text().strip():
            with replacing(file) as temporary:
                descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(descriptor, "w") as opened:
                    opened.write(secrets.token_urlsafe(24))
        return file.read_text().strip()

    def _added(self, kind: str) -> list[Path]:
        return [folder for folder in map(Path, self._listed(kind)) if folder.is_dir()]

    def _listed(self, kind: str) -> list[str]:
        found = self.settings.get(kind)
        return [str(one) for one in found] if isinstance(found, list) else []


def open_workspace(path: Path) -> Workspace:
    """The workspace at a path, with its folders, which are made if need be.

    Raises:
        UserError: the folder holds something else, or cannot be made.
    """
    path = path.expanduser().resolve()
    try:
        names = {entry.name for entry in path.iterdir()} if path.exists() else set()
        shown = {name for name in names if not name.startswith(".")}
        if "pyproject.toml" in names or (shown and not names & set(_FOLDERS)):
            raise UserError(
                f"{path}: is not a workspace: it is not empty and has no data/, configs/ or runs/; "
                f"diffsynth-lite ui {path / 'workspace'} makes one in it"
            )
        path.mkdir(parents=True, exist_ok=True)
        (path / ".ui").mkdir(mode=_PRIVATE, exist_ok=True)
        for name in ("data", "configs", "runs", "trash", ".ui/logs"):
            (path / name).mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be a workspace: {error.strerror}; give another folder") from None
    return Workspace(path)


def folder_here(folder: Path) -> Path:
    """A folder that a person has named by its whole path.

    Raises:
        UserError: there is none.
    """
    try:
        folder = folder.expanduser()
        is_there = folder.is_absolute() and folder.is_dir()
    # A name that is too long, a user who is not there, a zero.
    except (OSError, RuntimeError, ValueError):
        is_there = False
    if not is_there:
        raise UserError(f"{str(folder)[:200]}: is not a folder on this machine; give its whole path")
    return folder


def is_workspace(path: Path) -> bool:
    """Whether :func:`open_workspace` has made a folder one."""
    return all((path / name).is_dir() for name in ("configs", "runs", ".ui"))


def _inner_folders(place: Path) -> list[Path]:
    return [entry for entry in sorted(place.glob("*")) if entry.is_dir() and not entry.name.startswith(".")]


def _shown(found: dict[str, Path]) -> dict[str, Path]:
    """Those whose names are UTF-8, as an address has to be."""
    return {name: path for name, path in found.items() if name == name.encode(errors="replace").decode()}


def _by_name(folders: Iterable[Path]) -> dict[str, Path]:
    """Folders by their own names; of several with one name, the later ones have a number."""
    named: dict[str, Path] = {}
    for folder in folders:
        name, number = folder.name, 2
        while name in named:
            name, number = f"{folder.name}~{number}", number + 1
        named[name] = folder
    return named
