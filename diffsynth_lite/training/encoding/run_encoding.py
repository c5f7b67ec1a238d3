"""This file encodes a run's data with the VAE and the text encoder, before the transformer loads.

An `EncodingJob` lists what to encode; the training reads the result as `TrainingData`, also from a sealed
cache, without media and single entries.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Self

import torch
from accelerate import Accelerator
from diffusers.training_utils import free_memory

from diffsynth_lite.config import Config
from diffsynth_lite.data.batches import NOT_CONDITIONING, OF_AUDIO, Anchor, EntryReader
from diffsynth_lite.data.encoding import Encodable, Encoder, LiveTensors, encode_missing, find_undecodable
from diffsynth_lite.data.item_table import ItemRow, ItemTable
from diffsynth_lite.data.items import DataIdentity, PromptItem, UsableData
from diffsynth_lite.data.media_index import FileMemory, MediaIndex
from diffsynth_lite.data.plan import BadItemsError, DatasetPlan
from diffsynth_lite.data.records import WHOLE, Part
from diffsynth_lite.data.schedule import Orders, draw_order
from diffsynth_lite.data.sealed.entries import SealedEntries
from diffsynth_lite.data.sealed.mapped import StoredOrders
from diffsynth_lite.data.sealed.seal import Seal
from diffsynth_lite.errors import Problems, RunStoppedError, UserError
from diffsynth_lite.media import evenly_spread
from diffsynth_lite.pipelines import ModelFamily, PreviewRequest
from diffsynth_lite.training.data_settings import (
    check_sizes,
    held_out_rules,
    learned_sources,
    open_memory,
    orders_folder,
    plan_rules,
    sealed_folder,
)
from diffsynth_lite.training.distributed.agreement import on_all_processes, some_processes_first
from diffsynth_lite.training.distributed.context import check_tokens
from diffsynth_lite.training.distributed.same_run import require_same_items
from diffsynth_lite.training.encoding.dataset import (
    CheckedData,
    Quarantine,
    bad_records,
    check_vae_tiling,
    find_cache_group,
    plan_dataset,
    read_records,
    records_of,
    require_audio,
)
from diffsynth_lite.training.encoding.job import EncodingJob
from diffsynth_lite.training.encoding.scored_prompts import (
    NOTHING_SCORED,
    NUM_PROMPTS,
    ScoredPrompts,
    choose_prompts,
    request_of,
)
from diffsynth_lite.training.encoding.seals import require_seal
from diffsynth_lite.training.evaluation import TrackedItem, ValidationItem, thumbnail_of
from diffsynth_lite.training.preview_requests import build_preview, input_files, preview_size
from diffsynth_lite.training.shortages import shortages_explained

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainingData(UsableData):
    """The encoded data of a run.

    Attributes:
        is_live: whether tensors are encoded when they are read, in the process that holds the encoders.
        validation_items: for the fixed-noise loss: the first held-out items, or the first of ``items`` where
            nothing is held out.
        validation_identity: of the whole data set of these items.
        tracked_items: those of ``items`` whose losses are measured one by one.
        previews: those of ``validation.prompts``, then those of ``scored``.
        scored: the prompts of scores.
        anchors: of a slider; None for other objectives.
        generated: images that the base model generates to be trained on, by the key of an entry in the cache.
    """

    tensors: EntryReader
    is_live: bool
    validation_items: Sequence[ValidationItem]
    validation_identity: DataIdentity
    tracked_items: Sequence[TrackedItem]
    previews: Sequence[PreviewRequest]
    scored: ScoredPrompts = NOTHING_SCORED
    anchors: Sequence[Anchor] | None = None
    generated: Mapping[str, PreviewRequest] = field(default_factory=dict)
    orders: Orders = draw_order


@dataclass(frozen=True, kw_only=True)
class RunEncoder:
    """Plans and encodes the data of a run, or of a part of it.

    Attributes:
        memory: what is known of the run's files.
    """

    config: Config
    accelerator: Accelerator
    memory: FileMemory
    part: Part = WHOLE

    @classmethod
    @contextmanager
    def opened(cls, config: Config, accelerator: Accelerator, part: Part = WHOLE) -> Iterator[Self]:
        """Scope in which the memory of files is open."""
        with open_memory(config, part) as memory:
            yield cls(config=config, accelerator=accelerator, memory=memory, part=part)

    def plan(self, checked: CheckedData) -> EncodingJob:
        """Everything that a run encodes with its model: training data, held-out data, prompts of previews.

        No pixel is decoded but the first frames of new clips.
        """
        config, family, accelerator = self.config, checked.family, self.accelerator
        training, held_out = checked.training, checked.held_out
        rules, group = plan_rules(config, family), find_cache_group(config, accelerator)
        shared = self.memory, accelerator, group
        job = EncodingJob(config, family, accelerator.device, group)
        trained_on = plan_dataset(training.records, rules, *shared).without(training.unread)
        job.add_dataset(trained_on, has_unconditional=config.needs_empty_captions)
        num_measured = max(config.validation.loss_items, NUM_PROMPTS * config.validation.scores)
        measured = records_of(self.part, held_out.records[:num_measured])
        held_out_plan = plan_dataset(measured, held_out_rules(rules), *shared)
        job.add_dataset(held_out_plan, has_unconditional=config.objective.guidance_target is not None)
        require_same_items(accelerator, *(table for _, table in job.datasets))
        sizes = [size for _, table in job.datasets for size in table.buckets]
        check_sizes(sizes, family)
        check_tokens(config, family, sizes)
        if family.vae_tiles is not None and self.part.is_whole:
            check_vae_tiling(family.vae_tiles, [item for plan, _ in job.datasets for item in plan.items])
        if family.with_audio and self.part.is_whole:
            require_audio(config, trained_on)
        scored = NOTHING_SCORED
        if self.part.is_whole:  # of a part nobody knows which of all items are chosen
            scored = choose_prompts(config, family, trained_on.items, held_out_plan.items)
        if config.objective.slider is not None:
            job.add_slider(config.objective.slider.texts, negative=config.validation.negative_prompt)
        if config.validation.model_path is None:  # else another model's encoder encodes them
            self._add_previews(family, job)
            job.add_scored(scored, negative=config.validation.negative_prompt)
        job.scored = scored
        return job

    def plan_previews(self, family: ModelFamily, scored: ScoredPrompts = NOTHING_SCORED) -> EncodingJob:
        """Only the prompts of the previews, and of scores."""
        group = find_cache_group(self.config, self.accelerator)
        job = EncodingJob(self.config, family, self.accelerator.device, group)
        self._add_previews(family, job)
        job.add_scored(scored, negative=self.config.validation.negative_prompt)
        return job

    def _add_previews(self, family: ModelFamily, job: EncodingJob) -> None:
        validation, background = self.config.validation, self.config.data.background
        index = MediaIndex(self.memory)
        # Edits start from images of any size, clips from one of theirs.
        size = None if family.frame_step is None else preview_size(self.config, family)
        for place, text in enumerate(validation.prompts):
            if not self.part.owns(f"preview {place}"):
                continue
            images = input_files(self.config, place) if family.edits.prompt_sees_images else ()
            content = tuple(index.content(path) for path in images)
            prompt = PromptItem(text=text, images=images, content=content, background=background, size=size)
            job.add_preview(prompt, negative=validation.negative_prompt)

    def encode(self, job: EncodingJob, unread: Mapping[str, str]) -> list[UsableData]:
        """Encode media, then prompts; the usable items of each data set.

        Bad items are the same for all processes, and the main process lists them, with ``unread`` held-out
        items.
        """
        quarantine = Quarantine(self.config, self.part)
        quarantine.add_rows(unread.items())
        try:
            with quarantine.named():
                return _usable_datasets(job, self._bad_entries(job), quarantine)
        finally:
            if self.accelerator.is_main_process:
                quarantine.write()

    def encode_previews(self, job: EncodingJob) -> None:
        """Encode the plan of :meth:`plan_previews`."""
        if bad := self._bad_entries(job):
            raise UserError("\n".join(f"validation.inputs: {reason}" for reason in bad.values()))

    def _bad_entries(self, job: EncodingJob) -> dict[str, str]:
        """Encode what is missing; bad entries, by key, are agreed on before the next encoder loads."""
        config, memory = self.config, self.memory
        stop_at_bad = config.data.on_bad_item == "error"
        is_hopeless = stop_at_bad and any(plan.bad for plan, _ in job.datasets)
        own = Part(job.group.place, len(job.group.ranks))

        @shortages_explained()  # here, so that all processes end alike
        def work(items: Mapping[str, Encodable], encoder: Encoder, share: Part) -> tuple[int, dict[str, str]]:
            if is_hopeless or not config.data.cache:
                return 0, find_undecodable(items, memory=memory, share=share)
            found = encode_missing(
                items, encoder, cache=job.cache, memory=memory, share=share, stop_at_bad=stop_at_bad
            )
            free_memory()
            return found

        bad: dict[str, str] = {}
        num_new = 0
        for items, encoder in job.passes:
            # Each process its share, then its missing entries: none, unless a file system shows files late.
            for share in [own, WHOLE][: self.accelerator.num_processes]:
                left = {key: item for key, item in items.items() if key not in bad}
                for num_encoded, found in on_all_processes(self.accelerator, work, left, encoder, share):
                    bad |= found
                    num_new += num_encoded
                if bad and stop_at_bad:
                    return bad
            if is_hopeless:
                return bad
        num_needed = len(job.media) + len(job.prompts) - len(bad)
        if config.data.cache and num_needed and not num_new:
            logger.info("the cache holds all %d entries that are needed, and nothing is encoded", num_needed)
        return bad


def encode_run(config: Config, checked: CheckedData, accelerator: Accelerator) -> TrainingData:
    """Plan the data of a run, and encode entries missing in the cache, each process its share.

    Where machines have caches of their own, each gets everything: processes that share one share the work.
    The encoders are freed on return, unless the run encodes while it trains.
    """
    held_out, slider = checked.held_out, config.objective.slider
    with RunEncoder.opened(config, accelerator) as encoder:
        job = encoder.plan(checked)
        trained_on, measured = encoder.encode(job, held_out.unread)
    validation = measured if held_out.records else trained_on
    tensors = job.cache if config.data.cache else LiveTensors(job.passes)
    if config.validation.model_path is None:
        previews = encoded_previews(config, checked.family, job, tensors)
    else:
        previews = encode_previews(config, checked.preview_family, accelerator, scored=job.scored)
    planned = {item.name: item for item in job.datasets[0][0].items}

    def shown(_: int, row: ItemRow) -> tuple[str, Callable[[], str | None]]:
        item = planned[row.name]
        return item.record.captions[0], partial(thumbnail_of, item)

    return TrainingData(
        **vars(trained_on),
        tensors=tensors,
        is_live=not config.data.cache,
        validation_items=measured_items(
            config, validation.items, tensors, are_held_out=bool(held_out.records)
        ),
        validation_identity=validation.identity,
        tracked_items=tracked_items(config, trained_on.items, tensors, shown),
        previews=previews,
        scored=job.scored,
        anchors=None if slider is None else [Anchor(caption_key=job.texts[text]) for text in slider.kept],
    )


def encode_part(config: Config, checked: CheckedData, accelerator: Accelerator, *, part: Part) -> UsableData:
    """Encode the missing entries of a part of a run in one process; returns its items to train on."""
    with RunEncoder.opened(config, accelerator, part) as encoder:
        trained_on, _ = encoder.encode(encoder.plan(checked), checked.held_out.unread)
        if config.validation.model_path is not None:
            encoder.encode_previews(encoder.plan_previews(checked.preview_family))
    return trained_on


def encode_previews(
    config: Config,
    family: ModelFamily,
    accelerator: Accelerator,
    *,
    sealed: SealedEntries | None = None,
    scored: ScoredPrompts = NOTHING_SCORED,
) -> list[PreviewRequest]:
    """Encode only the prompts of previews and scores that the cache does not hold; the encoder is freed.

    Args:
        sealed: entries that are taken before those of the cache.
    """
    with RunEncoder.opened(config, accelerator) as encoder:
        job = encoder.plan_previews(family, scored)
        if sealed is not None:
            job.leave_out(sealed)
        encoder.encode_previews(job)
    tensors = job.cache if config.data.cache else LiveTensors(job.passes)
    entries = tensors if sealed is None else sealed.before(tensors)
    return encoded_previews(config, family, job, entries)


def encode_scored(
    config: Config, family: ModelFamily, accelerator: Accelerator
) -> tuple[ScoredPrompts, list[PreviewRequest]]:
    """The prompts of a run's scores, and their encoded requests; of the data nothing is encoded.

    Args:
        config: without prompts of previews.
    """
    problems = Problems()
    training, held_out = read_records(config, accelerator, problems)
    problems.require_none()
    checked = CheckedData(family=family, training=training, held_out=held_out, preview_family=family)
    with RunEncoder.opened(config, accelerator) as encoder:
        scored = encoder.plan(checked).scored
    return scored, encode_previews(config, family, accelerator, scored=scored)


def encoded_previews(
    config: Config, family: ModelFamily, job: EncodingJob, tensors: EntryReader
) -> list[PreviewRequest]:
    """The previews, then those of scores, whose prompts are encoded."""
    found = [tuple(require_entry(tensors, key) for key in keys) for keys in job.preview_keys]
    num_previews = len(config.validation.prompts)
    previews = [
        build_preview(config, family, place, *both) for place, both in enumerate(found[:num_previews])
    ]
    pairs = zip(job.scored.all, found[num_previews:], strict=True)
    scored = [request_of(config, family, one, place, *both) for place, (one, both) in enumerate(pairs)]
    return previews + scored


def _usable_datasets(
    job: EncodingJob, bad_keys: Mapping[str, str], quarantine: Quarantine
) -> list[UsableData]:
    """The items of each data set to train on or measure, or one error about all of them."""
    problems = Problems()

    def usable(plan: DatasetPlan, table: ItemTable) -> UsableData:
        bad = bad_records(plan, table, bad_keys)
        quarantine.leave_out(plan.names, bad)
        return job.usable(plan.without(bad), table)

    found = [problems.attempt(usable, plan, table) for plan, table in job.datasets]
    if problems:
        raise BadItemsError("\n".join(problems))
    return [each for each in found if each is not None]


def require_entry(tensors: EntryReader, key: str) -> dict[str, torch.Tensor]:
    """Tensors that the caching pass has just made or found."""
    found = tensors.read(key)
    if found is None:
        raise RunStoppedError(
            "data.cache_dir: an entry vanished or was damaged while the run started; "
            "the same command encodes it again"
        )
    return found


def tracked_items(
    config: Config,
    table: ItemTable,
    tensors: EntryReader,
    shown: Callable[[int, ItemRow], tuple[str, Callable[[], str | None]]],
) -> list[TrackedItem]:
    """The training items that are measured one by one.

    Args:
        shown: gives the caption of an item by its place and row, and what makes its thumbnail.
    """
    tracked = []
    for place in tracked_places(config, table):
        row = table.row(place)
        caption, thumbnail = shown(place, row)
        read = partial(read_item, tensors, row)
        tracked.append(
            TrackedItem(
                position=place,
                row=row,
                caption=caption,
                # Without a cache it is encoded when it is first read.
                read=read if config.data.cache else cache(read),
                thumbnail=thumbnail,
            )
        )
    return tracked


def tracked_places(config: Config, table: ItemTable) -> list[int]:
    """Training items that are measured one by one: some of the learned ones, evenly spread.

    None of a slider, which does not learn to predict them.
    """
    if config.objective.slider is not None:
        return []
    return evenly_spread(table.places(learned_sources(config)), config.validation.item_losses)


def measured_items(
    config: Config, items: ItemTable, tensors: EntryReader, *, are_held_out: bool
) -> list[ValidationItem]:
    """The first items of a table, as many as ``validation.loss_items``; of training items, those learned.

    None of a slider.
    """
    if config.objective.slider is not None:
        return []
    places = range(len(items)) if are_held_out else items.places(learned_sources(config))
    return [read_item(tensors, items.row(place)) for place in places[: config.validation.loss_items]]


def read_item(tensors: EntryReader, row: ItemRow) -> ValidationItem:
    """An item with its first caption."""
    media, empty = require_entry(tensors, row.media_key), row.unconditional_key
    extra = {name: tensor for name, tensor in media.items() if name not in NOT_CONDITIONING}
    return ValidationItem(
        bucket=row.bucket,
        latents=media["latents"],
        conditioning=require_entry(tensors, row.caption_keys[0]) | extra,
        unconditional=None if empty is None else require_entry(tensors, empty) | extra,
        loss_mask=media.get("loss_mask"),
        audio={name: media[name] for name in OF_AUDIO if name in media},
    )


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
