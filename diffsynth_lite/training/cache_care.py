"""This file fills the cache ahead of a run, and tells which of its entries a run needs."""

from pathlib import Path

from accelerate import Accelerator

from diffsynth_lite.config import Config
from diffsynth_lite.data import FileMemory, TensorCache
from diffsynth_lite.training.builder import build_accelerator
from diffsynth_lite.training.caching import encode_run
from diffsynth_lite.training.data_rules import cache_folder, index_file
from diffsynth_lite.training.planning import plan_run
from diffsynth_lite.training.preflight import check_run


def cache_of(config: Config) -> TensorCache:
    """The cache of a run."""
    return TensorCache(cache_folder(config))


def caching_accelerator(config: Config) -> Accelerator:
    """Device and processes for the caches of any number of runs.

    A process can have one accelerator, and runs may differ in their mixed precision, which nothing that is
    encoded depends on.

    Raises:
        UserError: the launcher asks for a kind of distribution that is not supported.
    """
    return build_accelerator(config, Path(config.output.dir).expanduser() / "trackers")


def fill_cache(config: Config, accelerator: Accelerator) -> int:
    """Encode all that a run will need; each process of a launcher does its share.

    Returns:
        The number of items that the run will train on.

    Raises:
        UserError: what would stop the run.
    """
    checked = check_run(config, accelerator)
    return len(encode_run(config, checked, accelerator).items)


def needed_keys(config: Config, accelerator: Accelerator) -> set[str]:
    """Keys of all entries that a run reads.

    Raises:
        UserError: what would stop the run.
    """
    checked = check_run(config, accelerator)
    with FileMemory(index_file(cache_folder(config))) as memory:
        planned = plan_run(config, checked, accelerator, memory)
    return set(planned.media) | set(planned.prompts)
