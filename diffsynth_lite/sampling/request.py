"""This file describes what to sample: which LoRAs, how strong, and where the images go; without torch."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from diffsynth_lite.config import Config
from diffsynth_lite.errors import UserError
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.loras import find_lora_place, lora_copies, lora_name, split_weight

FILES = {
    "input": "inputs",
    "last_frame": "last_frames",
    "control": "control",
    "mask": "inpaint_masks",
    "face": "faces",
}
"""Settings of ``validation`` with files that a preview may need, by the names of the arguments for them."""


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
        by_step: the LoRAs of a run to compare, in place of the one in ``loras``; empty is none.
        seeds: of the starting noise; each prompt is generated from each.
        run: the run that the LoRA belongs to; None for other LoRAs.
        out: where the images go, new or empty; None is a new folder in ``samples`` of the run.
    """

    config: Config
    loras: Sequence[GivenLora]
    scales: Sequence[float]
    by_step: Mapping[int, GivenLora]
    seeds: Sequence[int]
    run: RunFolder | None
    out: Path | None


class SampleArguments(BaseModel):
    """The arguments of ``diffsynth-lite sample`` by their names; None is not given.

    Attributes:
        prompt: never the name of a file.
        size: width and height.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    lora: list[str] | None = None
    every_checkpoint: bool | None = None
    prompt: list[str] | None = None
    negative: str | None = None
    seed: list[Annotated[int, Field(ge=0, lt=2**63)]] | None = None
    scale: Annotated[list[float], Field(min_length=1)] | None = None
    steps: int | None = None
    guidance: float | None = None
    size: tuple[int, int] | None = None
    frames: int | None = None
    layers: int | None = None
    input: list[str] | None = None
    last_frame: list[str] | None = None
    control: list[str] | None = None
    mask: list[str] | None = None
    face: list[str] | None = None
    out: str | None = None


def find_lora(given: str) -> GivenLora:
    """The LoRA that ``PATH`` or ``PATH:WEIGHT`` names; see :func:`find_lora_place`."""
    path, weight = split_weight(given, key="--lora")
    place = find_lora_place(path, key="--lora")
    return GivenLora(place=place, name=lora_name(place), weight=weight)


def loras_by_step(run: RunFolder | None, loras: Sequence[GivenLora]) -> dict[int, GivenLora]:
    """The LoRA of each step that a run kept one of, with the weight of the one LoRA that was given."""
    if run is None or len(loras) != 1:
        raise UserError("--every-checkpoint: compares the steps of one run; give --lora once, as runs/mine")
    (given,) = loras
    export = run.ema_lora_folder if given.place.name == run.ema_lora_folder.name else run.lora_folder
    copies = lora_copies(run.checkpoints_folder, export.name)
    if not copies:
        raise UserError(
            f"--every-checkpoint: {run.path} kept no LoRA of a step; a run keeps one with each checkpoint "
            "(output.keep_adapters)"
        )
    return {
        copy.step: GivenLora(place=copy.path, name=lora_name(copy.path), weight=given.weight)
        for copy in copies
    }


def require_new(out: Path) -> None:
    """Check that a folder for images is empty."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"--out {out}: exists, and nothing is overwritten; name a new or empty folder")


@contextmanager
def made_folder(request: SampleRequest) -> Iterator[Path]:
    """Scope that makes the folder for the images, and removes it where nothing came of it."""
    samples = Path("samples") if request.run is None else request.run.samples_folder
    folder = request.out or samples
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder = request.out or _next_folder(samples)
    except OSError as error:
        raise UserError(f"--out: {folder} cannot be made: {error.strerror}") from error
    try:
        yield folder
    finally:
        with suppress(OSError):  # it is not empty
            folder.rmdir()


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
