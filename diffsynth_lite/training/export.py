"""This file writes the LoRA for inference, and proves that the written file holds what was trained."""

import logging
import shutil
from pathlib import Path
from typing import Any

import torch

from diffsynth_lite.pipelines import ModelFamily
from diffsynth_lite.redaction import redacted

logger = logging.getLogger(__name__)


def export_lora(
    family: ModelFamily, folder: Path, tensors: dict[str, torch.Tensor], settings: dict[str, Any]
) -> list[Path]:
    """Write an adapter in its family's format, read it back, compare, and only then replace the last one.

    Args:
        family: decides the format.
        folder: where the files go; a reader sees an old file or a new one, never a part.
        tensors: the adapter by peft's names.
        settings: peft's settings, alpha included; the file holds them with secrets masked.

    Returns:
        The files written.

    Raises:
        RuntimeError: the files do not hold the adapter. A bug, of ours or of the library that wrote it.
    """
    settings = redacted(settings)
    aside = folder.with_name(f".{folder.name}-writing")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        written = family.save_lora(aside, tensors, settings)
        _compare(family, aside, tensors, settings)
        folder.mkdir(parents=True, exist_ok=True)
        for file in written:
            # safetensors writes files that only their owner may read.
            file.chmod(folder.stat().st_mode & 0o666)
        return [file.replace(folder / file.name) for file in written]
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
