"""A sealed cache gives back the data that were sealed, or names the damaged row and file."""

import hashlib
import os
import pickle
import signal
import sys
import threading
import time
from pathlib import Path

import lance
import numpy as np
import pytest
import torch

from diffsynth_lite.data.buckets import Bucket
from diffsynth_lite.data.cache import TensorCache
from diffsynth_lite.data.captions import TagCounts
from diffsynth_lite.data.item_table import ItemRow, ItemTable
from diffsynth_lite.data.items import DataIdentity, UsableData
from diffsynth_lite.data.sealed.entries import SealFolder
from diffsynth_lite.data.sealed.mapped import DamagedSealError, StoredOrders, prune_orders, prune_tables
from diffsynth_lite.data.sealed.seal import open_seal, write_seal
from diffsynth_lite.errors import UserError

NUM_ITEMS = 40
KEYS = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(2 * NUM_ITEMS + 1)]
ROWS = [
    ItemRow(
        name=f"{number}.png",
        bucket=Bucket(width=32, height=16 * (1 + number % 2), inputs=((8, 8),) * (number % 2)),
        source=number % 3,
        media_key=KEYS[2 * number],
        caption_keys=(KEYS[2 * number + 1], KEYS[1]),
        unconditional_key=KEYS[-1],
    )
    for number in range(NUM_ITEMS)
]
IDENTITY = DataIdentity(items="40", num_buckets=2, decoder="d", media_encoder="m", prompt_encoder="p")
DATA = UsableData(
    items=ItemTable.build(ROWS), identity=IDENTITY, tag_counts={1: TagCounts(3, {"b": 2, "a": 1})}
)
HELD_OUT = UsableData(items=ItemTable.build(ROWS[:3]), identity=IDENTITY, tag_counts={})
CONTENT = {
    "settings": {"data.width": 64},
    "data": DATA,
    "validation": HELD_OUT,
    "more_keys": [KEYS[0]],
    "texts": {KEYS[1]: "a red circle"},
    "thumbnails": {3: "data:image/jpeg;base64,"},
}


def nothing(done: int, total: int) -> None:
    pass


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> TensorCache:
    cache = TensorCache(tmp_path_factory.mktemp("cache"))
    for number, key in enumerate(KEYS):
        cache.write(key, {"latents": torch.full((2, 3), number), "mask": torch.ones(number % 4)})
    return cache


@pytest.fixture(params=["{}", "file-object-store://{}"], ids=["folder", "uri"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> SealFolder:
    """On a disk by its path, and as an object store reads it."""
    return SealFolder(request.param.format(tmp_path / "sealed"))


def test_sealed_data_come_back_by_path_and_by_uri_also_in_another_process(
    folder: SealFolder, cache: TensorCache, tmp_path: Path
) -> None:
    assert open_seal(folder) is None
    document = write_seal(folder, cache, nothing, **CONTENT)
    seal = open_seal(folder)
    assert seal is not None
    assert seal.document == document
    assert document.num_entries == len(KEYS)
    assert document.data.identity == IDENTITY
    assert document.data.tag_counts == DATA.tag_counts
    table = seal.map_table(tmp_path / "copies")
    assert (tmp_path / "copies").exists() == (not folder.is_local)
    assert document.validation is not None
    for sealed, given in ((document.data, DATA), (document.validation, HELD_OUT)):
        items = seal.dataset(table, sealed).items
        assert list(items) == list(given.items)
        assert items.facts() == given.items.facts()
        members = [(group.bucket, group.source, group.members().tolist()) for group in items.groups]
        assert members == [(each.bucket, each.source, each.members().tolist()) for each in given.items.groups]
    entries = seal.entries(table)
    for reader in (entries, pickle.loads(pickle.dumps(entries))):
        for key in KEYS:
            read, written = reader.read(key), cache.read(key)
            assert read.keys() == written.keys()
            assert all(torch.equal(read[name], written[name]) for name in read)
    assert entries.text(KEYS[1]) == "a red circle"
    assert "ab" * 32 not in entries
    with pytest.raises(DamagedSealError, match="has no entry abab"):
        entries.read("ab" * 32)
    assert list(seal.problems(tmp_path / "copies", nothing)) == []


def test_a_sealing_that_was_killed_leaves_no_seal_and_is_done_again(
    folder: SealFolder, cache: TensorCache
) -> None:
    def killed(done: int, total: int) -> None:
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_seal(folder, cache, killed, **CONTENT)
    assert open_seal(folder) is None
    folder.upload(cache.path(KEYS[0]), "entries.lance/data/left.lance")
    folder.upload(cache.path(KEYS[0]), "items.table")
    first = write_seal(folder, cache, nothing, **CONTENT)
    assert "entries.lance/data/left.lance" not in folder.names()
    other = write_seal(SealFolder(f"{folder}-other"), cache, nothing, **CONTENT)
    assert (first.data, first.keys, first.table_bytes) == (other.data, other.keys, other.table_bytes)
    with pytest.raises(UserError, match="holds SEALED and is not a sealed cache"):
        write_seal(folder, cache, nothing, **CONTENT)


def test_ctrl_c_stops_a_sealing_and_the_thread_that_reads_for_it(cache: TensorCache, tmp_path: Path) -> None:
    read = []

    def interrupted(done: int, total: int) -> None:
        read.append(done)
        if done == 2:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.01)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # Shells start jobs that ignore it.
    try:
        with pytest.raises(KeyboardInterrupt):
            write_seal(SealFolder(str(tmp_path / "sealed")), cache, interrupted, **CONTENT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert 2 <= read[-1] < len(KEYS)
    assert open_seal(SealFolder(str(tmp_path / "sealed"))) is None


def test_damage_is_found_and_named(cache: TensorCache, tmp_path: Path) -> None:
    root = tmp_path / "sealed"
    write_seal(SealFolder(str(root)), cache, nothing, **CONTENT)
    seal = open_seal(SealFolder(str(root)))
    [shard] = (root / "entries.lance/data").iterdir()
    whole = {path: path.read_bytes() for path in (shard, root / "items.table", root / "SEALED")}

    def damaged(path: Path, place: int) -> None:
        for each, content in whole.items():
            each.write_bytes(content)
        content = bytearray(whole[path])
        content[place] ^= 1
        path.write_bytes(content)

    row = sorted(KEYS).index(KEYS[7])
    damaged(shard, whole[shard].index(torch.full((2, 3), 7).numpy().tobytes()))
    entries = seal.entries(seal.map_table(tmp_path))
    with pytest.raises(DamagedSealError, match=f"row {row} of .* in data/{shard.name} is damaged"):
        entries.read(KEYS[7])
    assert entries.read(KEYS[8])["latents"][0, 0] == 8
    [problem] = seal.problems(tmp_path, nothing)
    assert problem.startswith(f"row {row} of ")

    damaged(root / "items.table", whole[root / "items.table"].index(b"11.png"))
    with pytest.raises(
        DamagedSealError, match=r"items.table is damaged between its bytes 0 and .*; restore it from a copy"
    ):
        seal.dataset(seal.map_table(tmp_path), seal.document.data).items.row(11)
    first, *_ = seal.problems(tmp_path, nothing)
    assert "names of data" in first

    damaged(root / "SEALED", 100)
    with pytest.raises(UserError, match="SEALED is damaged"):
        open_seal(SealFolder(str(root)))
    damaged(root / "items.table", 0)
    (root / "items.table").write_bytes(whole[root / "items.table"][:-1])
    with pytest.raises(DamagedSealError, match=r"bytes, and .* were written"):
        seal.map_table(tmp_path)
    (root / "items.table").write_bytes(whole[root / "items.table"])
    shard.unlink()
    with pytest.raises(DamagedSealError, match="cannot be read"):
        seal.entries(seal.map_table(tmp_path)).read(KEYS[0])
    (root / "SEALED").write_bytes(whole[root / "SEALED"])
    with pytest.raises(UserError, match=f"lacks 1 of its 2 files, such as .*{shard.name}; restore it"):
        open_seal(SealFolder(str(root)))


class PanicException(BaseException):
    """As Lance raises it; its own class can only be had by a panic."""


def test_a_panic_of_lance_and_rows_that_are_gone_are_reported_as_damage(
    cache: TensorCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "sealed"
    write_seal(SealFolder(str(root)), cache, nothing, **CONTENT)
    seal = open_seal(SealFolder(str(root)))
    lance.dataset(str(root / "entries.lance")).delete(f"key = X'{KEYS[3]}'")
    entries = seal.entries(seal.map_table(tmp_path))
    *_, last = entries.problems(nothing)
    assert last.endswith(f"cannot be read: {len(KEYS) - 1} of its {len(KEYS)} rows are there")

    def panics(uri: str) -> None:
        raise PanicException("range end index 9 out of range")

    monkeypatch.setattr(lance, "dataset", panics)
    entries = seal.entries(seal.map_table(tmp_path))
    with pytest.raises(DamagedSealError, match="cannot be read: Lance: range end index 9"):
        entries.read(KEYS[0])
    [problem] = entries.problems(nothing)
    assert problem.endswith("cannot be read: Lance: range end index 9 out of range")


def test_an_entry_that_is_gone_or_damaged_is_not_sealed(cache: TensorCache, tmp_path: Path) -> None:
    own = TensorCache(tmp_path / "cache")
    for key in KEYS[1:]:
        own.write(key, cache.read(key))
    with pytest.raises(UserError, match="is not there; fill the cache"):
        write_seal(SealFolder(str(tmp_path / "one")), own, nothing, **CONTENT)
    own.path(KEYS[0]).parent.mkdir(exist_ok=True)
    own.path(KEYS[0]).write_bytes(own.path(KEYS[1]).read_bytes())
    with pytest.raises(UserError, match="is damaged: its hash does not match; `diffsynth-lite cache verify`"):
        write_seal(SealFolder(str(tmp_path / "two")), own, nothing, **CONTENT)


def test_without_lance_the_install_line_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "lance", None)
    with pytest.raises(UserError, match=r"pip install 'diffsynth_lite\[lance\]'"):
        open_seal(SealFolder("s3://bucket/folder"))


def make_old(folder: Path) -> None:
    for path in folder.iterdir():
        os.utime(path, (time.time() - 90_000,) * 2)


def test_tables_of_other_seals_and_unfinished_files_are_pruned_and_nothing_else(
    tmp_path: Path,
) -> None:
    digests = ["a" * 32, "b" * 32]
    abandoned = tmp_path / f".tmp-{digests[0]}.table-{'c' * 8}"
    for path in (abandoned, tmp_path / "mine.table", *(tmp_path / f"{digest}.table" for digest in digests)):
        path.write_bytes(b"123")
    assert prune_tables(tmp_path, (), dry_run=False).num_files == 0  # made today
    make_old(tmp_path)
    found = prune_tables(tmp_path, digests[:1], dry_run=True)
    assert (found.num_files, found.num_bytes) == (2, 6)
    assert prune_tables(tmp_path, digests[:1], dry_run=False) == found
    assert {path.name for path in tmp_path.iterdir()} == {"mine.table", f"{digests[0]}.table"}
    assert prune_tables(tmp_path / "none", (), dry_run=False).num_files == 0


def test_an_order_is_drawn_once_and_one_that_nobody_reads_is_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    drawn = []

    def order(number: int, length: int = 5000) -> np.ndarray:
        def draw() -> np.ndarray:
            drawn.append(number)
            return np.random.default_rng(number).permutation(length)

        given = StoredOrders(tmp_path, identity="a", fewest=100)("pass", number, length, draw)
        assert len(given) == length
        assert np.array_equal(given[:], np.random.default_rng(number).permutation(length))
        return given[7:9]

    order(0), order(0), order(1)
    assert drawn == [0, 1]
    [first, path] = sorted(tmp_path.glob("*.order"), key=lambda path: path.stat().st_mtime_ns)
    order(2)
    assert not first.exists()
    assert prune_orders(tmp_path, dry_run=False).num_files == 0  # made today
    make_old(tmp_path)
    mapped = StoredOrders(tmp_path, identity="a", fewest=100)("pass", 1, 5000, lambda: np.arange(0))
    assert prune_orders(tmp_path, dry_run=True).num_files == 1
    assert prune_orders(tmp_path, dry_run=False).num_files == 1
    assert path.exists()
    del mapped
    assert prune_orders(tmp_path, dry_run=True).num_files == 1
    order(2)
    order(3, length=99)
    assert drawn == [0, 1, 2, 2, 3]
    assert len(list(tmp_path.glob("*.order"))) == 2
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedSealError, match=f"remove {path}"):
        order(1)
    (tmp_path / "file").touch()
    orders = StoredOrders(tmp_path / "file", identity="a", fewest=1)
    assert orders("pass", 0, 3, lambda: np.arange(3))[:].tolist() == [0, 1, 2]
    assert "each process draws its own" in caplog.text
