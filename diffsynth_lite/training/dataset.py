"""This file reads the records of a run, plans what is trained on, and lists what cannot be used."""

import json
import logging
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from accelerate import Accelerator

from diffsynth_lite.config import Config
from diffsynth_lite.data import (
    BadItemsError,
    Bucket,
    DatasetPlan,
    FileMemory,
    FoundRecords,
    MediaIndex,
    PlanRules,
    Record,
    TrainingItem,
    plan_items,
    refuse_bad_items,
)
from diffsynth_lite.errors import Problems, UserError
from diffsynth_lite.files import write_text
from diffsynth_lite.pipelines.base.vae_tiles import VaeTiles
from diffsynth_lite.progress_log import ProgressLog
from diffsynth_lite.redaction import redacted
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.training.data_settings import (
    cache_folder,
    find_held_out_records,
    find_training_records,
    index_file,
)
from diffsynth_lite.training.distributed.agreement import (
    on_main_process,
    problems_of_all,
    some_processes_first,
)
from diffsynth_lite.training.distributed.folder_groups import FolderGroup, find_folder_group

logger = logging.getLogger(__name__)


def read_records(
    config: Config, accelerator: Accelerator, problems: Problems
) -> tuple[list[Record], list[Record]]:
    """The training and the held-out records of a run, after a look at the headers of their files.

    The first of the processes that share a cache goes first and the others find its findings, so that no file
    is read by all at once. Bad items are listed in the run's ``quarantine.jsonl``.

    Args:
        config: names the data.
        problems: what is wrong with either is added; its records are then empty.
    """
    quarantine = Quarantine(config)

    def read_one(find: Callable[[Config], FoundRecords | None]) -> list[Record]:
        found = find(config)
        records = found.require_all() if found else []
        _check_headers(config, records, quarantine)
        return records

    def read() -> list[list[Record]]:
        # A UserError stays in here. Caught further out it would let this process go on to the next exchange,
        # and wait there for one that has ended with another error.
        finds = (find_training_records, find_held_out_records)
        return [problems.attempt(partial(read_one, find)) or [] for find in finds]

    group = find_cache_group(config, accelerator)
    group.log("data.cache_dir", cache_folder(config), own="what one lacks is encoded for it")
    (training, held_out), gathered = some_processes_first(
        accelerator, read, lambda _: quarantine.rows, is_first=group.is_first
    )
    problems[:] = problems_of_all(accelerator, problems)
    for rows in gathered:
        quarantine.add_rows(rows)
    if quarantine.rows:
        on_main_process(accelerator, quarantine.write)
    return training, held_out


def find_cache_group(config: Config, accelerator: Accelerator) -> FolderGroup:
    """The processes that share this one's cache; call it on all."""
    return find_folder_group(accelerator, cache_folder(config), on_each_machine=True)


def _check_headers(config: Config, records: Sequence[Record], quarantine: "Quarantine") -> None:
    if config.data.on_bad_item == "skip":
        return  # The caching pass finds the bad ones and keeps the list of them.
    with FileMemory(index_file(cache_folder(config))) as memory:
        bad = _bad_headers(records, MediaIndex(memory))
    quarantine.add(records, bad)
    with quarantine.named():
        refuse_bad_items(records, bad, on_bad_item="error", max_bad_ratio=0.0)


def _bad_headers(records: Sequence[Record], index: MediaIndex) -> dict[str, str]:
    bad = {}
    progress = ProgressLog("looked at the files of %d of %d items", len(records))
    for record in records:
        try:
            for file in record.files:
                index.facts(file)
        except UserError as error:
            bad[record.name] = str(error)
        progress.advance()
    return bad


def plan_dataset(
    records: Sequence[Record],
    rules: PlanRules,
    memory: FileMemory,
    accelerator: Accelerator,
    group: FolderGroup,
) -> DatasetPlan:
    """The plan of records, without those that are bad for any process."""

    def plan() -> DatasetPlan:
        planned = plan_items(records, index=MediaIndex(memory), rules=rules)
        memory.flush()  # for the other processes
        return planned

    planned, bad = some_processes_first(
        accelerator, plan, lambda planned: planned.bad, is_first=group.is_first
    )
    return planned.without(dict(ChainMap(*map(dict, bad))))


def say_what_is_tiled(tiles: VaeTiles, items: Sequence[TrainingItem]) -> None:
    """Log how many items the autoencoder takes apart.

    Raises:
        UserError: none is large enough.
    """

    def is_split(bucket: Bucket) -> bool:
        sizes = [(bucket.width, bucket.height, bucket.num_frames), *bucket.inputs]
        return any(tiles.split(*size) for size in sizes)

    num_split = sum(is_split(item.bucket) for item in items)
    if items and not num_split:
        raise UserError(
            f"model.vae_tiling: true has no effect, as each of {len(items)} items fits into one of the "
            f"{tiles}; set it to false"
        )
    logger.info("model.vae_tiling: %d of %d items are encoded in %s.", num_split, len(items), tiles)


class Quarantine:
    """``quarantine.jsonl`` of a run: one row an item that cannot be used; written anew by each start."""

    def __init__(self, config: Config) -> None:
        self._path = RunFolder(Path(config.output.dir).expanduser()).quarantine_file
        self._rows: dict[tuple[str, str], None] = {}

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Name of each item, and why it cannot be used."""
        return list(self._rows)

    def add(self, records: Sequence[Record], bad: Mapping[str, str]) -> None:
        """Note the records that are in ``bad``, a name to the reason, in their order."""
        self.add_rows((record.name, bad[record.name]) for record in records if record.name in bad)

    def add_rows(self, rows: Iterable[tuple[str, str]]) -> None:
        """Note the rows of another process."""
        self._rows |= dict.fromkeys(rows)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Scope in which an error about bad items also says where all of them are listed.

        Raises:
            UserError: instead of the BadItemsError.
        """
        try:
            yield
        except BadItemsError as error:
            raise UserError(f"{error}. All of them are listed in {self._path}") from error

    def write(self) -> None:
        """Write the file; none when everything can be used."""
        if not self._rows:
            self._path.unlink(missing_ok=True)
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        rows = (json.dumps({"item": name, "reason": reason}) for name, reason in redacted(self.rows))
        write_text(self._path, "".join(f"{row}\n" for row in rows))
