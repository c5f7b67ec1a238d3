"""This file suggests changes to the model and data of a run, and to the data that are held out."""

from collections.abc import Sequence

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
    about_disk = []
    if estimate and estimate.missing_bytes > free_bytes:
        about_disk.append(
            f"The cache needs about {format_bytes(estimate.missing_bytes)} more, and "
            f"{format_bytes(free_bytes)} are free at data.cache_dir: name a folder on a larger disk, or set "
            "data.cache: false."
        )
    return [
        *_about_bad_items(data),
        *filter(None, [warning_of_distilled(data.config, data.family)]),
        *about_disk,
        *_about_captions(found.captions),
        *_about_copies(found),
        *_about_sizes(data),
        *_about_audio(data),
        *_about_batches(found.buckets),
    ]


def advise_on_held_out(data: ExaminedData, found: Findings) -> list[str]:
    """What to change in the held-out data, the most important first."""
    leaks = {"are equal to": found.trained, "look like": found.like_trained}
    return [
        *_about_bad_items(data),
        *(
            remark
            for what, groups in leaks.items()
            for remark in _remark(
                [names[0] for names in groups],
                "group",
                f"of held-out items that {what} items that are trained on, so that their loss measures "
                "memorization",
            )
        ),
        *_about_captions(found.captions),
        *_about_copies(found),
        *_about_sizes(data),
    ]


def _about_bad_items(data: ExaminedData) -> list[str]:
    # Those that stop the run are listed one by one, with what to do.
    left_out = [name for name in data.dropped if name not in data.reported] if not data.remedy else []
    return _remark(left_out, "item", "cannot be used, and left out")


def _about_captions(captions: CaptionFindings) -> list[str]:
    remarks = [
        *_remark(
            captions.too_long,
            "item",
            f"with a caption of more than {captions.limit} tokens, the rest of which the model does not see",
        ),
        *_remark(
            captions.without_trigger, "item", "without the trigger, which is put in front of the caption"
        ),
    ]
    if captions.same:
        caption, count = captions.same[0]
        others = len(captions.same) - 1
        more = f"; {counted(others, 'caption')} more of that kind" if others else ""
        remarks.append(f"{counted(count, 'item')} with the same caption {caption[:80]!r}{more}.")
    return remarks


def _about_copies(found: Findings) -> list[str]:
    copies = [name for names in found.equal for name in names[1:]]
    return [
        *_remark(copies, "copy", "of files that are there already; each is an item of its own"),
        *_remark([names[0] for names in found.alike], "group", "of items that look alike"),
    ]


def _about_sizes(data: ExaminedData) -> list[str]:
    odd = {kind: data.records_of(found) for kind, found in data.oddities.items()}
    example = next(iter(data.oddities["repeated"].values()), "")
    return [
        *_remark(
            odd["cropped"],
            "item",
            f"of which the crop takes more than {MUCH_CROPPED:.0%}; a larger data.max_aspect_ratio, or sizes "
            "of other shapes, keep more",
        ),
        *_remark(odd["enlarged"], "item", "enlarged, so not sharp"),
        *_remark(
            odd["small"],
            "item",
            "with fewer pixels than the resolution, learned at a smaller size (data.upscale: true would "
            "enlarge them)",
        ),
        *_remark(
            odd["repeated"],
            "clip",
            "with fewer frames a second than asked for, so that some are repeated and motion stutters "
            f"({example}); a lower data.fps, or faster clips, help",
        ),
    ]


def _about_audio(data: ExaminedData) -> list[str]:
    treatment = data.config.data.silent_clips
    does = "learned as silent ones" if treatment == "learn" else "of which only the images are learned"
    return [
        *_remark(data.unheard, "clip", "with audio, which is ignored: data.audio: true would learn it"),
        *_remark(data.silent, "clip", f"without audio, {does} (data.silent_clips: {treatment})"),
    ]


def _about_batches(buckets: Sequence[BucketFindings]) -> list[str]:
    return _remark(
        [row.name for row in buckets if row.samples_per_pass < row.micro_batch_size],
        "bucket",
        "with fewer samples in a pass than a batch has, which holds some of them twice; a larger "
        "data.bucket_step, input images of fewer shapes or a smaller batch helps",
    )


def _remark(names: Sequence[str], noun: str, words: str) -> list[str]:
    """A line about some things, of which it names the first three; no line about nothing."""
    if not names:
        return []
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return [f"{counted(len(names), noun)} {words}: {', '.join(names[:_NAMED])}{more}."]
