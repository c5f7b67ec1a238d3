"""How the processes that read batches ahead end."""

import multiprocessing
from fractions import Fraction
from pathlib import Path

import torch

from diffsynth_lite.data import (
    BatchLayout,
    BatchStream,
    Bucket,
    ItemRow,
    ItemTable,
    SampleSchedule,
    TensorCache,
)


def stream_of_many_tensors(folder: Path) -> BatchStream:
    """So many in an entry that a worker takes a while to hand a batch over."""
    cache = TensorCache(folder)
    media, caption = "0" * 64, "1" * 64
    cache.write(media, {"latents": torch.zeros(2, 3, 3)})
    cache.write(caption, {str(place): torch.ones(1000) for place in range(100)})
    rows = [ItemRow(name="a", bucket=0, source=0, media_key=media, caption_keys=(caption,))]
    items = ItemTable.build(rows, [Bucket(width=24, height=24)])
    return BatchStream(
        items,
        cache,
        SampleSchedule(items.bucket_index, items.source_index, passes=[Fraction(1)], sizes=[2], seed=5),
        BatchLayout(global_batch_size=8, micro_batch_size=2, num_processes=1, process_index=0),
        seed=5,
        num_workers=2,
        start_step=0,
    )


def test_workers_of_a_dropped_stream_hand_over_what_they_have_begun_and_end_in_peace(tmp_path: Path) -> None:
    for num_steps in (1, 2):
        known = set(multiprocessing.active_children())
        steps = iter(stream_of_many_tensors(tmp_path))
        for _ in range(num_steps):
            next(steps)
        workers = set(multiprocessing.active_children()) - known
        assert len(workers) == 2
        del steps
        assert [worker.exitcode for worker in workers] == [0, 0]
