"""How the processes that read batches ahead end."""

import multiprocessing
import os
import sys
from fractions import Fraction
from pathlib import Path

import pytest
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


def stream_of_many_tensors(folder: Path, *, num_workers: int = 2) -> BatchStream:
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
        num_workers=num_workers,
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


@pytest.mark.skipif(sys.platform == "win32", reason="needs named pipes")
def test_workers_that_hang_in_a_read_are_killed_when_their_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diffsynth_lite.data.batches.WORKER_TIMEOUT_S", 7.0)
    stream = stream_of_many_tensors(tmp_path, num_workers=1)
    for entry in tmp_path.rglob("*.safetensors"):
        entry.unlink()
        os.mkfifo(entry)  # to open it is to wait for a writer, and SIGTERM does not end that
    started = []
    start = multiprocessing.context.SpawnProcess.start
    monkeypatch.setattr(
        multiprocessing.context.SpawnProcess,
        "start",
        lambda process: (started.append(process), start(process)),
    )
    with pytest.raises(RuntimeError, match="DataLoader timed out"):
        next(iter(stream))
    for worker in started:
        worker.join(5)
    assert [worker.is_alive() for worker in started] == [False]
