"""This file copies the LoRA of each save into a folder of ComfyUI, in its names (``output.copy_to``)."""

import hashlib
import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from diffsynth_lite.config import Config
from diffsynth_lite.errors import UserError, join_names
from diffsynth_lite.files import write_bytes
from diffsynth_lite.lora.conversion import FamilyNames, convert, write_conversion
from diffsynth_lite.lora.reading import LoraContents, read_contents
from diffsynth_lite.pipelines import ModelFamily
from diffsynth_lite.run_folder.loras import contract_of, named_file

logger = logging.getLogger(__name__)

_KEY = "output.copy_to"


def require_comfyui_names(config: Config, family: ModelFamily, layers: Sequence[str]) -> None:
    """Check that ComfyUI has a name for each layer of the LoRA that it is to get."""
    if config.output.copy_to is None or not layers:
        return
    spelling = family.lora_spelling
    theirs = spelling.for_comfyui or spelling
    is_known = spelling.is_joined_in_comfyui or theirs.unknown_to_comfyui not in (None, ("",))
    if not is_known or not family.lora_layers:
        raise UserError(
            f"{_KEY}: it is not known how ComfyUI names the layers of {config.model.family}; set it to null"
        )
    if config.lora.kind != "lora" and spelling.is_converted_for_comfyui:
        raise UserError(
            f"{_KEY}: only a plain LoRA of {config.model.family} can be converted for ComfyUI; set it to "
            "null, or lora.kind to lora"
        )
    prefix = f"{family.trained[0]}." if len(family.trained) == 1 else ""
    unknown = [layer for layer in layers if not theirs.in_comfyui(f"{prefix}{layer}")]
    if unknown and not spelling.is_joined_in_comfyui:
        raise UserError(
            f"{_KEY}: ComfyUI has no names for {join_names(unknown)}; leave them out of lora.target_modules, "
            "or set it to null"
        )


def require_copy_folder(config: Config) -> None:
    """Check that the folder is there, and takes files."""
    if config.output.copy_to is None:
        return
    folder = Path(config.output.copy_to).expanduser()
    if not folder.is_dir():
        raise UserError(f"{_KEY}: {folder}: is not a folder; name one that is there, such as models/loras")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{_KEY}: {folder} cannot be written to: {error.strerror}") from error


@dataclass(frozen=True)
class ComfyuiCopies:
    """The copies of a run's LoRA.

    Args:
        folder: where they go; None for none.
    """

    folder: Path | None
    name: str
    family: ModelFamily

    @classmethod
    def of(cls, config: Config, family: ModelFamily) -> "ComfyuiCopies":
        """Those that a config asks for."""
        given = config.output.copy_to
        folder = None if given is None else Path(given).expanduser()
        name = Path(config.output.dir).expanduser().resolve().name
        return cls(folder, name, family)

    def require_free(self, contract: Mapping[str, Any] | None) -> None:
        """Check that the files there are this run's, or not there yet.

        Args:
            contract: of the checkpoint that the run resumes from; None in a new run.
        """
        digest = contract and hashlib.sha256(json.dumps(contract, sort_keys=True).encode()).hexdigest()
        for target in map(self._target, self.family.lora_files.by_name if self.folder else ()):
            if target.exists() and (digest is None or contract_of(target) != digest):
                raise UserError(
                    f"{_KEY}: {target} is there already, and not of this run; move or remove it, or give "
                    "output.dir another name"
                )

    def write(self, files: Sequence[Path]) -> None:
        """Copy the files of a LoRA, each whole or not at all; warns where that fails, as a run goes on."""
        names = FamilyNames(layers=self.family.lora_layers, comfyui=self.family.lora_spelling)
        for file in files if self.folder else ():
            target = self._target(file.name)
            try:
                write_copy(read_contents(file), target, names)
            except (OSError, SafetensorError, UserError) as error:
                logger.warning(
                    "%s: %s could not be written (%s). The run goes on; its LoRA is %s.",
                    *(_KEY, target, " ".join(str(error).split()), file),
                )

    def _target(self, name: str) -> Path:
        assert self.folder is not None
        return named_file(self.folder, self.name, name)


def write_copy(contents: LoraContents, target: Path, names: FamilyNames) -> None:
    """Write a LoRA into a folder of ComfyUI as ComfyUI reads it, whole or not at all.

    Raises:
        UserError: the folder is gone, or ComfyUI takes no such LoRA of this family.
    """
    if not target.parent.is_dir():
        raise UserError(f"{target.parent} is gone")
    if contents.is_plain or names.comfyui.is_converted_for_comfyui:
        write_conversion(convert(contents, names, "comfyui", target))
    else:
        write_bytes(target, contents.file.read_bytes())
