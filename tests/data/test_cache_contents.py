import os
import time
from pathlib import Path

import pytest
import torch

from diffsynth_lite.data.cache import TensorCache, is_present, prune, remember_written, verify
from diffsynth_lite.data.media_index import FileMemory

KEYS = [f"{number:02x}" * 32 for number in range(4)]


@pytest.fixture
def cache(tmp_path):
    cache = TensorCache(tmp_path / "cache")
    for key in KEYS:
        cache.write(key, {"latents": torch.ones(10)})
    return cache


@pytest.fixture
def memory(cache):
    with FileMemory(cache.folder / "index.sqlite") as memory:
        yield memory


def damage(path):
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")


class CountingCache(TensorCache):
    num_reads = 0

    def read(self, key):
        self.num_reads += 1
        return super().read(key)


def test_an_entry_is_read_once_and_then_only_looked_at(cache, memory):
    counting = CountingCache(cache.folder)
    assert all(is_present(counting, memory, key) for key in KEYS for _ in range(3))
    assert counting.num_reads == len(KEYS)
    memory.flush()
    with FileMemory(cache.folder / "index.sqlite") as again:
        assert is_present(counting, again, KEYS[0])
    assert counting.num_reads == len(KEYS)


def test_an_entry_that_was_just_written_is_not_read(cache, memory):
    counting = CountingCache(cache.folder)
    remember_written(counting, memory, KEYS[0])
    assert is_present(counting, memory, KEYS[0])
    assert counting.num_reads == 0


@pytest.mark.parametrize("cut", [0, 1, 40])
def test_an_entry_that_changed_is_read_and_set_aside_when_damaged(cache, memory, cut):
    assert is_present(cache, memory, KEYS[0])
    path = cache.path(KEYS[0])
    content = path.read_bytes()
    path.write_bytes(content[: len(content) - cut] if cut else content[:-1] + b"\xff")
    assert not is_present(cache, memory, KEYS[0])
    assert path.with_suffix(".damaged").exists()
    assert not is_present(cache, memory, KEYS[0])


def test_an_entry_that_was_only_touched_is_still_there(cache, memory):
    assert is_present(cache, memory, KEYS[0])
    os.utime(cache.path(KEYS[0]), ns=(0, 1))
    assert is_present(cache, memory, KEYS[0])


def test_an_entry_that_is_not_there_or_cannot_be_read_is_not_present(cache, memory):
    assert not is_present(cache, memory, "ff" * 32)
    cache.path(KEYS[0]).unlink()
    cache.path(KEYS[0]).mkdir()
    assert not is_present(cache, memory, KEYS[0])


def test_an_entry_with_numbers_that_are_not_finite_is_set_aside_before_a_run_reads_it(
    cache, memory, monkeypatch, caplog
):
    with monkeypatch.context() as patch:
        patch.setattr("diffsynth_lite.data.cache.require_finite", lambda _: None)
        for key in KEYS[:2]:
            cache.write(key, {"latents": torch.tensor([1.0, torch.nan])})
    assert not is_present(cache, memory, KEYS[0])
    assert f"{cache.path(KEYS[0])}: damaged cache entry is set aside: latents holds NaN" in caplog.text
    assert verify(cache, lambda done, total: None).damaged == (KEYS[1],)


def test_an_entry_that_the_system_cannot_read_is_not_present_and_stays(cache, memory, monkeypatch, caplog):
    def fail(*_args, **_settings):
        raise PermissionError("no")

    monkeypatch.setattr(Path, "read_bytes", fail)
    assert not is_present(cache, memory, KEYS[0])
    assert "the cache entry cannot be read: no" in caplog.text
    assert cache.path(KEYS[0]).exists()


def test_verify_reads_all_and_names_what_is_damaged(cache):
    damage(cache.path(KEYS[1]))
    progress = []
    verified = verify(cache, lambda done, total: progress.append((done, total)))
    assert (verified.num_entries, verified.damaged) == (4, (KEYS[1],))
    assert progress == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert cache.path(KEYS[1]).with_suffix(".damaged").exists()
    assert verify(cache, lambda done, total: None).damaged == ()


def test_verify_of_no_cache_finds_nothing(tmp_path):
    verified = verify(TensorCache(tmp_path / "none"), lambda done, total: None)
    assert (verified.num_entries, verified.damaged) == (0, ())


def test_prune_deletes_what_is_not_kept_and_nothing_that_is_not_an_entry(cache):
    keep = set(KEYS[:2])
    damaged = cache.path(KEYS[0]).with_name(f"{KEYS[0]}.damaged")
    damaged.write_bytes(b"12345")
    old = cache.folder / "00" / f".tmp-{KEYS[0]}.safetensors-{'a' * 8}"
    young = cache.folder / "00" / f".tmp-{KEYS[0]}.safetensors-{'b' * 8}"
    for path in (old, young):
        path.write_bytes(b"123")
    os.utime(old, (time.time() - 90_000,) * 2)
    foreign = [
        cache.folder / "00" / "notes.txt",
        cache.folder / "00" / "model.safetensors",
        cache.folder / "00" / f"{'ff' * 32}.safetensors",
        cache.folder / "media" / f"{KEYS[3]}.safetensors",
        cache.folder / f"{KEYS[3]}.safetensors",
    ]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"mine")
    size = cache.path(KEYS[2]).stat().st_size
    expected = (4, 2 * size + 5 + 3)
    counted = prune(cache, keep, dry_run=True)
    assert (counted.num_files, counted.num_bytes) == expected
    assert old.exists()
    pruned = prune(cache, keep, dry_run=False)
    assert (pruned.num_files, pruned.num_bytes) == expected
    assert [cache.path(key).exists() for key in KEYS] == [True, True, False, False]
    assert not damaged.exists()
    assert not old.exists()
    assert young.exists()
    assert all(path.read_bytes() == b"mine" for path in foreign)
