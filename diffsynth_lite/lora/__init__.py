"""Adapters on a model: which layers get one, how it is added, and its tensors."""

from diffsynth_lite.lora.adapter import (
    LoraSize,
    UpdateSize,
    UpdateSizes,
    adapter_settings,
    adapter_shapes,
    adapter_size,
    adapter_tensors,
    add_adapter,
    by_peft_names,
    exported_tensors,
    load_adapter_tensors,
    without_adapter,
)
from diffsynth_lite.lora.finished import (
    adapter_digest,
    add_finished_lora,
    add_training_adapter,
    excludes_other_loras,
    load_finished_lora,
    require_fit,
    set_lora_weights,
    without_training_adapter,
)
from diffsynth_lite.lora.targets import find_target_layers, layers_ending_in, layers_with

__all__ = [
    "LoraSize",
    "UpdateSize",
    "UpdateSizes",
    "adapter_digest",
    "adapter_settings",
    "adapter_shapes",
    "adapter_size",
    "adapter_tensors",
    "add_adapter",
    "add_finished_lora",
    "add_training_adapter",
    "by_peft_names",
    "excludes_other_loras",
    "exported_tensors",
    "find_target_layers",
    "layers_ending_in",
    "layers_with",
    "load_adapter_tensors",
    "load_finished_lora",
    "require_fit",
    "set_lora_weights",
    "without_adapter",
    "without_training_adapter",
]
