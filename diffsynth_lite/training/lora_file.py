"""This file writes the LoRA for inference and reads it back, and reads the one that a run starts from."""

import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError

from diffsynth_lite.errors import RunDivergedError, RunStoppedError, UserError
from diffsynth_lite.files import sync
from diffsynth_lite.lora import LoraSize
from diffsynth_lite.lora.adapter import example_tensors
from diffsynth_lite.lora.kinds import LORA, AdapterKind, Lokr
from diffsynth_lite.lora.layers import MAGNITUDE
from diffsynth_lite.lora.metadata import NoiseRange, add_metadata
from diffsynth_lite.lora.reading import UnknownLayersError
from diffsynth_lite.lora.spelling import DIFFUSERS
from diffsynth_lite.lora.targets import ending_of
from diffsynth_lite.lora.updates import (
    LOKR_NAME,
    LayerUpdate,
    LoraFile,
    kind_of,
    rank_of,
    tensors_of,
    trained_tensors,
    updates_of,
)
from diffsynth_lite.pipelines import ModelFamily, families_of
from diffsynth_lite.redaction import redacted
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.loras import find_lora_place

logger = logging.getLogger(__name__)

_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")
_BY_LAYER = ("target_modules", "rank_pattern", "alpha_pattern")
_FIRST, _SECOND = ".lora_A.weight", ".lora_B.weight"


def export_lora(
    family: ModelFamily,
    folder: Path,
    tensors: dict[str, torch.Tensor],
    settings: dict[str, Any],
    describe: Callable[[NoiseRange], Mapping[str, str]],
    *,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[Path], float]:
    """Write an adapter in its family's format, have it loaded, compare, and only then replace the last one.

    Args:
        folder: where the files go; a reader sees the old file or the new one, also after a power cut.
        tensors: the adapter by peft's names, as ``exported_tensors`` has them.
        settings: peft's settings, alpha included; the file holds them with secrets masked, layers by name.
        describe: metadata of a file, by the noise levels that it is for.

    Returns:
        The files, and the norm of the update's error in their dtype, over the norm of the update.

    Raises:
        RunStoppedError: a number is too large for the dtype.
        RunDivergedError: the update is too large to be computed.
        RuntimeError: the files do not do what the adapter does. A bug, of ours or of a library.
        OSError: the disk is full, or fails; the last files are as they were.
    """
    adapter = updates_of(tensors, settings)
    if dtype == torch.float16:  # the others hold what float32 does
        _require_range(adapter)
    # The name of a layer is not a secret, and a masked one would make another LoRA.
    settings = {name: value if name in _BY_LAYER else redacted(value) for name, value in settings.items()}
    aside = folder.with_name(f".{folder.name}-writing")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        written = _saved(family, aside, tensors, settings, dtype)
        # Each expert has its own range; other models have one, however many files they have.
        ranges = family.noise_ranges if len(family.noise_ranges) > 1 else family.noise_ranges * len(written)
        for file, noise_range in zip(written, ranges, strict=True):
            add_metadata(file, describe(noise_range))
        try:
            loaded = family.lora_files.loaded(aside)
        except ValueError as error:
            text = " ".join(str(error).split())
            raise RuntimeError(f"diffusers does not load the LoRA file ({text})") from error
        rounding = _compare(loaded, adapter, dtype)
        folder.mkdir(exist_ok=True)
        for file in written:
            # safetensors writes files that only their owner may read.
            file.chmod(folder.stat().st_mode & 0o666)
            sync(file)
        replaced = [file.replace(folder / file.name) for file in written]
        sync(folder)
        return replaced, rounding
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _require_range(adapter: Mapping[str, LayerUpdate]) -> None:
    largest = max(float(matrix.abs().max()) for matrix in tensors_of(adapter, DIFFUSERS).values())
    if largest > (limit := torch.finfo(torch.float16).max):
        raise RunStoppedError(
            f"output.lora_dtype: float16 holds nothing above {limit:g}, and the LoRA has a {largest:g}; "
            "continue from the checkpoint with output.lora_dtype=bfloat16"
        )


def _saved(
    family: ModelFamily,
    folder: Path,
    tensors: dict[str, torch.Tensor],
    settings: dict[str, Any],
    dtype: torch.dtype,
) -> list[Path]:
    try:
        return family.lora_files.save(folder, tensors, settings, dtype=dtype)
    except SafetensorError as error:
        # safetensors reports a full disk only in words.
        if not (found := _SYSTEM_ERROR.search(str(error))):
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(folder)) from error


def _compare(
    loaded: Mapping[str, LayerUpdate], adapter: Mapping[str, LayerUpdate], dtype: torch.dtype
) -> float:
    if other := sorted(loaded.keys() ^ adapter.keys()):
        raise RuntimeError(f"{len(other)} layers of the LoRA file are not the adapter's (first: {other[0]})")
    differing, lost, whole = [], 0.0, 0.0
    for layer, pair in adapter.items():
        norm = pair.norm
        if not math.isfinite(norm):
            raise RunDivergedError(
                f"the LoRA's update of {layer} is not finite, so no LoRA file was written; the one before is "
                "intact"
            )
        distance = pair.distance(loaded[layer])
        if not distance <= pair.rounding_bound(dtype):
            differing.append(layer)
        lost, whole = math.hypot(lost, distance), math.hypot(whole, norm)
    if differing:
        raise RuntimeError(
            f"the LoRA file does something else than the adapter to {len(differing)} layers (first: "
            f"{differing[0]})"
        )
    return lost / whole if whole else 0.0


def read_lora(family: ModelFamily, location: str, *, key: str) -> LoraFile:
    """A LoRA of this or another program, as the family reads it.

    Args:
        location: the file, or a folder with it; of experts, with the family's file names in it; or a run, or
            a LoRA of it as ``RUN@WHICH``.
        key: the setting or flag that names it, for messages.
    """
    place = Path(location).expanduser()
    if "@" in location and not place.exists():
        place = find_lora_place(location, key=key)
    if not place.exists():
        raise UserError(f"{key}: there is no {location}; name a LoRA file, or the folder that holds it")
    if not (place.is_file() or place.is_dir()):
        raise UserError(f"{key}: {location} is neither a file nor a folder")
    if RunFolder(place).holds_run():
        place = RunFolder(place).lora_folder
    try:
        return family.lora_files.read(place)
    except UnknownLayersError as error:
        is_named = "diffsynth_lite.family" in error.contents.metadata
        found = () if is_named else families_of(error.contents)
        likely = f"; it looks like a LoRA of {' or '.join(found)}: name one of this model" if found else ""
        raise UserError(f"{key}: {error}{likely}") from error
    except UserError as error:
        raise UserError(f"{key}: {error}") from error
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        text = " ".join(str(error).split())
        raise UserError(
            f"{key}: {location} holds no LoRA that this family's pipeline can read ({text})"
        ) from error


def read_initial_lora(
    family: ModelFamily,
    location: str,
    *,
    layers: Collection[str],
    rank: int,
    alpha: float,
    own: Mapping[str, LoraSize] = MappingProxyType({}),
    kind: AdapterKind = LORA,
) -> dict[str, torch.Tensor]:
    """The tensors of a LoRA of this or another program.

    Args:
        layers: full names of the layers that this run trains. The LoRA must be on these, with this rank.
        alpha: of this run; a LoRA of another is scaled so that it does the same.
        own: of layers that have another rank and alpha in this run.
        kind: of this run's adapter, which the LoRA must be, too.

    Returns:
        Tensors by peft's names, in fp32.
    """
    tensors, settings = read_lora(family, location, key="lora.init_from")
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise UserError(f"lora.init_from: {location}: {name} holds NaN or infinity; name another LoRA")
    given = _read_updates(tensors, settings, location)
    if others := {kind_of(update).title for update in given.values()} - {kind.title}:
        raise UserError(
            f"lora.init_from: {location} is a {min(others)}, and this run trains a {kind.title}; set "
            "lora.kind to it, or name another file"
        )
    _check_layers(given, layers, location)
    usual = LoraSize(rank, alpha)
    _check_ranks(given, usual, own, location)
    logger.info("The run starts from the LoRA in %s, with the same update at alpha %g.", location, alpha)
    initial: dict[str, torch.Tensor] = {}
    for layer, update in given.items():
        size = own.get(layer, usual)
        initial |= trained_tensors(update, layer, rank=size.rank, alpha=size.alpha)
    _check_shapes(family, initial, layers, rank=rank, own=own, kind=kind, location=location)
    return initial


def _read_updates(
    tensors: Mapping[str, torch.Tensor], settings: Mapping[str, Any], location: str
) -> dict[str, LayerUpdate]:
    given, known = updates_of(tensors, settings), (_FIRST, _SECOND, MAGNITUDE)
    others = sorted(name for name in tensors if not name.endswith(known) and not LOKR_NAME.fullmatch(name))
    if others:
        raise UserError(
            f"lora.init_from: {location} holds {others[0]}, not part of a plain LoRA (lora_A, lora_B)"
        )
    return given


def _check_layers(given: Collection[str], layers: Collection[str], location: str) -> None:
    found = set(given)
    if found != set(layers):
        missing, added = sorted(set(layers) - found), sorted(found - set(layers))
        named = f"it lacks {missing[0]}" if missing else f"it also has {added[0]}"
        endings = sorted(set(map(ending_of, found)))
        is_in_all_blocks = added or not any(ending_of(layer) in endings for layer in missing)
        blocks = "" if is_in_all_blocks else ", and lora.target_blocks to its blocks"
        remedy = f"set 'lora.target_modules=[{', '.join(endings)}]'{blocks}"
        if any(layer.startswith("text_encoder") for layer in added):
            remedy = "set lora.target_modules and lora.components to its layers"
        raise UserError(
            f"lora.init_from: the LoRA in {location} is on {len(found)} layers, this run's on {len(layers)} "
            f"({named}); {remedy}"
        )


def _check_ranks(
    given: Mapping[str, LayerUpdate], usual: LoraSize, own: Mapping[str, LoraSize], location: str
) -> None:
    ranks = {layer: rank for layer, update in given.items() if (rank := rank_of(update)) is not None}
    if others := {rank for layer, rank in ranks.items() if rank != own.get(layer, usual).rank}:
        found = ", ".join(map(str, sorted(others if own else set(ranks.values()))))
        where = " where this run has another (lora.groups)" if own else ""
        raise UserError(
            f"lora.init_from: the LoRA in {location} has rank {found}{where}; set lora.rank to it"
        )


def _check_shapes(
    family: ModelFamily,
    initial: Mapping[str, torch.Tensor],
    layers: Collection[str],
    *,
    rank: int,
    own: Mapping[str, LoraSize],
    kind: AdapterKind,
    location: str,
) -> None:
    """Check what rank and layers do not show: how a LoKr splits the sides of weights."""
    if kind.name != Lokr.name:
        return
    model = family.empty_transformer()
    wanted = example_tensors(model, sorted(layers), rank=rank, own=own, kind=kind)
    shapes, found = ({name: one.shape for name, one in some.items()} for some in (wanted, initial))
    if differing := sorted(
        name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name)
    ):
        raise UserError(
            f"lora.init_from: the LoKr in {location} splits weights otherwise ({len(differing)} tensors, "
            f"such as {differing[0]}); set lora.lokr_factor and lora.rank to those that it was trained with"
        )
