"""This file lists everything that a run encodes: media and prompts, each once, by the key of its tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Never

import torch

from diffsynth_lite.config import Config
from diffsynth_lite.data.cache import TensorCache
from diffsynth_lite.data.captions import count_tags
from diffsynth_lite.data.encoding import Encodable, Encoder
from diffsynth_lite.data.item_table import ItemRow, ItemTable
from diffsynth_lite.data.items import DataIdentity, PromptItem, TrainingItem, UsableData
from diffsynth_lite.data.plan import DatasetPlan
from diffsynth_lite.data.sealed.entries import SealedEntries
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines import ModelFamily
from diffsynth_lite.training.data_settings import cache_folder
from diffsynth_lite.training.distributed.agreement import FolderGroup
from diffsynth_lite.training.encoding.scored_prompts import NOTHING_SCORED, ScoredPrompts


class EncodingJob:
    """Everything that a run encodes: media and prompts, each once, by the key of its tensors.

    Args:
        family: its encoders are loaded when they are first needed.

    Attributes:
        media: key to the item whose files are encoded.
        prompts: key to a caption or the prompt of a preview.
        datasets: plan of each data set, and a row for each of its items.
        preview_keys: key of each preview's prompt, and of its negative prompt; then those of ``scored``.
        scored: what scores of the run are made of.
        texts: key of each prompt of a slider.
        steered_from: key of the negative prompt of the images of a slider.
    """

    def __init__(self, config: Config, family: ModelFamily, device: torch.device, group: FolderGroup) -> None:
        text_dtype = getattr(torch, config.model.text_encoder_dtype)
        vae_dtype = getattr(torch, config.model.vae_dtype)
        tiles = "" if family.vae_tiles is None else f" {family.vae_tiles}"
        self.cache = TensorCache(cache_folder(config))
        self.group = group
        self.media: dict[str, TrainingItem] = {}
        self.prompts: dict[str, PromptItem] = {}
        self.datasets: list[tuple[DatasetPlan, ItemTable]] = []
        self.preview_keys: list[tuple[str, str]] = []
        self.scored = NOTHING_SCORED
        self.texts: dict[str, str] = {}
        self.steered_from = ""
        self._tag_separator = config.data.tag_separator
        self._edits = family.edits
        self._media_encoder = Encoder(
            what="items",
            identity=f"{family.media_encoder_id(vae_dtype)}{tiles}",
            load=lambda: family.load_media_encoder(vae_dtype, device),
        )
        self._prompt_encoder = Encoder(
            what="captions",
            # Nothing is added for plain weights: these are the keys of caches from before there were formats.
            identity=family.prompt_encoder_id(text_dtype)
            + (
                ""
                if config.model.text_encoder_quantize == "none"
                else f" {config.model.text_encoder_quantize}"
            ),
            load=lambda: family.text_encoder_memory.watched(
                lambda: family.load_prompt_encoder(text_dtype, device)
            ),
        )

    @property
    def passes(self) -> tuple[tuple[Mapping[str, Encodable], Encoder], ...]:
        """The entries of each encoder, in the order in which the encoders are loaded."""
        return (self.media, self._media_encoder), (self.prompts, self._prompt_encoder)

    @property
    def encoder_ids(self) -> tuple[str, str]:
        """Identities of the encoder of media and of that of prompts."""
        return self._media_encoder.identity, self._prompt_encoder.identity

    def leave_out(self, sealed: SealedEntries) -> None:
        """Do not encode sealed entries."""
        self.media = {key: item for key, item in self.media.items() if key not in sealed}
        self.prompts = {key: prompt for key, prompt in self.prompts.items() if key not in sealed}

    def refuse_to_encode(self, remedy: str) -> None:
        """Raise a UserError with a remedy where an encoder would be loaded."""

        def refuse(encoder: Encoder) -> Never:
            raise UserError(f"data.cache_dir: {self.cache.folder} lacks {encoder.what}; {remedy}")

        self._media_encoder, self._prompt_encoder = (
            replace(encoder, load=partial(refuse, encoder))
            for encoder in (self._media_encoder, self._prompt_encoder)
        )

    def add_dataset(self, plan: DatasetPlan, *, has_unconditional: bool) -> None:
        """Also encode the items of a plan and their captions, and the empty one if it is asked for."""
        rows = (self._row(item, has_unconditional=has_unconditional) for item in plan.items)
        self.datasets.append((plan, ItemTable.build(rows)))

    def add_preview(self, prompt: PromptItem, *, negative: str) -> None:
        """Also encode the prompt of a preview and its negative, which sees the same images."""
        steered_from = replace(prompt, text=negative, is_negative=True)
        self.preview_keys.append((self.add_prompt(prompt), self.add_prompt(steered_from)))

    def add_slider(self, texts: Sequence[str], *, negative: str) -> None:
        """Also encode the prompts of a slider, which may be empty, and what its images are to avoid."""
        self.texts = {text: self.add_prompt(PromptItem(text=text, is_negative=not text)) for text in texts}
        self.steered_from = self.add_prompt(PromptItem(text=negative, is_negative=True))

    def usable(self, plan: DatasetPlan, table: ItemTable) -> UsableData:
        """The items to train on, where the items of ``plan`` are some of those in ``table``."""
        if len(plan.items) < len(table):
            names = {item.name for item in plan.items}
            table = ItemTable.build(row for row in table if row.name in names)
        identity = DataIdentity.of(
            plan.items,
            media_encoder=self._media_encoder.identity,
            prompt_encoder=self._prompt_encoder.identity,
        )
        records = {item.record.name: item.record for item in plan.items}
        tag_counts = count_tags(records.values(), self._tag_separator)
        return UsableData(items=table, identity=identity, tag_counts=tag_counts)

    def _row(self, item: TrainingItem, *, has_unconditional: bool) -> ItemRow:
        media_key = item.key(self.cache, self._media_encoder.identity)
        self.media.setdefault(media_key, item)  # equal files are encoded once
        return ItemRow(
            name=item.name,
            bucket=item.bucket,
            source=item.record.source,
            media_key=media_key,
            caption_keys=tuple(
                self._add_caption(item, text, is_negative=not text) for text in item.record.captions
            ),
            unconditional_key=self._add_caption(item, "", is_negative=True) if has_unconditional else None,
        )

    def add_scored(self, scored: ScoredPrompts, *, negative: str) -> None:
        """Also encode the prompts of scores, each with what its item starts from."""
        self.scored = scored
        for prompt in scored.all:
            self.add_preview(self._prompt_of(prompt.items[0], prompt.text), negative=negative)

    def _add_caption(self, item: TrainingItem, text: str, *, is_negative: bool = False) -> str:
        return self.add_prompt(self._prompt_of(item, text, is_negative=is_negative))

    def _prompt_of(self, item: TrainingItem, text: str, *, is_negative: bool = False) -> PromptItem:
        inputs = () if item.is_clip else item.record.inputs
        sees_images = self._edits.negative_sees_images or not is_negative
        if not (inputs or item.is_clip) or not (self._edits.prompt_sees_images and sees_images):
            return PromptItem(text=text, is_negative=is_negative)
        return PromptItem(
            text=text,
            is_negative=is_negative,
            images=inputs,
            content=item.content[1 : 1 + len(inputs)],
            background=item.background,
            clip=item if item.is_clip else None,
        )

    def add_prompt(self, prompt: PromptItem) -> str:
        """Also encode a prompt; returns the key of its entry."""
        key = prompt.key(self.cache, self._prompt_encoder.identity)
        self.prompts.setdefault(key, prompt)
        return key
