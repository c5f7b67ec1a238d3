"""This file writes and reads the LoRA of a UNet and of text encoders as diffusers does: in one file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from diffsynth_lite.pipelines.base.composite import join_adapter, split_adapter
from diffsynth_lite.pipelines.base.family import LoraFile

# transformers 5 has no such level in its CLIPTextModel; earlier versions and ComfyUI look for it in the file.
_PREFIXES = {"text_encoder": "text_encoder.text_model."}


def save_joint_lora(
    pipeline_class: Any,
    file: Path,
    tensors: Mapping[str, torch.Tensor],
    settings: Mapping[str, Any],
    components: Sequence[str],
) -> None:
    """Write an adapter with the ``save_lora_weights`` of a pipeline.

    Args:
        pipeline_class: has ``<component>_lora_layers`` and ``<component>_lora_adapter_metadata`` there.
        file: to write.
        tensors: the adapter's, by the names in the model that is made of ``components``.
        settings: peft's, alpha included.
        components: that are trained.
    """
    arguments: dict[str, Any] = {}
    for component, (layers, metadata) in split_adapter(tensors, settings, components).items():
        inner = _prefix(component).removeprefix(f"{component}.")
        arguments[f"{component}_lora_layers"] = {f"{inner}{name}": value for name, value in layers.items()}
        arguments[f"{component}_lora_adapter_metadata"] = metadata
    pipeline_class.save_lora_weights(file.parent, weight_name=file.name, **arguments)


def read_joint_lora(pipeline_class: Any, file: Path, components: Sequence[str]) -> LoraFile:
    """The opposite of :func:`save_joint_lora`, through the pipeline's own loader."""
    tensors, _, settings = pipeline_class.lora_state_dict(
        file.parent,
        weight_name=file.name,
        use_safetensors=True,
        local_files_only=True,
        return_lora_metadata=True,
    )
    return join_adapter(
        {
            component: (
                _under(_prefix(component), tensors),
                _under(f"{component}.", settings or {}),
            )
            for component in components
        }
    )


def _prefix(component: str) -> str:
    return _PREFIXES.get(component, f"{component}.")


def _under(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
