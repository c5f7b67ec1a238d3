"""This file has what an entry of the queue asks for, how its run went, and the command that is made of it.

A file of the queue may be somebody else's: it names a config and settings and never a command.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from diffsynth_lite.config import LoadedConfig, load_config
from diffsynth_lite.errors import UserError
from diffsynth_lite.files import read_bytes
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.workspace import Workspace

QueueState = Literal["waiting", "running", "done"]
STATES: tuple[QueueState, ...] = ("waiting", "running", "done")
MOST_PROCESSES = 64
"""Of a run on one machine."""
MOST_NODES = 1024

_MOST_BYTES = 1 << 20
_TRAIN = ("-m", "diffsynth_lite.cli.main", "train")
_LAUNCHED_TRAIN = ("-m", "diffsynth_lite.cli.train")
_LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node")

_OF_RUN = {"process", "was_signalled", "started_at", "ended_at", "exit_code", "outcome", "message"}

_Word = Annotated[str, StringConstraints(pattern=r"^[^-\x00][^\x00]*$", max_length=10_000)]
"""An argument that is not a flag."""
_Setting = Annotated[str, StringConstraints(pattern=r"^[a-z_]+\.[a-z0-9_]+=[^\x00]*$", max_length=100_000)]
_Devices = Annotated[str, StringConstraints(pattern=r"^([\w/-]+(,[\w/-]+)*)?$", max_length=500)]


class Entry(BaseModel):
    """The content of a file of the queue.

    Attributes:
        config: path of a config in the workspace, or the name of a recipe.
        folder: of the run, its ``output.dir``.
        settings: that win over those of the config, as ``section.key=value``.
        device: for ``CUDA_VISIBLE_DEVICES``; empty for whichever the run takes by itself.
        num_nodes: of a cluster, which train together with ``num_processes`` each.
        working_folder: of a run that was begun elsewhere and goes on by the settings in its own folder;
            empty for the workspace.
        process: that was started, as :class:`~diffsynth_lite.run_folder.process.Process` writes it.
        started_at: seconds since 1970, as ``ended_at``; 0 before.
        was_signalled: whether it was asked to stop by a signal, as before its first status.
        exit_code: None before the end, and where neither a worker nor the run recorded it.
        outcome: of a run that is done: the state in its folder, or "killed", "refused", "did not start".
        message: the reason, where it did not finish.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    config: _Word
    folder: _Word
    settings: tuple[_Setting, ...] = ()
    presets: tuple[_Word, ...] = ()
    device: _Devices = ""
    num_processes: int = Field(default=1, ge=1, le=MOST_PROCESSES)
    num_nodes: int = Field(default=1, ge=1, le=MOST_NODES)
    working_folder: str = Field(default="", pattern=r"^(/[^\x00]*|[A-Za-z]:[^\x00]*)?$", max_length=10_000)
    process: str = ""
    was_signalled: bool = False
    started_at: float = 0.0
    ended_at: float = 0.0
    exit_code: int | None = None
    outcome: str = ""
    message: str = ""

    def command(self) -> list[str]:
        """What trains it: ``train`` of this installation, in so many processes of this machine."""
        launcher = (*_LAUNCHER, str(self.num_processes), *_LAUNCHED_TRAIN)
        return [sys.executable, *(_TRAIN if self.num_processes == 1 else launcher), *self.arguments()]

    def command_on_cluster(self, words: Sequence[str]) -> list[str]:
        """What has a cluster train it.

        Args:
            words: of ``train``, that name the cluster, and what each node has unless the entry asks for more.
        """
        several = ["--num-nodes", str(self.num_nodes)] if self.num_nodes > 1 else []
        several += ["--gpus-per-node", str(self.num_processes)] if self.num_processes > 1 else []
        return [sys.executable, *_TRAIN, *self.arguments(), *words, *several]

    def arguments(self) -> list[str]:
        """The arguments of ``train``, in the folder of :meth:`place`."""
        presets = (word for name in self.presets for word in ("--preset", name))
        return ["--config", self.config, *presets, *self.settings, f"output.dir={self.folder}"]

    def place(self, workspace: Workspace) -> Path:
        """The folder that it is started in."""
        return Path(self.working_folder) if self.working_folder else workspace.path

    def asked(self) -> "Entry":
        """What it asks for, without how a run of it went."""
        return Entry.model_validate(self.model_dump(exclude=_OF_RUN))

    def load(self, workspace: Workspace) -> LoadedConfig:
        """The config of the run.

        Raises:
            UserError: it is wrong, or names code of others, which only a person starts.
        """
        inside = workspace.path / self.config
        settings = [*self.settings, f"output.dir={self.folder}"]
        loaded = load_config(inside if inside.exists() else self.config, settings, presets=self.presets)
        for key, name in loaded.config.code_of_others.items():
            raise UserError(
                f"{key}: {name} is code that comes with neither diffsynth_lite nor torch; the queue does not "
                "run it; if you know it, start it in a terminal"
            )
        return loaded

    def require_inside(self, workspace: Workspace) -> None:
        """Check that the config is one of the workspace, and that the run will be seen there.

        Raises:
            UserError: a path leads elsewhere.
        """
        root, folder = workspace.path.resolve(), self.folder_in(workspace)
        config = (root / self.config).resolve()
        is_own = config == folder / RunFolder(folder).resolved_file.name
        if not is_own and (self.working_folder or not config.is_relative_to(root)):
            raise UserError(f"config: {self.config}: is outside of {root}; copy it to configs/ there")
        runs = workspace.runs_folder.resolve()
        if folder.parent != runs and folder not in (place.resolve() for place in workspace.runs.values()):
            raise UserError(
                f"output.dir: {self.folder}: is not seen in {root}; give one in runs/, such as "
                f"runs/{folder.name}"
            )

    def folder_in(self, workspace: Workspace, resolve: Callable[[Path], Path] = Path.resolve) -> Path:
        """The folder of the run."""
        return resolve(workspace.path / Path(self.folder).expanduser())

    def node_in(self, workspace: Workspace) -> str:
        """Name of the machine that its run is on, or was, if that is another one."""
        return RunFolder(self.folder_in(workspace)).node if self.started_at else ""

    def shares_device(self, other: "Entry") -> bool:
        """Whether both would run on one device: a run without a device of its own may take any."""
        mine, others = set(self.device.split(",")), set(other.device.split(","))
        return "" in mine or "" in others or not mine.isdisjoint(others)


@dataclass(frozen=True, kw_only=True)
class QueuedRun:
    """A file of the queue.

    Attributes:
        id: name of its file without the ending: a number, which is its place, and ``name``.
        state: the folder that it is in.
        entry: its content; None where it is refused.
        refusal: why it is never started; empty where it may be.
        changed_at: of the file, seconds since 1970: while it waits, when it was added.
    """

    id: str
    number: int
    name: str
    state: QueueState
    file: Path
    entry: Entry | None
    refusal: str
    changed_at: float

    @property
    def ended_at(self) -> float:
        """When it was done, in seconds since 1970."""
        return (self.entry.ended_at if self.entry else 0.0) or self.changed_at

    @classmethod
    def read(cls, file: Path, state: QueueState, workspace: Workspace) -> "QueuedRun | None":
        """The file of that path; None where it is gone."""
        number, _, name = file.stem.partition("-")
        try:
            status = file.stat()
            if state == "done":
                key = status.st_ino, status.st_mtime_ns, status.st_size
                entry, refusal = _read_done(file, workspace, key)
            else:
                entry, refusal = _read(file, state, workspace)
        except FileNotFoundError:
            return None
        return cls(
            id=file.stem,
            number=int(number) if number.isdecimal() else 0,
            name=name,
            state=state,
            file=file,
            entry=entry,
            refusal=refusal,
            changed_at=status.st_mtime,
        )


@lru_cache(maxsize=4096)
def _read_done(file: Path, workspace: Workspace, version: tuple[int, ...]) -> tuple[Entry | None, str]:
    """Of what is done, which changes no more and may be hundreds of files that a screen looks at often."""
    return _read(file, "done", workspace)


def _read(file: Path, state: QueueState, workspace: Workspace) -> tuple[Entry | None, str]:
    """The content of a file, or why it is refused."""
    try:
        entry = Entry.model_validate_json(read_bytes(file, most_bytes=_MOST_BYTES))
        # Whatever ran, its folder is only looked at.
        entry.require_inside(workspace) if state == "waiting" else entry.folder_in(workspace)
    except FileNotFoundError:
        raise
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        return None, f"{'.'.join(map(str, first['loc'])) or 'file'}: {first['msg']}"
    except (OSError, RuntimeError, UserError) as error:  # no name of a file, the home of nobody
        return None, str(error)
    return entry, ""


def read_state(folder: Path, state: QueueState, workspace: Workspace) -> list[QueuedRun]:
    """The files in the folder of a state, in their order."""
    with suppress(FileNotFoundError):
        files = [file for file in folder.glob("*.json") if file.is_file()]
        found = [run for file in files if (run := QueuedRun.read(file, state, workspace)) is not None]
        return sorted(found, key=lambda run: (run.number, run.name))
    return []


def named(runs: Sequence[QueuedRun], name: str) -> QueuedRun:
    """The run of that name or id: one that waits or runs, or else the latest that is done."""
    found = [run for run in runs if name in (run.id, run.name)]
    if not found:
        known = ", ".join(dict.fromkeys(run.name for run in runs)) or "nothing"
        raise UserError(f"{name}: is not in the queue, which has {known}")
    return next((run for run in found if run.state != "done"), found[-1])
