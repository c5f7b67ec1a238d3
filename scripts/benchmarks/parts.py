"""Cost of finding, hashing and planning the items of a folder: all at once, by parts, and after the parts.

Nothing is encoded: this is what comes before, and what one process alone would do for all of them.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from diffsynth_lite.data import (
    WHOLE,
    BucketRule,
    FileMemory,
    MediaIndex,
    Part,
    PartMemory,
    PlanRules,
    Source,
    adopt_parts,
    find_records,
    plan_items,
)

SIDE = 64
RULES = PlanRules(buckets=BucketRule(divisor=16, step=16, sizes=((SIDE, SIDE),)))


def main() -> None:
    """Write the files, and print a row for each way to plan them."""
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        num_bytes = write_pictures(root / "data", arguments.files)
        print(f"{arguments.files} pictures of {num_bytes // arguments.files} bytes, and their captions")
        print("                              |  items |  CPU, s | wall, s")
        at_once, by_parts = root / "at once" / "index.sqlite", root / "by parts" / "index.sqlite"
        for files in ("new", "known"):
            print_row(f"all, files {files}", root, FileMemory(at_once), WHOLE)
        first, *others = (Part(index, arguments.parts) for index in range(arguments.parts))
        for files in ("new", "known"):
            print_row(f"part {first}, files {files}", root, PartMemory(by_parts, first), first)
        for part in others:
            plan(root, PartMemory(by_parts, part), part)
        began = time.process_time(), time.perf_counter()
        adopt_parts(by_parts)
        print_times("what the parts know taken over", arguments.files, *began)
        print_row("all, files known from parts", root, FileMemory(by_parts), WHOLE)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", type=int, default=10_000, help="pictures (default: %(default)s)")
    parser.add_argument("--parts", type=int, default=16, help="default: %(default)s")
    return parser.parse_args()


def write_pictures(folder: Path, count: int) -> int:
    """Pictures of noise, each with a caption; returns the bytes of the pictures."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    for place in range(count):
        pixels = generator.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{place:06}.png", compress_level=0)
        (folder / f"{place:06}.txt").write_text(f"picture number {place}")
    return sum(path.stat().st_size for path in folder.glob("*.png"))


def plan(root: Path, memory: FileMemory, part: Part) -> int:
    """Find and plan the items of a part, as before they are encoded; returns how many there are."""
    with memory:
        source = Source(path=root / "data")
        records = find_records([source], media_store=root / "store", part=part).require_all()
        return len(plan_items(records, index=MediaIndex(memory), rules=RULES).items)


def print_row(label: str, root: Path, memory: FileMemory, part: Part) -> None:
    """A row of the table."""
    began = time.process_time(), time.perf_counter()
    print_times(label, plan(root, memory, part), *began)


def print_times(label: str, num_items: int, cpu_began: float, began: float) -> None:
    """How long something took, and for how many items."""
    cpu, wall = time.process_time() - cpu_began, time.perf_counter() - began
    print(f"{label:30}| {num_items:6} | {cpu:7.2f} | {wall:7.2f}")


if __name__ == "__main__":
    main()
