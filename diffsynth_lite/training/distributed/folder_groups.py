"""This file finds out which processes have the same folder under a path: machines may each have their own."""

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import gather_object

from diffsynth_lite.files import temporary_path

logger = logging.getLogger(__name__)

_WAIT_S = 1.0
"""For a file that another machine has just written: a network file system may show it late."""
_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class FolderGroup:
    """The processes that have the same folder under a path as this one.

    Attributes:
        ranks: theirs, this process's among them.
        place: of this process in ``ranks``.
        num_folders: how many different folders all processes have under that path.
        num_machines: that all processes run on.
    """

    ranks: Sequence[int] = (0,)
    place: int = 0
    num_folders: int = 1
    num_machines: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process is the first one of the group."""
        return self.place == 0

    def log(self, key: str, folder: Path, *, own: str) -> None:
        """Say whether machines share a folder; nothing where there is one machine.

        Args:
            key: of the setting that names the folder.
            own: what follows from it where they do not.
        """
        if self.num_folders > 1:
            logger.info("%s: %s is not shared by the %d machines: %s.", key, folder, self.num_machines, own)
        elif self.num_machines > 1:
            logger.info("%s: %s is shared by the %d machines.", key, folder, self.num_machines)


def find_folder_group(accelerator: Accelerator, folder: Path, *, on_each_machine: bool) -> FolderGroup:
    """Find out who has the same folder; call it on all processes.

    Some processes leave a file with a random name, and all look which of these they see. A file that is seen
    too late only makes a folder pass for one that is not shared.

    Args:
        folder: of this process; made where a file is left.
        on_each_machine: whether the first process of each leaves one; else the main process alone does, and
            nothing is written anywhere else.
    """
    if accelerator.num_processes == 1:
        return FolderGroup()
    leaves_one = accelerator.is_local_main_process if on_each_machine else accelerator.is_main_process
    marker = _left_in(folder) if leaves_one else None
    try:
        # That the others look comes after all are there: a name that was missed once may be remembered so.
        name = None if marker is None else marker.name
        told = gather_object([(name, bool(accelerator.is_local_main_process))])
        names = frozenset(name for name, _ in told if name is not None)
        seen_by = gather_object([_seen(folder, names)])
    finally:
        if marker is not None:
            marker.unlink(missing_ok=True)
    own = accelerator.process_index
    ranks = [rank for rank, seen in enumerate(seen_by) if seen == seen_by[own]]
    return FolderGroup(
        ranks=ranks,
        place=ranks.index(own),
        num_folders=len(set(seen_by)),
        num_machines=sum(is_local_main for _, is_local_main in told),
    )


def _left_in(folder: Path) -> Path | None:
    """An empty file in a folder; None where it cannot be written to."""
    marker = temporary_path(folder / "shared")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        marker.touch()
    except OSError:
        return None
    return marker


def _seen(folder: Path, names: frozenset[str]) -> frozenset[str]:
    """Those of the names that are there, or will be in a moment."""
    end = time.monotonic() + _WAIT_S
    while True:
        seen = frozenset(name for name in names if os.path.lexists(folder / name))
        if seen == names or time.monotonic() > end:
            return seen
        time.sleep(_POLL_S)
