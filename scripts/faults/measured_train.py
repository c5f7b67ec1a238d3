"""The training command, which writes down before every so-many-th step what its processes hold.

The first argument is the file of the measurements, the second how many steps are between two; the others are
those of the training command. The steps that it saved are in a file beside that one, ``.saves`` at its end.
Linux only.
"""

import json
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from diffsynth_lite.cli.train import main
from diffsynth_lite.run_folder.progress import StepResult
from diffsynth_lite.training import trainer
from diffsynth_lite.training.builder import TrainingObjects
from diffsynth_lite.training.checkpoint.saver import Saver

_train_step = trainer.train_step
_save = Saver.save
_SELF = Path("/proc/self")


def held() -> dict[str, Any]:
    """Memory, open files, threads, children and temporary files of this process."""
    children = [int(child) for task in (_SELF / "task").iterdir() for child in _children_of(task)]
    return {
        "rss": _resident_bytes(_SELF),
        "descriptors": _num_descriptors(_SELF),
        "threads": len(list((_SELF / "task").iterdir())),
        "python_threads": threading.active_count(),
        "children": len(children),
        "children_rss": sum(_resident_bytes(Path(f"/proc/{child}")) for child in children),
        "children_descriptors": sum(_num_descriptors(Path(f"/proc/{child}")) for child in children),
        "temporary": len(list(Path(tempfile.gettempdir()).iterdir())),
    }


def _children_of(task: Path) -> list[str]:
    try:
        return (task / "children").read_text().split()
    except FileNotFoundError:  # a thread that has ended meanwhile
        return []


def _resident_bytes(process: Path) -> int:
    line = next(line for line in (process / "status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def _num_descriptors(process: Path) -> int:
    return len(list((process / "fd").iterdir()))


def measured_step(file: Path, every: int) -> Any:
    """`train_step` that measures before every so-many-th step."""

    def train_step(built: TrainingObjects, step: int) -> StepResult:
        if (step - 1) % every == 0:
            with file.open("a") as rows:
                rows.write(json.dumps({"step": step - 1, **held()}) + "\n")
        return _train_step(built, step)

    return train_step


def noted_save(file: Path) -> Any:
    """`Saver.save` that notes each step when it is saved."""

    def save(self: Saver, step: int) -> None:
        _save(self, step)
        with file.open("a") as steps:
            steps.write(f"{step}\n")

    return save


if __name__ == "__main__":
    Saver.save = noted_save(Path(f"{sys.argv[1]}.saves"))  # type: ignore[method-assign]
    trainer.train_step = measured_step(Path(sys.argv[1]), int(sys.argv[2]))
    sys.exit(main(sys.argv[3:]))
