"""This file encodes all that the text encoder and the VAE are needed for, before the transformer loads."""

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from diffusers.training_utils import free_memory
from PIL.Image import Image

from diffsynth_lite.config import Config
from diffsynth_lite.data import (
    BadItemsError,
    DataIdentity,
    DatasetPlan,
    Encodable,
    Encoder,
    EntryReader,
    FileMemory,
    ItemTable,
    LiveTensors,
    MediaIndex,
    PlanRules,
    PromptItem,
    Record,
    Shard,
    TensorCache,
    TrainingItem,
    encode_missing,
    find_undecodable,
    load_image,
    plan_items,
)
from diffsynth_lite.errors import Problems, RunStoppedError
from diffsynth_lite.pipelines import Conditioning
from diffsynth_lite.training.checks import CheckedRun
from diffsynth_lite.training.data_settings import DataRules, cache_folder, data_rules, index_file
from diffsynth_lite.training.dataset import DataSet, FamilyEncoders, Quarantine, UsableItems
from diffsynth_lite.training.distributed import main_process_first, on_all_processes
from diffsynth_lite.training.evaluation import ValidationItem


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """All that a run encodes, by the keys of its tensors.

    Attributes:
        rules: how the data are taken.
        encoders: of the family.
        cache: of the run.
        training: what is trained on, and the prompts of the previews.
        held_out: what the validation loss is measured on; empty where it is training items.
        prompt_keys: key of each preview prompt, and of its negative.
    """

    rules: DataRules
    encoders: FamilyEncoders
    cache: TensorCache
    training: DataSet
    held_out: DataSet
    prompt_keys: Sequence[tuple[str, str]]

    @property
    def media(self) -> Mapping[str, TrainingItem]:
        """Items by key."""
        return {**self.training.media, **self.held_out.media}

    @property
    def prompts(self) -> Mapping[str, PromptItem]:
        """Captions and prompts by key."""
        return {**self.training.prompts, **self.held_out.prompts}


def plan_run(config: Config, checked: CheckedRun, accelerator: Accelerator, memory: FileMemory) -> PlannedRun:
    """Plan a run; no pixel is decoded but first frames of clips that are new.

    Args:
        config: of the run.
        checked: the run's records and family.
        accelerator: tells processes and device.
        memory: of the files.

    Raises:
        UserError: settings that the family cannot do.
    """
    family, validation = checked.family, config.validation
    rules, cache = data_rules(config, family), TensorCache(cache_folder(config))
    encoders = FamilyEncoders.of(
        family,
        text_dtype=getattr(torch, config.model.text_encoder_dtype),
        vae_dtype=getattr(torch, config.model.vae_dtype),
        device=accelerator.device,
    )
    index = MediaIndex(memory)

    def data_set(records: Sequence[Record], plan_rules: PlanRules, *, has_unconditional: bool) -> DataSet:
        def plan() -> DatasetPlan:
            planned = plan_items(records, index=index, rules=plan_rules)
            memory.flush()
            return planned

        planned, bad = main_process_first(accelerator, plan, lambda planned: planned.bad)
        return DataSet(
            records,
            planned.without(dict(ChainMap(*map(dict, bad)))),
            encoders,
            cache,
            prompt_sees_images=family.prompt_sees_images,
            has_unconditional=has_unconditional,
        )

    training = data_set(checked.records, rules.plan, has_unconditional=rules.has_unconditional)
    held_out = data_set(
        checked.validation_records[: validation.loss_items], rules.held_out_plan, has_unconditional=False
    )
    seen = family.prompt_sees_images
    return PlannedRun(
        rules=rules,
        encoders=encoders,
        cache=cache,
        training=training,
        held_out=held_out,
        prompt_keys=[
            _add_prompts(config, training, text, preview_files(config, place) if seen else (), index)
            for place, text in enumerate(validation.prompts)
        ],
    )


def preview_files(config: Config, place: int) -> tuple[Path, ...]:
    """Files of the picture that the preview at ``place`` starts from, and of the one that it leads to."""
    validation = config.validation
    files = (*validation.inputs[place : place + 1], *validation.last_frames[place : place + 1])
    return tuple(Path(file).expanduser() for file in files)


def _add_prompts(
    config: Config, data: DataSet, text: str, images: tuple[Path, ...], index: MediaIndex
) -> tuple[str, str]:
    """Also encode a preview prompt and its negative; returns their keys."""
    content = tuple(index.content(path) for path in images)
    prompt = PromptItem(text=text, images=images, content=content, background=config.data.background)
    negative = replace(prompt, text=config.validation.negative_prompt, is_negative=True)
    return data.add_prompt(prompt), data.add_prompt(negative)


@dataclass(frozen=True, kw_only=True)
class EncodedPrompt:
    """A preview prompt.

    Attributes:
        conditioning: of the prompt.
        negative: of the negative prompt.
        inputs: the picture that it starts from, and the one that it leads to, where there are any.
    """

    conditioning: Conditioning
    negative: Conditioning
    inputs: tuple[Image, ...]


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """The encoded data of a run.

    Attributes:
        items: what is trained on, in order.
        identity: of these items, whatever the cache is like.
        tensors: where the tensors of the items are.
        is_live: they are encoded when they are read, in the process that holds the encoders.
        validation_items: what the fixed-noise loss is measured on: the first ones of what is held out, or of
            the items where nothing is.
        validation_identity: of all that they are the first ones of.
        prompts: the preview prompts.
    """

    items: ItemTable
    identity: DataIdentity
    tensors: EntryReader
    is_live: bool
    validation_items: Sequence[ValidationItem]
    validation_identity: DataIdentity
    prompts: Sequence[EncodedPrompt]


def encode_run(config: Config, checked: CheckedRun, accelerator: Accelerator) -> TrainingData:
    """Plan the data, and encode what the cache does not hold, each process its share.

    The encoders are freed on return, unless the run encodes while it trains.

    Args:
        config: of the run.
        checked: the run's records and family.
        accelerator: tells processes and device.

    Raises:
        UserError: bad items, all of them listed in the run's ``quarantine.jsonl``; the same on all processes.
    """
    validation = config.validation
    with FileMemory(index_file(cache_folder(config))) as memory:
        planned = plan_run(config, checked, accelerator, memory)
        training, held_out = _usable(config, _Encoding(planned, memory, accelerator))
    tensors = _reader(planned)
    measured = held_out if checked.validation_records else training
    return TrainingData(
        items=training.table,
        identity=training.identity,
        tensors=tensors,
        is_live=not planned.rules.use_cache,
        validation_items=[
            _validation_item(tensors, measured.table, place)
            for place in range(min(validation.loss_items, len(measured.table)))
        ],
        validation_identity=measured.identity,
        prompts=[
            EncodedPrompt(
                conditioning=_require(tensors, prompt_key),
                negative=_require(tensors, negative_key),
                inputs=tuple(
                    load_image(path, background=config.data.background)
                    for path in preview_files(config, place)
                ),
            )
            for place, (prompt_key, negative_key) in enumerate(planned.prompt_keys)
        ],
    )


def _usable(config: Config, encoding: "_Encoding") -> tuple[UsableItems, UsableItems]:
    """As `_Encoding.encode`; the main process writes the list of what cannot be used."""
    quarantine = Quarantine(config)
    try:
        with quarantine.named():
            return encoding.encode(quarantine.add)
    finally:
        if encoding.accelerator.is_main_process:
            quarantine.write()


@dataclass(frozen=True)
class _Encoding:
    """What encodes the data of a planned run."""

    planned: PlannedRun
    memory: FileMemory
    accelerator: Accelerator

    def encode(self, quarantine: Callable[[Record, str], None]) -> tuple[UsableItems, UsableItems]:
        """Encode media, then prompts; what is bad is agreed on before the next encoder loads.

        Returns:
            The usable items of the training data, and of those held out.
        """
        run, bad = self.planned, dict[str, str]()
        stop_at_bad = run.rules.on_bad_item == "error"
        is_hopeless = stop_at_bad and bool(run.training.plan.bad or run.held_out.plan.bad)
        passes: Sequence[tuple[Encoder, Mapping[str, Encodable]]] = (
            (run.encoders.media, run.media),
            (run.encoders.prompts, run.prompts),
        )
        for encoder, planned in passes:
            bad |= self._encode_shared(planned, encoder, only_look=is_hopeless)
            if is_hopeless or (stop_at_bad and bad):
                self._usable_items(bad, quarantine)
        return self._usable_items(bad, quarantine)

    def _encode_shared(
        self, planned: Mapping[str, Encodable], encoder: Encoder, *, only_look: bool
    ) -> dict[str, str]:
        """Each process encodes its share, and then what it still misses: nothing in a shared folder."""
        processes = self.accelerator
        shard = Shard(num_processes=processes.num_processes, process_index=processes.process_index)

        def work(shard: Shard, planned: Mapping[str, Encodable]) -> dict[str, str]:
            if only_look or not self.planned.rules.use_cache:
                return find_undecodable(planned, memory=self.memory, shard=shard)
            stop_at_bad = self.planned.rules.on_bad_item == "error"
            bad = encode_missing(
                planned,
                encoder,
                cache=self.planned.cache,
                memory=self.memory,
                shard=shard,
                stop_at_bad=stop_at_bad,
            )
            free_memory()
            return bad

        bad: dict[str, str] = {}
        for each in [shard, Shard()][: processes.num_processes]:
            left = {key: one for key, one in planned.items() if key not in bad}
            for part in on_all_processes(processes, partial(work, each, left)):
                bad |= part
            if bad and self.planned.rules.on_bad_item == "error":
                break
        return bad

    def _usable_items(
        self, bad: Mapping[str, str], quarantine: Callable[[Record, str], None]
    ) -> tuple[UsableItems, UsableItems]:
        """Those of both data sets, or one error about both."""
        problems = Problems()

        def usable(data: DataSet) -> UsableItems:
            return data.usable_items(
                bad,
                on_bad_item=self.planned.rules.on_bad_item,
                max_bad_ratio=self.planned.rules.max_bad_ratio,
                quarantine=quarantine,
            )

        training = problems.attempt(lambda: usable(self.planned.training))
        held_out = problems.attempt(lambda: usable(self.planned.held_out))
        if training is None or held_out is None:
            raise BadItemsError("\n".join(problems))
        return training, held_out


def _reader(planned: PlannedRun) -> EntryReader:
    """Where the tensors of a run are read."""
    if planned.rules.use_cache:
        return planned.cache
    return LiveTensors([(planned.media, planned.encoders.media), (planned.prompts, planned.encoders.prompts)])


def _require(tensors: EntryReader, key: str) -> dict[str, torch.Tensor]:
    """Tensors that the caching pass has just made or seen."""
    found = tensors.read(key)
    if found is None:
        raise RunStoppedError(
            "data.cache_dir: an entry vanished or was damaged while the run started; "
            "the same command encodes it again"
        )
    return found


def _validation_item(tensors: EntryReader, items: ItemTable, place: int) -> ValidationItem:
    row = items.row(place)
    media = _require(tensors, row.media_key)
    extra = {name: tensor for name, tensor in media.items() if name not in ("latents", "loss_mask")}
    return ValidationItem(
        bucket=items.buckets[row.bucket],
        latents=media["latents"],
        conditioning=_require(tensors, row.caption_keys[0]) | extra,
        loss_mask=media.get("loss_mask"),
    )
