"""This file holds a planned data set: what is to be encoded, and where its tensors will be."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from diffsynth_lite.data import (
    DataIdentity,
    Encoder,
    ItemRow,
    ItemTable,
    OnBadItem,
    Plan,
    PlannedItem,
    PlannedPrompt,
    Record,
    TensorCache,
    without_bad_items,
)
from diffsynth_lite.pipelines import ModelFamily


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
        plan: Plan,
        encoders: FamilyEncoders,
        cache: TensorCache,
        *,
        prompt_sees_images: bool,
        has_unconditional: bool,
    ) -> None:
        self.records = records
        self.plan = plan
        self.media: dict[str, PlannedItem] = {}
        self.prompts: dict[str, PlannedPrompt] = {}
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

    def add_prompt(self, prompt: PlannedPrompt) -> str:
        """Also encode ``prompt``; returns its key."""
        key = prompt.key(self._cache, self._encoders.prompts.identity)
        self.prompts.setdefault(key, prompt)
        return key

    def _keys_of(self, item: PlannedItem, *, has_unconditional: bool) -> "_Keys":
        media_key = item.key(self._cache, self._encoders.media.identity)
        self.media.setdefault(media_key, item)  # equal files are encoded once
        return _Keys(
            media=media_key,
            captions=tuple(self.add_prompt(self._prompt(text, item)) for text in item.record.captions),
            unconditional=self._add_unconditional(item) if has_unconditional else None,
        )

    def _add_unconditional(self, item: PlannedItem) -> str:
        return self.add_prompt(replace(self._prompt("", item), is_negative=True))

    def _prompt(self, text: str, item: PlannedItem) -> PlannedPrompt:
        inputs = item.record.inputs
        if not inputs or not self._prompt_sees_images:
            return PlannedPrompt(text=text)
        return PlannedPrompt(
            text=text,
            images=inputs,
            content=item.content[1 : 1 + len(inputs)],
            background=item.background,
        )
