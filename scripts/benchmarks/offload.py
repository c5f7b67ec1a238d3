"""What offloading the inputs of blocks saves and costs, next to plain checkpointing and torch's save_on_cpu.

Memory is measured between forward and backward for two or more numbers of blocks: with offloading that on the
device does not grow. Time is measured in turns; the stall is what a block takes longer than with plain
checkpointing. On CUDA torch's profiler shows how much of the copying ran next to kernels. On cpu and meta
every tensor is counted by its size, and the host copies separately; meta computes nothing and has no times.
"""

import argparse
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from meters import EngineMethod, Figures, Meter, Method, cells, measure, meter_for, print_table, take_step
from subjects import Subject, add_arguments, build_subject, size_of
from torch import Tensor
from torch.autograd import DeviceType
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from diffsynth_lite.core.gradient import OFFLOAD, RECOMPUTE, BlockPolicy
from diffsynth_lite.core.planning import LiveBytes

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Span = tuple[float, float]

REFERENCE = "checkpoint"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all rows and print the table."""
    options = parse_arguments(arguments)
    size = size_of(options)
    counts = sorted(options.num_blocks or [size.num_blocks // 2, size.num_blocks])
    subject = build_subject(options, replace(size, num_blocks=counts[-1]))
    figures = measured(subject, counts, num_warmup=options.warmup, num_rounds=options.rounds)
    print_table(
        f"{options.model} on {options.device}, {replace(size, num_blocks=counts[-1])}\n"
        "Memory in MiB; under a number of blocks: on the device between forward and backward.",
        table_of(figures),
    )


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_arguments(parser)
    parser.add_argument(
        "--num-blocks", type=int, nargs="+", help="default: half of those of the model and all, on cpu 4 8"
    )
    options = parser.parse_args(arguments)
    if options.num_blocks is not None and len(set(options.num_blocks)) < 2:
        parser.error(f"--num-blocks {options.num_blocks}: two different numbers are needed")
    return options


def measured(
    subject: Subject, counts: Sequence[int], *, num_warmup: int, num_rounds: int
) -> dict[str, Figures]:
    """The figures of every row, by its name; as ``measure``, and on CUDA what copies overlap."""
    meter = meter_for(subject.device)
    methods = rows(subject, meter)
    figures = measure(subject, methods, meter, counts, num_warmup=num_warmup, num_rounds=num_rounds)
    if subject.device.type == "cuda":
        for method in methods:
            overlap = measure_overlap(subject, method)
            figures[method.name] = replace(figures[method.name], overlap=overlap)
    return figures


def rows(subject: Subject, meter: Meter) -> list[Method]:
    """The ways to run the blocks that are compared."""
    return [
        EngineMethod(REFERENCE, BlockPolicy(selected=RECOMPUTE), subject, meter),
        EngineMethod("offload", BlockPolicy(selected=OFFLOAD), subject, meter),
        SaveOnCpuMethod("save_on_cpu, keywords", as_keywords, meter),
        SaveOnCpuMethod("save_on_cpu, positions", as_positions, meter),
    ]


class SaveOnCpuMethod:
    """Torch's ``save_on_cpu`` around its ``checkpoint``, for every block.

    Args:
        name: of the row.
        arrange: how a block is called: its arguments in other places.
        meter: which must not count the host memory.
    """

    def __init__(
        self, name: str, arrange: Callable[[torch.nn.Module, Arguments], Arguments], meter: Meter
    ) -> None:
        self.name, self._arrange, self._meter = name, arrange, meter
        self._host = LiveBytes()

    def loss(self, subject: Subject) -> Tensor:
        torch_hooks = save_on_cpu(pin_memory=True)

        def pack(tensor: Tensor) -> Any:
            # On meta the copy must be there too; elsewhere torch decides where it is.
            with torch.device("meta" if tensor.device.type == "meta" else "cpu"):
                device, packed = torch_hooks.pack_hook(tensor)
            self._host.add(packed)
            self._meter.ignore(packed)
            return device, packed

        def run(_index: int, block: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = self._arrange(block, (args, kwargs))
            with saved_tensors_hooks(pack, torch_hooks.unpack_hook):
                return checkpoint(block, *args, use_reentrant=False, **kwargs)

        return subject.loss(run)

    def host_bytes(self) -> int:
        return self._host.num_bytes


def as_keywords(block: torch.nn.Module, call: Arguments) -> Arguments:
    """The call with every argument by its name."""
    args, kwargs = call
    return (), inspect.signature(block.forward).bind(*args, **kwargs).arguments


def as_positions(block: torch.nn.Module, call: Arguments) -> Arguments:
    """The call with every argument in its position."""
    args, kwargs = call
    bound = inspect.signature(block.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    return tuple(bound.arguments.values()), {}


def measure_overlap(subject: Subject, method: Method) -> float | None:
    """Share of the time of copies between host and device in which a kernel ran; None without copies."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        take_step(subject, method)
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    copies = [event for event in events if "DtoH" in event.name or "HtoD" in event.name]
    kernels = [event for event in events if not event.name.startswith(("Memcpy", "Memset"))]
    return covered_ratio(
        [(event.time_range.start, event.time_range.end) for event in copies],
        [(event.time_range.start, event.time_range.end) for event in kernels],
    )


def covered_ratio(spans: Sequence[Span], covers: Sequence[Span]) -> float | None:
    """Share of the length of ``spans`` that lies in ``covers``; None if there is no length.

    Args:
        spans: (start, end) of each.
        covers: (start, end) of each; they may overlap each other.
    """
    total = sum(end - start for start, end in spans)
    if not total:
        return None
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(covers):
        start, reached = max(start, reached), max(end, reached)
        covered += sum(max(0.0, min(end, last) - max(start, first)) for first, last in spans)
    return covered / total


def table_of(figures: dict[str, Figures]) -> list[dict[str, str]]:
    """The table; where steps were timed, with what a block takes longer than with plain checkpointing."""
    reference = figures[REFERENCE].seconds
    table = cells("blocks run by", figures)
    for line, row in zip(table, figures.values(), strict=True):
        if row.seconds and reference:
            stall = (row.seconds - reference) / max(row.memory)
            line["stall, ms a block"] = f"{stall * 1000:.2f}"
            line["copies next to kernels"] = "-" if row.overlap is None else f"{row.overlap:.1%}"
    return table


if __name__ == "__main__":
    main()
