"""This file describes what to sample: which LoRAs, how strong, and where the images go; without torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diffsynth_lite.config import Config
from diffsynth_lite.errors import UserError
from diffsynth_lite.run_folder.folder import RunFolder

_SUFFIX = ".safetensors"


@dataclass(frozen=True, kw_only=True)
class GivenLora:
    """A LoRA to sample with.

    Attributes:
        place: its file, or the folder with the family's file names in it.
        name: for people.
        weight: factor of its update; 1 is as trained.
    """

    place: Path
    name: str
    weight: float


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """The samples to generate.

    Attributes:
        config: the base model and its formats; its section ``validation`` has the prompts.
        loras: used together; the base model only where empty.
        scales: each multiplies the weights of all LoRAs; 0 is the base model.
        seeds: of the starting noise; each prompt is generated from each.
        run: the run that the LoRA belongs to; None for other LoRAs.
        out: where the images go, new or empty; None is a new folder in ``samples`` of the run.
    """

    config: Config
    loras: Sequence[GivenLora]
    scales: Sequence[float]
    seeds: Sequence[int]
    run: RunFolder | None
    out: Path | None


def find_lora(given: str) -> GivenLora:
    """The LoRA that ``PATH`` or ``PATH:WEIGHT`` names; the path is a run's, a folder's or a file's."""
    path, weight = _without_weight(given)
    place = Path(path).expanduser()
    if not place.exists():
        raise UserError(
            f"--lora {path}: there is no such file or folder; name the folder of a run, one of its LoRAs, "
            f"such as runs/mine/lora_best, or a {_SUFFIX} file"
        )
    run = run_of(place)
    if run is not None and place.samefile(run.path):
        place = run.lora_folder
    if place.is_file() and place.suffix != _SUFFIX:
        raise UserError(f"--lora {path}: is not a {_SUFFIX} file")
    if not place.is_file() and not list(place.glob(f"*{_SUFFIX}")):
        raise UserError(
            f"--lora {path}: there is no LoRA in {place}; a run writes its first with its first checkpoint"
        )
    return GivenLora(place=place, name=_name(place, run), weight=weight)


def run_of(place: Path) -> RunFolder | None:
    """The run that a folder or file belongs to; None for others."""
    folders = [RunFolder(folder) for folder in (place, *place.absolute().parents[:2])]
    return next((folder for folder in folders if folder.holds_run()), None)


def require_new(out: Path) -> None:
    """Check that a folder for images is empty."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"--out {out}: exists, and nothing is overwritten; name a new or empty folder")


def make_folder(request: SampleRequest) -> Path:
    """Make the folder for the images."""
    samples = Path("samples") if request.run is None else request.run.samples_folder
    folder = request.out or samples
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return request.out or _next_folder(samples)
    except OSError as error:
        raise UserError(f"--out: {folder} cannot be made: {error.strerror}") from error


def _next_folder(samples: Path) -> Path:
    """A new folder in ``samples``, with the next number, also while another command does the same."""
    number = 1
    while True:
        folder = samples / f"{number:04d}"
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


def _without_weight(given: str) -> tuple[str, float]:
    """Path and weight; a colon may be part of the path."""
    path, colon, written = given.rpartition(":")
    try:
        weight = float(written)
    except ValueError:
        return given, 1.0
    if not colon:
        return given, 1.0
    if not math.isfinite(weight):
        raise UserError(
            f"--lora {given}: {written} is not a weight; give a finite number, such as {path}:0.7"
        )
    return path, weight


def _name(place: Path, run: RunFolder | None) -> str:
    folder = place.parent if place.is_file() else place
    if run is None:
        return place.stem if place.is_file() else folder.resolve().name
    run_name = run.path.resolve().name
    return run_name if folder.name == run.lora_folder.name else f"{run_name}-{folder.name}"
