"""Fill the cache of encoded media and captions ahead of a run, check it, or drop what nothing needs."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress
from rich.prompt import Confirm

from diffsynth_lite.cli.arguments import add_preset_argument
from diffsynth_lite.cli.processes import join_processes
from diffsynth_lite.config import Config, LoadedConfig, load_config
from diffsynth_lite.errors import UserError

if TYPE_CHECKING:  # Wrong arguments are told before torch is imported, which takes seconds.
    from accelerate import Accelerator

    from diffsynth_lite.data import TensorCache

logger = logging.getLogger(__name__)

_OLD_FLAGS = ("--config", "--preset", "--verify", "--prune", "--yes")
"""With which the command began when it had no subcommands."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A subcommand of ``diffsynth-lite cache`` for each thing that is done to one."""
    parser.add_argument(*_OLD_FLAGS, nargs=0, action=_OldForm, dest="old", help=argparse.SUPPRESS)
    tasks = parser.add_subparsers(title="tasks", required=True, metavar="TASK")
    for name, task, example in (
        ("fill", _fill, "--config my.yaml"),
        ("verify", _verify, "--config my.yaml"),
        ("prune", _prune, "--config a.yaml --config b.yaml"),
    ):
        summary = task.__doc__ or ""
        command = tasks.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        command.epilog = f"Example: {command.prog} {example}"
        command.set_defaults(task=task)
        command.add_argument(
            "--config",
            metavar="FILE",
            action="append",
            required=True,
            dest="configs",
            help="yaml; give it again for each run that the cache is for",
        )
        add_preset_argument(command)
        if task is _prune:
            command.add_argument("--yes", action="store_true", help="delete without asking")
        command.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as for train.py")


def run(parsed: argparse.Namespace) -> None:
    """Fill, verify or prune the cache of the configs.

    Raises:
        UserError: wrong settings or data, caches that differ, or a prune that nobody agreed to.
    """
    loaded = [load_config(path, parsed.overrides, presets=parsed.presets) for path in parsed.configs]
    if off := [str(one.path) for one in loaded if not one.config.data.cache]:
        raise UserError(
            f"data.cache: is false in {', '.join(off)}, so that there is nothing to do; set it true"
        )
    folders = {str(Path(one.config.data.cache_dir).expanduser().resolve()) for one in loaded}
    if len(folders) > 1:
        raise UserError(
            f"data.cache_dir: the configs name {' and '.join(sorted(folders))}; take those of one cache"
        )
    parsed.task(parsed, loaded)


class _OldForm(argparse.Action):
    """Names the subcommands to who still writes the flags that they were."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        parser.error(
            f"{option_string}: the task comes first: `{parser.prog} fill` (was without a flag), "
            f"`{parser.prog} verify` (was --verify) or `{parser.prog} prune` (was --prune), then the rest"
        )


def _fill(parsed: argparse.Namespace, loaded: Sequence[LoadedConfig]) -> None:
    """Encode all that the runs of the configs will need."""
    accelerator = caching_accelerator(loaded[0].config)
    for one in loaded:
        items = fill_cache(one.config, accelerator)
        logger.info("%s: all of its %d items are in the cache %s", one.path, items, one.config.data.cache_dir)


def _verify(parsed: argparse.Namespace, loaded: Sequence[LoadedConfig]) -> None:
    """Read every entry, and set those that are damaged aside."""
    from diffsynth_lite.data import verify

    _require_one_process("verify")
    with Progress(console=Console(stderr=True, emoji=False)) as progress:
        task = progress.add_task("verifying", total=None)
        verified = verify(
            _cache_of(loaded[0].config),
            lambda done, total: progress.update(task, completed=done, total=total),
        )
    logger.info("%d entries are whole", verified.num_entries - len(verified.damaged))
    if verified.damaged:
        logger.warning(
            "%d entries were damaged and are set aside; the next run that needs them makes them again",
            len(verified.damaged),
        )


def _prune(parsed: argparse.Namespace, loaded: Sequence[LoadedConfig]) -> None:
    """Delete the entries that none of the configs needs, after asking."""
    from diffsynth_lite.core.units import format_bytes
    from diffsynth_lite.data import prune

    _require_one_process("prune")
    cache, accelerator = _cache_of(loaded[0].config), caching_accelerator(loaded[0].config)
    keep = set[str]().union(*(needed_keys(one.config, accelerator) for one in loaded))
    found = prune(cache, keep, dry_run=True)
    what = f"{found.num_files} files, {format_bytes(found.num_bytes)}, that {_none_of(loaded)}"
    if not found.num_files:
        logger.info("The cache holds nothing that the configs do not need.")
        return
    if not parsed.yes and not _agrees(f"Delete {what}, from {cache.folder}?"):
        raise UserError(f"prune: nothing was deleted from {cache.folder}; agree when asked, or give --yes")
    prune(cache, keep, dry_run=False)
    logger.info("Deleted %s.", what)


def _require_one_process(task: str) -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(f"cache {task}: needs one process; start it without a launcher")


def caching_accelerator(config: Config) -> "Accelerator":
    """Device and processes for the caches of any number of runs.

    A process can have one accelerator, and runs may differ in their mixed precision, which nothing that is
    encoded depends on.

    Raises:
        UserError: what a launcher started is not one run, or of a kind that is not supported.
    """
    join_processes(os.environ, sys.argv)
    from diffsynth_lite.training.builder import build_accelerator

    return build_accelerator(config, Path(config.output.dir).expanduser() / "trackers")


def fill_cache(config: Config, accelerator: "Accelerator") -> int:
    """Encode all that a run will need; each process of a launcher does its share.

    Returns:
        The number of items that the run will train on.

    Raises:
        UserError: what would stop the run.
    """
    from diffsynth_lite.training.checks import check_run
    from diffsynth_lite.training.encoding.run_encoding import encode_run
    from diffsynth_lite.training.shortages import shortages_explained

    with shortages_explained():
        checked = check_run(config, accelerator)
        encoded = encode_run(
            config,
            checked.family,
            accelerator,
            training=checked.training,
            held_out=checked.held_out,
        )
    return len(encoded.items)


def needed_keys(config: Config, accelerator: "Accelerator") -> set[str]:
    """Keys of all entries that a run reads.

    Raises:
        UserError: what would stop the run.
    """
    from diffsynth_lite.data import FileMemory
    from diffsynth_lite.training.checks import check_run
    from diffsynth_lite.training.data_settings import cache_folder, index_file
    from diffsynth_lite.training.encoding.run_encoding import plan_encoding
    from diffsynth_lite.training.shortages import shortages_explained

    with shortages_explained():
        checked = check_run(config, accelerator)
        with FileMemory(index_file(cache_folder(config))) as memory:
            job = plan_encoding(
                config,
                checked.family,
                accelerator,
                training=checked.training,
                held_out=checked.held_out,
                memory=memory,
            )
    return {*job.media, *job.prompts}


def _cache_of(config: Config) -> "TensorCache":
    from diffsynth_lite.data import TensorCache
    from diffsynth_lite.training.data_settings import cache_folder

    return TensorCache(cache_folder(config))


def _none_of(loaded: Sequence[LoadedConfig]) -> str:
    return "the config does not need" if len(loaded) == 1 else f"none of the {len(loaded)} configs needs"


def _agrees(question: str) -> bool:
    """The answer of whoever sits there; nobody does not agree."""
    try:
        return Confirm.ask(question, default=False)
    except EOFError:
        return False
