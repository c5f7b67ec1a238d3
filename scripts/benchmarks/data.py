"""Cost of the data layer by the size of the data set, and the loader's samples a second against bare reading.

The first table is of synthetic rows whose entries need no reading, so it shows the table, the schedule and
the loader alone; building the table includes making the rows. The second reads real files that this script
writes, in the same order, in the same run; the loader also checks their hashes and draws the noise.
"""

import argparse
import dataclasses
import hashlib
import resource
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from pathlib import Path

import torch
from meters import mebibytes, print_table
from safetensors.torch import load_file
from torch import Tensor

from diffsynth_lite.data import (
    BatchLayout,
    BatchStream,
    Bucket,
    ItemRow,
    ItemTable,
    SampleSchedule,
    TensorCache,
)
from diffsynth_lite.data.batches import EntryReader
from diffsynth_lite.data.schedule import Orders, draw_order

MICRO_BATCH_SIZE = 4
NUM_BUCKETS = 8
BUCKETS = [Bucket(width=512 + 64 * index, height=512) for index in range(NUM_BUCKETS)]


def main() -> None:
    """Measure and print both tables."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    print_table(
        f"{NUM_BUCKETS} buckets, 2 sources, micro-batches of {MICRO_BATCH_SIZE}",
        [cost_row(rows, arguments.batches) for rows in arguments.rows],
    )
    with tempfile.TemporaryDirectory() as folder:
        speeds = speeds_of(Path(folder), arguments)
    print_table(
        f"{arguments.files} items: latents 16 x {arguments.side} x {arguments.side}, embeddings 256 x 3584",
        [{"": name, "samples/s": f"{speed:.0f}"} for name, speed in speeds.items()],
    )


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[100, 10_000, 1_000_000], help="of data sets")
    parser.add_argument("--batches", type=int, default=2000, help="batches timed (default: %(default)s)")
    parser.add_argument(
        "--files", type=int, default=500, help="items that are written (default: %(default)s)"
    )
    parser.add_argument("--side", type=int, default=64, help="side of their latents (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="of the loader (default: %(default)s)")
    return parser.parse_args()


@dataclass(frozen=True)
class NoReading:
    """The same small tensors for each key."""

    tensors: dict[str, Tensor]

    def read(self, key: str) -> dict[str, Tensor]:
        """Tensors of any entry."""
        return self.tensors


def synthetic_rows(count: int) -> Iterator[ItemRow]:
    """Rows with names and keys of the usual length, over all buckets and both sources."""
    for index in range(count):
        media, caption = (hashlib.sha256(f"{kind}{index}".encode()).hexdigest() for kind in "mc")
        yield ItemRow(
            name=f"pictures/{index:08}.png",
            bucket=BUCKETS[index % NUM_BUCKETS],
            source=index // NUM_BUCKETS % 2,
            media_key=media,
            caption_keys=(caption,),
        )


def batch_stream(
    table: ItemTable, entries: EntryReader, orders: Orders = draw_order, *, num_workers: int
) -> BatchStream:
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


def cost_row(num_rows: int, num_batches: int) -> dict[str, str]:
    """One row of the first table."""
    started_at = time.perf_counter()
    table = ItemTable.build(synthetic_rows(num_rows))
    built_at = time.perf_counter()
    steps = iter(batch_stream(table, NoReading({"latents": torch.zeros(4, 2, 2)}), num_workers=0))
    next(steps)
    first_at = time.perf_counter()
    for _ in islice(steps, num_batches):
        pass
    seconds = time.perf_counter() - first_at
    return {
        "rows": f"{num_rows:,}",
        "build table, s": f"{built_at - started_at:.3f}",
        "schedule + first batch, s": f"{first_at - built_at:.3f}",
        "table, MiB": mebibytes(table.num_bytes),
        "peak, MiB": f"{peak_mib():.0f}",
        "ms a batch": f"{1000 * seconds / num_batches:.3f}",
    }


def peak_mib() -> float:
    """Most memory that this process has had, on Linux."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def speeds_of(folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Samples a second: the loader over real files, and the same files read bare."""
    cache = TensorCache(folder)
    table = written_items(cache, arguments.files, arguments.side)
    num_batches = max(1, arguments.files // MICRO_BATCH_SIZE)
    steps = islice(batch_stream(table, NoReading({"latents": torch.zeros(1)}), num_workers=0), num_batches)
    names = [name for [batch] in steps for name in batch.names]
    row_of = {row.name: row for row in map(table.row, range(len(table)))}
    started_at = time.perf_counter()
    for name in names:
        for key in (row_of[name].media_key, row_of[name].caption_keys[0]):
            tensors = load_file(folder / key[:2] / f"{key}.safetensors")
            for tensor in tensors.values():
                tensor.clone()  # a tensor of a file is read only when it is used
    speeds = {"safetensors bare": len(names) / (time.perf_counter() - started_at)}
    for num_workers in sorted({0, arguments.workers}):
        speeds[f"loader, {num_workers} workers"] = samples_per_second(
            table, cache, num_workers=num_workers, num_batches=num_batches
        )
    return speeds


def written_items(cache: TensorCache, count: int, side: int) -> ItemTable:
    """Items in the cache of the size of Qwen-Image's, all of one bucket."""
    generator = torch.Generator().manual_seed(0)
    bucket = Bucket(width=8 * side, height=8 * side)
    rows = [dataclasses.replace(row, bucket=bucket) for row in synthetic_rows(count)]
    for row in rows:
        cache.write(row.media_key, {"latents": torch.randn(16, 1, side, side, generator=generator)})
        embeds = torch.randn(256, 3584, generator=generator).bfloat16()
        cache.write(row.caption_keys[0], {"prompt_embeds": embeds})
    return ItemTable.build(rows)


def samples_per_second(table: ItemTable, cache: TensorCache, *, num_workers: int, num_batches: int) -> float:
    """Of a pass of the loader, after the first batch, which starts the workers."""
    steps = iter(batch_stream(table, cache, num_workers=num_workers))
    next(steps)
    started_at = time.perf_counter()
    for _ in islice(steps, num_batches):
        pass
    return num_batches * MICRO_BATCH_SIZE / (time.perf_counter() - started_at)


if __name__ == "__main__":
    main()
