"""This file writes and reads LoRA files by the functions that a pipeline of diffusers has for them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diffsynth_lite.pipelines.base.family import LoraFile


def save_lora_file(pipeline_class: Any, file: Path, parts: Mapping[str, LoraFile]) -> None:
    """Write the adapters of one or more models into one file.

    Args:
        pipeline_class: its ``save_lora_weights`` takes ``<model>_lora_layers`` and
            ``<model>_lora_adapter_metadata``.
        file: to write.
        parts: tensors and settings of each model, by what its names begin with in the file, such as
            ``"unet."``: the model, and where the file has more levels than the model, these.
    """
    arguments: dict[str, Any] = {}
    for prefix, (tensors, settings) in parts.items():
        model, _, inner = prefix.partition(".")
        arguments[f"{model}_lora_layers"] = {f"{inner}{name}": value for name, value in tensors.items()}
        arguments[f"{model}_lora_adapter_metadata"] = settings
    pipeline_class.save_lora_weights(file.parent, weight_name=file.name, **arguments)


def read_lora_file(pipeline_class: Any, file: Path, prefixes: Sequence[str]) -> list[LoraFile]:
    """The opposite of :func:`save_lora_file`, through the pipeline's own loader.

    Args:
        prefixes: of the models, as above. What begins with none of them is left to the first, whose layers
            then are not those that are asked for.

    Returns:
        The adapter of each of ``prefixes``.
    """
    tensors, *_, settings = pipeline_class.lora_state_dict(
        file.parent,
        weight_name=file.name,
        use_safetensors=True,
        local_files_only=True,
        return_lora_metadata=True,
    )
    of_models = [f"{prefix.partition('.')[0]}." for prefix in prefixes]
    return list(zip(_split(tensors, prefixes), _split(settings or {}, of_models), strict=True))


def _split(values: Mapping[str, Any], prefixes: Sequence[str]) -> list[dict[str, Any]]:
    """What begins with each prefix, without it."""
    parts: dict[str, dict[str, Any]] = {prefix: {} for prefix in prefixes}
    for name, value in values.items():
        prefix = next(filter(name.startswith, prefixes), prefixes[0])
        parts[prefix][name.removeprefix(prefix)] = value
    return list(parts.values())
