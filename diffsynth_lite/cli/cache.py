"""Fill the cache of encoded media and captions ahead of a run, check, seal or prune it."""

import argparse
import logging
import os
import sys
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress, TaskID
from rich.prompt import Confirm

from diffsynth_lite.cli.arguments import add_preset_argument, part_of
from diffsynth_lite.cli.processes import join_processes, refuse_group
from diffsynth_lite.config import Config, LoadedConfig, load_config
from diffsynth_lite.errors import UserError, join_lines, join_names

if TYPE_CHECKING:  # Wrong arguments are reported before torch is imported, which takes seconds.
    from accelerate import Accelerator

    from diffsynth_lite.data import Part, Pruned, TensorCache

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
        ("seal", _seal, "--config my.yaml data.sealed=sealed/my"),
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
        if task is _fill:
            command.add_argument(
                "--part",
                metavar="I/N",
                type=part_of,
                help="encode one of N parts of the items, I from 0 to N - 1, in a process that knows of no "
                "other: for job arrays, in any order; without it all missing items are encoded",
            )
        if task is _prune:
            command.add_argument("--yes", action="store_true", help="delete without asking")
        command.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as for train.py")


def run(parsed: argparse.Namespace) -> None:
    """Fill, verify, seal or prune the cache of the configs."""
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
    """Encode all that the runs of the configs will need, or a part of it."""
    if parsed.part:
        _fill_part(parsed.part, loaded)
        return
    join_processes(os.environ, sys.argv)
    accelerator = caching_accelerator(loaded[0].config)
    for one in loaded:
        items = fill_cache(one.config, accelerator)
        logger.info("%s: all of its %d items are in the cache %s", one.path, items, one.config.data.cache_dir)


def _fill_part(numbers: tuple[int, int], loaded: Sequence[LoadedConfig]) -> None:
    from diffsynth_lite.data import Part

    refuse_group(os.environ, "cache fill --part")
    part, accelerator = Part(*numbers), caching_accelerator(loaded[0].config)
    for one in loaded:
        try:
            items = fill_cache(one.config, accelerator, part)
        except UserError as error:
            lines = str(error).splitlines()
            raise UserError("\n".join(f"part {part}: {line}" for line in lines)) from error
        logger.info("%s: %d items of part %s are in the cache", one.path, items, part)


def _verify(parsed: argparse.Namespace, loaded: Sequence[LoadedConfig]) -> None:
    """Read every entry, and set those that are damaged aside; read all that data.sealed holds, too."""
    from diffsynth_lite.data import verify

    refuse_group(os.environ, "cache verify")
    with Progress(console=Console(stderr=True, emoji=False)) as progress:
        task = progress.add_task("verifying", total=None)
        verified = verify(
            _cache_of(loaded[0].config),
            partial(_show, progress, task),
        )
    logger.info("%d entries are whole", verified.num_entries - len(verified.damaged))
    if verified.damaged:
        logger.warning(
            "%d entries were damaged and are set aside; the next run that needs them makes them again",
            len(verified.damaged),
        )
    for one in loaded:
        if one.config.data.sealed is not None:
            _verify_seal(one.config)


def _verify_seal(config: Config) -> None:
    from diffsynth_lite.training.data_settings import sealed_folder
    from diffsynth_lite.training.encoding.seals import open_config_seal

    seal = open_config_seal(config)
    if seal is None:
        logger.info("data.sealed: %s holds no sealed cache yet", config.data.sealed)
        return
    with Progress(console=Console(stderr=True, emoji=False)) as progress:
        task = progress.add_task("verifying the sealed cache", total=None)
        problems = list(seal.problems(sealed_folder(config), partial(_show, progress, task)))
    if problems:
        damaged = join_lines([f"data.sealed: {problem}" for problem in problems])
        raise UserError(f"{damaged}\nrestore {seal.folder} from a copy, or seal again into another folder")
    logger.info("%s: its table and %d entries are whole", seal.folder, seal.document.num_entries)


def _seal(parsed: argparse.Namespace, loaded: Sequence[LoadedConfig]) -> None:
    """Write what runs read of a filled cache to data.sealed; where that is done, compare it with the data."""
    from diffsynth_lite.core.units import format_bytes
    from diffsynth_lite.training.sealing import seal_run
    from diffsynth_lite.training.shortages import shortages_explained

    refuse_group(os.environ, "cache seal")
    if unnamed := [str(one.path) for one in loaded if one.config.data.sealed is None]:
        raise UserError(f"data.sealed: is not set in {', '.join(unnamed)}; name the folder to be written")
    accelerator = caching_accelerator(loaded[0].config)
    for one in loaded:
        with shortages_explained(), Progress(console=Console(stderr=True, emoji=False)) as progress:
            task = progress.add_task("sealing", total=None)
            sealed = seal_run(one.config, accelerator, partial(_show, progress, task))
        document, folder = sealed.document, one.config.data.sealed
        if sealed.was_there:
            logger.info("%s: %s holds just these data already; nothing was written.", one.path, folder)
            continue
        logger.info(
            "%s: sealed in %s: %d items and %d entries; shards: %d, of %s; table: %s.",
            *(one.path, folder, sum(count for *_, count in document.data.group_counts)),
            *(document.num_entries, len(document.shards)),
            *(format_bytes(document.num_bytes - document.table_bytes), format_bytes(document.table_bytes)),
        )


def _prune(parsed: argparse.Namespace, loaded: Sequence[LoadedConfig]) -> None:
    """Delete entries that none of the configs needs, after asking; those of a sealed cache are not needed."""
    from diffsynth_lite.core.units import format_bytes
    from diffsynth_lite.data import prune

    refuse_group(os.environ, "cache prune")
    join_processes(os.environ, sys.argv)
    cache, accelerator = _cache_of(loaded[0].config), caching_accelerator(loaded[0].config)
    keep = set[str]().union(*(needed_keys(one.config, accelerator) for one in loaded))
    seals = _digests(loaded)
    found, more = prune(cache, keep, dry_run=True), _prune_more(loaded[0].config, seals, dry_run=True)
    num_files, size = found.num_files + more.num_files, format_bytes(found.num_bytes + more.num_bytes)
    what = f"{num_files} files, {size}, that {_none_of(loaded)}"
    if sealed := [one.config.data.sealed for one in loaded if one.config.data.sealed is not None]:
        what += f" next to {join_names(sealed)}"
    if more.num_files:
        what += (
            f" ({more.num_files} of them, {format_bytes(more.num_bytes)}, are orders of samples and copies "
            "of sealed tables, which a run makes again, or were never finished)"
        )
    if not num_files:
        logger.info("The cache holds nothing that the configs do not need.")
        return
    if not parsed.yes and not _agrees(f"Delete {what}, from {cache.folder}?"):
        raise UserError(f"prune: nothing was deleted from {cache.folder}; agree when asked, or give --yes")
    prune(cache, keep, dry_run=False)
    _prune_more(loaded[0].config, seals, dry_run=False)
    logger.info("Deleted %s.", what)


def _digests(loaded: Sequence[LoadedConfig]) -> set[str]:
    """Of the seals that the configs name, where there are any yet."""
    from diffsynth_lite.training.encoding.seals import open_config_seal

    named = (open_config_seal(one.config) for one in loaded if one.config.data.sealed is not None)
    return {seal.digest for seal in named if seal is not None}


def _prune_more(config: Config, seals: Collection[str], *, dry_run: bool) -> "Pruned":
    """Delete the folder's other files; the tables of seals of these digests stay."""
    from diffsynth_lite.data import Pruned, parts_folder
    from diffsynth_lite.data.sealed import prune_orders, prune_tables, prune_unfinished
    from diffsynth_lite.training.data_settings import cache_folder, index_file, orders_folder, sealed_folder

    found = (
        prune_orders(orders_folder(config), dry_run=dry_run),
        prune_tables(sealed_folder(config), seals, dry_run=dry_run),
        prune_unfinished(parts_folder(index_file(cache_folder(config))), dry_run=dry_run),
    )
    return Pruned(
        num_files=sum(one.num_files for one in found), num_bytes=sum(one.num_bytes for one in found)
    )


def _show(progress: Progress, task: TaskID, done: int, total: int) -> None:
    progress.update(task, completed=done, total=total)


def caching_accelerator(config: Config) -> "Accelerator":
    """Device and processes for the caches of any number of runs.

    A process can have one accelerator, and runs may differ in their mixed precision, which nothing that is
    encoded depends on.
    """
    from diffsynth_lite.training.session import build_accelerator

    return build_accelerator(config, Path(config.output.dir).expanduser() / "trackers")


def fill_cache(config: Config, accelerator: "Accelerator", part: "Part | None" = None) -> int:
    """Encode all that a run will need, or one part of it; each process of a launcher does its share.

    The sealed cache is not looked at.

    Returns:
        The number of items that the run will train on, of the part.
    """
    from diffsynth_lite.data import WHOLE
    from diffsynth_lite.training.checks import check_run
    from diffsynth_lite.training.encoding.run_encoding import encode_part, encode_run
    from diffsynth_lite.training.encoding.seals import unsealed
    from diffsynth_lite.training.shortages import shortages_explained

    config = unsealed(config)
    with shortages_explained():
        checked = check_run(config, accelerator, part or WHOLE)
        encode = partial(encode_part, part=part) if part else encode_run
        encoded = encode(config, checked, accelerator)
    return len(encoded.items)


def needed_keys(config: Config, accelerator: "Accelerator") -> set[str]:
    """Keys of all entries that a run reads; those of its previews only where its data are sealed."""
    from diffsynth_lite.training.checks import check_run
    from diffsynth_lite.training.data_settings import open_memory, sealed_folder
    from diffsynth_lite.training.encoding.run_encoding import plan_encoding, plan_previews
    from diffsynth_lite.training.encoding.seals import open_config_seal, unsealed
    from diffsynth_lite.training.shortages import shortages_explained

    seal = None if config.data.sealed is None else open_config_seal(config)
    config = unsealed(config) if seal is None else config
    with shortages_explained():
        checked = check_run(config, accelerator)
        with open_memory(config) as memory:
            drawn = plan_previews(config, checked.preview_family, accelerator, memory).prompts
            if seal is not None:
                sealed = seal.entries(seal.map_table(sealed_folder(config)))
                return {key for key in drawn if key not in sealed}
            job = plan_encoding(config, checked, accelerator, memory)
    return {*job.media, *job.prompts, *drawn}


def _cache_of(config: Config) -> "TensorCache":
    from diffsynth_lite.data import TensorCache
    from diffsynth_lite.training.data_settings import cache_folder

    return TensorCache(cache_folder(config))


def _none_of(loaded: Sequence[LoadedConfig]) -> str:
    return "the config does not need" if len(loaded) == 1 else f"none of the {len(loaded)} configs needs"


def _agrees(question: str) -> bool:
    """Whether the user agrees; without a terminal, no."""
    try:
        return Confirm.ask(question, default=False)
    except EOFError:
        return False
