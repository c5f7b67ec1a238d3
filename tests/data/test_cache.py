"""The cache keeps whole entries, and finds, checks and prunes them."""

import gc
import hashlib
import json
import logging
import os
import struct
import sys
import time
from pathlib import Path

import pytest
import torch
from processes import FORKED

from diffsynth_lite.data.cache import TensorCache, is_present, prune, remember_written, verify
from diffsynth_lite.data.media_index import FileMemory
from diffsynth_lite.files import file_fingerprint


@pytest.fixture
def cache(tmp_path):
    return TensorCache(tmp_path / "cache")


@pytest.fixture
def tensors():
    return {
        "latents": torch.arange(6, dtype=torch.bfloat16).reshape(1, 2, 3),
        "mask": torch.tensor([True, False]),
        "scale": torch.tensor(0.5),
        "none": torch.zeros(0, 4),
    }


def file_of(cache, key):
    return cache.folder / key[:2] / f"{key}.safetensors"


def equal(left, right):
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def test_what_is_written_is_read_back_bit_for_bit(cache, tensors):
    key = cache.key(kind="image", content="abc")
    assert cache.read(key) is None
    cache.write(key, tensors)
    assert equal(cache.read(key), tensors)
    assert equal(TensorCache(cache.folder).read(key), tensors)


def test_views_and_tensors_with_gradient_are_stored_by_value(cache):
    whole = torch.arange(12.0).reshape(3, 4)
    tensors = {"column": whole[:, 1], "weight": torch.ones(2, requires_grad=True)}
    cache.write("ab", tensors)
    stored = cache.read("ab")
    assert stored["column"].tolist() == [1.0, 5.0, 9.0]
    assert not stored["weight"].requires_grad


def test_a_key_is_pinned_and_depends_on_every_part(cache):
    assert cache.key(a="x", b=1) == "8095d22d316211ca856f8fe79438018c231dcc0a52a696198921f522749f8534"
    assert cache.key(b=1, a="x") == cache.key(a="x", b=1)
    others = [cache.key(a="y", b=1), cache.key(a="x", b=2), cache.key(a="x", b="1"), cache.key(a="x", c=1)]
    assert len({cache.key(a="x", b=1), *others}) == 5


def test_tensors_that_were_read_are_independent_of_the_file(cache):
    cache.write("ab", {"latents": torch.zeros(4)})
    first = cache.read("ab")["latents"]
    first.fill_(1)
    second = cache.read("ab")["latents"]
    assert second.tolist() == [0.0] * 4
    with file_of(cache, "ab").open("r+b") as file:
        file.seek(-16, os.SEEK_END)
        file.write(b"\x01" * 16)
    assert second.tolist() == [0.0] * 4


def test_an_entry_that_is_read_leaves_nothing_behind(cache):
    cache.write("ab", {"latents": torch.rand(16, 8, 8), "mask": torch.rand(8, 8)})
    cache.read("ab")
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(200):
        cache.read("ab")
    gc.collect()
    assert sys.getallocatedblocks() - before < 20  # three for each read while safetensors opened the file


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_that_are_not_finite_are_never_stored(cache, value, dtype):
    with pytest.raises(ValueError, match="latents holds NaN or infinity"):
        cache.write("ab", {"fine": torch.ones(2), "latents": torch.tensor([1.0, value], dtype=dtype)})
    assert cache.read("ab") is None
    assert not list(cache.folder.rglob("*.*"))


def test_every_changed_byte_and_every_cut_is_noticed(cache, tensors):
    cache.write("ab", tensors)
    path = file_of(cache, "ab")
    content = path.read_bytes()
    for position in range(len(content)):
        path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        assert cache.read("ab") is None, position
    for length in range(0, len(content), 5):
        path.write_bytes(content[:length])
        assert cache.read("ab") is None, length
    path.write_bytes(content)
    assert equal(cache.read("ab"), tensors)


def test_a_changed_type_is_noticed(cache):
    cache.write("ab", {"latents": torch.zeros(4)})
    path = file_of(cache, "ab")
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"'))
    assert cache.read("ab") is None


def test_an_entry_without_a_hash_is_not_read(cache, tensors):
    cache.write("ab", tensors)
    path = file_of(cache, "ab")
    for metadata in ("null", "{}"):
        header = json.dumps({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}})
        header = f'{header[:-1]}, "__metadata__": {metadata}}}'
        path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + b"0")
        assert cache.read("ab") is None


def test_a_damaged_entry_is_warned_of_once_set_aside_and_can_be_written_again(cache, tensors, caplog):
    cache.write("ab", tensors)
    path = file_of(cache, "ab")
    damaged = path.read_bytes()[:-1] + b"\xff"
    path.write_bytes(damaged)
    with caplog.at_level(logging.WARNING):
        assert cache.read("ab") is None
        assert cache.read("ab") is None
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: damaged cache entry is set aside: its hash does not match"
    ]
    assert not path.exists()
    assert path.with_suffix(".damaged").read_bytes() == damaged
    cache.write("ab", tensors)
    assert equal(cache.read("ab"), tensors)


def test_a_whole_entry_that_took_the_place_of_a_damaged_one_stays(cache, tensors, monkeypatch):
    cache.write("ab", tensors)
    path = file_of(cache, "ab")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"\xff")

    def another_process_writes(key, tensors):
        path.write_bytes(whole + b"")
        os.utime(path, ns=(0, 12345))
        return "does not fit"

    monkeypatch.setattr("diffsynth_lite.data.cache._digest", another_process_writes)
    assert cache.read("ab") is None
    monkeypatch.undo()
    assert equal(cache.read("ab"), tensors)


def test_an_entry_under_the_name_of_another_is_refused(cache, tensors):
    cache.write("ab", tensors)
    file_of(cache, "ac").parent.mkdir()
    file_of(cache, "ab").rename(file_of(cache, "ac"))
    assert cache.read("ac") is None


def test_a_write_that_fails_leaves_the_entry_as_it_was(cache, tensors, monkeypatch):
    cache.write("ab", tensors)

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        cache.write("ab", {"latents": torch.ones(1)})
    assert equal(cache.read("ab"), tensors)
    assert [path.name for path in file_of(cache, "ab").parent.iterdir()] == ["ab.safetensors"]


def test_an_entry_is_on_the_disk_before_it_has_its_name(cache, monkeypatch):
    visible_at_sync = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: visible_at_sync.append(file_of(cache, "ab").exists()))
    cache.write("ab", {"latents": torch.ones(1)})
    assert visible_at_sync == [False]


def _write_until_killed(folder):
    while True:
        TensorCache(folder).write("ab", {"latents": torch.full((100_000,), 3.0)})


def test_two_writers_one_of_them_killed_leave_a_whole_entry(cache):
    other = FORKED.Process(target=_write_until_killed, args=(cache.folder,))
    other.start()
    while not file_of(cache, "ab").exists():
        other.join(0.01)
    for _ in range(20):
        cache.write("ab", {"latents": torch.full((100_000,), 3.0)})
        assert cache.read("ab")["latents"].eq(3).all()
    other.kill()
    other.join()
    assert cache.read("ab")["latents"].eq(3).all()
    cache.write("ab", {"latents": torch.ones(1)})
    assert cache.read("ab")["latents"].tolist() == [1.0]


def test_a_fingerprint_is_the_hash_of_the_bytes(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"content")
    assert file_fingerprint(path) == hashlib.sha256(b"content").hexdigest()


KEYS = [f"{number:02x}" * 32 for number in range(4)]


@pytest.fixture
def filled(tmp_path):
    filled = TensorCache(tmp_path / "cache")
    for key in KEYS:
        filled.write(key, {"latents": torch.ones(10)})
    return filled


@pytest.fixture
def memory(filled):
    with FileMemory(filled.folder / "index.sqlite") as memory:
        yield memory


def damage(path):
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")


class CountingCache(TensorCache):
    num_reads = 0

    def read(self, key):
        self.num_reads += 1
        return super().read(key)


def test_an_entry_is_read_once_and_then_only_looked_at(filled, memory):
    counting = CountingCache(filled.folder)
    assert all(is_present(counting, memory, key) for key in KEYS for _ in range(3))
    assert counting.num_reads == len(KEYS)
    memory.flush()
    with FileMemory(filled.folder / "index.sqlite") as again:
        assert is_present(counting, again, KEYS[0])
    assert counting.num_reads == len(KEYS)


def test_an_entry_that_was_just_written_is_not_read(filled, memory):
    counting = CountingCache(filled.folder)
    remember_written(counting, memory, KEYS[0])
    assert is_present(counting, memory, KEYS[0])
    assert counting.num_reads == 0


@pytest.mark.parametrize("cut", [0, 1, 40])
def test_an_entry_that_changed_is_read_and_set_aside_when_damaged(filled, memory, cut):
    assert is_present(filled, memory, KEYS[0])
    path = filled.path(KEYS[0])
    content = path.read_bytes()
    path.write_bytes(content[: len(content) - cut] if cut else content[:-1] + b"\xff")
    assert not is_present(filled, memory, KEYS[0])
    assert path.with_suffix(".damaged").exists()
    assert not is_present(filled, memory, KEYS[0])


def test_an_entry_that_was_only_touched_is_still_there(filled, memory):
    assert is_present(filled, memory, KEYS[0])
    os.utime(filled.path(KEYS[0]), ns=(0, 1))
    assert is_present(filled, memory, KEYS[0])


def test_an_entry_that_is_not_there_or_cannot_be_read_is_not_present(filled, memory):
    assert not is_present(filled, memory, "ff" * 32)
    filled.path(KEYS[0]).unlink()
    filled.path(KEYS[0]).mkdir()
    assert not is_present(filled, memory, KEYS[0])


def test_an_entry_with_numbers_that_are_not_finite_is_set_aside_before_a_run_reads_it(
    filled, memory, monkeypatch, caplog
):
    with monkeypatch.context() as patch:
        patch.setattr("diffsynth_lite.data.cache.require_finite", lambda _: None)
        for key in KEYS[:2]:
            filled.write(key, {"latents": torch.tensor([1.0, torch.nan])})
    assert not is_present(filled, memory, KEYS[0])
    assert f"{filled.path(KEYS[0])}: damaged cache entry is set aside: latents holds NaN" in caplog.text
    assert verify(filled, lambda done, total: None)[1] == [KEYS[1]]


def test_an_entry_that_the_system_cannot_read_is_not_present_and_stays(filled, memory, monkeypatch, caplog):
    def fail(*_args, **_settings):
        raise PermissionError("no")

    monkeypatch.setattr(Path, "read_bytes", fail)
    assert not is_present(filled, memory, KEYS[0])
    assert "the cache entry cannot be read: no" in caplog.text
    assert filled.path(KEYS[0]).exists()


def test_verify_reads_all_and_names_what_is_damaged(filled):
    damage(filled.path(KEYS[1]))
    progress = []
    verified = verify(filled, lambda done, total: progress.append((done, total)))
    assert verified == (4, [KEYS[1]])
    assert progress == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert filled.path(KEYS[1]).with_suffix(".damaged").exists()
    assert verify(filled, lambda done, total: None) == (3, [])


def test_verify_of_no_cache_finds_nothing(tmp_path):
    assert verify(TensorCache(tmp_path / "none"), lambda done, total: None) == (0, [])


def test_prune_deletes_what_is_not_kept_and_nothing_that_is_not_an_entry(filled):
    keep = set(KEYS[:2])
    damaged = filled.path(KEYS[0]).with_name(f"{KEYS[0]}.damaged")
    damaged.write_bytes(b"12345")
    old = filled.folder / "00" / f".tmp-{KEYS[0]}.safetensors-{'a' * 8}"
    young = filled.folder / "00" / f".tmp-{KEYS[0]}.safetensors-{'b' * 8}"
    for path in (old, young):
        path.write_bytes(b"123")
    os.utime(old, (time.time() - 90_000,) * 2)
    foreign = [
        filled.folder / "00" / "notes.txt",
        filled.folder / "00" / "model.safetensors",
        filled.folder / "00" / f"{'ff' * 32}.safetensors",
        filled.folder / "media" / f"{KEYS[3]}.safetensors",
        filled.folder / f"{KEYS[3]}.safetensors",
    ]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"mine")
    size = filled.path(KEYS[2]).stat().st_size
    expected = (4, 2 * size + 5 + 3)
    counted = prune(filled, keep, dry_run=True)
    assert (counted.num_files, counted.num_bytes) == expected
    assert old.exists()
    pruned = prune(filled, keep, dry_run=False)
    assert (pruned.num_files, pruned.num_bytes) == expected
    assert [filled.path(key).exists() for key in KEYS] == [True, True, False, False]
    assert not damaged.exists()
    assert not old.exists()
    assert young.exists()
    assert all(path.read_bytes() == b"mine" for path in foreign)
