"""This file examines captions: their length, what several items share, and triggers that were missing."""

from collections import Counter

from diffsynth_lite.doctor.examined import ExaminedData
from diffsynth_lite.doctor.findings import CaptionFindings, Spread

_MAX_SHARED = 20


def examine_captions(data: ExaminedData) -> CaptionFindings:
    """Findings about all captions of the records, with the tags in all their orders."""
    limit, lengths = data.family.max_prompt_tokens, data.caption_tokens
    owners = Counter(caption for record in data.records for caption in set(record.captions))
    return CaptionFindings(
        tokens=Spread.of([lengths[caption] for record in data.records for caption in record.captions]),
        limit=limit,
        too_long=[
            record.name
            for record in data.records
            if any(lengths[caption] > limit for caption in record.captions)
        ],
        without_trigger=data.without_trigger,
        same=[(caption, count) for caption, count in owners.most_common(_MAX_SHARED) if count > 1],
    )
