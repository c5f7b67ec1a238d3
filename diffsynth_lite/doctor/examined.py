"""This file holds the data of a run as the doctor has read and planned them, and what their cache takes."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from diffsynth_lite.config import Config
from diffsynth_lite.data.buckets import kept_ratio
from diffsynth_lite.data.cache import TensorCache
from diffsynth_lite.data.captions import caption_command
from diffsynth_lite.data.items import PromptItem, TrainingItem
from diffsynth_lite.data.plan import BadItemsError, DatasetPlan, remedy_of_bad, summary_of_bad
from diffsynth_lite.data.records import Record, Source
from diffsynth_lite.data.sources import FoundRecords
from diffsynth_lite.data.video import VideoFacts
from diffsynth_lite.doctor.findings import ItemCrop, ItemFindings
from diffsynth_lite.pipelines import ModelFamily
from diffsynth_lite.training.data_settings import audio_shape
from diffsynth_lite.training.distributed.agreement import FolderGroup
from diffsynth_lite.training.encoding.job import EncodingJob

MUCH_CROPPED = 0.3
"""Part of an item's area whose loss is worth a remark."""
_MUCH_SMALLER = 0.75
"""Part of the wanted pixels; buckets of odd shapes have nearly as few anyway."""
_MUCH_REPEATED = 0.05
"""Part of a clip's frames whose repetition is worth a remark: 24 frames a second of 23.976 have fewer."""
_FRAME_TOLERANCE = 0.02
"""By how much of a frame's time a rate that is rounded may miss its start."""
_FILE_BYTES = 300
"""Header of a file: names, shapes, hash."""
_LATENT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class ExaminedData:
    """The data that a run would train on, or measure its loss on.

    Attributes:
        family: bound to its folder, without weights.
        records: those that the family trains on.
        found: all that was read.
        dropped: name of an item to the reason why it cannot be used, whether or not it could be read.
        reported: names of those of them that a problem of their own stops the run for.
        caption_tokens: of each caption, uncut; empty where there is no tokenizer.
        unheard: names of clips that have audio, where the model could learn it and does not.
    """

    config: Config
    family: ModelFamily
    records: Sequence[Record]
    found: FoundRecords
    plan: DatasetPlan
    dropped: Mapping[str, str]
    reported: frozenset[str]
    caption_tokens: Mapping[str, int]
    unheard: Sequence[str] = ()

    @cached_property
    def items(self) -> Sequence[TrainingItem]:
        """Those that can be used."""
        return [item for item in self.plan.items if item.record.name not in self.dropped]

    @property
    def remedy(self) -> str:
        """What to do about the items that stop the run; empty where none do."""
        settings, reasons = self.config.data, self.dropped.values()
        other_kinds = self.reported - self.found.unread.keys()
        names = [name for name in self.plan.names if name not in other_kinds]
        bad = {name: why for name, why in self.dropped.items() if name not in other_kinds}
        ways = [
            remedy_of_bad(names, bad, on_bad_item=settings.on_bad_item, max_bad_ratio=settings.max_bad_ratio)
        ]
        if ways[0] and any(why.startswith("no caption") for why in reasons):
            given = "data.captions=optional data.trigger=WORD"
            if settings.sources:
                given = "captions: optional and trigger: WORD in its entry of data.sources"
            lacking = next(name for name, why in self.dropped.items() if why.startswith("no caption"))
            ways.append(f"This writes captions: {caption_command(self.source_of(lacking)[0])}")
            ways.append(f"What has no caption can be trained on one word: {given}")
        return ". ".join(ways)

    def require_usable(self) -> None:
        """Check the items of which no other problem is known."""
        bad = {name: why for name, why in self.dropped.items() if name not in self.reported}
        if bad and self.remedy:
            raise BadItemsError(f"{summary_of_bad(self.plan.names, bad)}. {self.remedy}")

    @cached_property
    def oddities(self) -> Mapping[str, Mapping[str, str]]:
        """What is unusual: cropped, enlarged, small or repeated, and by the name of an item how much.

        Small items have too few pixels for a resolution, and so are trained at a smaller size. Clips of fewer
        frames a second than asked for repeat some.
        """
        data = self.config.data
        wanted = 0 if data.given_sizes or data.upscale else _MUCH_SMALLER * max(data.resolutions) ** 2
        found: dict[str, dict[str, str]] = {"cropped": {}, "enlarged": {}, "small": {}, "repeated": {}}
        for item in self.items:
            facts, name, bucket = self.plan.facts[item.record.name], item.name, item.bucket
            size, num_frames = f"{facts.width}x{facts.height}", bucket.num_frames
            lost = 1 - kept_ratio((facts.width, facts.height), (bucket.width, bucket.height))
            if lost > MUCH_CROPPED:
                found["cropped"][name] = f"{float(lost):.0%} of {size} is cropped"
            scale = max(bucket.width / facts.width, bucket.height / facts.height)
            if scale > 1:
                found["enlarged"][name] = f"enlarged {scale:.2g} times from {size}"
            if facts.width * facts.height < wanted:
                found["small"][name] = f"only {size}"
            if not isinstance(facts, VideoFacts):
                continue
            # About that many where their rate varies.
            different = {int(time_s * facts.fps + _FRAME_TOLERANCE) for time_s in item.times()}
            num_repeats = num_frames - len(different)
            if num_repeats > _MUCH_REPEATED * num_frames:
                found["repeated"][name] = (
                    f"{num_repeats} of {num_frames} frames are repeats: it has {facts.fps:.4g} a second"
                )
        return found

    @cached_property
    def clips_with_audio(self) -> Sequence[str]:
        """Names of the records that are learned with their audio, if they have some."""
        return list(dict.fromkeys(item.record.name for item in self.items if item.audio is not None))

    @cached_property
    def silent(self) -> Sequence[str]:
        """Those of them that have no track of audio."""
        return [name for name in self.clips_with_audio if name not in self.plan.audio]

    def source_of(self, name: str) -> tuple[Source, str]:
        """The source of an item, and its name without the index of that."""
        index, _, rest = name.partition("/") if len(self.found.sources) > 1 else ("0", "", name)
        return self.found.sources[int(index)], rest

    def records_of(self, items: Collection[str]) -> list[str]:
        """Names of the records that the named items are taken of."""
        return list(dict.fromkeys(item.record.name for item in self.items if item.name in items))

    def as_written(self, captions: Sequence[str]) -> list[str]:
        """The captions of a record without the other orders of their tags."""
        data = self.config.data
        if not data.tag_shuffles:
            return list(captions)
        first = {
            tuple(sorted(map(str.strip, text.split(data.tag_separator)))): text for text in captions[::-1]
        }
        return list(first.values())[::-1]

    def remarks(self, name: str) -> list[str]:
        """Remarks on an item."""
        return [found[name] for found in self.oddities.values() if name in found]


def remarks_by_record(
    named: Iterable[Mapping[str, str]], groups: Mapping[str, Iterable[Sequence[str]]]
) -> dict[str, list[str]]:
    """Remarks on each record.

    Args:
        named: remarks by the names of records.
        groups: names that have something in common, by the words in front of another's name.
    """
    remarks: dict[str, list[str]] = defaultdict(list)
    for name, remark in (entry for of_items in named for entry in of_items.items()):
        remarks[name].append(remark)
    for words, names in ((words, names) for words, found in groups.items() for names in found):
        for name in names:
            remarks[name].append(f"{words} {next(other for other in names if other != name)}")
    return remarks


def item_findings(data: ExaminedData, about: Mapping[str, Sequence[str]]) -> dict[str, ItemFindings]:
    """Findings by the names of all records and of all items that cannot be used.

    Args:
        about: remarks on records, in addition to how they are cropped and resized.
    """
    crops: dict[str, list[ItemCrop]] = defaultdict(list)
    odd: dict[str, list[str]] = {name: [f"cannot be used: {why}"] for name, why in data.dropped.items()}
    for item in data.items:
        facts, name = data.plan.facts[item.record.name], item.record.name
        crops[name].append(ItemCrop(bucket=item.bucket.name, box=_crop_box(item, facts.width, facts.height)))
        odd.setdefault(name, []).extend(data.remarks(item.name))
    captions = {name: () for name in data.dropped} | {one.name: one.captions for one in data.records}
    tokens = data.caption_tokens
    return {
        name: ItemFindings(
            crops=crops[name],
            tokens=[tokens[text] for text in texts if text in tokens],
            limit=data.family.max_prompt_tokens,
            remarks=list(dict.fromkeys([*odd.get(name, ()), *about.get(name, ())])),
        )
        for name, texts in captions.items()
    }


def _crop_box(item: TrainingItem, width: int, height: int) -> tuple[int, int, int, int]:
    """What is kept of an image or frame when it covers the item's size."""
    scale = min(width / item.bucket.width, height / item.bucket.height)
    kept_width, kept_height = scale * item.bucket.width, scale * item.bucket.height
    left, top = (width - kept_width) * item.crop_x, (height - kept_height) * item.crop_y
    return round(left), round(top), round(left + kept_width), round(top + kept_height)


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheEstimate:
    """Entries of the cache that a run reads."""

    num_present: int
    present_bytes: int
    num_missing: int
    missing_bytes: float


def estimate_cache(
    data: ExaminedData, cache: TensorCache, held_out: ExaminedData | None = None
) -> CacheEstimate:
    """Bytes that the items of a run and their captions take in the cache; no entry is read.

    Previews, which are few, are not counted.

    Args:
        held_out: of which the loss is measured on the first ones.
    """
    config, family = data.config, data.family
    text_dtype: torch.dtype = getattr(torch, config.model.text_encoder_dtype)
    job = EncodingJob(config, family, torch.device("cpu"), FolderGroup())
    plan = dataclasses.replace(data.plan, items=data.items)
    job.add_dataset(plan, has_unconditional=config.needs_empty_captions)
    caption_tokens = data.caption_tokens
    if held_out is not None:
        measured = {record.name for record in held_out.records[: config.validation.loss_items]}
        items = [item for item in held_out.items if item.record.name in measured]
        plan = dataclasses.replace(held_out.plan, items=items)
        job.add_dataset(plan, has_unconditional=config.objective.guidance_target is not None)
        caption_tokens = {**held_out.caption_tokens, **caption_tokens}
    token_bytes = _token_width(family) * text_dtype.itemsize
    entries: dict[str, TrainingItem | PromptItem] = {**job.media, **job.prompts}
    num_present = present_bytes = 0
    missing_bytes = 0.0
    for key, item in entries.items():
        path = cache.path(key)
        if path.exists():
            num_present += 1
            present_bytes += path.stat().st_size
        elif isinstance(item, TrainingItem):
            missing_bytes += _FILE_BYTES + _LATENT_BYTES * _num_latents(item, config, family)
        else:
            of_text = min(caption_tokens.get(item.text, 0), family.max_prompt_tokens)
            of_text = family.max_prompt_tokens if family.keeps_padding else of_text
            num_seen = len(item.images) + (item.clip is not None)
            num_tokens = of_text + family.num_other_rows + num_seen * family.edits.prompt_tokens_of_an_input
            missing_bytes += _FILE_BYTES + token_bytes * num_tokens
    return CacheEstimate(
        num_present=num_present,
        present_bytes=present_bytes,
        num_missing=len(entries) - num_present,
        missing_bytes=missing_bytes,
    )


def _num_latents(item: TrainingItem, config: Config, family: ModelFamily) -> int:
    bucket = item.bucket
    shape = family.latents_shape(bucket.width, bucket.height, bucket.num_images)
    target = math.prod(shape) + family.num_condition_values(shape)
    audio = None if item.audio is None else audio_shape(config, family, bucket.num_frames)
    target += 0 if audio is None else math.prod(audio)
    return target + sum(math.prod(family.latents_shape(*size, 1)) for size in bucket.inputs)


def _token_width(family: ModelFamily) -> int:
    """Numbers that are kept of each token of a prompt, by the family or else its text encoder's config.

    Some families keep those of several layers of the text encoder.
    """
    side = family.size_divisor
    with torch.device("meta"):
        example = family.example_conditioning(family.latents_shape(side, side, family.default_num_frames))
    if example is not None and "prompt_embeds" in example:
        num_tokens = len(example["prompt_embeds"])
        of_tokens = [value for value in example.values() if num_tokens in value.shape[:-1]]
        return sum(value.numel() for value in of_tokens) // num_tokens
    settings = family.folder.component_config("text_encoder")
    nested = settings.get("text_config", {})
    names = ("d_model", "hidden_size")
    return int(next((part[name] for part in (settings, nested) for name in names if name in part), 0))
