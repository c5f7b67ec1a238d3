"""This file suggests changes to the model and data of a run, and to the data that are held out."""

from collections.abc import Mapping, Sequence

from diffsynth_lite.captioning.instructions import Goal
from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.data.captions import caption_command
from diffsynth_lite.doctor.examined import MUCH_CROPPED, CacheEstimate, ExaminedData
from diffsynth_lite.doctor.findings import CaptionFindings, Findings, counted
from diffsynth_lite.doctor.images import BLURRED
from diffsynth_lite.training.distilled import warning_of_distilled

_NAMED = 3
USUAL_NUMBERS: Mapping[Goal, tuple[str, int, int]] = {
    "likeness": ("item", 10, 60),
    "style": ("item", 15, 100),
    "motion": ("clip", 10, 60),
    "edit": ("pair", 10, 100),
}
"""Least and most items that guides of 2025 and 2026 advise, about; many a good LoRA has others."""
_CAPTION_REMEDIES = {
    "too_long": "with a caption of more than {limit} tokens, the rest of which the model does not see",
    "without_trigger": "without the trigger, which is put in front of the caption",
    "misspelt_trigger": "with the trigger spelt in another way, which the model learns as other words; spell "
    "it as in data.trigger",
    "one_word": "with a caption of one word, so that all else they show binds to the trigger; describe what "
    "may change, or let {caption} do it",
    "other_script": "with a caption in another script than the others; write all in the language of prompts",
    "refusal": "with a captioner's refusal as caption; write it, or let {caption} do it",
    "boilerplate": "with a phrase of captioners, which prompts do not have; take it out",
    "not_json": "with a caption that is not the JSON it should be; mend it, or let "
    "{caption} --format json write it again",
}


def advise(
    data: ExaminedData,
    found: Findings,
    *,
    goal: Goal | None,
    estimate: CacheEstimate | None,
    free_bytes: int,
) -> list[str]:
    """What to change in the run's model and training data, the most important first.

    Args:
        goal: what is trained, for the number of items that is usual for it.
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
        *filter(None, [data.family.notice, warning_of_distilled(data.config, data.family)]),
        *about_disk,
        *_about_number(data, goal),
        *_about_phrases(data, found.captions, goal),
        *_about_captions(data, found.captions),
        *_about_items(data, found),
        *_about_audio(data),
        *_remark(
            [row.name for row in found.buckets if row.samples_per_pass < row.micro_batch_size],
            "bucket",
            "with fewer samples in a pass than a batch has, which holds some of them twice; a larger "
            "data.bucket_step, input images of fewer shapes or a smaller batch helps",
        ),
    ]


def advise_on_held_out(data: ExaminedData, found: Findings) -> list[str]:
    """What to change in the held-out data, the most important first."""
    leaks = (
        line
        for what, groups in {"are equal to": found.trained, "look like": found.like_trained}.items()
        for line in _remark(
            [names[0] for names in groups],
            "group",
            f"of held-out items that {what} items that are trained on, so that their loss measures "
            "memorization",
        )
    )
    return [
        *_about_bad_items(data),
        *leaks,
        *_about_captions(data, found.captions),
        *_about_items(data, found),
    ]


def _about_bad_items(data: ExaminedData) -> list[str]:
    # Those that stop the run are listed one by one, with what to do.
    left_out = [name for name in data.dropped if name not in data.reported] if not data.remedy else []
    return _remark(left_out, "item", "cannot be used, and left out")


def _about_number(data: ExaminedData, goal: Goal | None) -> list[str]:
    if goal is None or any(reason.startswith("no caption: ") for reason in data.dropped.values()):
        return []  # with their captions there are more
    noun, least, most = USUAL_NUMBERS[goal]
    learned = [item.record.name for item in data.items if not data.found.sources[item.record.source].preserve]
    number = len(set(learned))
    if least <= number <= most:
        return []
    few = "with few, what they have in common by chance is learned, too: add some that differ"
    many = "more take longer, and help only where they are as good as the others"
    usual = f"{least} to {most} are usual for --goal {goal}"
    return [f"{counted(number, noun)}, and {usual}; {few if number < least else many}."]


def _about_phrases(data: ExaminedData, captions: CaptionFindings, goal: Goal | None) -> list[str]:
    if not captions.constant:
        return []
    named = [f"{one.text!r} ({one.num_captions} of {one.num_all})" for one in captions.constant[:_NAMED]]
    more = len(captions.constant) - _NAMED
    others = f" and {counted(more, 'phrase')} more" if more > 0 else ""
    trigger = "the trigger" if any(source.trigger for source in data.found.sources) else "a trigger"
    what = goal if goal in ("likeness", "style", "motion") else "likeness or style"
    return [
        f"Most captions have {', '.join(named)}{others}: the "
        f"{what} binds to these words and not to {trigger}. Leave them out of the captions, or make them "
        "data.trigger."
    ]


def _about_captions(data: ExaminedData, captions: CaptionFindings) -> list[str]:
    remarks = []
    for kind, words in _CAPTION_REMEDIES.items():
        named = captions.remarks.get(kind, {})
        details = {name: remark.partition(": ")[2] for name, remark in named.items()}
        names = [f"{name} ({detail})" if detail else name for name, detail in details.items()]
        remarks += _remark(
            names, "item", words.format(limit=captions.limit, caption=_caption_command(data, list(named)))
        )
    if captions.same:
        caption, count = captions.same[0]
        others = len(captions.same) - 1
        more = f"; {counted(others, 'caption')} more of that kind" if others else ""
        remarks.append(f"{counted(count, 'item')} with the same caption {caption[:80]!r}{more}.")
    return remarks


def _caption_command(data: ExaminedData, names: Sequence[str]) -> str:
    """The command that writes the captions of the first of some items again."""
    found = [data.source_of(name) for name in names]
    first = found[0][0] if found else data.found.sources[0]
    own = [name for source, name in found if source is first]
    items = (word for name in own[:_NAMED] for word in ("--only", name))
    return caption_command(first, "--replace", "all", *items)


def _about_items(data: ExaminedData, found: Findings) -> list[str]:
    """Lines on copies of items, on their flaws and on their sizes."""
    equal, alike = ([f"({_group(names)})" for names in groups] for groups in (found.equal, found.alike))
    odd = {kind: data.records_of(named) for kind, named in data.oddities.items()}
    example = next(iter(data.oddities["repeated"].values()), "")
    remarks: list[tuple[Sequence[str], str, str]] = [
        (equal, "group", "of equal files, each of which is an item of its own"),
        (alike, "group", "of items that look alike"),
        (
            list(found.flaws.get("blurred", ())),
            "item",
            f"without sharp edges (below {BLURRED}, where 1 is sharp): blur is learned, too; use sharper "
            "ones, or a lower resolution",
        ),
        (
            list(found.flaws.get("bars", ())),
            "item",
            "with black bars, which are learned, too; diffsynth-lite prepare FOLDER --out NEW --strip-bars "
            "cuts them off",
        ),
        (
            odd["cropped"],
            "item",
            f"of which the crop takes more than {MUCH_CROPPED:.0%}; a larger data.max_aspect_ratio, or sizes "
            "of other shapes, keep more",
        ),
        (odd["enlarged"], "item", "enlarged, so not sharp"),
        (
            odd["small"],
            "item",
            "with fewer pixels than the resolution, learned at a smaller size (data.upscale: true would "
            "enlarge them)",
        ),
        (
            odd["repeated"],
            "clip",
            "with fewer frames a second than asked for, so that some are repeated and motion stutters "
            f"({example}); a lower data.fps, or faster clips, help",
        ),
    ]
    return [line for remark in remarks for line in _remark(*remark)]


def _group(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def _about_audio(data: ExaminedData) -> list[str]:
    treatment = data.config.data.silent_clips
    does = "learned as silent ones" if treatment == "learn" else "of which only the images are learned"
    return [
        *_remark(data.unheard, "clip", "with audio, which is ignored: data.audio: true would learn it"),
        *_remark(data.silent, "clip", f"without audio, {does} (data.silent_clips: {treatment})"),
    ]


def _remark(names: Sequence[str], noun: str, words: str) -> list[str]:
    """A line about some things, of which it names the first three; no line about nothing."""
    if not names:
        return []
    return [f"{counted(len(names), noun)} {words}: {_group(names)}."]
