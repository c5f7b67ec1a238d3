"""This file fills the cache of a run ahead of it, seals it, and finds what in it no run needs."""

from collections.abc import Callable, Sequence
from pathlib import Path

from accelerate import Accelerator

from diffsynth_lite.config import Config
from diffsynth_lite.data.cache import Pruned, TensorCache, prune
from diffsynth_lite.data.items import UsableData
from diffsynth_lite.data.media_index import parts_folder
from diffsynth_lite.data.records import WHOLE, Part
from diffsynth_lite.data.sealed.entries import LANCE_ERRORS, SealFolder, first_line
from diffsynth_lite.data.sealed.mapped import prune_orders, prune_tables, prune_unfinished
from diffsynth_lite.data.sealed.seal import Seal, SealDocument, write_seal
from diffsynth_lite.errors import RunStoppedError, UserError
from diffsynth_lite.training.checks import check_run
from diffsynth_lite.training.data_settings import (
    cache_folder,
    index_file,
    orders_folder,
    sealed_folder,
)
from diffsynth_lite.training.encoding.job import EncodingJob
from diffsynth_lite.training.encoding.run_encoding import (
    RunEncoder,
    encode_part,
    encode_run,
    tracked_places,
)
from diffsynth_lite.training.encoding.seals import open_config_seal, seal_settings, unsealed
from diffsynth_lite.training.evaluation import thumbnail_of
from diffsynth_lite.training.session import build_accelerator
from diffsynth_lite.training.shortages import shortages_explained
from diffsynth_lite.training.slider.images import image_requests


def caching_accelerator(config: Config) -> Accelerator:
    """Device and processes for the caches of any number of runs.

    A process can have one accelerator, and runs may differ in their mixed precision, which nothing that is
    encoded depends on.
    """
    return build_accelerator(config, Path(config.output.dir).expanduser() / "trackers")


def fill_cache(config: Config, accelerator: Accelerator, part: Part = WHOLE) -> int:
    """Encode all that a run will need, or one part of it; each process of a launcher does its share.

    The sealed cache is not looked at.

    Returns:
        The number of items that the run will train on, of the part.
    """
    config = unsealed(config)
    try:
        with shortages_explained():
            checked = check_run(config, accelerator, part)
            if part.is_whole:
                return len(encode_run(config, checked, accelerator).items)
            return len(encode_part(config, checked, accelerator, part=part).items)
    except UserError as error:
        if part.is_whole:
            raise
        raise UserError("\n".join(f"part {part}: {line}" for line in str(error).splitlines())) from error


@shortages_explained()
def needed_keys(config: Config, accelerator: Accelerator) -> set[str]:
    """Keys of all entries that a run reads; those of its previews only where its data are sealed."""
    seal = None if config.data.sealed is None else open_config_seal(config)
    config = unsealed(config) if seal is None else config
    checked = check_run(config, accelerator)
    with RunEncoder.opened(config, accelerator) as encoder:
        of_previews = encoder.plan_previews(checked.preview_family).prompts
        if seal is not None:
            sealed = seal.entries(seal.map_table(sealed_folder(config)))
            return {key for key in of_previews if key not in sealed}
        job = encoder.plan(checked)
    generated = image_requests(config, checked.family, job)
    return {*job.media, *job.prompts, *of_previews, *generated}


def prune_cache(configs: Sequence[Config], needed: set[str], *, dry_run: bool) -> tuple[Pruned, Pruned]:
    """Delete the files in the cache of some configs that none of them needs.

    Args:
        needed: keys of the entries that stay.

    Returns:
        The entries that were deleted, and the other files: orders of samples, copies of sealed tables,
        unfinished ones.
    """
    cache, sealed = configs[0], [config for config in configs if config.data.sealed is not None]
    seals = [seal.digest for seal in map(open_config_seal, sealed) if seal is not None]
    others = (
        prune_orders(orders_folder(cache), dry_run=dry_run),
        prune_tables(sealed_folder(cache), seals, dry_run=dry_run),
        prune_unfinished(parts_folder(index_file(cache_folder(cache))), dry_run=dry_run),
    )
    return prune(TensorCache(cache_folder(cache)), needed, dry_run=dry_run), Pruned(
        num_files=sum(each.num_files for each in others), num_bytes=sum(each.num_bytes for each in others)
    )


@shortages_explained()
def seal_run(
    config: Config, accelerator: Accelerator, progress: Callable[[int, int], None]
) -> tuple[SealDocument, bool]:
    """Seal the data of a run as the media are now, or compare them with a seal that is there.

    Nothing is encoded. Thumbnails are made of the items whose losses are to be measured.

    Args:
        accelerator: of one process.
        progress: called after each entry with the number of those written, and of all.

    Returns:
        What was sealed, and whether it was there before with the same data.

    Raises:
        UserError: a problem would stop the run; the cache lacks entries; the folder holds a seal of other
            data or something else.
        RunStoppedError: the seal could not be written.
    """
    there = open_config_seal(config)
    plain = unsealed(config)
    checked = check_run(plain, accelerator)
    with RunEncoder.opened(plain, accelerator) as encoder:
        job = encoder.plan(checked)
        remedy = "fill the cache with `diffsynth-lite cache fill`, then seal it"
        if there is not None:
            job.leave_out(there.entries(there.map_table(sealed_folder(config))))
            remedy = f"{there.folder} has none of them, either: name another folder, and {remedy}"
        job.refuse_to_encode(remedy)
        trained_on, measured = encoder.encode(job, checked.held_out.unread)
    validation = measured if checked.held_out.records else None
    if there is not None:
        _require_same_items(there, trained_on, validation)
        return there.document, True
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
    return document, False


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
