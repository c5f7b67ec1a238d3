"""Cost of a start from a sealed cache, by the number of items.

Items and entries are synthetic, and as small as entries can be, so that the table shows what grows with their
number and not with their size. Each start is a process of its own: it opens what there is and reads its first
batch. Ten items share an entry.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from meters import mebibytes, print_table

from diffsynth_lite.data import (
    BatchLayout,
    BatchStream,
    Bucket,
    DataIdentity,
    ItemTable,
    SampleSchedule,
    TensorCache,
    UsableData,
)
from diffsynth_lite.data.batches import EntryReader
from diffsynth_lite.data.cache import entry_content
from diffsynth_lite.data.item_table import KEY_BYTES, Indices, ItemColumns
from diffsynth_lite.data.schedule import Numbers, Orders
from diffsynth_lite.data.sealed import SealFolder, StoredOrders, open_seal, write_seal
from diffsynth_lite.data.sealed.entries import import_lance

MICRO_BATCH_SIZE = 4
ITEMS_OF_AN_ENTRY = 10
ITEMS_OF_A_CAPTION = 1000
LATENTS = torch.zeros(4, 2, 2, dtype=torch.bfloat16)
HASHED = json.dumps(["latents", "torch.bfloat16", [4, 2, 2]]).encode() + bytes(LATENTS.nbytes)
CONTENT = entry_content("", {"latents": LATENTS})
HASH_AT = CONTENT.index(b'"xxh3":"') + len(b'"xxh3":"')
START, END = CONTENT[:HASH_AT], CONTENT[HASH_AT + 32 :]
IDENTITY = DataIdentity(items="", num_buckets=1, decoder="", media_encoder="", prompt_encoder="")


def main() -> None:
    """Measure and print the table."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    if arguments.part is not None:
        {"seal": seal, "start": start}[arguments.part](Path(arguments.folder), arguments)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        rows = [sealed_row(Path(folder) / str(rows), rows, arguments) for rows in arguments.rows]
    print_table(f"{arguments.buckets} buckets, 2 sources, micro-batches of {MICRO_BATCH_SIZE}; sealed", rows)


def batch_stream(table: ItemTable, entries: EntryReader, orders: Orders, *, num_workers: int) -> BatchStream:
    """A stream of one process, whose step is one micro-batch."""
    schedule = SampleSchedule(
        table.groups,
        passes=[Fraction(1), Fraction(3, 2)],
        sizes=[MICRO_BATCH_SIZE] * len(table.buckets),
        seed=0,
        orders=orders,
    )
    layout = BatchLayout(
        global_batch_size=MICRO_BATCH_SIZE,
        micro_batch_size=MICRO_BATCH_SIZE,
        num_processes=1,
        process_index=0,
    )
    return BatchStream(table, entries, schedule, layout, seed=0, num_workers=num_workers, start_step=0)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[10_000, 1_000_000], help="of sealed data sets"
    )
    parser.add_argument("--buckets", type=int, default=8, help="of each (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=500, help="batches timed (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=0, help="that read them (default: %(default)s)")
    parser.add_argument("--folder", help="for the files; the system's own unless given")
    parser.add_argument("--part", choices=("seal", "start"), help=argparse.SUPPRESS)
    return parser.parse_args()


def sealed_row(folder: Path, rows: int, arguments: argparse.Namespace) -> dict[str, str]:
    """One row of the table; what it wrote is removed."""
    folder.mkdir()
    [sealed] = measured(["seal"], folder, rows, arguments)
    [first] = measured(["start"], folder, rows, arguments)
    [later] = measured(["start"], folder, rows, arguments)
    both = measured(["start", "start"], folder, rows, arguments)
    files = [path for path in (folder / "sealed").rglob("*") if path.is_file()]
    row = {
        "rows": f"{rows:,}",
        "seal, CPU s": f"{sealed['cpu_s']:.1f}",
        "its peak, MiB": f"{sealed['peak_mib']:.0f}",
        "files": str(len(files)),
        "MiB": mebibytes(sum(path.stat().st_size for path in files)),
        "orders, CPU s": f"{first['orders_s']:.2f}",
        "start, CPU s": f"{later['start_cpu_s']:.3f}",
        "start, s": f"{later['start_s']:.2f}",
        "own MiB": f"{later['own_mib']:.1f}",
        "MiB of 2": f"{sum(each['mib'] for each in both):.1f}",
        "CPU ms a batch": f"{1000 * later['batches_cpu_s'] / arguments.batches:.2f}",
    }
    for path in (*files, *(folder / "cache").rglob("*.order")):
        path.unlink()
    return row


def measured(
    parts: Sequence[str], folder: Path, rows: int, arguments: argparse.Namespace
) -> list[dict[str, float]]:
    """What processes of this script measured, which were all there at the end."""
    options = [f"--{name}={getattr(arguments, name)}" for name in ("buckets", "batches", "workers")]
    command = [sys.executable, __file__, f"--folder={folder}", f"--rows={rows}", *options]
    running = [
        subprocess.Popen(
            [*command, f"--part={part}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for part in parts
    ]
    results = [json.loads(process.stdout.readline()) for process in running if process.stdout]
    for process, result in zip(running, results, strict=True):
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        result |= json.loads(process.stdout.readline())
    for process in running:
        process.communicate()
        assert process.returncode == 0
    return results


def told(found: dict[str, float], before: "Memory") -> None:
    """Print what was found, and, when all processes are there, the memory that this one has since gained."""
    print(json.dumps(found), flush=True)
    sys.stdin.readline()
    now = Memory.now()
    print(json.dumps({"own_mib": now.own - before.own, "mib": now.share - before.share}), flush=True)


@dataclass(frozen=True)
class Memory:
    """Memory of this process in MiB, on Linux.

    Attributes:
        own: what is of no file, and cannot be had again by reading one.
        share: all of it, of what it shares with n processes one n-th (PSS).
    """

    own: float
    share: float

    @classmethod
    def now(cls) -> "Memory":
        """At this moment."""
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
        sizes = {line.split()[0]: int(line.split()[1]) / 1024 for line in lines}
        return cls(own=sizes["Anonymous:"], share=sizes["Pss:"])


class TimedOrders:
    """Stored orders, and the CPU seconds that getting them took."""

    def __init__(self, orders: Orders) -> None:
        self.orders, self.cpu_s = orders, 0.0

    def __call__(self, name: str, number: int, length: int, draw: Callable[[], Indices]) -> Numbers:
        """As `Orders`."""
        began_at = time.process_time()
        order = self.orders(name, number, length, draw)
        self.cpu_s += time.process_time() - began_at
        return order


def synthetic_table(count: int, num_buckets: int) -> ItemTable:
    """Items with names of the usual length, over all buckets and two sources; some share their entries."""
    index = np.arange(count)
    bucket, source = index % num_buckets, index // num_buckets % 2
    groups, counts = np.unique(2 * bucket + source, return_counts=True)
    names = b"".join(b"pictures/%08d.png" % number for number in range(count))
    name_bytes = len(names) // count
    return ItemTable(
        buckets=tuple(Bucket(width=512 + 64 * number, height=512) for number in range(num_buckets)),
        has_unconditional=False,
        group_counts={
            divmod(group, 2): number for group, number in zip(groups.tolist(), counts.tolist(), strict=True)
        },
        columns=ItemColumns(
            bucket_index=bucket.astype("<u2").tobytes(),
            source_index=source.astype("<u2").tobytes(),
            members=np.argsort(2 * bucket + source, kind="stable").astype("<u4").tobytes(),
            names=names,
            name_ends=((index + 1) * name_bytes).astype("<i8").tobytes(),
            media_keys=shared_keys(count, ITEMS_OF_AN_ENTRY),
            caption_keys=shared_keys(count, ITEMS_OF_A_CAPTION),
            caption_ends=(index + 1).astype("<i8").tobytes(),
        ),
    )


def shared_keys(count: int, shared_by: int) -> bytes:
    """A key for each item, so many of which have the same one; no item is near another that shares its."""
    num_keys = -(-count // shared_by)
    keys = np.random.default_rng(shared_by).integers(256, size=(num_keys, KEY_BYTES), dtype=np.uint8)
    return keys[np.arange(count) % num_keys].tobytes()


@dataclass(frozen=True)
class SyntheticEntry:
    """In the place of an entry's file; all entries are one but for the hash, which `write_seal` checks."""

    key: str

    def read_bytes(self) -> bytes:
        """Its content."""
        digest = xxhash.xxh3_128(self.key.encode())
        digest.update(HASHED)
        return START + digest.hexdigest().encode() + END


class SyntheticCache(TensorCache):
    """Has an entry of every key, and no file."""

    def path(self, key: str) -> Any:
        """The entry of a key."""
        return SyntheticEntry(key)


def seal(folder: Path, arguments: argparse.Namespace) -> None:
    """Seal synthetic items."""
    cache = SyntheticCache(folder / "cache")
    cache.folder.mkdir()
    table = synthetic_table(arguments.rows[0], arguments.buckets)
    data = UsableData(items=table, identity=IDENTITY, tag_counts={})

    began_at = time.process_time()
    write_seal(SealFolder(str(folder / "sealed")), cache, lambda done, total: None, data=data, settings={})
    told(
        {
            "cpu_s": time.process_time() - began_at,
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        },
        Memory.now(),
    )


def start(folder: Path, arguments: argparse.Namespace) -> None:
    """Start from what is sealed, and read batches."""
    import_lance()  # Of which the tables say nothing: it takes as long, and as much, at any size.
    before, started_at, began_at = Memory.now(), time.perf_counter(), time.process_time()
    found = open_seal(SealFolder(str(folder / "sealed")))
    assert found is not None
    table = found.map_table(folder / "copies")
    items = found.items(table, found.document.data)
    orders = TimedOrders(StoredOrders(folder / "cache", identity=found.digest))
    steps = iter(batch_stream(items, found.entries(table), orders, num_workers=arguments.workers))
    next(steps)
    times = {"start_s": time.perf_counter() - started_at, "start_cpu_s": time.process_time() - began_at}
    began_at = time.process_time()
    for _ in islice(steps, arguments.batches):
        pass
    times["batches_cpu_s"] = time.process_time() - began_at
    told({**times, "orders_s": orders.cpu_s}, before)


if __name__ == "__main__":
    main()
