"""This file knows what to do with models that are distilled to few steps: warn of them, or keep them so."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from diffsynth_lite.config import Config
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora import adapter_digest, excludes_other_loras, require_fit
from diffsynth_lite.lora.updates import LoraFile
from diffsynth_lite.pipelines import ModelFamily, require_family, resolve_folder
from diffsynth_lite.training.distributed.agreement import from_main_process, tensors_from_main_process
from diffsynth_lite.training.lora_file import read_lora

_DISTILLED = frozenset(
    ["distill", "distilled", "dmd", "flash", "hyper", "lcm", "lightning", "schnell", "sprint", "turbo"]
)
"""Words in the names of distilled models."""
_UNDONE = frozenset(["de", "un"])
"""Words next to them in names of models that are not distilled, as in de-distilled."""


def warning_of_distilled(config: Config, family: ModelFamily) -> str | None:
    """A warning before a distilled model is trained; None for others, and where a setting keeps it so."""
    if config.keeps_distillation:
        return None
    return distillation_warning(family, config.model.path, config.model.transformer_file)


def distillation_warning(family: ModelFamily, location: str, file: str | None = None) -> str | None:
    """A warning before a distilled model is trained; None for other models.

    Args:
        location: the pipeline as given: where its files do not show it, its name may.
        file: the transformer's file as given; its name counts in place of the pipeline's.
    """
    key, named, reason = "model.path", location, family.distilled
    if reason is None and file is not None:
        key, named = "model.transformer_file", file
    if reason is None and _is_named_distilled(Path(named).name):
        reason = "by its name, not by its files; better train the model that it was made from"
    if reason is None:
        return None
    return (
        f"{key}: {named} is distilled to few steps: {reason}. Training knows nothing of the "
        "distillation and undoes it: with the LoRA, few steps give blurred images. To keep them, set "
        "objective.guidance_target, or model.training_adapter where there is one for it; or train what it "
        "was made from, with previews on this one (validation.model_path)."
    )


def _is_named_distilled(name: str) -> bool:
    # Also of names such as StepDistill and SDXLTurbo.
    words = {word.lower() for word in re.findall("[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}
    return not words.isdisjoint(_DISTILLED) and words.isdisjoint(_UNDONE)


def read_training_adapter(config: Config, family: ModelFamily) -> LoraFile | None:
    """The frozen adapter that a run has on its model; None where it has none."""
    location = config.model.training_adapter
    if location is None:
        return None
    tensors, settings = read_lora(family, location, key="model.training_adapter")
    if excludes_other_loras(tensors):
        raise UserError(
            f"model.training_adapter: {location} is a DoRA or a LoKr, which cannot be combined with "
            "another adapter here; give a plain LoRA"
        )
    require_fit(family.empty_transformer(), tensors, place=f"model.training_adapter: {location}")
    return tensors, settings


def training_adapter_digest(config: Config, family: ModelFamily) -> str | None:
    """A digest of the adapter of :func:`read_training_adapter`; None where there is none."""
    adapter = read_training_adapter(config, family)
    return None if adapter is None else adapter_digest(*adapter)


def load_training_adapter(
    config: Config, family: ModelFamily, accelerator: Accelerator, digest: str | None
) -> LoraFile | None:
    """The same on all processes, of which the main one reads it; call this on all.

    Args:
        digest: of the adapter that the run was checked with.
    """
    if digest is None:
        return None
    known: dict[str, Any] = {}

    def read() -> dict[str, torch.Tensor]:
        adapter = read_training_adapter(config, family)
        if adapter is None or adapter_digest(*adapter) != digest:
            raise UserError(
                f"model.training_adapter: {config.model.training_adapter} was changed while the run started; "
                "start it again"
            )
        known.update(adapter[1])
        return adapter[0]

    tensors = tensors_from_main_process(accelerator, read)
    return tensors, from_main_process(accelerator, lambda: known)


def find_preview_family(config: Config, family: ModelFamily, layers: Sequence[str]) -> ModelFamily:
    """The family, bound to the pipeline that previews are generated on.

    Args:
        family: bound to the one that is trained.
        layers: full names of those with a LoRA.
    """
    location = config.validation.model_path
    if location is None or not config.validation.prompts:
        return family
    if location == config.model.path and not family.folder.files:
        raise UserError(
            "validation.model_path: is model.path, which generates previews anyway; leave it out, or name "
            "another model"
        )
    try:
        folder = resolve_folder(location)
        require_family(type(family), folder)
        other = type(family)(folder, trained=family.trained)
        other.learn_as(family)
        other.check_folder()
        other.check_vae_dtype(getattr(torch, config.model.vae_dtype))
        if config.model.vae_tiling:
            other.tile_vae()
    except UserError as error:
        raise UserError(str(error).replace("model.path", "validation.model_path")) from error
    _require_layers(other.empty_transformer(), family.empty_transformer(), layers, location)
    return other


def _require_layers(
    model: torch.nn.Module, trained: torch.nn.Module, layers: Sequence[str], location: str
) -> None:
    theirs, ours = (
        {name: weight.shape for name, weight in one.named_parameters()} for one in (model, trained)
    )
    names = [f"{layer}.weight" for layer in layers]
    if misfits := [name for name in names if theirs.get(name) != ours[name]]:
        example = misfits[0].removesuffix(".weight")
        raise UserError(
            f"validation.model_path: {location} lacks {len(misfits)} of the {len(layers)} layers of the "
            f"LoRA, or has them in other sizes, such as {example}; name a model that was made from that of "
            "model.path"
        )
