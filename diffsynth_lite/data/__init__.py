"""Records, images, the sample schedule and the cache."""

from diffsynth_lite.data.bad_items import without_bad_items
from diffsynth_lite.data.batches import Batch, BatchStream
from diffsynth_lite.data.cache import TensorCache
from diffsynth_lite.data.encoding import EncodedItem, encode_captions, encode_images
from diffsynth_lite.data.images import check_image
from diffsynth_lite.data.records import Record, read_records
from diffsynth_lite.data.schedule import BatchLayout, SampleSchedule

__all__ = [
    "Batch",
    "BatchLayout",
    "BatchStream",
    "EncodedItem",
    "Record",
    "SampleSchedule",
    "TensorCache",
    "check_image",
    "encode_captions",
    "encode_images",
    "read_records",
    "without_bad_items",
]
