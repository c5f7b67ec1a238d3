"""This file counts what a run has: its sources, buckets and captions, and numbers about them."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from diffsynth_lite.captioning.instructions import Goal
from diffsynth_lite.core.noise.densities import LevelShares, mixed_shares
from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.data.buckets import Bucket
from diffsynth_lite.data.records import Record, is_video
from diffsynth_lite.data.schedule import micro_batch_sizes
from diffsynth_lite.data.video import VideoFacts
from diffsynth_lite.doctor.captions import CaptionLint, lint
from diffsynth_lite.doctor.examined import CacheEstimate, ExaminedData
from diffsynth_lite.doctor.findings import (
    BucketFindings,
    CaptionFindings,
    NoiseFindings,
    SourceFindings,
    Spread,
    counted,
)
from diffsynth_lite.pipelines import ModelFamily, WithAudio
from diffsynth_lite.training.data_settings import num_tokens_of
from diffsynth_lite.training.objective import NoiseLevels

_MAX_SHARED = 20


def source_table(data: ExaminedData) -> list[SourceFindings]:
    """What each source holds, in their order."""
    found = []
    for index, source in enumerate(data.found.sources):
        place = f"{index}/" if len(data.found.sources) > 1 else ""
        kinds: Counter[str] = Counter(record.kind for record in data.found.records if record.source == index)
        usual = next((kind for kind, _ in kinds.most_common() if kind != "video"), "image")
        unread = [name for name in data.found.unread if name.startswith(place)]
        kinds += Counter("video" if is_video(name) else usual for name in unread)
        found.append(
            SourceFindings(
                place=source.where,
                num_records=dict(kinds),
                num_captions=sum(len(one.captions) for one in data.records if one.source == index),
                num_dropped=sum(name.startswith(place) for name in data.dropped),
                passes=float(source.passes),
                is_preserved=source.preserve,
            )
        )
    return found


def samples_by_bucket(data: ExaminedData) -> dict[Bucket, Fraction]:
    """Samples of each bucket in a pass over the data, with repeats and weights."""
    samples: dict[Bucket, Fraction] = defaultdict(Fraction)
    for item in data.items:
        samples[item.bucket] += data.found.sources[item.record.source].passes
    return samples


def bucket_table(data: ExaminedData) -> list[BucketFindings]:
    """The bucket table, the fullest bucket first."""
    train = data.config.train
    samples = samples_by_bucket(data)
    counts = Counter(item.bucket for item in data.items)
    tokens = [num_tokens_of(bucket, data.family) for bucket in counts]
    sizes = micro_batch_sizes(
        tokens,
        micro_batch_size=train.micro_batch_size,
        micro_batch_tokens=train.micro_batch_tokens,
    )
    table = [
        BucketFindings(
            name=bucket.name,
            num_items=count,
            samples_per_pass=float(samples[bucket]),
            micro_batch_size=size,
            num_tokens=num_tokens,
        )
        for (bucket, count), size, num_tokens in zip(counts.items(), sizes, tokens, strict=True)
    ]
    return sorted(table, key=lambda row: -row.num_items)


def number_table(data: ExaminedData, captions: CaptionFindings) -> dict[str, str]:
    """Numbers in words by name: sizes, durations, audio, captions."""
    targets = list(data.plan.facts.values())
    clips = [facts for facts in targets if isinstance(facts, VideoFacts)]
    spreads: dict[str, Sequence[float]] = {
        "width": [facts.width for facts in targets],
        "height": [facts.height for facts in targets],
        "seconds": [round(clip.duration_s, 3) for clip in clips],
        "frames per second": [round(clip.fps, 3) for clip in clips],
    }
    table = {name: str(Spread.of(numbers)) for name, numbers in spreads.items() if numbers}
    if data.family.with_audio:
        table["audio"] = _audio(data)
    if data.found.skipped:
        table["skipped files"] = "; ".join(data.found.skipped)
    if captions.tokens:
        table["caption tokens"] = f"{captions.tokens}; the model sees {captions.limit}"
    return table


def pass_table(
    data: ExaminedData, buckets: Sequence[BucketFindings], estimate: CacheEstimate | None
) -> dict[str, str]:
    """Numbers in words by name: length of a pass over the training data, the cache.

    Args:
        estimate: None where nothing is cached.
    """
    table = {}
    if batches := sum(row.batches_per_pass for row in buckets):
        train = data.config.train
        steps = batches * train.micro_batch_size / train.global_batch_size
        table["one pass"] = (
            f"{_rounded(steps)} steps; {train.steps} steps are {_rounded(train.steps / steps)} passes"
        )
    parts = [] if estimate else ["off: encoded while training"]
    if estimate and estimate.num_missing:
        parts.append(
            f"{counted(estimate.num_missing, 'entry')} to make, about {format_bytes(estimate.missing_bytes)}"
        )
    if estimate and estimate.num_present:
        parts.append(f"{estimate.num_present} there already, {format_bytes(estimate.present_bytes)}")
    return table | {"cache": "; ".join(parts) or "nothing to keep"}


def _rounded(number: float) -> str:
    """Three digits of a small number, all of a large one: never an exponent."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _audio(data: ExaminedData) -> str:
    clips, family = data.clips_with_audio, data.family
    form = family.audio_format if isinstance(family, WithAudio) else None
    forms = Counter(
        (facts.sample_rate, facts.num_channels) for name in clips if (facts := data.plan.audio.get(name))
    )
    files = ", ".join(
        f"{counted(count, 'file')} of {rate} Hz and {counted(channels, 'channel')}"
        for (rate, channels), count in forms.most_common()
    )
    learned = (
        "" if form is None else f"; learned at {form.sample_rate} Hz, {counted(form.num_channels, 'channel')}"
    )
    has = f"{len(clips) - len(data.silent)} of {counted(len(clips), 'clip')}"
    return f"{has}: {files}{learned}" if forms else has


def caption_table(data: ExaminedData, *, goal: Goal | None) -> CaptionFindings:
    """Findings about all captions of the records.

    Args:
        goal: of the captions of an edit a constant phrase is as it should be.
    """
    limit, lengths = data.family.max_prompt_tokens, data.caption_tokens
    learned = [record for record in data.records if not data.found.sources[record.source].preserve]
    described = [record for record in learned if not _is_instructed(record, goal)]
    owners = Counter(caption for record in described for caption in set(record.captions))
    same = [(caption, count) for caption, count in owners.most_common(_MAX_SHARED) if count > 1]
    lints = [_lint(data, index, goal) for index in range(len(data.found.sources))]
    remarks: dict[str, dict[str, str]] = {
        "too_long": {
            record.name: f"a caption of {longest} tokens, of which the model sees {limit}"
            for record in data.records
            if (longest := max((lengths.get(text, 0) for text in record.captions), default=0)) > limit
        },
        "without_trigger": dict.fromkeys(data.found.without_trigger, "no trigger in the caption"),
        "same": {
            record.name: f"the same caption as {counted(others, 'other item')}"
            for record in described
            if (others := max((owners[text] for text in record.captions), default=1) - 1)
        },
    }
    for found in lints:
        for kind, of_items in found.remarks.items():
            remarks.setdefault(kind, {}).update(of_items)
    for name in remarks.get("misspelt_trigger", ()):
        remarks["without_trigger"].pop(name, None)
    return CaptionFindings(
        tokens=Spread.of(
            [lengths[text] for record in data.records for text in record.captions if text in lengths]
        ),
        limit=limit,
        remarks=remarks,
        constant=[phrase for found in lints for phrase in found.constant],
        same=same,
    )


def _is_instructed(record: Record, goal: Goal | None) -> bool:
    """Whether a caption is an instruction, which several items may share."""
    return record.kind == "edit" or goal == "edit"


def _lint(data: ExaminedData, index: int, goal: Goal | None) -> CaptionLint:
    """That of one source, of its captions as they are written."""
    source, added = data.found.sources[index], f"{data.found.sources[index].trigger}, "
    if source.preserve or source.captions == "none":
        return CaptionLint()
    lacking = set(data.found.without_trigger)
    records = [record for record in data.records if record.source == index]
    are_edits = any(_is_instructed(record, goal) for record in records)
    texts = {}
    for record in records:
        written = data.as_written(record.captions)
        texts[record.name] = (
            [text.replace(added, "", 1) for text in written] if record.name in lacking else written
        )
    return lint(texts, trigger=source.trigger or "", may_repeat=are_edits)


@dataclass(frozen=True, kw_only=True, slots=True)
class _NoiseSize:
    """The steps of one size.

    Attributes:
        part: of all steps.
        ranges: as :meth:`NoiseLevels.shares` gives them.
    """

    name: str
    part: float
    shift: float
    ranges: Sequence[tuple[float, LevelShares]]


def noise_table(
    levels: NoiseLevels,
    family: ModelFamily,
    samples: Mapping[Bucket, float],
    audio_shape: Callable[[int], Sequence[int] | None] = lambda _num_frames: None,
) -> list[NoiseFindings]:
    """All steps, each size where they differ in their shift, each expert, and audio with levels of its own.

    Args:
        samples: of each bucket in a pass over the data, at least one above 0.
        audio_shape: of the latents of the audio of so many frames, where it has levels of its own.
    """

    def shape_of(bucket: Bucket) -> Sequence[int]:
        return family.latents_shape(bucket.width, bucket.height, bucket.num_images)

    total = sum(samples.values())
    sizes = _noise_sizes(levels, shape_of, samples, total)
    rows = [_noise_row("all steps", sizes, part=1.0)]
    if rows[0].shift is None:
        rows += [
            NoiseFindings(name=size.name, part=size.part, shift=size.shift, shares=mixed_shares(size.ranges))
            for size in sizes
        ]
    if len(levels.ranges) > 1:
        rows += [_noise_row(name, sizes, expert=place) for place, name in enumerate(family.trained)]
    heard = {bucket: number for bucket, number in samples.items() if audio_shape(bucket.num_frames)}
    if heard:
        of_audio = _noise_sizes(levels, lambda bucket: audio_shape(bucket.num_frames) or (), heard, total)
        rows.append(_noise_row("audio", of_audio, part=sum(heard.values()) / total))
    return rows


def _noise_row(
    name: str, sizes: Sequence[_NoiseSize], *, part: float | None = None, expert: int | None = None
) -> NoiseFindings:
    """The steps of all sizes, or of those only the ones of an expert, whose part of all steps is counted."""
    only = slice(None) if expert is None else slice(expert, expert + 1)
    parts = [(size.part * own, shares) for size in sizes for own, shares in size.ranges[only]]
    return NoiseFindings(
        name=name,
        part=sum(own for own, _ in parts) if part is None else part,
        shift=sizes[0].shift if len({size.shift for size in sizes}) == 1 else None,
        shares=mixed_shares(parts),
    )


def _noise_sizes(
    levels: NoiseLevels,
    shape_of: Callable[[Bucket], Sequence[int]],
    samples: Mapping[Bucket, float],
    total: float,
) -> list[_NoiseSize]:
    """The sizes, the one with most steps first; ``total`` are the samples that make all steps."""
    counts: dict[Bucket, float] = defaultdict(float)
    for bucket, number in samples.items():
        counts[replace(bucket, inputs=())] += number
    known: dict[float, list[tuple[float, LevelShares]]] = {}
    sizes = []
    for bucket, number in sorted(counts.items(), key=lambda entry: -entry[1]):
        shape = shape_of(bucket)
        shift = levels.shift(shape)
        if shift not in known:
            known[shift] = levels.shares(shape)
        sizes.append(_NoiseSize(name=bucket.name, part=number / total, shift=shift, ranges=known[shift]))
    return sizes
