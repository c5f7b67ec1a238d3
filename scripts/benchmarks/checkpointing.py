"""Speed and memory of a training step by what happens to its blocks, all rows in one run.

The model is LTX-Video 2B, on cpu a smaller one of its class. The rows none, every block, every 2nd and
every 4th are those of diffusers pull request 10611, whose subject (512 x 768, 81 frames, every weight trains)
is the default on CUDA and meta; ``save_on_cpu`` is torch's, around its own ``checkpoint``. Memory is what the
step adds to weights and input: between forward and backward, for all blocks and for four fewer, and at its
peak. On CUDA torch counts it, and its profiler shows how much of the copying ran next to kernels. On cpu and
meta every tensor is counted by its size, and what is moved to the host is counted separately. Steps are timed
in turns, with the time as a ratio to the first row; the stall is what a block takes longer than where every
block is recomputed. Meta computes nothing, and has no times.
"""

import argparse
import inspect
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from diffusers import LTXVideoTransformer3DModel
from meters import (
    STRATEGIES,
    EngineMethod,
    Figures,
    Meter,
    Method,
    SeveralBlocks,
    cells,
    measure,
    mebibytes,
    meter_for,
    print_table,
    take_step,
)
from peft import LoraConfig
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from diffsynth_lite.core.gradient import (
    KEEP,
    OFFLOAD,
    RECOMPUTE,
    BlockPolicy,
    BlockStrategy,
    blocks_of,
    intercept_blocks,
)
from diffsynth_lite.core.planning.meters import LiveBytes
from diffsynth_lite.pipelines.ltx_video import LTXVideo

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Span = tuple[float, float]

PERIOD = 4
"""Blocks after which every selection repeats itself."""
REFERENCE = "every block"
"""Row whose time the stall of the others is over."""
BLOCKS = "transformer_blocks"
FULL = {"num_blocks": 28, "heads": 32, "height": 512, "width": 768, "frames": 81}
"""LTX-Video 2B, whose config is the default of its class."""
SMALL = {"num_blocks": 8, "heads": 4, "height": 256, "width": 384, "frames": 41}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all rows and print the table."""
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    subject = Subject(options)
    counts = [options.num_blocks - PERIOD, options.num_blocks]
    figures = measured(subject, counts, num_warmup=options.warmup, num_rounds=options.rounds)
    trained = sum(weight.numel() for weight in subject.trained())
    sizes = ", ".join(f"{name} {getattr(options, name)}" for name in FULL)
    print_table(
        f"LTX-Video on {options.device}, {sizes}\n{trained:,} weights train; all weights take "
        f"{mebibytes(subject.weight_bytes)} MiB, which are not in the table. Memory in MiB.",
        table_of(figures),
    )


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    devices, dtypes = ("cpu", "cuda", "meta"), ("float32", "bfloat16")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=devices, default=device, help="default: cuda where there is one")
    parser.add_argument("--dtype", choices=dtypes, help="of the model (default: bfloat16, on cpu float32)")
    parser.add_argument("--train", choices=("full", "lora"), default="full", help="default: %(default)s")
    for name, size in FULL.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, help=f"default: {size}, on cpu {SMALL[name]}")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the measured ones")
    parser.add_argument("--rounds", type=int, default=5, help="measured steps of each row")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")
    options = parser.parse_args(arguments)
    is_cpu = options.device == "cpu"
    options.dtype = options.dtype or ("float32" if is_cpu else "bfloat16")
    for name, size in (SMALL if is_cpu else FULL).items():
        setattr(options, name, getattr(options, name) or size)
    if options.num_blocks < 2 * PERIOD:
        parser.error(f"--num-blocks {options.num_blocks}: at least {2 * PERIOD} are needed")
    return options


class Subject(SeveralBlocks):
    """The model with an input of batch one, as the options have it; its blocks can be fewer."""

    unused_matmuls = LTXVideo.unused_matmuls

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        device, dtype = torch.device(options.device), getattr(torch, options.dtype)
        frames, height, width = (options.frames - 1) // 8 + 1, options.height // 32, options.width // 32
        with device:
            model = LTXVideoTransformer3DModel(
                num_layers=options.num_blocks,
                num_attention_heads=options.heads,
                cross_attention_dim=64 * options.heads,
            )
            self._inputs = {
                "hidden_states": torch.randn(1, frames * height * width, 128, dtype=dtype),
                "encoder_hidden_states": torch.randn(1, 128, 4096, dtype=dtype),
                "encoder_attention_mask": torch.ones(1, 128, dtype=dtype),
                "timestep": torch.full((1,), 500.0),
                "num_frames": frames,
                "height": height,
                "width": width,
            }
        targets = ["to_q", "to_k", "to_v", "to_out.0"]
        lora = LoraConfig(r=16, target_modules=targets) if options.train == "lora" else None
        super().__init__(model, device, dtype, lora)
        self._blocks = blocks_of(self.model, [BLOCKS])

    @property
    def num_blocks(self) -> int:
        return len(self.model.get_submodule(BLOCKS))

    def use_blocks(self, num_blocks: int) -> None:
        setattr(self.model, BLOCKS, nn.ModuleList(self._blocks[:num_blocks]))

    def loss(self, run: Callable[..., Any]) -> Tensor:
        with self.attention(), intercept_blocks(self.model, run):
            return self.loss_of_model()

    def loss_of_model(self) -> Tensor:
        """A forward pass of the model as it is."""
        output = self.model(**self._inputs, return_dict=False)[0]
        return output.float().square().mean()


def measured(
    subject: Subject, counts: Sequence[int], *, num_warmup: int, num_rounds: int
) -> dict[str, Figures]:
    """The figures of every row, by its name; as ``measure``, and on CUDA what copies overlap."""
    meter = meter_for(subject.device)
    methods = rows(subject, meter)
    figures = measure(subject, methods, meter, counts, num_warmup=num_warmup, num_rounds=num_rounds)
    if subject.device.type == "cuda":
        for method in methods:
            if figures[method.name].memory:
                overlap = measure_overlap(partial(take_step, subject, method))
                figures[method.name] = replace(figures[method.name], overlap=overlap)
    return figures


def rows(subject: Subject, meter: Meter) -> list[Method]:
    """The ways to run the blocks that are compared; the first is the measure of the others."""

    def row(name: str, strategy: BlockStrategy, every: int = 1, **options: bool) -> EngineMethod:
        policy = BlockPolicy(select="every_n", n=every, selected=strategy)
        return EngineMethod(name, lambda _: policy, subject, meter, **options)

    def first_half(name: str, strategy: BlockStrategy) -> EngineMethod:
        return EngineMethod(
            name,
            lambda num_blocks: BlockPolicy(select="first_k", n=num_blocks // 2, selected=strategy),
            subject,
            meter,
        )

    methods: list[Method] = [
        row("none", KEEP),
        row(REFERENCE, RECOMPUTE),
        row("every 2nd", RECOMPUTE, 2),
        row("every 4th", RECOMPUTE, 4),
        first_half("first half", RECOMPUTE),
        row("offload every block", OFFLOAD),
        first_half("offload first half", OFFLOAD),
        SaveOnCpuMethod("save_on_cpu, keywords", as_keywords, meter),
        SaveOnCpuMethod("save_on_cpu, positions", as_positions, meter),
    ]
    named = {method.name for method in methods}
    methods += [row(name, strategy) for name, strategy in STRATEGIES.items() if name not in named]
    if not all(weight.requires_grad for weight in subject.model.parameters()):
        methods.insert(2, row("every block, dead ops run", RECOMPUTE, skip_dead_ops=False))
    return methods


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


def measure_overlap(take: Callable[[], object]) -> float | None:
    """Share of the time of copies between host and device in which a kernel ran; None without copies.

    Args:
        take: takes a step.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        take()
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
    joined: list[Span] = []
    for start, end in sorted(covers):
        before = joined.pop() if joined and start <= joined[-1][1] else (start, end)
        joined.append((before[0], max(before[1], end)))
    starts, covered = [start for start, _ in joined], 0.0
    for first, last in spans:
        near = joined[max(0, bisect(starts, first) - 1) : bisect(starts, last)]
        covered += sum(max(0.0, min(end, last) - max(start, first)) for start, end in near)
    return covered / total


def table_of(figures: dict[str, Figures]) -> list[dict[str, str]]:
    """The table; where steps were timed, with what a block takes longer than where all are recomputed."""
    reference = figures[REFERENCE].seconds
    table = cells("blocks", figures)
    for line, row in zip(table, figures.values(), strict=True):
        if row.seconds and reference:
            stall = (row.seconds - reference) / max(row.memory)
            line["stall, ms a block"] = f"{stall * 1000:.2f}"
            line["copies next to kernels"] = "-" if row.overlap is None else f"{row.overlap:.1%}"
        elif reference:
            line |= {"stall, ms a block": "-", "copies next to kernels": "-"}
    return table


if __name__ == "__main__":
    main()
