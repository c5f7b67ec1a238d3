"""How the processes that read batches ahead end."""

import multiprocessing
import os
import sys
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from processes import LIMIT_S, few_files, wait_for
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from diffsynth_lite.data.batches import WORKER_TIMEOUT_S, BatchStream
from diffsynth_lite.data.buckets import Bucket
from diffsynth_lite.data.cache import TensorCache
from diffsynth_lite.data.item_table import ItemRow, ItemTable
from diffsynth_lite.data.schedule import BatchLayout, SampleSchedule
from diffsynth_lite.data.workers import WorkerWatch

CAPTION = "1" * 64


def stream_of_many_tensors(folder: Path, *, num_workers: int = 2) -> BatchStream:
    """So many in an entry that a worker takes a while to hand a batch over."""
    cache = TensorCache(folder)
    media, caption = "0" * 64, CAPTION
    cache.write(media, {"latents": torch.zeros(2, 3, 3)})
    cache.write(caption, {str(place): torch.ones(1000) for place in range(100)})
    bucket = Bucket(width=24, height=24)
    row = ItemRow(name="a", bucket=bucket, source=0, media_key=media, caption_keys=(caption,))
    items = ItemTable.build([row])
    return BatchStream(
        items,
        cache,
        SampleSchedule(items.groups, passes=[Fraction(1)], sizes=[2], seed=5),
        BatchLayout(global_batch_size=8, micro_batch_size=2, num_processes=1, process_index=0),
        seed=5,
        num_workers=num_workers,
        start_step=0,
    )


def test_workers_of_a_dropped_stream_hand_over_what_they_have_begun_and_end_in_peace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Torch sends SIGTERM to those that have not ended after 5 s, and a busy machine takes longer.
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", LIMIT_S)
    for num_steps, num_workers in ((1, 2), (2, 1)):
        known = set(multiprocessing.active_children())
        steps = iter(stream_of_many_tensors(tmp_path, num_workers=num_workers))
        for _ in range(num_steps):
            next(steps)
        workers = set(multiprocessing.active_children()) - known
        assert len(workers) == num_workers
        del steps
        assert [worker.exitcode for worker in workers] == [0] * num_workers


@pytest.mark.skipif(sys.platform == "win32", reason="has no such limit")
@pytest.mark.parametrize("num_free", [10, 60])
def test_too_few_files_for_a_worker_or_its_batches_are_an_error_and_no_wait(
    tmp_path: Path, num_free: int
) -> None:
    stream = stream_of_many_tensors(tmp_path, num_workers=1)
    known = set(multiprocessing.active_children())
    with few_files(num_free), pytest.raises(OSError, match="Too many open files"):
        next(iter(stream))
    assert set(multiprocessing.active_children()) == known


def begin_to_count_when_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a worker any time to start, which takes long on a busy machine; then 10 s."""
    watches = []

    def watch(*, num_workers: int, limit_s: float) -> WorkerWatch:
        assert limit_s == WORKER_TIMEOUT_S
        watches.append(WorkerWatch(num_workers=num_workers, limit_s=2.5))
        return watches[0]

    try_to_get = _MultiProcessingDataLoaderIter._try_get_data

    def wait_and_try(iterator: _MultiProcessingDataLoaderIter, timeout: float) -> object:
        assert timeout == WORKER_TIMEOUT_S
        wait_for(lambda: bool(watches[0].being_read()))
        return try_to_get(iterator, 10.0)

    monkeypatch.setattr("diffsynth_lite.data.batches.WorkerWatch", watch)
    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "_try_get_data", wait_and_try)


@pytest.mark.skipif(sys.platform == "win32", reason="needs named pipes")
def test_a_worker_that_hangs_says_where_and_in_reading_what_and_is_killed_when_its_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    begin_to_count_when_it_reads(monkeypatch)
    stream = stream_of_many_tensors(tmp_path, num_workers=1)
    entry = TensorCache(tmp_path).path(CAPTION)
    entry.unlink()
    os.mkfifo(entry)  # to open it is to wait for a writer, and SIGTERM does not end that
    started = []
    start = multiprocessing.context.SpawnProcess.start
    monkeypatch.setattr(
        multiprocessing.context.SpawnProcess,
        "start",
        lambda process: (started.append(process), start(process)),
    )
    with pytest.raises(
        RuntimeError, match=rf"^DataLoader timed out.*being read: a \(cache entry {CAPTION}\)$"
    ):
        next(iter(stream))
    for worker in started:
        worker.join(LIMIT_S)
    assert [worker.is_alive() for worker in started] == [False]
    stack = capfd.readouterr().err
    assert "Timeout (" in stack
    assert f'{Path("diffsynth_lite", "data", "cache.py")}", line' in stack
    assert " in read\n" in stack


def test_the_time_of_a_worker_runs_from_its_first_read_to_the_end_of_the_batch(
    monkeypatch: pytest.MonkeyPatch, alarm
) -> None:
    watch = WorkerWatch(num_workers=1, limit_s=0.5)
    monkeypatch.setattr("diffsynth_lite.data.workers.get_worker_info", lambda: SimpleNamespace(id=0))
    for name in ("a", "b"):
        with watch.batch():
            watch.reads(name)
            assert watch.being_read() == [name]
        assert watch.being_read() == []
    alarm.sleep(1.0)  # a long step of the trainer
    with watch.batch():
        alarm.sleep(1.0)  # data that is in memory takes as long as it takes
    assert alarm.num_dumps == 0
    with watch.batch():
        watch.reads("c")
        alarm.sleep(1.0)
    assert alarm.num_dumps == 1


def test_the_time_that_a_worker_takes_to_start_is_part_of_that_for_its_first_batch(
    monkeypatch: pytest.MonkeyPatch, alarm
) -> None:
    monkeypatch.setattr("diffsynth_lite.data.workers.get_worker_info", lambda: SimpleNamespace(id=0))
    for started_after_s in (40.0, 290.0):
        watch = WorkerWatch(num_workers=1, limit_s=300.0)
        alarm.sleep(started_after_s)
        for _ in range(2):
            with watch.batch():
                watch.reads("a")
                watch.reads("b")
    assert alarm.limits_s == [200.0, 240.0, 15.0, 240.0]


def test_reads_in_the_trainer_itself_leave_its_own_time_limit_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the limit of a step was moved")

    monkeypatch.setattr("faulthandler.dump_traceback_later", refuse)
    monkeypatch.setattr("faulthandler.cancel_dump_traceback_later", refuse)
    assert next(iter(stream_of_many_tensors(tmp_path, num_workers=0)))


def test_a_name_of_any_length_and_kind_is_noted_for_the_worker_it_belongs_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = WorkerWatch(num_workers=3, limit_s=300.0)
    names = {0: "a", 2: "\u00e9\udc80" * 500}
    with watch.batch():
        for worker_id, name in names.items():
            worker = SimpleNamespace(id=worker_id)
            monkeypatch.setattr("diffsynth_lite.data.workers.get_worker_info", lambda worker=worker: worker)
            watch.reads(name)
        short, long = watch.being_read()
        assert short == "a"
        assert long.startswith("\u00e9?\u00e9?")
        assert len(long.encode(errors="ignore")) <= 512
    assert watch.being_read() == ["a"]
