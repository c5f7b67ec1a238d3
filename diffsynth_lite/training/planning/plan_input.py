"""This file names what a plan depends on: two configs with the same input have the same plan."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffsynth_lite.config import Config, LoadedConfig, recipes_for_card
from diffsynth_lite.config.settings import Settings
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines import ModelFamily
from diffsynth_lite.training.data_settings import plan_rules
from diffsynth_lite.training.planning.choices import MemoryBudget
from diffsynth_lite.training.planning.gpus import COUNTED_SHARE, Gpu

_SOURCE = "input_columns input_dirs layer_columns layer_dirs repeats weight preserve"
_SOURCE_WHETHER = "path dataset control_column control_dir"
_READ: Mapping[str, str] = {
    "model": "family path revision variant transformer_file transformer_2_file training_adapter dtype "
    "quantize quantize_skip attention text_encoder_dtype text_encoder_quantize vae_dtype vae_tiling",
    "lora": "kind rank use_rslora init lokr_factor dropout components target_modules target_blocks "
    "loraplus_ratio groups",
    "data": f"{_SOURCE} width height resolutions sizes bucket_step max_aspect_ratio frame_counts fps audio "
    "control_downscale cache",
    "objective": "audio_noise guidance_target slider",
    "train": "global_batch_size micro_batch_size micro_batch_tokens optimizer optimizer_options adam_beta1 "
    "adam_beta2 adam_epsilon weight_decay ema_decay mixed_precision use_gradient_checkpointing "
    "use_gradient_checkpointing_offload context_parallel context_parallel_kind compile",
    "memory": "auto min_bytes resident_blocks prefetched_blocks policy policy_n policy_blocks save_attention "
    "stream_blocks stream_slots shard_base stream_text_encoder skip_dead_ops",
    "validation": "guidance_scale width height num_frames num_layers use_ema",
}
_READ_WHETHER: Mapping[str, str] = {
    "data": _SOURCE_WHETHER,
    "validation": "prompts model_path inputs last_frames control inpaint_masks faces",
}
"""Of these only whether there is any."""
_ANY = "any"
_GIB = 1024**3
_ROUNDING = 0.01
"""GiB by which a card may be smaller than its recipes: nine tenths of a number are not exact."""
_NEXT_CARD = 1.4
"""A recipe for a card is not proposed for one with so many times its memory: most of that would be idle."""


@dataclass(frozen=True, kw_only=True)
class PlanInput:
    """All that a plan depends on, in addition to the code.

    Attributes:
        config: what a plan reads of it; all other settings have their defaults, see :func:`planned`.
        room: the memory that there is; None where no card is known.
        gpu: the card, for times; None for ratios only.
        recipes: those that train the LoRA on this card, by name, as far as a plan reads them.
        files: hash of the files of each component in the model's folder, and of other files that are read.
        steps: of the run. They and what follows are only in the answer, and no part of a comparison.
        other_numbers: by recipe, the settings that make it another run, by dotted key.
    """

    config: Config
    room: MemoryBudget | None = None
    gpu: Gpu | None = None
    num_processes: int = 1
    recipes: tuple[tuple[str, Config], ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    steps: int = field(default=1, compare=False)
    other_numbers: Mapping[str, Sequence[str]] = field(default_factory=dict, compare=False)

    @classmethod
    def of(
        cls,
        loaded: LoadedConfig,
        family: ModelFamily,
        *,
        room: MemoryBudget | None = None,
        gpu: Gpu | None = None,
        num_processes: int = 1,
        **given: Any,
    ) -> "PlanInput":
        """The input of a config.

        Args:
            given: overrides and presets of the command line, which hold for other recipes, too.

        Raises:
            UserError: no run could do what the config says.
        """
        config = loaded.config
        plan_rules(config, family)  # refuses what no run could do
        _require_processes(config, num_processes)
        recipes = dict(_recipes_like(loaded, room, **given)) if room else {}
        parts = (*family.components, *family.components_without_weights)
        return cls(
            config=planned(config),
            room=room,
            gpu=gpu,
            num_processes=num_processes,
            recipes=tuple((name, planned(recipe)) for name, recipe in recipes.items()),
            files={part: family.folder.fingerprint(part) for part in parts} | _adapter_file(config),
            steps=config.train.steps,
            other_numbers={name: _other_numbers(config, recipe) for name, recipe in recipes.items()},
        )


def room_of(device_gib: float | None, host_gib: float, *, num_processes: int = 1) -> MemoryBudget | None:
    """The memory that each of the processes of a machine may take; None where that of its card is not known.

    Args:
        host_gib: which they share.
    """
    if device_gib is None:
        return None
    host = host_gib * _GIB / num_processes
    return MemoryBudget(device=device_gib * _GIB, host=host, num_sharing=num_processes)


def _require_processes(config: Config, num_processes: int) -> None:
    """Check that there are as many as share something."""
    shards, shared = config.memory.shard_base, config.train.context_parallel
    if shards != "no" and num_processes == 1:
        raise UserError(f"memory.shard_base: {shards} needs several processes: pass --processes 8")
    if num_processes % shared:
        raise UserError(
            f"train.context_parallel: {shared} must divide the processes: pass --processes {shared}"
        )


def planned(config: Config) -> Config:
    """A config with the settings that a plan reads, and the defaults of all others."""
    sections: dict[str, Settings] = {}
    for section, settings in config:
        read = _READ.get(section, "").split()
        sections[section] = _limited(settings, read, _READ_WHETHER.get(section, "").split())
    sources = [_limited(one, _SOURCE.split(), _SOURCE_WHETHER.split()) for one in config.data.sources]
    sections["data"] = sections["data"].model_copy(update={"sources": sources})
    return config.model_copy(update=sections)


def _adapter_file(config: Config) -> dict[str, str]:
    """The time at which the training adapter was written, if it is a file."""
    adapter = config.model.training_adapter
    file = Path(adapter or _ANY).expanduser()
    return {"training_adapter": str(file.stat().st_mtime_ns)} if adapter and file.exists() else {}


def _limited(settings: Settings, read: Iterable[str], whether: Iterable[str]) -> Settings:
    kind = type(settings)
    limited = {name: one.get_default(call_default_factory=True) for name, one in kind.model_fields.items()}
    limited |= {name: getattr(settings, name) for name in read}
    for name in whether:
        value = getattr(settings, name)
        limited[name] = value and ([_ANY] if isinstance(value, list) else _ANY)
    return settings.model_copy(update=limited)


def _recipes_like(loaded: LoadedConfig, room: MemoryBudget, **given: Any) -> Iterable[tuple[str, Config]]:
    """The recipes that train the LoRA of another recipe on a card of this memory, by name."""
    card_gib = room.device / COUNTED_SHARE / _GIB + _ROUNDING
    for card_gb, found in recipes_for_card(loaded, card_gib, **given):
        if card_gib >= _NEXT_CARD * card_gb:
            return
        if found.path.resolve() != loaded.path.resolve():
            yield found.path.name, found.config


def _other_numbers(config: Config, recipe: Config) -> list[str]:
    """The settings of a recipe that make it another run than the config, by dotted key."""
    return [
        f"{section}.{key}"
        for section in ("data", "model")
        for key, value in getattr(config, section)
        if getattr(getattr(recipe, section), key) != value
    ]
