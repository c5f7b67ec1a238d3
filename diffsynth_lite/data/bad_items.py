"""This file decides what happens to items that cannot be used: the run stops, or goes on without them."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from diffsynth_lite.data.listing import listed
from diffsynth_lite.data.records import Record
from diffsynth_lite.errors import UserError

logger = logging.getLogger(__name__)

OnBadItem = Literal["error", "skip"]


class BadItemsError(UserError):
    """Items that cannot be used stop the run; the message names the first of them."""


def without_bad_items(
    records: Sequence[Record],
    bad: Mapping[str, str],
    *,
    on_bad_item: OnBadItem,
    max_bad_ratio: float,
    quarantine: Callable[[Record, str], None],
) -> list[Record]:
    """Records that are not in ``bad``.

    Args:
        records: all records.
        bad: name of a record to the reason why it cannot be used.
        on_bad_item: "error" refuses any bad item, "skip" leaves them out.
        max_bad_ratio: more bad items than this part of all, in [0, 1], are not skipped.
        quarantine: is told each record that cannot be used, and why, also where that is an error.

    Raises:
        BadItemsError: there are bad items and none is to be skipped, or too many are bad.
    """
    if not bad:
        return list(records)
    for record in records:
        if record.name in bad:
            quarantine(record, bad[record.name])
    reasons = [f"{name}: {bad[name]}" for name in (record.name for record in records) if name in bad]
    summary = f"{len(reasons)} of {len(records)} items cannot be used: {listed(reasons)}"
    if on_bad_item == "error":
        raise BadItemsError(f"{summary}. Repair or remove them, or leave them out with data.on_bad_item=skip")
    left = [record for record in records if record.name not in bad]
    if len(reasons) > max_bad_ratio * len(records) or not left:
        raise BadItemsError(
            f"{summary}. Too many to skip: data.max_bad_ratio is {max_bad_ratio}, and one must be good"
        )
    logger.warning("%s. They are left out", summary)
    return left
