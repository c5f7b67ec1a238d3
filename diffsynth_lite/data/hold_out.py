"""This file holds some records of each source out of training, so that the loss can be measured on them."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from diffsynth_lite.core.randomness import uniform
from diffsynth_lite.data.sources import FoundRecords


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
