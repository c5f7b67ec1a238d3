"""Records, media, the plan of a data set, its encoding and the cache, and the sample schedule."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffsynth_lite.data.batches import (
        NOT_CONDITIONING,
        OF_AUDIO,
        AudioBatch,
        Batch,
        BatchStream,
        EntryReader,
    )
    from diffsynth_lite.data.buckets import Bucket, BucketRule, kept_ratio
    from diffsynth_lite.data.cache import Pruned, TensorCache, prune, verify
    from diffsynth_lite.data.captions import TagCounts, count_tags, tag_variants
    from diffsynth_lite.data.encoding import (
        Encodable,
        Encoder,
        LiveTensors,
        encode_missing,
        find_undecodable,
    )
    from diffsynth_lite.data.images import load_image
    from diffsynth_lite.data.item_table import ItemRow, ItemTable
    from diffsynth_lite.data.items import DataIdentity, PromptItem, TrainingItem, UsableData
    from diffsynth_lite.data.media_index import (
        FileMemory,
        FileState,
        MediaIndex,
        PartMemory,
        adopt_parts,
        parts_folder,
    )
    from diffsynth_lite.data.plan import (
        BadItemsError,
        DatasetPlan,
        PlanRules,
        plan_items,
        refuse_bad_items,
        refuse_other_kinds,
        remedy_of_bad,
        summary_of_bad,
    )
    from diffsynth_lite.data.records import ROLES, WHOLE, Part, Record, Source, unpacked
    from diffsynth_lite.data.schedule import (
        BatchLayout,
        Orders,
        SampleSchedule,
        draw_order,
        micro_batch_sizes,
    )
    from diffsynth_lite.data.sources import FoundRecords, find_records
    from diffsynth_lite.data.video import VideoFacts
    from diffsynth_lite.data.workers import is_lost_worker

_HOMES = (
    *("records", "captions", "images", "video", "buckets", "media_index", "sources"),
    *("item_table", "schedule", "items", "plan", "cache", "encoding", "batches", "workers"),
)
"""Modules of the public names; the first line imports no torch."""

__all__ = [
    "NOT_CONDITIONING",
    "OF_AUDIO",
    "ROLES",
    "WHOLE",
    "AudioBatch",
    "BadItemsError",
    "Batch",
    "BatchLayout",
    "BatchStream",
    "Bucket",
    "BucketRule",
    "DataIdentity",
    "DatasetPlan",
    "Encodable",
    "Encoder",
    "EntryReader",
    "FileMemory",
    "FileState",
    "FoundRecords",
    "ItemRow",
    "ItemTable",
    "LiveTensors",
    "MediaIndex",
    "Orders",
    "Part",
    "PartMemory",
    "PlanRules",
    "PromptItem",
    "Pruned",
    "Record",
    "SampleSchedule",
    "Source",
    "TagCounts",
    "TensorCache",
    "TrainingItem",
    "UsableData",
    "VideoFacts",
    "adopt_parts",
    "count_tags",
    "draw_order",
    "encode_missing",
    "find_records",
    "find_undecodable",
    "is_lost_worker",
    "kept_ratio",
    "load_image",
    "micro_batch_sizes",
    "parts_folder",
    "plan_items",
    "prune",
    "refuse_bad_items",
    "refuse_other_kinds",
    "remedy_of_bad",
    "summary_of_bad",
    "tag_variants",
    "unpacked",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: folders of media are read without torch."""
    if name in __all__:
        for home in _HOMES:
            module = importlib.import_module(f"{__name__}.{home}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
