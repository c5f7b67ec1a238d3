"""How much memory a transformer with all blocks streamed takes to load, and how much two processes hold.

A Qwen-Image of random weights is written to disk, as scripts/benchmarks/loading.py does it, and loaded in a
process of its own, in bfloat16, with its blocks in a format or plain: each streamed weight to where it stays.
Anonymous memory is what a process cannot give back: pages of files that it reads are the system's to drop.

Then two processes load it and touch all of it: with a copy of the streamed weights each, and with one that
they share. A page that several processes have counts for each by its part (PSS).

    python scripts/benchmarks/streamed_loading.py [--blocks 24] [--formats none int8 nf4] [--folder FOLDER]

Linux only: it reads /proc/self/status and smaps_rollup.
"""

import json
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
import torch.multiprocessing as multiprocessing_of_torch
from loading import CPU, DTYPES, Loaded, argument_parser, measure, measure_all, rows_of, write_model
from meters import mebibytes, print_table
from torch import distributed, nn

from diffsynth_lite.core.gradient import blocks_in
from diffsynth_lite.core.transfer.backends import PlainBackend
from diffsynth_lite.core.transfer.shared_memory import HostMemory
from diffsynth_lite.core.weights import (
    HostBlocks,
    Quantization,
    WeightStream,
    frozen_weights,
    packed_bytes,
    weight_format,
)
from diffsynth_lite.pipelines import PipelineFolder
from diffsynth_lite.pipelines.base.quantized import quantizable_layers, set_formats
from diffsynth_lite.pipelines.qwen_image import QwenImage

NUM_PROCESSES = 2
NUM_SLOTS = 2

MakeMemory = Callable[[int], HostMemory]
"""Gives the host memory for so many bytes of streamed weights."""


def load(folder: Path, name: str, make_memory: MakeMemory) -> tuple[nn.Module, WeightStream]:
    """The transformer in bfloat16, with its blocks in a format or plain and all of them streamed."""
    family = QwenImage(PipelineFolder(path=folder))

    def blocks_of(model: nn.Module) -> list[nn.Module]:
        return blocks_in(model, family.block_lists)

    empty = family.empty_transformer().requires_grad_(False)
    if name != "none":
        layers = tuple(quantizable_layers(empty, family.block_lists))
        family.quantization = Quantization(format=weight_format(name), layers=layers, device=CPU)
    set_formats(empty, torch.bfloat16, family.quantization)
    memory = make_memory(sum(packed_bytes(frozen_weights(block, 0)) for block in blocks_of(empty)))
    family.host_blocks = HostBlocks(blocks_of, CPU, min_bytes=0, memory=memory)
    transformer = family.load_transformer(torch.bfloat16)
    stream = WeightStream(
        [blocks_of(transformer)], CPU, num_slots=NUM_SLOTS, min_bytes=0, loaded=family.host_blocks
    )
    return transformer, stream


def own_memory(_num_bytes: int) -> HostMemory:
    """Of a process alone."""
    return HostMemory(PlainBackend())


def measure_once(folder: Path, name: str, small: Path) -> Loaded:
    """One load, after that of a small model has imported and set up all that a first one does."""
    torch.set_num_threads(1)
    load(small, name, own_memory)
    streams = []

    def run() -> nn.Module:
        transformer, stream = load(folder, name, own_memory)
        streams.append(stream)
        return transformer

    loaded = measure(run)
    return replace(loaded, kept=loaded.kept + streams[0].host_bytes + streams[0].slot_bytes)


def proportional_bytes() -> int:
    """What this process has in memory that is no page of a file on a disk, shared pages by its part."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    found = {field: int(size) for field, size in re.findall(r"(Pss_\w+):\s+(\d+) kB", rollup)}
    return 1024 * (found["Pss_Anon"] + found["Pss_Shmem"])


def gathered(value: object) -> list[object]:
    """What each process gives, on all of them."""
    found: list[object] = [None] * NUM_PROCESSES
    distributed.all_gather_object(found, value)
    return found


def hold_on_a_rank(rank: int, folder: Path, small: Path, name: str, is_shared: bool, rendezvous: str) -> None:
    """Load, touch all that was loaded, and write down what this process holds of it."""
    torch.set_num_threads(1)
    load(small, name, own_memory)
    distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=NUM_PROCESSES)
    before = proportional_bytes()

    def make_memory(num_bytes: int) -> HostMemory:
        # Processes that will have something else in it do not share.
        return HostMemory.of_machine(num_bytes, 0 if is_shared else rank, PlainBackend(), gathered)

    transformer, stream = load(folder, name, make_memory)
    distributed.barrier()
    digest = sum(
        int(tensor.view(torch.uint8).sum())
        for module in transformer.modules()
        for tensor in vars(module).values()
        if isinstance(tensor, torch.Tensor)
    )
    distributed.barrier()
    held = {"bytes": proportional_bytes() - before, "digest": digest, "report": stream.report().lines()[0]}
    (folder / f"rank{rank}.json").write_text(json.dumps(held))
    distributed.barrier()
    distributed.destroy_process_group()


def sharing_rows(folder: Path, small: Path, formats: Sequence[str]) -> list[dict[str, str]]:
    """What two processes hold: with a copy of the streamed weights each, and with one for both."""
    rows = []
    for name, is_shared in product(formats, (False, True)):
        with tempfile.TemporaryDirectory() as meeting:
            multiprocessing_of_torch.start_processes(
                hold_on_a_rank,
                (folder, small, name, is_shared, f"file://{meeting}/rendezvous"),
                nprocs=NUM_PROCESSES,
                start_method="spawn",
            )
        held = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(NUM_PROCESSES)]
        assert held[0]["digest"] == held[1]["digest"], "the processes have other weights"
        assert ("shared by" in held[0]["report"]) == is_shared, held[0]["report"]
        sizes = [one["bytes"] for one in held]
        rows.append(
            {"model.quantize": name, "copies on the host": "1" if is_shared else str(NUM_PROCESSES)}
            | {f"process {rank}, MiB": mebibytes(size) for rank, size in enumerate(sizes)}
            | {"both, MiB": mebibytes(sum(sizes))}
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the files, measure, print both tables."""
    options = argument_parser(__doc__).parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as root:
        folders = {dtype: Path(root) / dtype for dtype in DTYPES}
        for dtype, folder in folders.items():
            write_model(folder, "transformer", options.blocks, options.width, getattr(torch, dtype))
        small = Path(root) / "small"
        write_model(small, "transformer", NUM_SLOTS + 1, 128, torch.float32)
        loading = rows_of(measure_all(folders, options.formats, measure_once, small))
        sharing = sharing_rows(folders["bfloat16"], small, options.formats)
    size = f"{options.blocks} streamed blocks of width {options.width}"
    print_table(f"Anonymous memory while a transformer with {size} loads.", loading)
    print_table(f"What {NUM_PROCESSES} processes hold of it, as PSS.", sharing)


if __name__ == "__main__":
    main()
