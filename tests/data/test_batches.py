import dataclasses
import logging
import multiprocessing
import os
import signal
from collections import Counter
from fractions import Fraction
from itertools import islice
from pathlib import Path

import pytest
import torch

import diffsynth_lite.data.batches as batches_module
from diffsynth_lite.core.randomness import normal, uniform
from diffsynth_lite.data.batches import Batch, BatchStream, _stacked_masks
from diffsynth_lite.data.buckets import Bucket
from diffsynth_lite.data.cache import TensorCache
from diffsynth_lite.data.item_table import ItemRow, ItemTable
from diffsynth_lite.data.records import Source
from diffsynth_lite.data.schedule import BatchLayout, SampleSchedule
from diffsynth_lite.errors import RunStoppedError

SMALL = Bucket(width=24, height=24)


@pytest.fixture
def cache(tmp_path):
    return TensorCache(tmp_path / "cache")


def key(index, kind):
    return f"{index:02}{kind}" + "0" * 61


@pytest.fixture
def rows(cache):
    """Seven items; the latents of item i are full of i, its embedding has i + 1 rows."""
    rows = []
    for index in range(7):
        media, caption = key(index, "a"), key(index, "b")
        cache.write(media, {"latents": torch.full((2, 3, 3), float(index), dtype=torch.bfloat16)})
        cache.write(caption, {"embeds": torch.full((index + 1, 4), float(index))})
        rows.append(
            ItemRow(name=f"{index}.png", bucket=SMALL, source=0, media_key=media, caption_keys=(caption,))
        )
    return rows


@pytest.fixture
def items(rows):
    return ItemTable.build(rows)


def schedule_of(items, sizes):
    passes = [Fraction(1)] * 2
    return SampleSchedule(items.groups, passes=passes, sizes=sizes, seed=5)


def stream(items, cache, *, sizes=None, **changes):
    batch_sizes = {"global_batch_size": 8, "micro_batch_size": 2, "num_processes": 1, "process_index": 0}
    layout = {name: changes.pop(name, value) for name, value in batch_sizes.items()}
    sizes = sizes or [layout["micro_batch_size"]] * len(items.buckets)
    options = {"seed": 5, "num_workers": 0, "start_step": 0} | changes
    return BatchStream(items, cache, schedule_of(items, sizes), BatchLayout(**layout), **options)


def entry(cache, index, kind):
    return cache.folder / f"{index:02}" / f"{key(index, kind)}.safetensors"


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


def assert_all_equal(left, right):
    for ours, theirs in zip(left, right, strict=True):
        assert_equal(ours, theirs)


def test_a_step_consumes_its_positions_in_micro_batches(items, cache):
    steps = first_steps(3, items, cache)
    assert [[batch.positions for batch in step] for step in steps] == [
        [[first, first + 1] for first in range(8 * step, 8 * step + 8, 2)] for step in range(3)
    ]


def test_a_batch_holds_what_belongs_to_its_positions(items, cache):
    schedule = schedule_of(items, [1])
    for batch in first_batches(3, items, cache):
        indices = [schedule.block(position)[position] for position in batch.positions]
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
    assert_all_equal(together, alone)


@pytest.mark.parametrize("start_step", [1, 2, 4])
def test_resuming_gives_the_rest_of_the_uninterrupted_stream(items, cache, start_step):
    whole = first_batches(5, items, cache)
    resumed = first_batches(5 - start_step, items, cache, start_step=start_step)
    assert_all_equal(resumed, whole[4 * start_step :])


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
    assert_all_equal(taken, expected)


def test_no_two_batches_share_memory(items, cache):
    """Else workers run out of open files: each tensor that is kept and was handed over is one."""
    batches = first_batches(4, items, cache)
    tensors = [tensor for batch in batches for entry in batch.conditioning for tensor in entry.values()]
    assert len(tensors) == 32
    assert len({tensor.data_ptr() for tensor in tensors}) == 32


def test_iterating_leaves_the_global_generator_of_torch_alone(items, cache):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first_steps(2, items, cache)
    assert torch.equal(before, torch.get_rng_state())


def test_a_cache_entry_that_vanished_stops_the_run_by_name(items, cache):
    entry(cache, 3, "b").unlink()
    with pytest.raises(RunStoppedError, match=r"^3\.png: its entry in the cache is damaged or gone") as error:
        first_steps(1, items, cache)
    assert "\n" not in str(error.value)


def test_only_the_first_batches_are_read(items, cache):
    """An iteration that starts must not read the whole data set first."""
    schedule = schedule_of(items, [1])
    for position in (4, 5, 6):
        index = schedule.block(position)[position]
        entry(cache, index, "a").unlink()
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
    assert_all_equal(first_batches(4, items, cache), expected)
    counts = Counter(read[14:])
    assert 1 in counts.values()
    assert sum(counts.values()) > 14


def test_a_data_set_smaller_than_a_step_works_and_warns(rows, items, cache, caplog):
    with caplog.at_level(logging.WARNING):
        [step] = first_steps(1, ItemTable.build(rows[:3]), cache)
    seen = Counter(name for batch in step for name in batch.names)
    assert sorted(seen.values()) == [2, 3, 3]
    assert "more than the 3 items" in caplog.text


@pytest.fixture
def mixed(cache, rows):
    """Two buckets: three items of one and four of the other, whose latents are wider."""
    for index in range(3, 7):
        cache.write(key(index, "a"), {"latents": torch.full((2, 3, 5), float(index))})
    wide = Bucket(width=40, height=24)
    return ItemTable.build([*rows[:3], *(dataclasses.replace(row, bucket=wide) for row in rows[3:])])


@pytest.mark.parametrize("num_processes", [1, 2])
def test_micro_batches_of_buckets_differ_in_size_and_know_the_samples_of_their_step(
    mixed, cache, num_processes
):
    alone = first_steps(6, mixed, cache, sizes=[3, 1])
    ranks = [
        first_steps(6, mixed, cache, sizes=[3, 1], num_processes=num_processes, process_index=index)
        for index in range(num_processes)
    ]
    for place, step in enumerate(alone):
        assert {batch.step_samples for batch in step} == {sum(len(batch.positions) for batch in step)}
        shared = [batch for row in zip(*(rank[place] for rank in ranks), strict=True) for batch in row]
        for ours, theirs in zip(shared, step, strict=True):
            assert_equal(ours, theirs)
            assert ours.step_samples == theirs.step_samples
    batches = [batch for step in alone for batch in step]
    assert {(batch.bucket.width, len(batch.positions), batch.latents.shape[-1]) for batch in batches} == {
        (24, 3, 3),
        (40, 1, 5),
    }
    positions = [position for batch in batches for position in batch.positions]
    assert positions == list(range(len(positions)))


def test_a_bucket_smaller_than_its_micro_batch_warns_by_name(mixed, cache, caplog):
    with caplog.at_level(logging.WARNING):
        stream(mixed, cache, sizes=[4, 4])
    assert "24x24 (3)" in caplog.text
    assert "40x24" not in caplog.text


@pytest.mark.parametrize("together", [False, True])
def test_what_is_preserved_is_named_also_to_processes_that_run_the_model_together(cache, rows, together):
    sources = [Source(path=Path("a")), Source(path=Path("b"), preserve=True, loss_weight=0.5)]
    items = ItemTable.build([*rows[:5], *(dataclasses.replace(row, source=1) for row in rows[5:])])
    options = {"sources": sources, "runs_together": together, "num_processes": 2}
    two = [first_batches(10, items, cache, **options, process_index=index) for index in range(2)]
    seen = Counter()
    for at_once in zip(*two, strict=True):
        own = [tuple(place for place, name in enumerate(each.names) if name > "5") for each in at_once]
        for each, places in zip(at_once, own, strict=True):
            weights = [0.5 if place in places else 1.0 for place in range(len(each.names))]
            assert each.loss_weights.tolist() == weights
            assert each.preserved == (places if places or (together and any(own)) else None)
        seen.update(each.preserved for each in at_once)
    assert bool(seen[()]) is together
    assert len(seen) >= 4
    alike = first_batches(1, items, cache, sources=[Source(path=Path("a"))] * 2)
    assert (alike[0].preserved, alike[0].loss_weights) == (None, None)


def test_captions_take_turns_by_chance_and_some_are_dropped(cache, rows):
    [row] = rows[:1]
    variants = dataclasses.replace(
        row, caption_keys=tuple(key(index, "b") for index in range(3)), unconditional_key=key(6, "b")
    )
    items = ItemTable.build([variants])
    batches = first_batches(100, items, cache, caption_dropout=0.25, global_batch_size=2)
    for batch in batches:
        for position, given in zip(batch.positions, batch.conditioning, strict=True):
            dropped = uniform(5, "caption-dropout", position) < 0.25
            expected = 7 if dropped else 1 + int(3 * uniform(5, "caption", position))
            assert len(given["embeds"]) == expected
    counts = Counter(len(given["embeds"]) for batch in batches for given in batch.conditioning)
    assert set(counts) == {1, 2, 3, 7}
    assert all(30 <= count <= 70 for count in counts.values())  # 50 of 200 each
    assert all(batch.unconditional == [] for batch in batches)


def test_a_batch_has_the_empty_caption_of_each_sample_where_it_is_asked_for(cache, rows):
    items = ItemTable.build([dataclasses.replace(row, unconditional_key=key(6, "b")) for row in rows[:1]])
    cache.write(rows[0].media_key, {"latents": torch.zeros(2, 3, 3), "input_latents": torch.ones(4)})
    for batch in first_batches(2, items, cache, with_unconditional=True):
        for given, empty in zip(batch.conditioning, batch.unconditional, strict=True):
            assert len(given["embeds"]) == 1
            assert len(empty["embeds"]) == 7
            assert torch.equal(given["input_latents"], empty["input_latents"])


def test_what_a_media_entry_holds_besides_latents_and_mask_conditions(cache, rows):
    mask = torch.zeros(1, 3, 3)
    for index, row in enumerate(rows[:2]):
        extra = {"input_latents": torch.full((4,), float(index))}
        cache.write(
            row.media_key, {"latents": torch.zeros(2, 3, 3), **extra} | ({} if index else {"loss_mask": mask})
        )
    items = ItemTable.build(rows[:2])
    for batch in first_batches(2, items, cache):
        indices = [int(name[0]) for name in batch.names]
        assert [set(given) for given in batch.conditioning] == [{"embeds", "input_latents"}] * 2
        assert [given["input_latents"][0].item() for given in batch.conditioning] == indices
        assert batch.loss_mask.shape == (2, 1, 3, 3)
        assert [row.unique().tolist() for row in batch.loss_mask] == [[float(index)] for index in indices]


def test_masks_of_one_frame_and_of_each_frame_fit_into_one_batch():
    still, moving = torch.zeros(1, 1, 3, 3), torch.tensor([0.0, 1.0]).view(1, 2, 1, 1).expand(1, 2, 3, 3)
    stacked = _stacked_masks([still, moving])
    assert torch.equal(stacked, torch.stack([torch.zeros(1, 2, 3, 3), moving]))


@pytest.mark.gpu
def test_batches_are_in_pinned_memory_where_there_is_a_gpu(items, cache):
    [[batch, *_]] = first_steps(1, items, cache)
    assert isinstance(batch, Batch)
    tensors = [batch.latents, batch.noise, batch.uniform, *(entry["embeds"] for entry in batch.conditioning)]
    assert all(tensor.is_pinned() for tensor in tensors)


def test_audio_has_noise_of_its_own_next_to_that_of_the_clips(rows, cache):
    silent = first_batches(4, ItemTable.build(rows), cache)
    assert {batch.audio for batch in silent} == {None}
    for index in range(7):
        clip = cache.read(key(index, "a"))
        sound = {"audio_latents": torch.full((4, 5), index + 0.5), "has_audio": torch.tensor(index % 2.0)}
        cache.write(key(index, "a"), clip | sound)
    heard = first_batches(4, ItemTable.build(rows), cache)
    for batch, other in zip(heard, silent, strict=True):
        # What clips had without their audio they have with it, bit for bit.
        assert_equal(dataclasses.replace(batch, audio=None), other)
        indices = [int(name.partition(".")[0]) for name in batch.names]
        assert [row.unique().tolist() for row in batch.audio.latents] == [[index + 0.5] for index in indices]
        assert batch.audio.has_audio.tolist() == [index % 2 for index in indices]
        drawn = torch.stack([normal(5, "audio-noise", place, (4, 5)) for place in batch.positions])
        assert torch.equal(batch.audio.noise, drawn)
        levels = [uniform(5, "audio-noise-level", place) for place in batch.positions]
        assert batch.audio.uniform.tolist() == levels != batch.uniform.tolist()


def test_all_tensors_of_a_batch_with_audio_are_pinned(rows, cache, monkeypatch):
    for index in range(7):
        sound = {"audio_latents": torch.zeros(4, 5), "has_audio": torch.tensor(1.0)}
        cache.write(key(index, "a"), cache.read(key(index, "a")) | sound)
    (batch,) = first_batches(1, ItemTable.build(rows), cache, global_batch_size=2)
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor.clone())
    copied = batch.pin_memory()
    assert torch.equal(copied.audio.noise, batch.audio.noise)
    held = [batch.latents, batch.noise, batch.uniform, *vars(batch.audio).values()]
    held += [tensor for entry in batch.conditioning for tensor in entry.values()]
    assert {id(tensor) for tensor in held} == {id(tensor) for tensor in pinned}
