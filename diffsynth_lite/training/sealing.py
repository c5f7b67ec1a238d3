"""This file seals the data of a run, from a cache that is filled."""

from collections.abc import Callable
from dataclasses import dataclass

from accelerate import Accelerator

from diffsynth_lite.config import Config
from diffsynth_lite.data import UsableData
from diffsynth_lite.data.sealed import (
    LANCE_ERRORS,
    Seal,
    SealDocument,
    SealFolder,
    first_line,
    write_seal,
)
from diffsynth_lite.errors import RunStoppedError, UserError
from diffsynth_lite.training.checks import check_run
from diffsynth_lite.training.data_settings import open_memory, sealed_folder
from diffsynth_lite.training.encoding.dataset import Quarantine
from diffsynth_lite.training.encoding.job import EncodingJob
from diffsynth_lite.training.encoding.run_encoding import encode_job, plan_encoding, tracked_places
from diffsynth_lite.training.encoding.seals import open_config_seal, seal_settings, unsealed
from diffsynth_lite.training.evaluation import thumbnail_of


@dataclass(frozen=True, kw_only=True)
class Sealed:
    """A seal, and whether it was there before with the same data."""

    document: SealDocument
    was_there: bool


def seal_run(config: Config, accelerator: Accelerator, progress: Callable[[int, int], None]) -> Sealed:
    """Seal the data of a run as the media are now, or compare them with a seal that is there.

    Nothing is encoded. Thumbnails are made of the items whose losses are to be measured.

    Args:
        config: names the data, the cache and the seal.
        accelerator: of one process.
        progress: called after each entry with the number of those written, and of all.

    Raises:
        UserError: a problem would stop the run; the cache lacks entries; the folder holds a seal of other
            data or something else.
        RunStoppedError: the seal could not be written.
    """
    there = open_config_seal(config)
    plain = unsealed(config)
    checked = check_run(plain, accelerator)
    with open_memory(plain) as memory:
        job = plan_encoding(plain, checked, accelerator, memory)
        remedy = "fill the cache with `diffsynth-lite cache fill`, then seal it"
        if there is not None:
            job.leave_out(there.entries(there.map_table(sealed_folder(config))))
            remedy = f"{there.folder} has none of them, either: name another folder, and {remedy}"
        job.refuse_to_encode(remedy)
        quarantine = Quarantine(plain)
        trained_on, measured = encode_job(
            plain, job, memory, accelerator, quarantine, checked.held_out.unread
        )
    validation = measured if checked.held_out.records else None
    if there is not None:
        _require_same_items(there, trained_on, validation)
        return Sealed(document=there.document, was_there=True)
    thumbnails = _thumbnails(config, job, trained_on)
    assert config.data.sealed is not None
    folder = SealFolder(config.data.sealed)
    try:
        document = write_seal(
            folder,
            job.cache,
            progress,
            data=trained_on,
            validation=validation,
            settings=seal_settings(config),
            more_keys=[key for keys in job.preview_keys for key in keys],
            texts={key: prompt.text for key, prompt in job.prompts.items()},
            thumbnails=thumbnails,
        )
    except (UserError, RunStoppedError):
        raise
    except LANCE_ERRORS as error:
        raise RunStoppedError(
            f"data.sealed: {folder} could not be written: {first_line(error)}; the folder holds no seal, and "
            "the same command starts over"
        ) from error
    return Sealed(document=document, was_there=False)


def _require_same_items(seal: Seal, trained_on: UsableData, validation: UsableData | None) -> None:
    """Check that the data are those that were sealed."""
    pairs = [("data", seal.document.data, trained_on)]
    if validation is not None and seal.document.validation is not None:
        pairs.append(("validation.data", seal.document.validation, validation))
    differing = [
        f"{what} of {key}"
        for key, sealed, found in pairs
        for what, fact in found.items.facts().items()
        if sealed.facts[what] != fact
    ]
    if differing:
        raise UserError(
            f"data.sealed: the data are not those that {seal.folder} holds: {', '.join(differing)}; name "
            "another folder to seal them as they are now"
        )


def _thumbnails(config: Config, job: EncodingJob, trained_on: UsableData) -> dict[int, str]:
    """Thumbnails of the items whose losses are measured one by one, by their numbers."""
    items = {item.name: item for item in job.datasets[0][0].items}
    table = trained_on.items
    thumbnails = {
        place: thumbnail_of(items[table.row(place).name]) for place in tracked_places(config, table)
    }
    return {place: image for place, image in thumbnails.items() if image is not None}
