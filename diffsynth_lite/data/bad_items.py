"""This file decides what happens to images that cannot be used: the run stops, or goes on without them."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from diffsynth_lite.data.listing import listed
from diffsynth_lite.data.records import Record
from diffsynth_lite.errors import UserError

logger = logging.getLogger(__name__)

OnBadItem = Literal["error", "skip"]


def without_bad_items(
    records: Sequence[Record],
    bad: Mapping[str, str],
    *,
    on_bad_item: OnBadItem,
    quarantine: Callable[[Record, str], None],
) -> list[Record]:
    """Records that are not in ``bad``.

    Args:
        records: all records.
        bad: name of a record to the reason why it cannot be used.
        on_bad_item: "error" refuses any bad item, "skip" leaves them out.
        quarantine: is told each record that is left out, and why.

    Raises:
        UserError: there are bad items and none is to be skipped, or more than half are bad.
    """
    if not bad:
        return list(records)
    summary = f"{len(bad)} of {len(records)} images cannot be used: {listed(list(bad.values()))}"
    if on_bad_item == "error":
        raise UserError(f"{summary}. Repair or remove them, or leave them out with data.on_bad_item=skip")
    if 2 * len(bad) > len(records):
        raise UserError(f"{summary}. Too many to skip: at least half must be good")
    for record in records:
        if record.name in bad:
            quarantine(record, bad[record.name])
    logger.warning("%s. They are left out", summary)
    return [record for record in records if record.name not in bad]
