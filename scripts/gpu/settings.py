"""This file makes the configs that stages measure: of recipes, and of tiny models for a rehearsal."""

import atexit
import importlib
import shutil
import tempfile
from functools import cache
from pathlib import Path

from diffsynth_lite.config import Config, load_config

_TINY = (
    *("model.dtype=float32", "train.mixed_precision=no", "memory.min_bytes=0"),
    *("memory.stream_slots=1", "lora.rank=4", "train.cpu_threads=1"),
)


def config_of(recipe: str, *overrides: str, rehearse: bool = False) -> Config:
    """A recipe with other settings.

    Args:
        recipe: file name in ``configs``, without ending.
        rehearse: in small, for the CPU: the tiny model of its family.
    """
    config = load_config(f"{recipe}.yaml", overrides).config
    if not rehearse:
        return config
    smaller = ["data.resolutions=[64]"] if config.data.width is None else ["data.width=64", "data.height=64"]
    if config.data.frame_counts:
        smaller.append("data.frame_counts=[9]")  # 4 k + 1, and 8 k + 1
    if config.memory.stream_blocks:
        smaller.append("memory.stream_blocks=all")  # of the two that there are
    path = f"model.path={_tiny_folder(config.model.family)}"
    return load_config(f"{recipe}.yaml", [*overrides, *_TINY, *smaller, path]).config


@cache
def _tiny_folder(family: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="rehearsal-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    importlib.import_module(f"diffsynth_lite.pipelines.{family}").tiny().save_pretrained(folder)
    return folder
