"""This file counts the data of a run: what its sources hold, its buckets, and numbers about it."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from fractions import Fraction

from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.data import VideoFacts, micro_batch_sizes
from diffsynth_lite.doctor.cache_estimate import CacheEstimate
from diffsynth_lite.doctor.examined import ExaminedData
from diffsynth_lite.doctor.findings import BucketFindings, CaptionFindings, SourceFindings, Spread, counted
from diffsynth_lite.training.data_settings import num_tokens_of


def source_table(data: ExaminedData) -> list[SourceFindings]:
    """What each source holds, in their order."""
    found = []
    for index, source in enumerate(data.sources):
        own = [record for record in data.records if record.source == index]
        found.append(
            SourceFindings(
                place=source.where,
                num_records=Counter(record.kind for record in own),
                num_captions=sum(len(record.captions) for record in own),
                num_dropped=sum(record.name in data.dropped for record in own),
                passes=float(source.passes),
            )
        )
    return found


def bucket_table(data: ExaminedData) -> list[BucketFindings]:
    """The bucket table, the fullest bucket first."""
    train = data.config.train
    samples: dict[object, Fraction] = defaultdict(Fraction)
    for item in data.items:
        samples[item.bucket] += data.sources[item.record.source].passes
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
    """Numbers in words by name: sizes, durations, captions.

    Args:
        data: of the run.
        captions: of the data.
    """
    table = _sizes(data)
    if captions.tokens:
        table["caption tokens"] = f"{captions.tokens}; the model sees {captions.limit}"
    return table


def pass_table(
    data: ExaminedData, buckets: Sequence[BucketFindings], estimate: CacheEstimate | None
) -> dict[str, str]:
    """Numbers in words by name: length of a pass over the training data, the cache.

    Args:
        data: that are trained on.
        buckets: the bucket table.
        estimate: of the cache; None where nothing is cached.
    """
    table = {}
    if batches := sum(row.batches_per_pass for row in buckets):
        train = data.config.train
        steps = batches * train.micro_batch_size / train.global_batch_size
        table["one pass"] = f"{steps:.4g} steps; {train.steps} steps are {train.steps / steps:.3g} passes"
    if estimate is None:
        table["cache"] = "off: encoded while training"
    else:
        table["cache"] = _cache_in_words(estimate)
    return table


def _cache_in_words(estimate: CacheEstimate) -> str:
    parts = []
    if estimate.num_missing:
        parts.append(
            f"{counted(estimate.num_missing, 'entry')} to make, about {format_bytes(estimate.missing_bytes)}"
        )
    if estimate.num_present:
        parts.append(f"{estimate.num_present} there already, {format_bytes(estimate.present_bytes)}")
    return "; ".join(parts) or "nothing to keep"


def _sizes(data: ExaminedData) -> dict[str, str]:
    targets = list(data.plan.facts.values())
    clips = [facts for facts in targets if isinstance(facts, VideoFacts)]
    spreads: dict[str, Sequence[float]] = {
        "width": [facts.width for facts in targets],
        "height": [facts.height for facts in targets],
        "seconds": [round(clip.duration_s, 3) for clip in clips],
        "frames per second": [round(clip.fps, 3) for clip in clips],
    }
    return {name: str(Spread.of(numbers)) for name, numbers in spreads.items() if numbers}
