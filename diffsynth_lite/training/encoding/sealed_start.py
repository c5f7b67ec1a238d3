"""This file reads a run's data from a sealed cache, without its media and single entries."""

import logging
from collections.abc import Callable
from functools import partial

from accelerate import Accelerator

from diffsynth_lite.config import Config
from diffsynth_lite.data import DataIdentity, ItemRow, ItemTable
from diffsynth_lite.data.sealed import Seal, StoredOrders
from diffsynth_lite.errors import UserError
from diffsynth_lite.training.data_settings import orders_folder, sealed_folder
from diffsynth_lite.training.distributed.agreement import on_all_processes, some_processes_first
from diffsynth_lite.training.distributed.context import check_tokens
from diffsynth_lite.training.distributed.same_run import require_same_items
from diffsynth_lite.training.encoding.dataset import CheckedData, find_cache_group
from diffsynth_lite.training.encoding.job import EncodingJob
from diffsynth_lite.training.encoding.run_encoding import (
    TrainingData,
    encode_previews,
    measured_items,
    tracked_items,
)
from diffsynth_lite.training.encoding.seals import require_seal

logger = logging.getLogger(__name__)


def sealed_data(config: Config, checked: CheckedData, accelerator: Accelerator) -> TrainingData:
    """The data of a run from the seal that its config names.

    Settings, encoders and processes are compared, which takes equally long for any number of items. Items and
    entries are checked when they are read.
    """
    family, group = checked.family, find_cache_group(config, accelerator)
    job = EncodingJob(config, family, accelerator.device, group)
    opened: list[Seal] = []

    def open_seal() -> None:
        opened.append(require_seal(config))
        _require_same_encoders(opened[0], job)

    on_all_processes(accelerator, open_seal)
    seal = opened[0]
    table, _ = some_processes_first(
        accelerator, lambda: seal.map_table(sealed_folder(config)), lambda _: None, is_first=group.is_first
    )
    document = seal.document
    trained_on = seal.dataset(table, document.data)
    held_out = None if document.validation is None else seal.dataset(table, document.validation)
    items, held_out_items = trained_on.items, held_out.items if held_out else ItemTable.build([])
    require_same_items(accelerator, items, held_out_items)
    check_tokens(config, family, [*items.buckets, *held_out_items.buckets])
    logger.info(
        "data.sealed: %d items and %d entries of %s; media and cache are not read.",
        *(len(items), document.num_entries, seal.folder),
    )
    entries = seal.entries(table)
    measured = held_out or trained_on

    def shown(place: int, row: ItemRow) -> tuple[str, Callable[[], str | None]]:
        # There are thumbnails of those that were tracked when it was sealed.
        return entries.text(row.caption_keys[0]), partial(document.thumbnails.get, place)

    return TrainingData(
        **vars(trained_on),
        tensors=entries,
        is_live=False,
        validation_items=measured_items(config, measured.items, entries, are_held_out=held_out is not None),
        validation_identity=measured.identity,
        tracked_items=tracked_items(config, items, entries, shown),
        previews=encode_previews(config, checked.preview_family, accelerator, sealed=entries),
        orders=StoredOrders(orders_folder(config), identity=seal.digest),
    )


def _require_same_encoders(seal: Seal, job: EncodingJob) -> None:
    (_, media_encoder), (_, prompt_encoder) = job.passes
    now = DataIdentity.of([], media_encoder=media_encoder.identity, prompt_encoder=prompt_encoder.identity)
    sealed = seal.document.data.identity
    differing = [
        f"the {what} is {is_now}, and was {was}"
        for what, is_now, was in (
            ("autoencoder", now.media_encoder, sealed.media_encoder),
            ("text encoder", now.prompt_encoder, sealed.prompt_encoder),
        )
        if is_now != was
    ]
    if differing:
        raise UserError(
            f"data.sealed: {seal.folder} was sealed with another model.path: {' and '.join(differing)}; "
            "restore it, or name another folder and seal again"
        )
