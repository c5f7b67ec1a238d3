"""This file finds the LoRAs of a run: its exports, the copies kept by step, the one that a person chose, and
what ``RUN@WHICH`` names."""

import logging
import math
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from diffsynth_lite.errors import UserError, join_names
from diffsynth_lite.files import parse_json, write_json
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.reading import read_run_file

logger = logging.getLogger(__name__)

SUFFIX = ".safetensors"
CHOSEN = "chosen"
"""Names the LoRA that was chosen, after an ``@``."""

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


def metadata_of(file: Path) -> dict[str, str]:
    """The metadata of a LoRA file; none where it cannot be read."""
    with suppress(OSError, SafetensorError), safe_open(file, "np") as opened:
        return dict(opened.metadata() or {})
    return {}


def contract_of(file: Path) -> str | None:
    """What the LoRAs of a run have in common, and those of no other run; None of another program's."""
    return metadata_of(file).get("diffsynth_lite.contract")


def named_file(folder: Path, name: str, file: str) -> Path:
    """The path of a LoRA file under another name, ``NAME.safetensors`` or ``NAME-high_noise.safetensors``.

    Args:
        file: name of the file, as the family has it.
    """
    expert = Path(file).stem.removeprefix("pytorch_lora_weights").strip("_")
    return folder / f"{'-'.join(filter(None, [name, expert]))}{SUFFIX}"


def find_lora_place(given: str, *, key: str = "") -> Path:
    """The LoRA that a text names: a file, or the folder that holds it.

    Args:
        given: a path, of a run also its folder, or ``RUN@WHICH``: the number of a step, ``last``, ``best``,
            ``ema`` or ``chosen``. An existing path wins.
        key: the flag that names it, for messages.

    Raises:
        UserError: there is no such LoRA; it names those that are there.
    """
    name = f"{key} {given}".strip()
    place = Path(given).expanduser()
    before, _, which = given.rpartition("@")
    run = RunFolder(Path(before).expanduser())
    if not place.exists():
        if before and _is_weight(which, of_file=run.path.is_file()):
            raise UserError(f"{name}: a weight comes after a colon, as an @ names a step: {before}:{which}")
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


def split_weight(given: str, *, key: str = "") -> tuple[str, float]:
    """Path and weight of ``PATH`` or ``PATH:WEIGHT``, without which it is 1; a colon may be part of the path.

    Args:
        key: the flag that names it, for messages.
    """
    path, colon, written = given.rpartition(":")
    try:
        weight = float(written)
    except ValueError:
        return given, 1.0
    if not colon:
        return given, 1.0
    if not math.isfinite(weight):
        raise UserError(
            f"{f'{key} {given}'.strip()}: {written} is not a weight; give a finite number, such as {path}:0.7"
        )
    return path, weight


def lora_name(place: Path) -> str:
    """Name of a LoRA for people, such as ``mine@200``, without the folders that it is in."""
    folder = place.parent if place.is_file() else place
    if (run := run_of(place)) is None:
        return place.stem if place.is_file() else folder.resolve().name
    run_name = run.path.resolve().name
    if copy := LoraCopy.of(folder):
        return f"{run_name}@{copy.step}"
    return run_name if folder.name == run.lora_folder.name else f"{run_name}-{folder.name}"


def chosen_copy(run: RunFolder) -> LoraCopy | None:
    """The LoRA that a person chose, which may be gone by now; None where nobody chose one.

    Raises:
        UserError: the file that names it is damaged.
    """
    try:
        name = parse_json(read_run_file(run.chosen_file))["lora"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError):
        name = ""
    # By its last part: the file may be somebody else's, and lead anywhere.
    if copy := LoraCopy.of(run.checkpoints_folder / Path(str(name)).name):
        return copy
    raise UserError(f"{run.chosen_file}: names no LoRA of the run; remove it, or choose one again")


def choose(run: RunFolder, copy: LoraCopy | None) -> None:
    """Write down which LoRA is the one to use; None takes a choice back."""
    if copy is None:
        run.chosen_file.unlink(missing_ok=True)
    else:
        write_json(run.chosen_file, {"lora": copy.path.name})


def copy_by_step(run: RunFolder, place: Path) -> LoraCopy:
    """The copy by step that a LoRA of a run is, or that holds the same weights as an export.

    Raises:
        UserError: that was not kept.
    """
    folder = place.parent if place.is_file() else place
    if copy := LoraCopy.of(folder):
        return copy
    metadata = _metadata(folder)
    # The best one is of either export.
    average = [run.ema_lora_folder.name] * (metadata.get("diffsynth_lite.weights") == "average")
    step = metadata.get("diffsynth_lite.step", "")
    for export in (folder.name, *average, run.lora_folder.name) if _STEP.fullmatch(step) else ():
        path = run.checkpoints_folder / copy_name(export, int(step))
        if (copy := LoraCopy.of(path)) and _has_lora(path):
            return copy
    raise UserError(f"{folder}: no LoRA by step was kept of it (output.keep_adapters); {_others(run)}")


def chosen_or(given: str) -> str:
    """``RUN@chosen`` for the folder of a run where a LoRA was chosen, which is logged; else the text."""
    run = RunFolder(Path(given).expanduser())
    choice = chosen_copy(run) if run.holds_run() else None
    if choice is None:
        return given
    logger.info("%s: step %d was chosen; %s@last is the latest LoRA.", given, choice.step, given)
    return f"{given}@{CHOSEN}"


def exports_of(run: RunFolder) -> dict[str, Path]:
    """The folders of a run's exports, which may not be there, by the names that they have after an ``@``."""
    return {"last": run.lora_folder, "best": run.best_lora_folder, "ema": run.ema_lora_folder}


def _is_weight(text: str, *, of_file: bool) -> bool:
    """Whether what is after an ``@`` can be meant as a weight; of a folder whole numbers are steps."""
    with suppress(ValueError):
        return math.isfinite(float(text)) and (of_file or not _STEP.fullmatch(text))
    return False


def _lora_of(run: RunFolder, which: str, name: str) -> Path:
    folders = exports_of(run)
    written = {
        "last": "a run writes it with its first checkpoint",
        "best": "a run writes it with validation.data or data.hold_out, for the lowest loss there, or with "
        "validation.scores for the step that these recommend",
        "ema": "a run writes it with train.ema_decay",
    }
    if which in folders:
        place, reason = folders[which], f"there is no {folders[which].name}; {written[which]}"
    elif _STEP.fullmatch(which):
        place = run.checkpoints_folder / copy_name(run.lora_folder.name, int(which))
        reason = f"no LoRA of step {int(which)} was kept (output.keep_adapters)"
    elif which == CHOSEN:
        choice = chosen_copy(run)
        if choice is None:
            raise UserError(
                f"{name}: no LoRA was chosen; diffsynth-lite choose RUN@STEP does that; {_others(run)}"
            )
        place, reason = choice.path, f"step {choice.step} was chosen, and its LoRA is gone; choose another"
    else:
        known = ", ".join([*folders, CHOSEN])
        raise UserError(f"{name}: {which!r} is neither a step nor {known}; {_others(run)}")
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


def _metadata(folder: Path) -> dict[str, str]:
    """Of a LoRA file; of several those of the first."""
    return next(filter(None, map(metadata_of, sorted(folder.glob(f"*{SUFFIX}")))), {})


def _has_lora(folder: Path) -> bool:
    return any(folder.glob(f"*{SUFFIX}"))


def _others(run: RunFolder) -> str:
    """The LoRAs that a run has, as text."""
    steps = [str(copy.step) for copy in lora_copies(run.checkpoints_folder)]
    there = [which for which, folder in exports_of(run).items() if _has_lora(folder)]
    with suppress(UserError):
        there += [CHOSEN] if (choice := chosen_copy(run)) and _has_lora(choice.path) else []
    there += steps
    if not there:
        return "the run has no LoRA yet: it writes the first with its first checkpoint"
    return f"the run has {join_names([f'@{which}' for which in there])}"
