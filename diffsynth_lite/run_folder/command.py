"""This file keeps in a run folder how the run was started, for whoever continues it."""

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diffsynth_lite.files import parse_json
from diffsynth_lite.redaction import redacted
from diffsynth_lite.run_folder.reading import read_run_file


@dataclass(frozen=True, kw_only=True)
class StartCommand:
    """How a run was started: a hint only, as a run folder may be somebody else's.

    Attributes:
        arguments: of ``train``, with secrets masked.
        working_folder: to which their paths are relative.
        host: name of the machine of the main process.
        num_processes: of the run.
        num_nodes: that these are on, as many on each.
    """

    arguments: Sequence[str]
    working_folder: str
    host: str
    num_processes: int
    num_nodes: int = 1

    @classmethod
    def of(cls, arguments: Sequence[str], num_processes: int, num_nodes: int = 1) -> "StartCommand":
        """How this process was started."""
        return cls(
            arguments=list(arguments),
            working_folder=str(Path.cwd()),
            host=socket.gethostname(),
            num_processes=num_processes,
            num_nodes=num_nodes,
        )

    def as_text(self) -> str:
        """As json for ``command.json``, with secrets masked."""
        # In ASCII, since names of files may hold bytes that are not text.
        return json.dumps(redacted(vars(self)), indent=2) + "\n"

    @classmethod
    def read(cls, path: Path) -> "StartCommand | None":
        """The command in a file; None where there is no such file, or another content."""
        try:
            found = parse_json(read_run_file(path))
        except (OSError, ValueError):
            return None
        kinds = {
            "arguments": list,
            "working_folder": str,
            "host": str,
            "num_processes": int,
            "num_nodes": int,
        }
        found = {"num_nodes": 1, **found} if isinstance(found, dict) else {}
        if {name: type(found.get(name)) for name in kinds} != kinds:
            return None
        if not all(isinstance(word, str) for word in found["arguments"]):
            return None
        if min(found["num_processes"], found["num_nodes"]) < 1:
            return None
        return cls(**{name: found[name] for name in kinds})


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """How a run is continued.

    Attributes:
        arguments: of ``train``; ``config``, ``presets`` and ``settings`` ask for the same.
        working_folder: to start in. It may be somebody else's, so no modules may be taken from it: ``python
            -P``, or the installed program.
        num_processes: that the run had on each node; another number trains on, too.
        num_nodes: that the run had.
        shown: the whole command, as a person types it in the folder that this process runs in.
    """

    arguments: tuple[str, ...]
    config: str
    presets: tuple[str, ...]
    settings: tuple[str, ...]
    working_folder: Path
    num_processes: int
    num_nodes: int
    shown: str
