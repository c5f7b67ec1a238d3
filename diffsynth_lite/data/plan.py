"""This file makes the plan of a data set: which image, crop and clip of each record is trained on.

Where records cannot be used, the run stops or continues without them.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from diffsynth_lite.core.randomness import uniform
from diffsynth_lite.data.audio import AudioFacts
from diffsynth_lite.data.buckets import Bucket, BucketRule, Size
from diffsynth_lite.data.items import TrainingItem
from diffsynth_lite.data.media_index import MediaFacts, MediaIndex
from diffsynth_lite.data.records import ROLES, OnBadItem, Record
from diffsynth_lite.data.video import ClipPlace, VideoFacts, clip_starts, max_frames
from diffsynth_lite.errors import UserError, join_names
from diffsynth_lite.media import AudioFormat, RecordKind
from diffsynth_lite.progress_log import ProgressLog

CropPlace = Literal["center", "random"]

_MAX_ASPECT_DIFFERENCE = 0.02
"""Largest relative difference of a mask's aspect ratio from its target's: rounded sizes differ a little."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRules:
    """Rules for the images, crops and clips that are taken from each record.

    Attributes:
        fps: frames per second that clips are resampled to; None keeps each file's own.
        background: colour that transparent images are laid over.
        input_size: width and height that an input image of some width and height is encoded at, where there
            are so many.
        check_caption: raises UserError for a caption that the model does not take, naming where it is.
        max_inputs: input images that a record may have; None allows any number.
        audio: format of the audio that is trained on with clips; None where there is none.
    """

    buckets: BucketRule
    crop: CropPlace = "center"
    crops_per_item: int = 1
    clip: ClipPlace = "center"
    clips_per_video: int = 1
    fps: float | None = None
    background: str = "white"
    input_size: Callable[[int, int, int], Size] = lambda width, height, _: (width, height)
    check_caption: Callable[[str, str], None] = lambda text, where: None
    max_inputs: int | None = None
    audio: AudioFormat | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetPlan:
    """The parts of a data set that are trained on.

    Attributes:
        records: all of the data set, the bad ones too.
        items: one or more for each record that is not bad, in the order of the records.
        bad: name of a record, or of an item that could not be read, to the reason why it cannot be used.
        facts: name of a record that is not bad to size and length of its target.
        audio: name of such a record to the facts of its audio, for clips with audio that is trained on.
    """

    records: Sequence[Record]
    items: Sequence[TrainingItem]
    bad: Mapping[str, str]
    facts: Mapping[str, MediaFacts]
    audio: Mapping[str, AudioFacts] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Names of all items of the data set, also of those that could not be read."""
        return list(dict.fromkeys((*(record.name for record in self.records), *self.bad)))

    def without(self, bad: Mapping[str, str]) -> "DatasetPlan":
        """The plan without more items: ``bad``, name to the reason why it cannot be used."""
        return dataclasses.replace(
            self,
            items=[item for item in self.items if item.record.name not in bad],
            bad={**bad, **self.bad},
            facts={name: facts for name, facts in self.facts.items() if name not in bad},
            audio={name: facts for name, facts in self.audio.items() if name not in bad},
        )


def refuse_other_kinds(records: Sequence[Record], kinds: Sequence[RecordKind]) -> None:
    """Check that the family can train on the records."""
    found = Counter(kind for record in records for kind in record.kinds)
    other = {kind: count for kind, count in found.items() if kind not in kinds}
    if other:
        counts = ", ".join(f"{count} of kind {kind}" for kind, count in other.items())
        example = next(record for record in records if not other.keys().isdisjoint(record.kinds))
        # The files that would make an item with only its target one of another kind.
        is_bare = not {"image", "video"}.isdisjoint(example.kinds)
        fits = [role for role in ROLES if role.only is None or role.only(example.target.name)]
        missing = [role for role in fits if role.kind in kinds and is_bare]
        settings = [setting for role in missing for setting in (role.folder, role.column)]
        settings += ["random_masks"] if "inpaint" in kinds and missing else []
        named = f"name the files that belong to them ({', '.join(settings)}), " if settings else ""
        raise UserError(
            f"{counts}, such as {example.name}; this family trains on the kinds {', '.join(kinds)}: "
            f"{named}choose another model.family, or other data"
        )


def plan_items(records: Sequence[Record], *, index: MediaIndex, rules: PlanRules) -> DatasetPlan:
    """The items of all records; images are not decoded, and of clips only the first frame.

    Random crops and clips depend only on the content of the target and their number, so that all runs with
    the same settings share their cache entries.
    """
    items: list[TrainingItem] = []
    bad: dict[str, str] = {}
    facts: dict[str, MediaFacts] = {}
    audio: dict[str, AudioFacts] = {}
    # Slow for new files: their content is read for its hash.
    progress = ProgressLog("looked at %d of %d items", len(records), phase="reading")
    for record in records:
        try:
            for caption in record.captions:
                rules.check_caption(caption, f"{record.target}: its caption")
            target = index.facts(record.target)
            _check_companions(record, target, index)
            inputs = _input_sizes(record, index, rules)
            content = tuple(index.content(path) for path in record.files)
            is_heard = rules.audio is not None and isinstance(target, VideoFacts)
            track = index.audio(record.target) if is_heard else None
            items += _items_of(record, target, content, inputs, rules)
            facts[record.name] = target
            audio |= {} if track is None else {record.name: track}
        except UserError as error:
            bad[record.name] = str(error)
        progress.advance()
    return DatasetPlan(records=records, items=items, bad=bad, facts=facts, audio=audio)


def _check_companions(record: Record, target: MediaFacts, index: MediaIndex) -> None:
    """Refuse files of another shape, which are cropped like the target and would show another part, and clips
    that end before it, which would show something else at most times, or nothing."""
    for role, path in ((role, path) for role, paths in record.by_role.items() for path in paths):
        if not role.follows_crop and role.of_clips == "image":
            continue
        facts = index.facts(path)
        difference = (facts.width * target.height) / (facts.height * target.width) - 1
        if role.follows_crop and abs(difference) > _MAX_ASPECT_DIFFERENCE:
            raise UserError(
                f"{path}: {facts.width}x{facts.height} has another aspect ratio than its target of "
                f"{target.width}x{target.height}"
            )
        if not isinstance(facts, VideoFacts):
            continue
        assert isinstance(target, VideoFacts), "only clips have clips that belong to them"
        # Rates may differ, and with them the end of the last frame.
        if facts.duration_s < target.duration_s - 0.5 / target.fps:
            raise UserError(
                f"{path}: is {facts.duration_s:.3g} s long, and its target {target.duration_s:.3g} s; "
                "it needs the length of the target"
            )


def _input_sizes(record: Record, index: MediaIndex, rules: PlanRules) -> tuple[Size, ...]:
    count = len(record.inputs)
    if rules.max_inputs is not None and count > rules.max_inputs:
        raise UserError(
            f"{record.target}: has {count} input images, and this family takes {rules.max_inputs}: "
            "name fewer in data.input_columns or data.input_dirs"
        )
    sizes = []
    for path in record.inputs:
        facts = index.facts(path)
        try:
            sizes.append(rules.input_size(facts.width, facts.height, count))
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
    return tuple(sizes)


def _items_of(
    record: Record,
    facts: MediaFacts,
    content: tuple[str, ...],
    inputs: tuple[Size, ...],
    rules: PlanRules,
) -> list[TrainingItem]:
    num_crops = rules.crops_per_item if rules.crop == "random" else 1
    fps = (rules.fps or facts.fps) if isinstance(facts, VideoFacts) else None
    num_masks = record.random_masks
    places: list[tuple[Bucket, float | None, float, float, int | None]] = []
    for resolution in range(rules.buckets.num_resolutions):
        bucket, starts = _clips(facts, content[0], rules, resolution)
        for number, start_s in enumerate(starts):
            crops = range(number * num_crops, (number + 1) * num_crops)
            places += [
                (bucket, start_s, *_crop(content[0], crop, rules.crop), mask)
                for crop in crops
                for mask in range(crop * num_masks, (crop + 1) * num_masks) or [None]
            ]
    return [
        TrainingItem(
            name=record.name if len(places) == 1 else f"{record.name}#{number}",
            record=record,
            content=content,
            bucket=dataclasses.replace(bucket, inputs=inputs, num_layers=len(record.layers)),
            crop_x=x,
            crop_y=y,
            clip_start_s=start_s,
            fps=fps,
            background=rules.background,
            random_mask=mask,
            audio=rules.audio if bucket.num_frames > 1 else None,
        )
        for number, (bucket, start_s, x, y, mask) in enumerate(places)
    ]


def _clips(
    facts: MediaFacts, content: str, rules: PlanRules, resolution: int
) -> tuple[Bucket, Sequence[float | None]]:
    """Bucket of a target, and the start of each of its clips; one None for an image."""
    if not isinstance(facts, VideoFacts):
        return rules.buckets.bucket(resolution, facts.width, facts.height, None), [None]
    fps = rules.fps or facts.fps
    num_frames = max_frames(facts.duration_s, fps)
    bucket = rules.buckets.bucket(resolution, facts.width, facts.height, num_frames)
    return bucket, clip_starts(
        facts.duration_s,
        bucket.num_frames / fps,
        fps=facts.fps,
        where=rules.clip,
        count=rules.clips_per_video,
        draw=lambda number: uniform(0, f"clip {content}", number),
    )


def _crop(content: str, number: int, place: CropPlace) -> tuple[float, float]:
    if place == "center":
        return 0.5, 0.5
    return uniform(0, f"crop-x {content}", number), uniform(0, f"crop-y {content}", number)


class BadItemsError(UserError):
    """Items that cannot be used stop the run; the message names the first of them."""


def refuse_bad_items(
    names: Sequence[str],
    bad: Mapping[str, str],
    *,
    on_bad_item: OnBadItem,
    max_bad_ratio: float,
) -> None:
    """Stop the run for items that cannot be used, unless they are to be left out and are not too many.

    Args:
        bad: name of an item to the reason why it cannot be used.
        on_bad_item: "error" refuses any bad item, "skip" leaves them out.
        max_bad_ratio: more bad items than this part of all, in [0, 1], are not skipped.
    """
    remedy = remedy_of_bad(names, bad, on_bad_item=on_bad_item, max_bad_ratio=max_bad_ratio)
    if remedy:
        raise BadItemsError(f"{summary_of_bad(names, bad)}. {remedy}")


def remedy_of_bad(
    names: Sequence[str], bad: Mapping[str, str], *, on_bad_item: OnBadItem, max_bad_ratio: float
) -> str:
    """What to do about items that stop the run, as `refuse_bad_items` has them; empty where none do."""
    if not bad:
        return ""
    if len(bad) == len(names):
        return "Repair them: there is none to train on"
    skip, *ratio = settings_to_skip(len(bad), len(names), max_bad_ratio=max_bad_ratio).split()
    if on_bad_item == "error":
        return f"Repair or remove them, or leave them out with {' '.join([skip, *ratio])}"
    if not ratio:
        return ""
    ways = f"repair or remove them, or set {ratio[0]}"
    return f"Too many to skip, as data.max_bad_ratio is {max_bad_ratio:g}: {ways}"


def settings_to_skip(num_bad: int, num_items: int, *, max_bad_ratio: float) -> str:
    """What leaves out so many items, with the least ratio that would do where this one does not."""
    if num_bad <= max_bad_ratio * num_items:
        return "data.on_bad_item=skip"
    would_do = next(part / 100 for part in range(101) if num_bad <= part / 100 * num_items)
    return f"data.on_bad_item=skip data.max_bad_ratio={would_do:g}"


def summary_of_bad(names: Sequence[str], bad: Mapping[str, str]) -> str:
    """Number of items that cannot be used, and the first ones with the reason; see `refuse_bad_items`."""
    reasons = [f"{name}: {bad[name]}" for name in names if name in bad]
    return f"{len(reasons)} of {len(names)} items cannot be used: {join_names(reasons)}"
