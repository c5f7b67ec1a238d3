"""This file writes the LoRA for inference and reads it back, and reads the one that a run starts from."""

import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from diffsynth_lite.errors import UserError
from diffsynth_lite.files import sync
from diffsynth_lite.lora.file_header import add_metadata
from diffsynth_lite.lora.metadata import NoiseRange
from diffsynth_lite.pipelines import ModelFamily
from diffsynth_lite.redaction import redacted

_FIRST, _SECOND = ".lora_A.weight", ".lora_B.weight"


def export_lora(
    family: ModelFamily,
    folder: Path,
    tensors: dict[str, torch.Tensor],
    settings: dict[str, Any],
    describe: Callable[[NoiseRange], Mapping[str, str]],
) -> list[Path]:
    """Write an adapter in its family's format, read it back, compare, and only then replace the last one.

    Args:
        folder: where the files go; a reader sees the old file or the new one, also after a power cut.
        tensors: the adapter by peft's names.
        settings: peft's settings, alpha included; the file holds them with secrets masked, layers by name.
        describe: what a file says of its run, by the noise levels that it is for.

    Returns:
        The files written.

    Raises:
        RuntimeError: the files do not hold the adapter. A bug, of ours or of the library that wrote it.
    """
    # A layer is no secret: to call it otherwise would be another LoRA.
    settings = {
        name: value if name == "target_modules" else redacted(value) for name, value in settings.items()
    }
    aside = folder.with_name(f".{folder.name}-writing")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        written = family.save_lora(aside, tensors, settings)
        # Of experts each has its own range; other models have one, whatever their files.
        ranges = family.noise_ranges if len(family.noise_ranges) > 1 else family.noise_ranges * len(written)
        for file, noise_range in zip(written, ranges, strict=True):
            add_metadata(file, describe(noise_range))
        _compare(family, aside, tensors, settings)
        folder.mkdir(parents=True, exist_ok=True)
        for file in written:
            # safetensors writes files that only their owner may read.
            file.chmod(folder.stat().st_mode & 0o666)
            sync(file)
        replaced = [file.replace(folder / file.name) for file in written]
        sync(folder)
        return replaced
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _compare(
    family: ModelFamily, folder: Path, tensors: dict[str, torch.Tensor], settings: dict[str, Any]
) -> None:
    read, read_settings = family.read_lora(folder)
    differing = [
        name
        for name in tensors.keys() | read.keys()
        if name not in read or name not in tensors or not torch.equal(read[name], tensors[name])
    ]
    if differing:
        raise RuntimeError(
            f"{len(differing)} tensors of the LoRA file differ from the adapter (first: {differing[0]})"
        )
    for name, value in settings.items():
        if read_settings.get(name) != value:
            raise RuntimeError(
                f"the LoRA file holds {name}={read_settings.get(name)!r}, the adapter {value!r}"
            )


def read_initial_lora(
    family: ModelFamily, location: str, *, layers: Collection[str], rank: int, alpha: float
) -> dict[str, torch.Tensor]:
    """The tensors of a LoRA in the format that the family's diffusers pipeline loads.

    Args:
        location: the file, or the folder with the family's file names in it.
        layers: full names of the layers that this run trains. The LoRA must be on these, with this rank and
            this alpha.

    Returns:
        Tensors by peft's names.

    Raises:
        UserError: it is missing or damaged, or has other layers, another rank or another alpha.
    """
    place = Path(location).expanduser()
    if not place.exists():
        raise UserError(
            f"lora.init_from: there is no {location}; name a LoRA file, or the folder that holds it"
        )
    try:
        tensors, settings = family.read_lora(place)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        text = " ".join(str(error).split())
        raise UserError(
            f"lora.init_from: {location} holds no LoRA that this family's pipeline can read ({text})"
        ) from error
    _check_layers(tensors, layers, location)
    ranks = {tensor.shape[0] for name, tensor in tensors.items() if name.endswith(_FIRST)}
    if ranks != {rank}:
        found = ", ".join(map(str, sorted(ranks)))
        raise UserError(f"lora.init_from: the LoRA in {location} has rank {found}; set lora.rank to it")
    # A file that says none means its rank, as diffusers reads it.
    found_alpha = float(settings.get("lora_alpha", rank))
    if found_alpha != alpha:
        raise UserError(
            f"lora.init_from: the LoRA in {location} has alpha {found_alpha:g}, this run {alpha:g}; "
            f"set lora.alpha: {found_alpha:g}"
        )
    return tensors


def _check_layers(tensors: dict[str, torch.Tensor], layers: Collection[str], location: str) -> None:
    others = sorted(name for name in tensors if not name.endswith((_FIRST, _SECOND)))
    if others:
        raise UserError(
            f"lora.init_from: {location} holds {others[0]}, which is no part of a plain LoRA (lora_A, lora_B)"
        )
    found = {name.removesuffix(_FIRST) for name in tensors if name.endswith(_FIRST)}
    if found != set(layers):
        missing, added = sorted(set(layers) - found), sorted(found - set(layers))
        named = f"it lacks {missing[0]}" if missing else f"it also has {added[0]}"
        raise UserError(
            f"lora.init_from: the LoRA in {location} is on {len(found)} layers, this run's on {len(layers)} "
            f"({named}); set lora.target_modules and lora.components to its layers"
        )
