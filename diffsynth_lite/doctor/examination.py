"""This file examines the data of a config as a run would use them, without loading any weights."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from PIL.Image import Image

from diffsynth_lite.captioning.instructions import Goal
from diffsynth_lite.config import Config
from diffsynth_lite.data.cache import TensorCache
from diffsynth_lite.data.images import load_image
from diffsynth_lite.data.media_index import FileMemory, MediaIndex, adopt_parts
from diffsynth_lite.data.plan import DatasetPlan, PlanRules, plan_items
from diffsynth_lite.data.records import is_image
from diffsynth_lite.data.sources import FoundRecords
from diffsynth_lite.data.video import VideoFacts
from diffsynth_lite.doctor.advice import advise, advise_on_held_out
from diffsynth_lite.doctor.examined import ExaminedData, estimate_cache, item_findings, remarks_by_record
from diffsynth_lite.doctor.findings import Findings, NoiseFindings, counted
from diffsynth_lite.doctor.images import Decoded, decode, equal_files, near_duplicates
from diffsynth_lite.doctor.machine import machine_table
from diffsynth_lite.doctor.model import model_table
from diffsynth_lite.doctor.tables import (
    bucket_table,
    caption_table,
    noise_table,
    number_table,
    pass_table,
    samples_by_bucket,
    source_table,
)
from diffsynth_lite.errors import Problems, UserError
from diffsynth_lite.files import free_disk_bytes
from diffsynth_lite.pipelines import ModelFamily, WithAudio, load_family
from diffsynth_lite.pipelines.base.release_folder import write_release
from diffsynth_lite.training.builder import build_noise_levels
from diffsynth_lite.training.checks import bind_family, check_held_out
from diffsynth_lite.training.data_settings import (
    cache_folder,
    check_records,
    check_sizes,
    find_held_out_records,
    find_training_records,
    held_out_rules,
    index_file,
    own_audio_shape,
    plan_rules,
    set_learned,
)
from diffsynth_lite.training.encoding.dataset import check_vae_tiling, require_audio
from diffsynth_lite.training.encoding.hold_out import divided_records

_Value = TypeVar("_Value")
_Groups = Sequence[Sequence[str]]

_WITHOUT_MODEL = {
    "model": "not here, so that tokens of captions and entries of the cache are not counted; sizes and noise "
    "levels are by the settings of a release"
}
_SMALL_PX = 96
_MAX_SHOWN = 60
"""Items that stop the run that are decoded to be shown."""
_TRAINING = "trained on: "
"""Prefix of the names of training items where they are listed next to held-out ones."""


@dataclass(frozen=True, kw_only=True)
class Examination:
    """The findings, and how the run would treat bad items.

    Attributes:
        findings: for people.
        problems: all errors of which no single item is the cause, and those about items that were not read.
        data: the training data, and the held-out data, if there are any.
    """

    findings: Findings
    problems: Sequence[str]
    data: Sequence[ExaminedData]

    def require_usable(self) -> None:
        """Check that the run would start with these data."""
        problems = Problems(self.problems)
        for data in self.data:
            problems.attempt(data.require_usable)
        problems.require_none()


def examine(config: Config, *, sheet_size: int, goal: Goal | None = None) -> Examination:
    """Read, plan and decode the data of a run. Of the disk only the index in the cache's folder changes.

    Args:
        sheet_size: items on the contact sheet, and on that of the held-out data.
        goal: what is trained, for the number of items that is usual for it.
    """
    if config.generates_data:
        raise UserError(
            "objective.slider: is learned from prompts, and there are no data to look at; `diffsynth-lite "
            "plan` estimates its memory, and a run checks its prompts before it loads weights"
        )
    with _bound_family(config) as (family, lacking):
        rules = plan_rules(config, family)
        cache = TensorCache(cache_folder(config))
        found = find_training_records(config)
        problems = Problems([*filter(None, [lacking]), *found.problems])
        model = _WITHOUT_MODEL if lacking else problems.attempt(lambda: model_table(config, family)) or {}
        adopt_parts(index_file(cache.folder))
        with FileMemory(index_file(cache.folder)) as memory:
            found, held_out = _divided(config, found, memory, problems)
            examiner = _Examiner(
                config, family, cache, memory, sheet_size, problems, counts_tokens=not lacking
            )
            data, decoded = examiner.examine(found, rules)
            examined = examiner.examine(held_out, held_out_rules(rules)) if held_out else None
        findings = dataclasses.replace(
            _training_findings(data, decoded, problems, cache, lacking, goal, examined and examined[0]),
            model=model,
            held_out=_held_out_findings(*examined, data, decoded) if examined else None,
        )
    return Examination(
        findings=findings, problems=problems, data=[data, *([examined[0]] if examined else [])]
    )


@contextmanager
def _bound_family(config: Config) -> Iterator[tuple[ModelFamily, str]]:
    """The family that the config names, and why its model is not at hand; empty where it is.

    Without its folder the family answers by the settings of the release that is named, else of its first one.
    """
    family_class, location = load_family(config.model.family), config.model.path
    try:
        family = bind_family(config, with_weights=False)
    except UserError as error:
        if not family_class.releases or Path(location).expanduser().exists():
            raise
        lacking = str(error)
    else:
        yield family, ""
        return
    named = [one for one in family_class.releases if one.hub_id.lower() == location.lower()]
    with TemporaryDirectory() as folder:
        release = write_release((*named, *family_class.releases)[0], Path(folder))
        family = family_class(release, trained=config.lora.components)
        set_learned(config, family)
        yield family, lacking


def _divided(
    config: Config, found: FoundRecords, memory: FileMemory, problems: Problems
) -> tuple[FoundRecords, FoundRecords | None]:
    """The records that are trained on, and those that are held out, if any are."""
    try:
        if config.data.hold_out:
            return divided_records(config, found, memory)
        if held_out := find_held_out_records(config):
            problems += held_out.problems
            check_held_out(found.records, held_out.records)
    except UserError as error:
        problems.append(str(error))
        return found, None
    return found, held_out


@dataclass(frozen=True)
class _Examiner:
    """Plans and decodes records as a run would; errors that concern all of them are added to ``problems``."""

    config: Config
    family: ModelFamily
    cache: TensorCache
    memory: FileMemory
    sheet_size: int
    problems: Problems
    counts_tokens: bool

    def examine(self, found: FoundRecords, rules: PlanRules) -> tuple[ExaminedData, Decoded]:
        """The records planned by the rules, and decoded."""
        self.problems.attempt(check_records, found.records, self.family)
        records = [record for record in found.records if record.kind in self.family.record_kinds]
        others = {
            record.name: f"this model does not train on the kind {record.kind}"
            for record in found.records
            if record.kind not in self.family.record_kinds
        }
        plan = plan_items(records, index=MediaIndex(self.memory), rules=rules)
        plan = plan.without({**found.unread, **others})
        stopping = found.unread.keys() if self.config.data.on_bad_item == "error" else set()
        decoded = decode(plan.items, cache=self.cache, memory=self.memory, sheet_size=self.sheet_size)
        bad = {**plan.bad, **decoded.bad}
        prefixes = {record.name: f"{record.target}: " for record in records}
        texts = list(dict.fromkeys(caption for record in records for caption in record.captions))
        counts = self.family.prompt_lengths(texts) if texts and self.counts_tokens else []
        data = ExaminedData(
            config=self.config,
            family=self.family,
            records=records,
            found=found,
            plan=plan,
            reported=frozenset({*others, *stopping}),
            dropped={
                name: bad[name].removeprefix(prefixes.get(name, "")) for name in plan.names if name in bad
            },
            caption_tokens=dict(zip(texts, counts, strict=False)),
            unheard=self._unheard(plan),
        )
        return data, decoded

    def _unheard(self, plan: DatasetPlan) -> list[str]:
        if self.family.with_audio or not isinstance(self.family, WithAudio):
            return []
        index, found = MediaIndex(self.memory), []
        for record in plan.records:
            if isinstance(plan.facts.get(record.name), VideoFacts):
                with suppress(UserError):  # that cannot be decoded, and need not
                    found += [record.name] if index.audio(record.target) else []
        return found


def _findings(
    data: ExaminedData,
    decoded: Decoded,
    *,
    goal: Goal | None = None,
    trained: _Groups = (),
    like_trained: _Groups = (),
) -> Findings:
    """What training and held-out data are looked at for alike."""
    captions = caption_table(data, goal=goal)
    # Preserved items may be learned ones with another caption.
    learned = _contents(data, only_learned=True)
    equal = equal_files(learned)
    hashes = {name: value for name, value in decoded.hashes.items() if name in learned}
    alike = _beyond(equal, near_duplicates(hashes))
    about = remarks_by_record(
        [*decoded.flaws.values(), *captions.remarks.values()],
        {"the same file as": [*equal, *trained], "looks like": [*alike, *like_trained]},
    )
    record_of = {item.name: item.record.name for item in data.items}
    coverage = {}
    if decoded.num_seen < decoded.num_items:
        coverage["decoded"] = f"{decoded.num_seen} of {decoded.num_items} items, evenly spread"
    return Findings(
        sources=source_table(data),
        facts=number_table(data, captions) | coverage,
        buckets=bucket_table(data),
        captions=captions,
        dropped=data.dropped,
        remedy=data.remedy,
        small=_small_images(data) if data.remedy else {},
        equal=equal,
        alike=alike,
        flaws=decoded.flaws,
        sizes={
            kind: {record_of[name]: remark for name, remark in named.items()}
            for kind, named in data.oddities.items()
        },
        trained=trained,
        like_trained=like_trained,
        items=item_findings(data, about),
        sheet=[
            dataclasses.replace(
                entry, remarks=[*data.remarks(entry.name), *about[record_of[entry.name]], *entry.remarks]
            )
            for entry in decoded.entries
        ],
        num_items=len(data.items),
    )


def _small_images(data: ExaminedData) -> dict[str, Image]:
    """What can be shown of the items that stop the run, the first ones only."""
    paths = {record.name: record.target for record in data.found.records}
    found = {}
    for name in list(data.dropped)[:_MAX_SHOWN]:
        source, rest = data.source_of(name)
        path = paths.get(name) or (source.folder or Path()) / rest
        if is_image(path.name) and path.is_file():
            with suppress(UserError):
                found[name] = load_image(path, background=data.config.data.background)
                found[name].thumbnail((_SMALL_PX, _SMALL_PX))
    return found


def _training_findings(
    data: ExaminedData,
    decoded: Decoded,
    problems: Problems,
    cache: TensorCache,
    lacking: str,
    goal: Goal | None,
    held_out: ExaminedData | None,
) -> Findings:
    """Of the data that are trained on; ``lacking`` is why the model is not at hand, or empty."""
    config, found = data.config, _findings(data, decoded, goal=goal)
    estimate = estimate_cache(data, cache, held_out) if config.data.cache and not lacking else None
    if data.family.with_audio:
        problems.attempt(lambda: require_audio(config, data.plan))
    if data.family.vae_tiles is not None:
        check_vae_tiling(data.family.vae_tiles, data.plan.items)
    problems.attempt(check_sizes, [item.bucket for item in data.items], data.family)
    noise = problems.attempt(lambda: _noise(data)) or []
    facts = {"trained on": counted(len(data.items), "item"), **found.facts}
    return dataclasses.replace(
        found,
        machine=machine_table([Path(config.output.dir), cache.folder]),
        problems=[problem for problem in problems if problem not in data.found.about_items],
        facts=facts
        | pass_table(data, found.buckets, estimate)
        | ({"cache": "not counted without the model"} if lacking else {}),
        noise=noise,
        noise_level=data.family.noise_path.noise_level,
        advice=advise(data, found, goal=goal, estimate=estimate, free_bytes=free_disk_bytes(cache.folder)),
    )


def _noise(data: ExaminedData) -> list[NoiseFindings]:
    samples = {bucket: float(number) for bucket, number in samples_by_bucket(data).items()}
    if not samples:
        return []
    levels = build_noise_levels(data.config, data.family)
    return noise_table(levels, data.family, samples, partial(own_audio_shape, data.config, data.family))


def _held_out_findings(
    data: ExaminedData, decoded: Decoded, training: ExaminedData, training_decoded: Decoded
) -> Findings:
    trained = equal_files(_contents(data) | _marked(_contents(training)))
    like_trained = _beyond(trained, near_duplicates(decoded.hashes | _marked(training_decoded.hashes)))
    found = _findings(data, decoded, trained=_of_both(trained), like_trained=_of_both(like_trained))
    measured = min(data.config.validation.loss_items, len(data.items))
    facts = {"measured on": f"{measured} of {counted(len(data.items), 'item')}", **found.facts}
    return dataclasses.replace(found, facts=facts, advice=advise_on_held_out(data, found))


def _contents(data: ExaminedData, *, only_learned: bool = False) -> dict[str, str]:
    return {
        item.record.name: item.content[0]
        for item in data.items
        if not (only_learned and data.found.sources[item.record.source].preserve)
    }


def _beyond(equal: Sequence[Sequence[str]], alike: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """Groups that look alike and are not equal."""
    known = [set(names) for names in equal]
    return [names for names in alike if not any(set(names) <= same for same in known)]


def _marked(values: Mapping[str, _Value]) -> dict[str, _Value]:
    """By names that distinguish training items from held-out ones."""
    return {f"{_TRAINING}{name}": value for name, value in values.items()}


def _of_both(groups: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """Those groups that hold training and held-out items, the held-out ones first."""
    ordered = (sorted(names, key=lambda name: name.startswith(_TRAINING)) for names in groups)
    return [
        names for names in ordered if names[-1].startswith(_TRAINING) and not names[0].startswith(_TRAINING)
    ]
