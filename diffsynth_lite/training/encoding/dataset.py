"""This file reads the records of a run, plans its data set, and lists items that cannot be used."""

import json
import logging
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from accelerate import Accelerator

from diffsynth_lite.config import Config
from diffsynth_lite.data.buckets import Bucket
from diffsynth_lite.data.item_table import ItemTable
from diffsynth_lite.data.items import TrainingItem
from diffsynth_lite.data.media_index import FileMemory, MediaIndex, adopt_parts, parts_folder
from diffsynth_lite.data.plan import (
    BadItemsError,
    DatasetPlan,
    PlanRules,
    plan_items,
    refuse_bad_items,
    summary_of_bad,
)
from diffsynth_lite.data.records import WHOLE, Part, Record
from diffsynth_lite.data.sources import FoundRecords
from diffsynth_lite.errors import Problems, UserError
from diffsynth_lite.files import write_text
from diffsynth_lite.pipelines import ModelFamily
from diffsynth_lite.pipelines.base.vae_tiles import VaeTiles
from diffsynth_lite.progress_log import ProgressLog
from diffsynth_lite.redaction import redacted
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.training.data_settings import (
    cache_folder,
    find_held_out_records,
    find_training_records,
    index_file,
    open_memory,
)
from diffsynth_lite.training.distributed.agreement import (
    FolderGroup,
    find_folder_group,
    on_main_process,
    problems_of_all,
    some_processes_first,
)
from diffsynth_lite.training.encoding.hold_out import divided_records
from diffsynth_lite.training.encoding.seals import require_seal

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CheckedData:
    """The data of a run, or of a part of it, by its checks.

    Attributes:
        family: bound to the folder of the base model.
        training: the records of the training items, or those of the part.
        held_out: those of all held-out items; empty where the loss is measured on training items instead.
        preview_family: bound to the pipeline that previews are generated with.
    """

    family: ModelFamily
    training: FoundRecords
    held_out: FoundRecords
    preview_family: ModelFamily


def read_records(
    config: Config, accelerator: Accelerator, problems: Problems, part: Part = WHOLE
) -> tuple[FoundRecords, FoundRecords]:
    """The training and the held-out records of a run, after a look at the headers of their files.

    They are the same on all processes, and none for a run from a sealed cache: the seal is read instead.

    The first of the processes that share a cache goes first and the others use its findings, so that no file
    is read by all at once. Bad items are listed in the run's ``quarantine.jsonl``.

    Args:
        problems: those of either data set are added; its records are then empty.
        part: of the training records, and of the files that are looked at. All held-out records are read:
            which of them are measured depends on their number.
    """
    if config.data.sealed is not None:
        problems.attempt(require_seal, config)
        return FoundRecords(), FoundRecords()
    quarantine, has_hold_out = Quarantine(config, part), config.data.hold_out > 0

    def read_training() -> FoundRecords:
        # Which items are held out depends on all of them.
        found = find_training_records(config, WHOLE if has_hold_out else part)
        return read_one(found, records_of(part, found.records))

    def read_held_out() -> FoundRecords:
        found = find_held_out_records(config)
        return read_one(found, records_of(part, found.records)) if found else FoundRecords()

    def divide(found: FoundRecords) -> list[FoundRecords]:
        with open_memory(config, part) as memory:
            training, held_out = divided_records(config, found, memory)
        return [replace(training, records=records_of(part, training.records)), held_out]

    def read_one(found: FoundRecords, own: Sequence[Record]) -> FoundRecords:
        quarantine.add_rows(found.unread.items())
        found.require_all()
        _check_headers(config, found, own, quarantine, part)
        return found

    def read() -> list[FoundRecords]:
        if part.is_whole:
            adopt_parts(index_file(cache_folder(config)))
        # A UserError is caught here. Caught further out, this process would wait in the next exchange for a
        # process that has ended with another error.
        both = [problems.attempt(work) or FoundRecords() for work in (read_training, read_held_out)]
        return (problems.attempt(divide, both[0]) or both) if has_hold_out and both[0].records else both

    group = find_cache_group(config, accelerator)
    group.log("data.cache_dir", cache_folder(config), own="missing entries are encoded for each")
    (training, held_out), gathered = some_processes_first(
        accelerator,
        read,
        lambda both: (quarantine.rows, [each.unread for each in both]),
        is_first=group.is_first,
    )
    problems[:] = problems_of_all(accelerator, problems)
    for rows, _ in gathered:
        quarantine.add_rows(rows)
    if quarantine.rows:
        on_main_process(accelerator, quarantine.write)
    of_training, of_held_out = zip(*(unread for _, unread in gathered), strict=True)
    return _without(training, of_training), _without(held_out, of_held_out)


def records_of(part: Part, records: Sequence[Record]) -> list[Record]:
    """Those of the records that are in a part, by their names."""
    return [record for record in records if part.is_whole or part.owns(record.name)]


def find_cache_group(config: Config, accelerator: Accelerator) -> FolderGroup:
    """The processes that share this one's cache; call it on all."""
    return find_folder_group(accelerator, cache_folder(config), on_each_machine=True)


def _without(found: FoundRecords, unread: Sequence[Mapping[str, str]]) -> FoundRecords:
    """The records without those that any process could not read."""
    of_any = dict(ChainMap(*map(dict, unread)))
    records = [record for record in found.records if record.name not in of_any]
    return replace(found, records=records, unread=of_any)


def _check_headers(
    config: Config, found: FoundRecords, own: Sequence[Record], quarantine: "Quarantine", part: Part
) -> None:
    """Refuse too many bad items early; the caching pass finds other bad items."""
    bad = found.unread
    if config.data.on_bad_item == "error":
        with open_memory(config, part) as memory:
            bad = _bad_headers(own, MediaIndex(memory))
        quarantine.add_rows(bad.items())
    with quarantine.named():
        quarantine.refuse(found.names, bad)


def _bad_headers(records: Sequence[Record], index: MediaIndex) -> dict[str, str]:
    bad = {}
    progress = ProgressLog("looked at the files of %d of %d items", len(records), phase="reading")
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


def bad_records(plan: DatasetPlan, table: ItemTable, bad_keys: Mapping[str, str]) -> dict[str, str]:
    """Name to the reason, of records that are bad by the plan or by one of their keys."""
    bad = dict(plan.bad)
    if bad_keys:
        for item, row in zip(plan.items, table, strict=True):
            if reasons := [bad_keys[key] for key in row.keys if key in bad_keys]:
                bad.setdefault(item.record.name, reasons[0])
    return bad


def check_vae_tiling(tiles: VaeTiles, items: Sequence[TrainingItem]) -> None:
    """Log how many items the autoencoder encodes in tiles; a warning where only previews may be larger."""

    def is_split(bucket: Bucket) -> bool:
        sizes = [(bucket.width, bucket.height, bucket.num_frames), *bucket.inputs]
        return any(tiles.split(*size) for size in sizes)

    num_split = sum(is_split(item.bucket) for item in items)
    if items and not num_split:
        logger.warning("model.vae_tiling: each of %d items fits into one of the %s.", len(items), tiles)
        return
    logger.info("model.vae_tiling: %d of %d items are encoded in %s.", num_split, len(items), tiles)


def require_audio(config: Config, plan: DatasetPlan) -> None:
    """Check that there are clips with audio to learn, and log how many."""
    clips = {item.record.name for item in plan.items if item.audio is not None}
    heard = [name for name in plan.audio if name in clips]
    if plan.items and not clips:
        raise UserError(
            "data.audio: true has no effect, as there are no clips of more than one frame, and images have "
            "no audio; set it to false"
        )
    if plan.items and not heard and config.data.silent_clips == "ignore":
        raise UserError(
            f"data.audio: true, but none of {len(clips)} clips has audio; set it to false to train only the "
            "images, or data.silent_clips: learn to train silence"
        )
    logger.info("data.audio: %d of %d clips have an audio track.", len(heard), len(clips))


class Quarantine:
    """``quarantine.jsonl`` of a run: one row for each item that cannot be used; each start writes it again.

    A part has its own file in the cache, so that parts do not overwrite each other's.
    """

    def __init__(self, config: Config, part: Part = WHOLE) -> None:
        self._data = config.data
        self._part = part
        run = Path(config.output.dir).expanduser()
        self._path = RunFolder(run).quarantine_file
        if not part.is_whole:
            name = f"{part.index}-of-{part.count}.{run.name}.{self._path.name}"
            self._path = parts_folder(index_file(cache_folder(config))) / name
        self._rows: dict[tuple[str, str], None] = {}

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Name of each item, and why it cannot be used."""
        return list(self._rows)

    def add_rows(self, rows: Iterable[tuple[str, str]]) -> None:
        """Note more items, each by its name with the reason."""
        self._rows |= dict.fromkeys(rows)

    def leave_out(self, names: Sequence[str], bad: Mapping[str, str]) -> None:
        """Note bad items, and warn that they are left out.

        Raises:
            BadItemsError: no item may be left out, or too many would be.
        """
        self.add_rows((name, bad[name]) for name in names if name in bad)
        self.refuse(names, bad)
        if bad:
            logger.warning("%s. They are left out", summary_of_bad(names, bad))

    def refuse(self, names: Sequence[str], bad: Mapping[str, str]) -> None:
        """Stop where the run would; whether too many are bad is known only for all parts together."""
        data = self._data
        if self._part.is_whole or data.on_bad_item == "error":
            refuse_bad_items(names, bad, on_bad_item=data.on_bad_item, max_bad_ratio=data.max_bad_ratio)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Scope in which an error about bad items also names the file that lists all of them."""
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
