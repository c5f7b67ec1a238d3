"""This file reads the records of a run and looks at their files, on all processes with one outcome."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from accelerate import Accelerator

from diffsynth_lite.config import Config
from diffsynth_lite.data import FileMemory, MediaIndex, Record, without_bad_items
from diffsynth_lite.errors import UserError
from diffsynth_lite.progress_log import PassPace
from diffsynth_lite.training.data_rules import (
    cache_folder,
    index_file,
    read_training_records,
    read_validation_records,
)
from diffsynth_lite.training.processes import main_process_first, on_main_process
from diffsynth_lite.training.quarantine import Quarantine
from diffsynth_lite.training.run_folder.status import shortages_explained


@dataclass(frozen=True, kw_only=True)
class ReadData:
    """The records of a run, and all that is wrong with them.

    Attributes:
        training: empty where they cannot be used.
        validation: held-out ones; also empty where there are none.
        problems: found by any process, the same on all.
    """

    training: list[Record]
    validation: list[Record]
    problems: Sequence[str]


def read_data(config: Config, accelerator: Accelerator) -> ReadData:
    """Read the records of a run, and the headers of their files.

    The main process goes first and the others find its findings, so that no file is read by all at once. Bad
    items are listed in the run's ``quarantine.jsonl``.

    Args:
        config: of the run.
        accelerator: tells processes.

    Raises:
        UserError: the list of bad items cannot be written.
    """
    quarantine = Quarantine(config)
    own, told = main_process_first(
        accelerator, lambda: _read(config, quarantine), lambda data: (data.problems, quarantine.rows)
    )
    for _, rows in told:
        quarantine.add_rows(rows)
    if quarantine.rows:
        with shortages_explained():
            on_main_process(accelerator, quarantine.write)
    problems = list(dict.fromkeys(problem for found, _ in told for problem in found))
    return ReadData(training=own.training, validation=own.validation, problems=problems)


def _read(config: Config, quarantine: Quarantine) -> ReadData:
    problems: list[str] = []

    def attempt(read: Callable[[Config], list[Record]]) -> list[Record]:
        try:
            return _looked_at(config, read(config), quarantine)
        except UserError as error:
            problems.append(str(error))
            return []

    return ReadData(
        training=attempt(read_training_records),
        validation=attempt(read_validation_records),
        problems=problems,
    )


def _looked_at(config: Config, records: list[Record], quarantine: Quarantine) -> list[Record]:
    """The records, after a look at their files' headers."""
    if config.data.on_bad_item == "skip":
        return records  # The caching pass finds the bad ones and keeps the list of them.
    bad = {}
    pace = PassPace("looked at the files of %d of %d items", len(records))
    with FileMemory(index_file(cache_folder(config))) as memory:
        index = MediaIndex(memory)
        for record in records:
            try:
                _look_at(record, index)
            except UserError as error:
                bad[record.name] = str(error)
            pace.advance()
    with quarantine.named():
        return without_bad_items(
            records, bad, on_bad_item="error", max_bad_ratio=0.0, quarantine=quarantine.add
        )


def _look_at(record: Record, index: MediaIndex) -> None:
    for file in record.files:
        index.facts(file)
