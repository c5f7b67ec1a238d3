"""What a cluster costs the machine that drives it, with parts and items by the million.

Example: python scripts/benchmarks/cluster.py --tasks 2000

Tasks are handed to a real Ray on this machine, with work that returns at once, so that what is measured is
the driver's share; many nodes are one, listed many times. Items are listed without a cluster.
"""

import argparse
import resource
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from diffsynth_lite.cli.cluster import parts_by_cost
from diffsynth_lite.cluster.node import Ended
from diffsynth_lite.cluster.session import HERE, connected, require_shared
from diffsynth_lite.cluster.tasks import run_tasks
from diffsynth_lite.data.records import Part

_WORDS = ["cache", "fill", "--config", "/shared/corpus.yaml", "data.cache_dir=/shared/cache", "--part"]
_ENTRIES = {
    "an image of 1024 px": 16 * 128 * 128 * 4,
    "a clip of 81 frames at 832 x 480": 16 * 21 * 60 * 104 * 4,
}
"""Bytes of the latents in a cache: 16 channels, 8 pixels and 4 frames a position, in float32."""


def main() -> None:
    """Print one line for each cost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", type=int, default=2000, help="handed to Ray, and extrapolated to 100,000")
    parser.add_argument("--nodes", type=int, default=1000, help="on each of which folders are looked at")
    parser.add_argument("--items", type=int, default=1_000_000, help="listed, and extrapolated to 10,000,000")
    parsed = parser.parse_args()
    _print_driver(parsed.tasks)
    _print_nodes(parsed.nodes)
    _print_items(parsed.items)
    _print_bytes()


def nothing(name: str, words: list[str], folder: str) -> Ended:
    """Takes the place of a command."""
    return Ended(name=name, node="", exit_code=0, last_line="")


def _print_driver(count: int) -> None:
    """What a task costs the driver: seconds of its processor, memory, and bytes that it sends."""
    names = (f"{place}/{count}" for place in range(count))
    given = ((name, [*_WORDS, name]) for name in names)
    needs = {"CPU": 0.001}
    with connected(HERE) as ray:
        list(run_tasks(ray, [("first", _WORDS)], "/", needs, work=nothing))
        before, began_at, used = _peak_mib(), time.perf_counter(), time.process_time()
        num_ended = sum(1 for _ in run_tasks(ray, given, "/", needs, work=nothing))
        seconds, used = time.perf_counter() - began_at, time.process_time() - used
        grown = _peak_mib() - before
    assert num_ended == count
    sent = len(ray.cloudpickle.dumps((f"{count}/{count}", [*_WORDS, f"{count}/{count}"], "/shared")))
    scale = 100_000 / count
    print(
        f"{count:,} tasks: {1e3 * seconds / count:.2f} ms each, {1e3 * used / count:.2f} ms of the driver's "
        f"processor; its memory grew by {grown:.0f} MiB; {sent} bytes of arguments each"
    )
    print(
        f"100,000 tasks by that: {used * scale:.0f} s of the driver's processor, "
        f"{100_000 * sent / 2**20:.0f} MiB of arguments"
    )


def _print_nodes(count: int) -> None:
    """What it costs to look on each node whether it sees the folders, before the first task."""
    with connected(HERE) as ray, TemporaryDirectory() as folder:
        found = ray.nodes() * count
        needs = {"CPU": 1.0}
        require_shared(ray, needs, written=[Path(folder)], read=[])
        before, began_at, used = _peak_mib(), time.perf_counter(), time.process_time()
        with patch.object(ray, "nodes", lambda: found):
            require_shared(ray, needs, written=[Path(folder)], read=[Path(folder)])
        seconds, used = time.perf_counter() - began_at, time.process_time() - used
        grown = _peak_mib() - before
    print(
        f"{count:,} nodes: {seconds:.1f} s, {used:.1f} s of the driver's processor; its memory grew by "
        f"{grown:.0f} MiB"
    )


def _print_items(count: int) -> None:
    """What it takes to know the items of each part, on the driver and on a node."""
    costs = {f"{place // 1000:05d}/{place:09d}.png": 1.0 for place in range(count)}
    scale = 10_000_000 / count
    listed = _seconds(lambda: parts_by_cost(costs, 64))
    part = Part(3, 64)
    owned = _seconds(lambda: sum(map(part.owns, costs)))
    print(
        f"{count:,} items in 64 parts: the driver {listed:.1f} s, a part finds its own in {owned:.1f} s; "
        f"10,000,000 by that: {listed * scale:.0f} s and {owned * scale:.0f} s"
    )


def _print_bytes() -> None:
    """What the shared disk delivers, from the bytes of entries."""
    for what, size in _ENTRIES.items():
        print(
            f"{what}: {size / 2**20:.1f} MiB of latents; 10,000,000 are {1e7 * size / 2**40:.1f} TiB; "
            f"a run of 64 samples/s reads {64 * size / 2**20:.0f} MiB/s"
        )


def _seconds(work: Callable[[], object]) -> float:
    began_at = time.perf_counter()
    work()
    return time.perf_counter() - began_at


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
