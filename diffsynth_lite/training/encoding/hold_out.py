"""This file holds some records of each source out of training, so that the loss can be measured on them."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from diffsynth_lite.config import Config
from diffsynth_lite.core.randomness import uniform
from diffsynth_lite.data.media_index import FileMemory, MediaIndex
from diffsynth_lite.data.sources import FoundRecords
from diffsynth_lite.errors import UserError, join_names
from diffsynth_lite.files import write_text
from diffsynth_lite.progress_log import ProgressLog
from diffsynth_lite.redaction import redacted
from diffsynth_lite.run_folder.folder import RunFolder

logger = logging.getLogger(__name__)


def divided_records(
    config: Config, found: FoundRecords, memory: FileMemory
) -> tuple[FoundRecords, FoundRecords]:
    """The training records and the held-out ones by ``data.hold_out``, of all records; logs which they are.

    Raises:
        UserError: there are too few items to hold one out.
    """
    index, data = MediaIndex(memory), config.data
    progress = ProgressLog("data.hold_out: read %d of %d files", len(found.records), phase="reading")

    def content(path: Path) -> str | None:
        progress.advance()
        try:
            return index.content(path)
        except UserError:
            return None  # reported with the other items that cannot be used

    training, held_out = hold_out(found, ratio=data.hold_out, seed=config.validation.seed, content=content)
    if found.records and not held_out.records:
        raise UserError(
            f"data.hold_out: {data.hold_out:g} holds nothing out, as no source that is learned has two "
            "different files; add some, or set it to 0"
        )
    names = [record.name for record in held_out.records]
    logger.info("data.hold_out: %d of %d items: %s", len(names), len(found.records), join_names(names))
    return training, held_out


def write_held_out(config: Config, held_out: FoundRecords) -> None:
    """List the items of ``data.hold_out`` in the run's ``held_out.jsonl``; no file where it is off.

    Of a sealed cache, which holds no records, an earlier list stays.
    """
    path = RunFolder(Path(config.output.dir).expanduser()).held_out_file
    if not config.data.hold_out:
        path.unlink(missing_ok=True)
    elif held_out.records:
        rows = (json.dumps({"item": name}) for name in redacted(held_out.names))
        write_text(path, "".join(f"{row}\n" for row in rows))


def hold_out(
    found: FoundRecords, *, ratio: float, seed: int, content: Callable[[Path], str | None]
) -> tuple[FoundRecords, FoundRecords]:
    """Divide records into those that are trained on, and those that are held out.

    Each file has a number that only the seed and its content decide; of each source the files with the lowest
    numbers are held out. So the others stay where they are when items are added, renamed or moved, and files
    of equal content, in whatever sources, stay together. Preserved records of such content are left out.

    Args:
        ratio: of the different files of a learned source that are held out, in (0, 1): at least one, and
            never all of any source.
        content: returns the sha256 of a file in hexadecimal; None where it cannot be read. Such a file stays
            among the training records.

    Returns:
        The training records, in their order. The held-out records with one caption each, those of a source
        evenly spread over the list, so that any number of first ones is a fair sample.
    """
    contents = {record.name: content(record.target) for record in found.records}
    trained: dict[int, set[str]] = {}
    for record in found.records:
        if (digest := contents[record.name]) is not None:
            trained.setdefault(record.source, set()).add(digest)
    sizes = {source: len(digests) for source, digests in trained.items()}
    places: dict[str | None, float] = {}
    for source, digests in trained.items():
        if not found.sources[source].preserve:
            number = max(1, round(ratio * sizes[source])) - (sizes[source] - len(digests))
            drawn = _draw(trained, source, number, seed)
            places |= {digest: (place + 0.5) / len(drawn) for place, digest in enumerate(drawn)}
    names = {record.name for record in found.records if contents[record.name] in places}
    held_out = [
        replace(record, captions=record.captions[:1], random_masks=min(1, record.random_masks))
        for record in found.records
        if record.name in names and not found.sources[record.source].preserve
    ]
    held_out.sort(key=lambda record: places[contents[record.name]])
    records = [record for record in found.records if record.name not in names]
    once = [source.model_copy(update={"repeats": 1, "weight": 1.0}) for source in found.sources]
    return replace(found, records=records), FoundRecords(sources=once, records=held_out)


def _draw(trained: Mapping[int, set[str]], source: int, number: int, seed: int) -> list[str]:
    """Take at most so many contents of a source out of all sources, but never the last one of any."""
    drawn: list[str] = []
    for digest in sorted(
        trained[source], key=lambda one: (uniform(seed, "hold-out", int(one[:32], 16)), one)
    ):
        holders = [digests for digests in trained.values() if digest in digests]
        if len(drawn) < number and all(len(digests) > 1 for digests in holders):
            drawn.append(digest)
            for digests in holders:
                digests.remove(digest)
    return drawn
