import logging
import multiprocessing
import os
import signal
from collections import Counter
from itertools import islice

import pytest
import torch

import diffsynth_lite.data.batches as batches_module
from diffsynth_lite.core.randomness import normal, uniform
from diffsynth_lite.data.batches import Batch, BatchStream
from diffsynth_lite.data.cache import TensorCache
from diffsynth_lite.data.encoding import EncodedItem
from diffsynth_lite.data.schedule import SampleSchedule
from diffsynth_lite.errors import RunStoppedError, UserError


@pytest.fixture
def cache(tmp_path):
    return TensorCache(tmp_path / "cache")


@pytest.fixture
def items(cache):
    """Seven items; the latents of item i are full of i, its embedding has i + 1 rows."""
    items = []
    for index in range(7):
        item = EncodedItem(name=f"{index}.png", latents_key=f"{index}a", caption_key=f"{index}b")
        cache.write(item.latents_key, {"latents": torch.full((2, 3, 3), float(index), dtype=torch.bfloat16)})
        cache.write(item.caption_key, {"embeds": torch.full((index + 1, 4), float(index))})
        items.append(item)
    return items


def stream(items, cache, **changes):
    options = {
        "seed": 5,
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "num_processes": 1,
        "process_index": 0,
        "num_workers": 0,
        "start_step": 0,
    }
    return BatchStream(items, cache, SampleSchedule(len(items), 1, 5), **(options | changes))


def first_steps(count, *arguments, **changes):
    return list(islice(stream(*arguments, **changes), count))


def first_batches(count, *arguments, **changes):
    return [batch for step in first_steps(count, *arguments, **changes) for batch in step]


def assert_equal(left, right):
    assert (left.positions, left.names) == (right.positions, right.names)
    assert all(
        torch.equal(getattr(left, name), getattr(right, name)) for name in ("latents", "noise", "uniform")
    )
    assert [entry.keys() for entry in left.conditioning] == [entry.keys() for entry in right.conditioning]
    for ours, theirs in zip(left.conditioning, right.conditioning, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_step_consumes_its_positions_in_micro_batches(items, cache):
    steps = first_steps(3, items, cache)
    assert [[batch.positions for batch in step] for step in steps] == [
        [[first, first + 1] for first in range(8 * step, 8 * step + 8, 2)] for step in range(3)
    ]


def test_a_batch_holds_what_belongs_to_its_positions(items, cache):
    schedule = SampleSchedule(7, 1, 5)
    for batch in first_batches(3, items, cache):
        indices = [schedule.item(position) for position in batch.positions]
        assert batch.names == [f"{index}.png" for index in indices]
        assert batch.latents.dtype == torch.bfloat16
        assert batch.latents.shape == batch.noise.shape == (2, 2, 3, 3)
        assert batch.latents[:, 0, 0, 0].tolist() == indices
        assert [entry["embeds"].shape for entry in batch.conditioning] == [
            (index + 1, 4) for index in indices
        ]
        for row, position in enumerate(batch.positions):
            assert torch.equal(batch.noise[row], normal(5, "noise", position, (2, 3, 3)))
            assert batch.uniform[row].item() == uniform(5, "timestep", position)
        assert batch.noise.dtype == batch.uniform.dtype == torch.float32


@pytest.mark.parametrize("num_processes", [2, 4])
def test_more_processes_share_out_the_very_same_batches(items, cache, num_processes):
    alone = first_batches(3, items, cache)
    ranks = [
        first_steps(3, items, cache, num_processes=num_processes, process_index=index)
        for index in range(num_processes)
    ]
    together = [
        batch for step in zip(*ranks, strict=True) for row in zip(*step, strict=True) for batch in row
    ]
    assert len(together) == len(alone)
    for ours, theirs in zip(together, alone, strict=True):
        assert_equal(ours, theirs)


@pytest.mark.parametrize("start_step", [1, 2, 4])
def test_resuming_gives_the_rest_of_the_uninterrupted_stream(items, cache, start_step):
    whole = first_batches(5, items, cache)
    resumed = first_batches(5 - start_step, items, cache, start_step=start_step)
    for ours, theirs in zip(resumed, whole[4 * start_step :], strict=True):
        assert_equal(ours, theirs)


def test_another_size_of_micro_batch_gives_the_same_samples_and_draws(items, cache):
    small = first_batches(2, items, cache, micro_batch_size=1)
    large = first_batches(2, items, cache, micro_batch_size=4)
    for name in ("latents", "noise", "uniform"):
        assert torch.equal(
            torch.cat([getattr(batch, name) for batch in small]),
            torch.cat([getattr(batch, name) for batch in large]),
        )


def test_workers_give_the_same_batches_bit_for_bit_and_survive_the_signals_that_stop_a_run(items, cache):
    expected = first_batches(6, items, cache)
    known = set(multiprocessing.active_children())
    steps = iter(stream(items, cache, num_workers=2))
    taken = next(steps)
    workers = set(multiprocessing.active_children()) - known
    assert len(workers) == 2
    for worker in workers:
        os.kill(worker.pid, signal.SIGINT)
        os.kill(worker.pid, signal.SIGUSR1)
    taken += [batch for step in islice(steps, 5) for batch in step]
    for ours, theirs in zip(taken, expected, strict=True):
        assert_equal(ours, theirs)


def test_iterating_leaves_the_global_generator_of_torch_alone(items, cache):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first_steps(2, items, cache)
    assert torch.equal(before, torch.get_rng_state())


def test_a_cache_entry_that_vanished_stops_the_run_by_name(items, cache):
    (cache.folder / "3b" / "3b.safetensors").unlink()
    with pytest.raises(
        RunStoppedError, match=r"^3\.png: its entry in the cache .* is damaged or gone"
    ) as error:
        first_steps(1, items, cache)
    assert "\n" not in str(error.value)


def test_the_first_batches_alone_are_read(items, cache):
    """An iteration that starts must not read the whole data set first."""
    schedule = SampleSchedule(7, 1, 5)
    for index in {schedule.item(position) for position in (4, 5, 6)}:
        (cache.folder / f"{index}a" / f"{index}a.safetensors").unlink()
    batches = first_batches(1, items, cache, global_batch_size=4)
    assert [batch.positions for batch in batches] == [[0, 1], [2, 3]]


def test_entries_are_kept_in_memory_only_while_there_is_room(items, cache, monkeypatch):
    read = []
    original = TensorCache.read
    monkeypatch.setattr(TensorCache, "read", lambda self, key: read.append(key) or original(self, key))
    expected = first_batches(4, items, cache)
    assert len(read) == len(set(read)) == 14
    monkeypatch.setattr(
        batches_module, "KEPT_BYTES", 100
    )  # one image of 36 bytes and its caption fit, or two
    for ours, theirs in zip(first_batches(4, items, cache), expected, strict=True):
        assert_equal(ours, theirs)
    counts = Counter(read[14:])
    assert 1 in counts.values()
    assert sum(counts.values()) > 14


def test_batch_sizes_that_do_not_fit_are_refused(items, cache):
    with pytest.raises(UserError, match=r"global_batch_size 8 is not a multiple .* 6 or 12 would do"):
        stream(items, cache, micro_batch_size=3, num_processes=2)


def test_a_data_set_smaller_than_a_step_works_and_warns(items, cache, caplog):
    with caplog.at_level(logging.WARNING):
        [step] = first_steps(1, items[:3], cache)
    seen = Counter(name for batch in step for name in batch.names)
    assert sorted(seen.values()) == [2, 3, 3]
    assert "more than the 3 items" in caplog.text


@pytest.mark.gpu
def test_batches_are_in_pinned_memory_where_there_is_a_gpu(items, cache):
    [[batch, *_]] = first_steps(1, items, cache)
    assert isinstance(batch, Batch)
    tensors = [batch.latents, batch.noise, batch.uniform, *(entry["embeds"] for entry in batch.conditioning)]
    assert all(tensor.is_pinned() for tensor in tensors)
