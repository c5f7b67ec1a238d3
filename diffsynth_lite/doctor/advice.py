"""This file suggests changes to the model and data of a run, and to the data that are held out."""

from collections.abc import Iterator, Sequence

from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.doctor.examined import MUCH_CROPPED, CacheEstimate, ExaminedData
from diffsynth_lite.doctor.findings import BucketFindings, CaptionFindings, Findings, counted
from diffsynth_lite.training.distilled import warning_of_distilled

_NAMED = 3


def advise(
    data: ExaminedData, found: Findings, *, estimate: CacheEstimate | None, free_bytes: int
) -> list[str]:
    """What to change in the run's model and training data, the most important first.

    Args:
        estimate: None where nothing is cached.
        free_bytes: free disk for the cache.
    """
    return [
        *_about_bad_items(data),
        *_about_the_model(data),
        *_about_disk(estimate, free_bytes),
        *_about_captions(found.captions),
        *_about_copies(found.equal, found.alike),
        *_about_sizes(data),
        *_about_repeats(data),
        *_about_audio(data),
        *_about_batches(found.buckets),
    ]


def advise_on_held_out(data: ExaminedData, found: Findings) -> list[str]:
    """What to change in the held-out data, the most important first."""
    return [
        *_about_bad_items(data),
        *_about_leaks(found.trained, "are equal to"),
        *_about_leaks(found.like_trained, "look like"),
        *_about_captions(found.captions),
        *_about_copies(found.equal, found.alike),
        *_about_sizes(data),
        *_about_repeats(data),
    ]


def _about_bad_items(data: ExaminedData) -> Iterator[str]:
    if data.dropped:
        stops = data.config.data.on_bad_item == "error"
        does = "which stops the run (data.on_bad_item: error)" if stops else "and left out"
        yield f"{counted(len(data.dropped), 'item')} cannot be used, {does}{_such_as(list(data.dropped))}."


def _about_the_model(data: ExaminedData) -> Iterator[str]:
    if warning := warning_of_distilled(data.config, data.family):
        yield warning


def _about_disk(estimate: CacheEstimate | None, free_bytes: int) -> Iterator[str]:
    if estimate and estimate.missing_bytes > free_bytes:
        yield (
            f"The cache needs about {format_bytes(estimate.missing_bytes)} more, and "
            f"{format_bytes(free_bytes)} are free at data.cache_dir: name a folder on a larger disk, or set "
            "data.cache: false."
        )


def _about_captions(captions: CaptionFindings) -> Iterator[str]:
    if captions.too_long:
        yield (
            f"{counted(len(captions.too_long), 'item')} with a caption of more than {captions.limit} tokens, "
            f"the rest of which the model does not see{_such_as(captions.too_long)}."
        )
    if captions.without_trigger:
        yield (
            f"{counted(len(captions.without_trigger), 'item')} without the trigger, which is put in front of "
            f"the caption{_such_as(captions.without_trigger)}."
        )
    if captions.same:
        caption, count = captions.same[0]
        others = len(captions.same) - 1
        more = f"; {counted(others, 'caption')} more of that kind" if others else ""
        yield f"{counted(count, 'item')} with the same caption {caption[:80]!r}{more}."


def _about_copies(equal: Sequence[Sequence[str]], alike: Sequence[Sequence[str]]) -> Iterator[str]:
    if equal:
        copies = [name for names in equal for name in names[1:]]
        yield (
            f"{counted(len(copies), 'copy')} of files that are there already; each is an item of its own"
            f"{_such_as(copies)}."
        )
    if alike:
        firsts = [names[0] for names in alike]
        yield f"{counted(len(alike), 'group')} of items that look alike{_such_as(firsts)}."


def _about_leaks(groups: Sequence[Sequence[str]], what: str) -> Iterator[str]:
    if groups:
        yield (
            f"{counted(len(groups), 'group')} of held-out items that {what} items that are trained on, so "
            f"that their loss measures memorization{_such_as([names[0] for names in groups])}."
        )


def _about_repeats(data: ExaminedData) -> Iterator[str]:
    if repeated := data.records_of(data.repeated):
        example = data.repeated[next(iter(data.repeated))]
        yield (
            f"{counted(len(repeated), 'clip')} with fewer frames a second than asked for, so that some are "
            f"repeated and motion stutters ({example}); a lower data.fps, or faster clips, help"
            f"{_such_as(repeated)}."
        )


def _about_audio(data: ExaminedData) -> Iterator[str]:
    if data.unheard:
        yield (
            f"{counted(len(data.unheard), 'clip')} with audio, which is ignored: data.audio: true "
            f"would learn it{_such_as(data.unheard)}."
        )
    if data.silent:
        is_learned = data.config.data.silent_clips == "learn"
        does = "learned as silent ones" if is_learned else "of which only the images are learned"
        yield (
            f"{counted(len(data.silent), 'clip')} without audio, {does} (data.silent_clips: "
            f"{data.config.data.silent_clips}){_such_as(data.silent)}."
        )


def _about_sizes(data: ExaminedData) -> Iterator[str]:
    if cropped := data.records_of(data.cropped):
        yield (
            f"{counted(len(cropped), 'item')} of which the crop takes more than {MUCH_CROPPED:.0%}; a larger "
            f"data.max_aspect_ratio, or sizes of other shapes, keep more{_such_as(cropped)}."
        )
    if enlarged := data.records_of(data.enlarged):
        yield f"{counted(len(enlarged), 'item')} enlarged, so not sharp{_such_as(enlarged)}."
    if small := data.records_of(data.small):
        yield (
            f"{counted(len(small), 'item')} with fewer pixels than the resolution, learned at a smaller size "
            f"(data.upscale: true would enlarge them){_such_as(small)}."
        )


def _about_batches(buckets: Sequence[BucketFindings]) -> Iterator[str]:
    sparse = [row.name for row in buckets if row.samples_per_pass < row.micro_batch_size]
    if sparse:
        yield (
            f"{counted(len(sparse), 'bucket')} with fewer samples in a pass than a batch has, which "
            "holds some of them twice; a larger data.bucket_step, input images of fewer shapes or a "
            f"smaller batch helps{_such_as(sparse)}."
        )


def _such_as(names: Sequence[str]) -> str:
    named = ", ".join(names[:_NAMED])
    return f": {named}" + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
