"""This file examines the data of a config as a run would use them, without loading any weights."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diffsynth_lite.config import Config
from diffsynth_lite.data import (
    FileMemory,
    MediaIndex,
    Record,
    TensorCache,
    plan_items,
    without_bad_items,
)
from diffsynth_lite.doctor.advice import advise
from diffsynth_lite.doctor.cache_estimate import estimate_cache
from diffsynth_lite.doctor.captions import examine_captions
from diffsynth_lite.doctor.duplicates import equal_files, look_alikes
from diffsynth_lite.doctor.examined import ExaminedData
from diffsynth_lite.doctor.findings import Findings
from diffsynth_lite.doctor.machine import describe_machine, free_disk_bytes
from diffsynth_lite.doctor.sheet import Decoded, decode
from diffsynth_lite.doctor.tables import bucket_table, number_table, source_table
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines import ModelFamily
from diffsynth_lite.training.data_rules import (
    cache_folder,
    check_records,
    data_rules,
    find_training_records,
    index_file,
)
from diffsynth_lite.training.preflight import bind_family


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What was found, and what the run would do about bad items.

    Attributes:
        findings: for people.
        records: all that could be read.
        config: of the run.
    """

    findings: Findings
    records: Sequence[Record]
    config: Config

    def require_usable(self) -> None:
        """Check that the run would start with these data.

        Raises:
            UserError: as the run would.
        """
        problems = list(self.findings.problems)
        try:
            without_bad_items(
                self.records,
                self.findings.dropped,
                on_bad_item=self.config.data.on_bad_item,
                max_bad_ratio=self.config.data.max_bad_ratio,
                quarantine=lambda *_: None,
            )
        except UserError as error:
            problems.append(str(error))
        if problems:
            raise UserError("\n".join(problems))


def examine(config: Config, *, sheet_size: int) -> Examination:
    """Read, plan and decode the data of a run. Of the disk only the index in the cache's folder changes.

    Args:
        config: of the run.
        sheet_size: items on the contact sheet.

    Raises:
        UserError: what is wrong with the settings or the model's folder.
    """
    family = bind_family(config, with_weights=False)
    rules = data_rules(config, family).plan
    found = find_training_records(config)
    problems = list(found.problems)
    records = _usable_kinds(found.records, family, problems)
    cache = TensorCache(cache_folder(config))
    with FileMemory(index_file(cache.folder)) as memory:
        plan = plan_items(records, index=MediaIndex(memory), rules=rules)
        decoded = decode(plan.items, cache=cache, memory=memory, sheet_size=sheet_size)
    bad = {**plan.bad, **decoded.bad}
    texts = list(dict.fromkeys(caption for record in records for caption in record.captions))
    data = ExaminedData(
        config=config,
        family=family,
        records=records,
        without_trigger=found.without_trigger,
        plan=plan,
        dropped={
            record.name: bad[record.name].removeprefix(f"{record.target}: ")
            for record in records
            if record.name in bad
        },
        caption_tokens=dict(zip(texts, family.prompt_lengths(texts), strict=True)) if texts else {},
    )
    findings = _findings(data, decoded, problems, cache)
    return Examination(findings=findings, records=records, config=config)


def _usable_kinds(records: Sequence[Record], family: ModelFamily, problems: list[str]) -> Sequence[Record]:
    try:
        check_records(records, family)
    except UserError as error:
        problems.append(str(error))
    return [record for record in records if record.kind in family.record_kinds]


def _findings(data: ExaminedData, decoded: Decoded, problems: Sequence[str], cache: TensorCache) -> Findings:
    config = data.config
    buckets = bucket_table(data)
    captions = examine_captions(data)
    equal = equal_files({item.record.name: item.content[0] for item in data.items})
    groups = [set(names) for names in equal]
    alike = [names for names in look_alikes(decoded.looks) if not any(set(names) <= same for same in groups)]
    estimate = estimate_cache(data, cache) if config.data.cache else None
    return Findings(
        machine=describe_machine([Path(config.output.dir), cache.folder]),
        problems=problems,
        sources=source_table(data),
        facts=number_table(data, buckets, captions, estimate) | _coverage(decoded),
        buckets=buckets,
        captions=captions,
        dropped=data.dropped,
        equal=equal,
        alike=alike,
        advice=advise(
            data,
            captions=captions,
            equal=equal,
            alike=alike,
            buckets=buckets,
            estimate=estimate,
            free_bytes=free_disk_bytes(cache.folder),
        ),
        sheet=[dataclasses.replace(entry, remarks=data.remarks(entry.name)) for entry in decoded.entries],
        num_items=len(data.items),
    )


def _coverage(decoded: Decoded) -> dict[str, str]:
    if decoded.num_seen == decoded.num_items:
        return {}
    return {"decoded": f"{decoded.num_seen} of {decoded.num_items} items, evenly spread"}
