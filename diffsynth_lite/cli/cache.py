"""Fill the cache of encoded media and captions ahead of a run, check, seal or prune it."""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.prompt import Confirm

from diffsynth_lite.cli.arguments import add_config_arguments, part_of
from diffsynth_lite.cli.cluster import (
    add_ray_arguments,
    folders_of,
    refuse_without_ray,
    require_done,
    run_parts,
    shared_folder,
)
from diffsynth_lite.cli.processes import join_processes, refuse_group
from diffsynth_lite.config import LoadedConfig, load_config
from diffsynth_lite.errors import UserError, join_lines, join_names

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
        several = "yaml; give it again for each run that the cache is for"
        add_config_arguments(command, action="append", dest="configs", help=several)
        if task is _fill:
            command.add_argument(
                "--part",
                metavar="I/N",
                type=part_of,
                help="encode one of N parts of the items, I from 0 to N - 1, in a process that knows of no "
                "other: for job arrays, in any order; without it all missing items are encoded",
            )
            add_ray_arguments(command, parts=True)
        if task is _prune:
            answers = command.add_mutually_exclusive_group()
            answers.add_argument("--yes", action="store_true", help="delete without asking")
            answers.add_argument("--dry-run", action="store_true", help="report what would be deleted")


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
    if parsed.ray is not None:
        _fill_on_cluster(parsed, loaded)
        return
    refuse_without_ray(parsed, "gpus_per_task", "parts")
    if parsed.part:
        refuse_group(os.environ, "cache fill --part")
    else:
        join_processes(os.environ, sys.argv)
    # Wrong arguments are reported before torch is imported, which takes seconds.
    from diffsynth_lite.data.records import WHOLE, Part
    from diffsynth_lite.training.caching import caching_accelerator, fill_cache

    part, accelerator = Part(*parsed.part) if parsed.part else WHOLE, caching_accelerator(loaded[0].config)
    for one in loaded:
        items, which = fill_cache(one.config, accelerator, part), "" if part.is_whole else f" of part {part}"
        logger.info(
            "%s: all of its %d items%s are in the cache %s", one.path, items, which, one.config.data.cache_dir
        )


def _fill_on_cluster(parsed: argparse.Namespace, loaded: Sequence[LoadedConfig]) -> None:
    """Encode parts of each config as tasks of a cluster."""
    if parsed.part:
        raise UserError(f"--part {parsed.part[0]}/{parsed.part[1]}: --ray makes the parts; give --parts N")
    refuse_group(os.environ, "cache fill --ray")
    from diffsynth_lite.training.data_settings import find_training_records

    for one in loaded:
        cache = shared_folder(one.config.data.cache_dir, key="data.cache_dir")
        read = folders_of(one.config, sections=("model", "data", "validation"))
        records = find_training_records(one.config).require_all()
        presets = [word for name in parsed.presets for word in ("--preset", name)]
        words = ["cache", "fill", "--config", str(one.path.resolve()), *presets, *parsed.overrides]
        ended = run_parts(
            parsed,
            words,
            {record.name: float(record.target.stat().st_size) for record in records},
            written=[cache],
            read=[Path.cwd(), one.path.resolve(), *read],
            then=words,  # It finds what only all parts together show.
        )
        require_done(ended)


def _verify(parsed: argparse.Namespace, loaded: Sequence[LoadedConfig]) -> None:
    """Read every entry, and set those that are damaged aside; read all that data.sealed holds, too."""
    from diffsynth_lite.data.cache import TensorCache, verify
    from diffsynth_lite.training.data_settings import cache_folder, sealed_folder
    from diffsynth_lite.training.encoding.seals import open_config_seal

    refuse_group(os.environ, "cache verify")
    with _progress("verifying") as progress:
        num_entries, damaged = verify(TensorCache(cache_folder(loaded[0].config)), progress)
    logger.info("%d entries are whole", num_entries - len(damaged))
    if damaged:
        logger.warning(
            "%d entries were damaged and are set aside; the next run that needs them makes them again",
            len(damaged),
        )
    for config in (one.config for one in loaded if one.config.data.sealed is not None):
        seal = open_config_seal(config)
        if seal is None:
            logger.info("data.sealed: %s holds no sealed cache yet", config.data.sealed)
            continue
        with _progress("verifying the sealed cache") as progress:
            problems = list(seal.problems(sealed_folder(config), progress))
        if problems:
            lines = join_lines([f"data.sealed: {problem}" for problem in problems])
            raise UserError(f"{lines}\nrestore {seal.folder} from a copy, or seal again into another folder")
        logger.info("%s: its table and %d entries are whole", seal.folder, seal.document.num_entries)


def _seal(parsed: argparse.Namespace, loaded: Sequence[LoadedConfig]) -> None:
    """Write what runs read of a filled cache to data.sealed; where that is done, compare it with the data."""
    from diffsynth_lite.core.units import format_bytes
    from diffsynth_lite.training.caching import caching_accelerator, seal_run

    refuse_group(os.environ, "cache seal")
    if unnamed := [str(one.path) for one in loaded if one.config.data.sealed is None]:
        raise UserError(f"data.sealed: is not set in {', '.join(unnamed)}; name the folder to be written")
    accelerator = caching_accelerator(loaded[0].config)
    for one in loaded:
        with _progress("sealing") as progress:
            document, was_there = seal_run(one.config, accelerator, progress)
        folder = one.config.data.sealed
        if was_there:
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
    from diffsynth_lite.training.caching import caching_accelerator, needed_keys, prune_cache

    refuse_group(os.environ, "cache prune")
    join_processes(os.environ, sys.argv)
    configs = [one.config for one in loaded]
    accelerator, folder = caching_accelerator(configs[0]), Path(configs[0].data.cache_dir).expanduser()
    keep = set[str]().union(*(needed_keys(config, accelerator) for config in configs))
    entries, others = prune_cache(configs, keep, dry_run=True)
    num_files, num_bytes = entries.num_files + others.num_files, entries.num_bytes + others.num_bytes
    none_needs = (
        "the config does not need" if len(loaded) == 1 else f"none of the {len(loaded)} configs needs"
    )
    what = f"{num_files} files, {format_bytes(num_bytes)}, that {none_needs}"
    if sealed := [config.data.sealed for config in configs if config.data.sealed is not None]:
        what += f" next to {join_names(sealed)}"
    if others.num_files:
        what += (
            f" ({others.num_files} of them, {format_bytes(others.num_bytes)}, are orders of samples and "
            "copies of sealed tables, which a run makes again, or were never finished)"
        )
    if not num_files:
        logger.info("The cache holds nothing that the configs do not need.")
        return
    if parsed.dry_run:
        logger.info("Would delete %s, from %s.", what, folder)
        return
    agrees = parsed.yes
    with suppress(EOFError):  # nobody answers without a terminal
        agrees = agrees or Confirm.ask(f"Delete {what}, from {folder}?", default=False)
    if not agrees:
        raise UserError(f"prune: nothing was deleted from {folder}; agree when asked, or give --yes")
    prune_cache(configs, keep, dry_run=False)
    logger.info("Deleted %s.", what)


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Scope of a progress line, which a call with the number of things done, and of all, updates."""
    with Progress(console=Console(stderr=True, emoji=False)) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
