"""LoRA training for image and video diffusion models on diffusers' own model classes."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffsynth_lite.config import Config, LoadedConfig, load_config
    from diffsynth_lite.core.gradient import (
        GradientEngine,
        GradientReport,
        gradient_checkpoint_forward,
        gradient_engine,
        intercept_blocks,
    )
    from diffsynth_lite.errors import RunStoppedError, UserError
    from diffsynth_lite.pipelines import ModelFamily, load_family

__version__ = "0.1.0"

_HOMES = {
    "diffsynth_lite.config": ("Config", "LoadedConfig", "load_config"),
    "diffsynth_lite.core.gradient": (
        "GradientEngine",
        "GradientReport",
        "blocks_run_by",
        "intercept_blocks",
        "gradient_checkpoint_forward",
        "gradient_engine",
    ),
    "diffsynth_lite.errors": ("RunStoppedError", "UserError"),
    "diffsynth_lite.pipelines": ("ModelFamily", "load_family"),
}

__all__ = [
    "Config",
    "GradientEngine",
    "GradientReport",
    "LoadedConfig",
    "ModelFamily",
    "RunStoppedError",
    "UserError",
    "blocks_run_by",
    "gradient_checkpoint_forward",
    "gradient_engine",
    "intercept_blocks",
    "load_config",
    "load_family",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: torch takes seconds, and a config needs none of it."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
