"""This file writes a base model with LoRAs in its weights, some tensors at a time."""

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, TypeAlias

import torch
from diffusers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFETENSORS_WEIGHTS_NAME
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from diffsynth_lite.config import Config
from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.core.weights.loading import StoredTensors
from diffsynth_lite.errors import RunStoppedError, UserError
from diffsynth_lite.files import free_disk_bytes, temporary_path
from diffsynth_lite.lora import require_fit
from diffsynth_lite.lora.merging import MERGED_FROM
from diffsynth_lite.lora.updates import DoraUpdate, LayerUpdate, LokrUpdate, updates_of
from diffsynth_lite.pipelines import ModelFamily
from diffsynth_lite.pipelines.base.quantized import set_formats, stored_component
from diffsynth_lite.run_folder.loras import lora_name
from diffsynth_lite.training.checks import bind_family
from diffsynth_lite.training.lora_file import read_lora

logger = logging.getLogger(__name__)

_FILES = SAFETENSORS_WEIGHTS_NAME.replace(".", "{suffix}.")
_SHARD_BYTES = 2**31
"""Most of one file, which is in memory at once."""

Updates: TypeAlias = Mapping[str, Sequence[tuple[LayerUpdate, float]]]
"""The updates of layers, each with its weight in the sum, by their names in a model."""
Norms: TypeAlias = dict[str, tuple[float, float]]
"""Norms of the error of a changed weight's dtype, and of its change, by names of layers."""


def write_merged_base(
    config: Config, loras: Sequence[tuple[Path, float]], folder: Path, dtype: torch.dtype
) -> Norms:
    """Write the models that remove noise with the weighted sum of LoRAs in their weights.

    Weights are read as they are stored: ``model.quantize`` is for training.

    Args:
        config: names the base model.
        loras: their files or folders, and weights; a DoRA, whose norms are those of the base, only by itself.
        folder: new; gets a folder for each model, as a pipeline of diffusers has.
        dtype: of all but what diffusers keeps in fp32.

    Raises:
        OSError, SafetensorError, RunStoppedError: the disk is full, or fails; there is no ``folder`` then.
    """
    family = bind_family(config)
    model = family.empty_transformer()
    if others := set(family.trained) - set(family.denoisers):
        raise UserError(f"--into-base: {', '.join(sorted(others))} is not written; see lora.components")
    updates = _read(family, model, loras)
    set_formats(model, dtype, None)
    needed, free = sum(one.nbytes for one in model.state_dict().values()), free_disk_bytes(folder)
    if needed > free:
        raise UserError(
            f"--into-base {folder}: needs {format_bytes(needed)}, and {format_bytes(free)} are free there"
        )
    family.folder.download_weights(family.trained)
    made_of = json.dumps([{"lora": lora_name(path), "weight": weight} for path, weight in loras])
    norms: Norms = {}
    unfinished = temporary_path(folder)
    try:
        for component, part in family.parts_of(model).items():
            prefix = "" if part is model else f"{component}."
            (unfinished / component).mkdir(parents=True)
            settings = json.dumps(family.folder.component_config(component), indent=2)
            (unfinished / component / "config.json").write_text(settings, encoding="utf-8")
            found = write_weights(
                unfinished / component,
                stored_component(family.folder, component, part),
                part.state_dict(),
                {name.removeprefix(prefix): one for name, one in updates.items() if name.startswith(prefix)},
                metadata={MERGED_FROM: made_of},
            )
            norms |= {f"{prefix}{layer}": norm for layer, norm in found.items()}
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return norms


def _read(family: ModelFamily, model: nn.Module, loras: Sequence[tuple[Path, float]]) -> Updates:
    updates: dict[str, list[tuple[LayerUpdate, float]]] = {}
    for path, weight in loras:
        tensors, settings = read_lora(family, str(path), key="--into-base")
        require_fit(model, tensors, place=f"--into-base: {path}")
        for layer, update in updates_of(tensors, settings).items():
            if len(loras) > 1 and isinstance(update, DoraUpdate):
                raise UserError(
                    f"--into-base: {path} is a DoRA, whose norms are those of the base model's weights; it "
                    "can be merged only by itself"
                )
            updates.setdefault(layer, []).append((update, weight))
    return updates


def write_weights(
    folder: Path,
    stored: StoredTensors,
    tensors: Mapping[str, Tensor],
    updates: Updates,
    *,
    metadata: Mapping[str, str],
    shard_bytes: int = _SHARD_BYTES,
) -> Norms:
    """Write weights with updates added to files as diffusers names them, and read each file back.

    Args:
        stored: those of the base model, also others.
        tensors: by name, with the dtypes to write; may be on the meta device.

    Raises:
        RunStoppedError: a file holds something else than was written.
    """
    split = split_torch_state_dict_into_shards(
        dict(tensors), filename_pattern=_FILES, max_shard_size=shard_bytes
    )
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2))
    norms: Norms = {}
    for file, names in split.filename_to_tensors.items():
        logger.info("Writing %s.", file)
        held = {}
        for name in names:
            numbers, dtype = stored.numbers(name, slice(None)), tensors[name].dtype
            held[name] = numbers.to(dtype, copy=True)
            layer = name.removesuffix(".weight")
            if layer != name and layer in updates:
                before = numbers.float()
                change = sum(weight * change_of(update, before) for update, weight in updates[layer])
                held[name] = (before + change).to(dtype)
                error = held[name].float() - (before + change)
                norms[layer] = float(error.norm()), float(torch.as_tensor(change).norm())
        save_file(held, folder / file, metadata={"format": "pt", **metadata})
        found = load_file(folder / file)
        if wrong := [name for name in names if not torch.equal(found[name], held[name])]:
            raise RunStoppedError(f"{file}: {wrong[0]} was read back as something else; check the disk")
    return norms


def change_of(update: LayerUpdate, weight: Tensor) -> Tensor:
    """What an update adds to a frozen weight, in fp32.

    Args:
        weight: (outputs, inputs, ...), in fp32; only what a DoRA adds depends on it.
    """
    if isinstance(update, LokrUpdate):
        return torch.kron(*(reduce(torch.matmul, side) for side in update.folded))
    pair: Any = update.pair if isinstance(update, DoraUpdate) else update
    up = pair.up.float().flatten(1) * (pair.alpha / pair.rank)
    change: Tensor = (up @ pair.down.float().flatten(1)).reshape(weight.shape)
    if isinstance(update, DoraUpdate):
        turned = weight + change
        change = turned * (update.magnitude.float() / turned.norm(dim=1))[:, None] - weight
    return change
