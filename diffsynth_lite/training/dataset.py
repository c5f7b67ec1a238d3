"""This file reads the data set of a run, and says what of it is encoded and where its tensors will be."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from accelerate import Accelerator

from diffsynth_lite.config import Config
from diffsynth_lite.data import (
    BadItemsError,
    DataIdentity,
    DatasetPlan,
    Encoder,
    FileMemory,
    ItemRow,
    ItemTable,
    MediaIndex,
    OnBadItem,
    PromptItem,
    Record,
    TensorCache,
    TrainingItem,
    without_bad_items,
)
from diffsynth_lite.errors import Problems, UserError
from diffsynth_lite.files import write_text
from diffsynth_lite.pipelines import ModelFamily
from diffsynth_lite.progress_log import ProgressLog
from diffsynth_lite.redaction import redacted
from diffsynth_lite.training.data_settings import (
    cache_folder,
    index_file,
    read_training_records,
    read_validation_records,
)
from diffsynth_lite.training.distributed import main_process_first, on_main_process
from diffsynth_lite.training.run_folder.folder import RunFolder
from diffsynth_lite.training.run_folder.status import shortages_explained


@dataclass(frozen=True, kw_only=True)
class FamilyEncoders:
    """The two encoders of a family, each loaded when it is first needed."""

    prompts: Encoder
    media: Encoder

    @classmethod
    def of(
        cls,
        family: ModelFamily,
        *,
        text_dtype: torch.dtype,
        vae_dtype: torch.dtype,
        device: torch.device,
    ) -> "FamilyEncoders":
        return cls(
            prompts=Encoder(
                what="captions",
                identity=family.prompt_encoder_id(text_dtype),
                load=lambda: family.load_prompt_encoder(text_dtype, device),
            ),
            media=Encoder(
                what="items",
                identity=family.media_encoder_id(vae_dtype),
                load=lambda: family.load_media_encoder(vae_dtype, device),
            ),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Keys:
    """Where the tensors of an item are."""

    media: str
    captions: tuple[str, ...]
    unconditional: str | None

    @property
    def all(self) -> tuple[str, ...]:
        return (self.media, *self.captions, *filter(None, [self.unconditional]))


@dataclass(frozen=True, kw_only=True)
class UsableItems:
    """The items of a data set of which nothing is bad.

    Attributes:
        table: where their tensors are.
        identity: what they are, wherever their tensors may be.
    """

    table: ItemTable
    identity: DataIdentity


class DataSet:
    """The items of a plan with the keys of their tensors.

    Args:
        records: all records of the data, the bad ones too.
        plan: of them.
        encoders: of the family.
        cache: makes the keys.
        prompt_sees_images: whether captions are encoded together with the input pictures of an edit.
        has_unconditional: whether items are also trained without their caption.
    """

    def __init__(
        self,
        records: Sequence[Record],
        plan: DatasetPlan,
        encoders: FamilyEncoders,
        cache: TensorCache,
        *,
        prompt_sees_images: bool,
        has_unconditional: bool,
    ) -> None:
        self.records = records
        self.plan = plan
        self.media: dict[str, TrainingItem] = {}
        self.prompts: dict[str, PromptItem] = {}
        self._prompt_sees_images = prompt_sees_images
        self._encoders = encoders
        self._cache = cache
        self._keys = [self._keys_of(item, has_unconditional=has_unconditional) for item in plan.items]

    def usable_items(
        self,
        bad_keys: Mapping[str, str],
        *,
        on_bad_item: OnBadItem,
        max_bad_ratio: float,
        quarantine: Callable[[Record, str], None],
    ) -> UsableItems:
        """The items of the records of which nothing is bad.

        Args:
            bad_keys: key of media or prompts to the reason why it cannot be used.
            on_bad_item: see `without_bad_items`.
            max_bad_ratio: likewise.
            quarantine: likewise.

        Raises:
            UserError: see `without_bad_items`.
        """
        bad = dict(self.plan.bad)
        for item, keys in zip(self.plan.items, self._keys, strict=True):
            reason = next((bad_keys[key] for key in keys.all if key in bad_keys), None)
            if reason is not None:
                bad.setdefault(item.record.name, reason)
        without_bad_items(
            self.records,
            bad,
            on_bad_item=on_bad_item,
            max_bad_ratio=max_bad_ratio,
            quarantine=quarantine,
        )
        usable = [
            (item, keys)
            for item, keys in zip(self.plan.items, self._keys, strict=True)
            if item.record.name not in bad
        ]
        buckets = sorted({item.bucket for item, _ in usable})
        place = {bucket: index for index, bucket in enumerate(buckets)}
        rows = (
            ItemRow(
                name=item.name,
                bucket=place[item.bucket],
                source=item.record.source,
                media_key=keys.media,
                caption_keys=keys.captions,
                unconditional_key=keys.unconditional,
            )
            for item, keys in usable
        )
        return UsableItems(
            table=ItemTable.build(rows, buckets),
            identity=DataIdentity.of(
                [item for item, _ in usable],
                media_encoder=self._encoders.media.identity,
                prompt_encoder=self._encoders.prompts.identity,
            ),
        )

    def add_prompt(self, prompt: PromptItem) -> str:
        """Also encode ``prompt``; returns its key."""
        key = prompt.key(self._cache, self._encoders.prompts.identity)
        self.prompts.setdefault(key, prompt)
        return key

    def _keys_of(self, item: TrainingItem, *, has_unconditional: bool) -> "_Keys":
        media_key = item.key(self._cache, self._encoders.media.identity)
        self.media.setdefault(media_key, item)  # equal files are encoded once
        return _Keys(
            media=media_key,
            captions=tuple(self.add_prompt(self._prompt(text, item)) for text in item.record.captions),
            unconditional=self._add_unconditional(item) if has_unconditional else None,
        )

    def _add_unconditional(self, item: TrainingItem) -> str:
        return self.add_prompt(replace(self._prompt("", item), is_negative=True))

    def _prompt(self, text: str, item: TrainingItem) -> PromptItem:
        inputs = item.record.inputs
        if not inputs or not self._prompt_sees_images:
            return PromptItem(text=text)
        return PromptItem(
            text=text,
            images=inputs,
            content=item.content[1 : 1 + len(inputs)],
            background=item.background,
        )


class Quarantine:
    """``quarantine.jsonl`` of a run: one row an item that cannot be used; written anew by each start."""

    def __init__(self, config: Config) -> None:
        self._path = RunFolder(Path(config.output.dir).expanduser()).quarantine_file
        self._rows: dict[tuple[str, str], None] = {}

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Name of each item, and why it cannot be used."""
        return list(self._rows)

    def add(self, record: Record, reason: str) -> None:
        """Note one item and why it cannot be used."""
        self.add_rows([(record.name, reason)])

    def add_rows(self, rows: Iterable[tuple[str, str]]) -> None:
        """Note `rows` of another process."""
        self._rows |= dict.fromkeys(rows)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Scope in which an error about bad items also says where all of them are listed.

        Raises:
            UserError: instead of the BadItemsError.
        """
        try:
            yield
        except BadItemsError as error:
            raise UserError(f"{error}. All of them are listed in {self._path}") from error

    def write(self) -> None:
        """Write the file; none when everything can be used."""
        if not self._rows:
            self._path.unlink(missing_ok=True)
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        rows = (json.dumps({"item": name, "reason": reason}) for name, reason in redacted(self.rows))
        write_text(self._path, "".join(f"{row}\n" for row in rows))


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
    own, gathered = main_process_first(
        accelerator, lambda: _read(config, quarantine), lambda data: (data.problems, quarantine.rows)
    )
    for _, rows in gathered:
        quarantine.add_rows(rows)
    if quarantine.rows:
        with shortages_explained():
            on_main_process(accelerator, quarantine.write)
    problems = list(dict.fromkeys(problem for found, _ in gathered for problem in found))
    return ReadData(training=own.training, validation=own.validation, problems=problems)


def _read(config: Config, quarantine: Quarantine) -> ReadData:
    problems = Problems()
    training = problems.attempt(lambda: _looked_at(config, read_training_records(config), quarantine))
    validation = problems.attempt(lambda: _looked_at(config, read_validation_records(config), quarantine))
    return ReadData(training=training or [], validation=validation or [], problems=problems)


def _looked_at(config: Config, records: list[Record], quarantine: Quarantine) -> list[Record]:
    """The records, after a look at their files' headers."""
    if config.data.on_bad_item == "skip":
        return records  # The caching pass finds the bad ones and keeps the list of them.
    bad = {}
    progress = ProgressLog("looked at the files of %d of %d items", len(records))
    with FileMemory(index_file(cache_folder(config))) as memory:
        index = MediaIndex(memory)
        for record in records:
            try:
                _look_at(record, index)
            except UserError as error:
                bad[record.name] = str(error)
            progress.advance()
    with quarantine.named():
        return without_bad_items(
            records, bad, on_bad_item="error", max_bad_ratio=0.0, quarantine=quarantine.add
        )


def _look_at(record: Record, index: MediaIndex) -> None:
    for file in record.files:
        index.facts(file)
