"""Fill the cache of encoded media and captions ahead of a run, check it, or drop what nothing needs."""

import argparse
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.prompt import Confirm

from diffsynth_lite.config import LoadedConfig, load_config
from diffsynth_lite.errors import UserError

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``diffsynth-lite cache``."""
    parser.add_argument(
        "--config",
        action="append",
        required=True,
        dest="configs",
        help="yaml file; give it again for each run that the cache is for",
    )
    task = parser.add_mutually_exclusive_group()
    task.add_argument(
        "--verify", action="store_true", help="read every entry, and set those that are damaged aside"
    )
    task.add_argument(
        "--prune", action="store_true", help="delete entries that none of the configs needs, after asking"
    )
    parser.add_argument("--yes", action="store_true", help="prune without asking")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as for train.py")


def run(parsed: argparse.Namespace) -> None:
    """Fill, verify or prune the cache of the configs.

    Raises:
        UserError: wrong settings or data, caches that differ, or a prune that nobody agreed to.
    """
    loaded = [load_config(path, parsed.overrides) for path in parsed.configs]
    if parsed.yes and not parsed.prune:
        raise UserError("--yes: has no effect without --prune; remove it")
    if off := [str(one.path) for one in loaded if not one.config.data.cache]:
        raise UserError(
            f"data.cache: is false in {', '.join(off)}, so that there is nothing to do; set it true"
        )
    folders = {str(Path(one.config.data.cache_dir).expanduser().resolve()) for one in loaded}
    if len(folders) > 1:
        raise UserError(
            f"data.cache_dir: the configs name {' and '.join(sorted(folders))}; take those of one cache"
        )
    if (parsed.verify or parsed.prune) and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("--verify, --prune: need one process; start them without a launcher")
    if parsed.verify:
        _verify(loaded[0])
    elif parsed.prune:
        _prune(loaded, ask=not parsed.yes)
    else:
        _fill(loaded)


def _fill(loaded: Sequence[LoadedConfig]) -> None:
    from diffsynth_lite.training.cache_care import caching_accelerator, fill_cache

    accelerator = caching_accelerator(loaded[0].config)
    for one in loaded:
        items = fill_cache(one.config, accelerator)
        logger.info("%s: all of its %d items are in the cache %s", one.path, items, one.config.data.cache_dir)


def _verify(loaded: LoadedConfig) -> None:
    from diffsynth_lite.data import verify
    from diffsynth_lite.training.cache_care import cache_of

    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("verifying", total=None)
        verified = verify(
            cache_of(loaded.config),
            lambda done, total: progress.update(task, completed=done, total=total),
        )
    logger.info("%d entries are whole", verified.num_entries - len(verified.damaged))
    if verified.damaged:
        logger.warning(
            "%d entries were damaged and are set aside; the next run that needs them makes them again",
            len(verified.damaged),
        )


def _prune(loaded: Sequence[LoadedConfig], *, ask: bool) -> None:
    from diffsynth_lite.data import prune
    from diffsynth_lite.doctor.machine import in_gib
    from diffsynth_lite.training.cache_care import cache_of, caching_accelerator, needed_keys

    cache, accelerator = cache_of(loaded[0].config), caching_accelerator(loaded[0].config)
    keep = set[str]().union(*(needed_keys(one.config, accelerator) for one in loaded))
    found = prune(cache, keep, dry_run=True)
    what = f"{found.num_files} files, {in_gib(found.num_bytes)}, that {_none_of(loaded)}"
    if not found.num_files:
        logger.info("The cache holds nothing that the configs do not need.")
        return
    if ask and not _agrees(f"Delete {what}, from {cache.folder}?"):
        raise UserError(f"--prune: nothing was deleted from {cache.folder}; agree when asked, or give --yes")
    prune(cache, keep, dry_run=False)
    logger.info("Deleted %s.", what)


def _none_of(loaded: Sequence[LoadedConfig]) -> str:
    return "the config does not need" if len(loaded) == 1 else f"none of the {len(loaded)} configs needs"


def _agrees(question: str) -> bool:
    """The answer of whoever sits there; nobody does not agree."""
    try:
        return Confirm.ask(question, default=False)
    except EOFError:
        return False
