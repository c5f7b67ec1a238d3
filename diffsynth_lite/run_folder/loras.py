"""This file finds the LoRAs of a run: its exports, the copies kept by step, and what ``RUN@WHICH`` names."""

import re
from dataclasses import dataclass
from pathlib import Path

from diffsynth_lite.errors import UserError, join_names
from diffsynth_lite.run_folder.folder import RunFolder

SUFFIX = ".safetensors"

_COPY_NAME = re.compile(r"(lora(?:_ema)?)-(\d{8,})", re.ASCII)
_STEP = re.compile("[0-9]{1,12}")
_CHECKPOINT_NAME = re.compile(r"step-\d{8,}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class LoraCopy:
    """A copy of an export as it was at a step, ``checkpoints/lora-00000200``.

    Attributes:
        export: name of the folder that it is a copy of, ``lora`` or ``lora_ema``.
    """

    path: Path
    export: str
    step: int

    @classmethod
    def of(cls, path: Path) -> "LoraCopy | None":
        """The copy that a folder of this name is; None for any other name."""
        match = _COPY_NAME.fullmatch(path.name)
        if match is None or copy_name(match[1], int(match[2])) != path.name:
            return None
        return cls(path=path, export=match[1], step=int(match[2]))


def copy_name(export: str, step: int) -> str:
    """Name of the folder with a copy of an export, ``lora-00000200``."""
    return f"{export}-{step:08d}"


def lora_copies(checkpoints: Path, export: str = "lora") -> list[LoraCopy]:
    """The copies of an export in the folder of the checkpoints, the earliest step first."""
    folders = [path for path in checkpoints.glob(f"{export}-*") if path.is_dir() and not path.is_symlink()]
    copies = [copy for copy in map(LoraCopy.of, folders) if copy is not None and copy.export == export]
    return sorted(copies, key=lambda copy: copy.step)


def run_of(place: Path) -> RunFolder | None:
    """The run that a folder or file belongs to; None for others."""
    folders = [RunFolder(folder) for folder in (place, *place.absolute().parents[:3])]
    return next((folder for folder in folders if folder.holds_run()), None)


def find_lora_place(given: str, *, key: str = "") -> Path:
    """The LoRA that a text names: a file, or the folder that holds it.

    Args:
        given: a path, of a run also its folder, or ``RUN@WHICH``: the number of a step, ``last``, ``best`` or
            ``ema``. An existing path wins.
        key: the flag that names it, for messages.

    Raises:
        UserError: there is no such LoRA; it names those that are there.
    """
    name = f"{key} {given}".strip()
    place = Path(given).expanduser()
    before, _, which = given.rpartition("@")
    run = RunFolder(Path(before).expanduser())
    if not place.exists():
        if before and run.holds_run():
            return _lora_of(run, which, name)
        raise UserError(
            f"{name}: there is no such file or folder{f', and {before} holds no run' * bool(before)}; name "
            f"the folder of a run, a step of it, such as runs/mine@1000, or a {SUFFIX} file"
        )
    if RunFolder(place).holds_run():
        place = RunFolder(place).lora_folder
    _require_lora(place, name)
    return place


def exports_of(run: RunFolder) -> dict[str, Path]:
    """The folders of a run's exports, which may not be there, by the names that they have after an ``@``."""
    return {"last": run.lora_folder, "best": run.best_lora_folder, "ema": run.ema_lora_folder}


def _lora_of(run: RunFolder, which: str, name: str) -> Path:
    folders = exports_of(run)
    written = {
        "last": "a run writes it with its first checkpoint",
        "best": "a run writes it with validation.data, for the lowest loss there (output.keep_best)",
        "ema": "a run writes it with train.ema_decay",
    }
    if which in folders:
        place, reason = folders[which], f"there is no {folders[which].name}; {written[which]}"
    elif _STEP.fullmatch(which):
        place = run.checkpoints_folder / copy_name(run.lora_folder.name, int(which))
        reason = f"no LoRA of step {int(which)} was kept (output.keep_adapters)"
    else:
        raise UserError(f"{name}: {which!r} is neither a step nor {', '.join(folders)}; {_others(run)}")
    if not _has_lora(place):
        raise UserError(f"{name}: {reason}; {_others(run)}")
    return place


def _require_lora(place: Path, name: str) -> None:
    folder = place if place.is_dir() else place.parent
    run = run_of(place)
    if run is not None and (folder.name == "checkpoints" or _CHECKPOINT_NAME.fullmatch(folder.name)):
        raise UserError(f"{name}: holds what a run resumes from, not a LoRA file; {_others(run)}")
    if place.is_file() and place.suffix != SUFFIX:
        raise UserError(f"{name}: is not a {SUFFIX} file")
    if not place.is_file() and not _has_lora(place):
        hint = "" if run is None else f"; {_others(run)}"
        raise UserError(f"{name}: there is no LoRA in {place}{hint}")


def _has_lora(folder: Path) -> bool:
    return any(folder.glob(f"*{SUFFIX}"))


def _others(run: RunFolder) -> str:
    """The LoRAs that a run has, as text."""
    steps = [str(copy.step) for copy in lora_copies(run.checkpoints_folder)]
    there = [*(which for which, folder in exports_of(run).items() if _has_lora(folder)), *steps]
    if not there:
        return "the run has no LoRA yet: it writes the first with its first checkpoint"
    return f"the run has {join_names([f'@{which}' for which in there])}"
