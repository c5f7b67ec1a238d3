"""Time of training steps as predicted, beside the time that they take on this CPU, by settings.

What a step does is counted on torch's meta device, as for a plan. How fast one thread is, is measured: at
matrix products and attention of the model's sizes, at what reads and writes memory, at weights that are made
again, at copies. What each kernel costs beside that is found from steps with next to no tokens, by their
numbers of kernels: in forward, in a recompute, and where autograd calls them. In each round all of these are
measured once, and a step is taken under each of the settings, by the CPU time of the thread. Compared are
ratios to the first settings: the median of the rounds, with the interval of 90 % of the medians of resampled
rounds, and what the prediction is off by.

    python scripts/benchmarks/step_prediction.py [--model qwen wan] [--rounds 9]

The models are of the released ones' classes, with 8 blocks and 256 channels, random weights in float32, and a
LoRA on the family's default layers. Their attention is torch's flash attention for the CPU. What is allocated
should stay with the process, as a GPU's allocator keeps it: run with MALLOC_TRIM_THRESHOLD_=-1 and
MALLOC_MMAP_MAX_=0.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from family_inputs import COUNTED, CountedRelease
from family_subject import conditioning_of, family_of
from meters import print_table
from peers import ratio_of
from torch import Tensor, nn
from torch.nn import functional

from diffsynth_lite.core.gradient import (
    OFFLOAD,
    RECOMPUTE,
    BlockPolicy,
    BlockStrategy,
    GradientEngine,
    gradient_engine,
)
from diffsynth_lite.core.weights import Int8, Quantization
from diffsynth_lite.lora import add_adapter, find_target_layers
from diffsynth_lite.pipelines import Conditioning, ModelFamily
from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily
from diffsynth_lite.pipelines.base.quantized import quantizable_layers
from diffsynth_lite.releases.release import Pixels
from diffsynth_lite.training.planning.device_speed import DeviceSpeed, StepPart
from diffsynth_lite.training.planning.memory_count import MemoryCounter
from diffsynth_lite.training.planning.step import StepSettings
from diffsynth_lite.training.planning.step_time import StepTimer

CPU = torch.device("cpu")
RANK = 16
NUM_BLOCKS, NUM_HEADS, HEAD_WIDTH = 8, 2, 128
WIDTH = NUM_HEADS * HEAD_WIDTH
NUM_PROMPT_TOKENS = 512
BEYOND_CACHES = 64 * 2**20
"""Bytes."""
SHORTEST_SECONDS = 0.1
"""That are measured at once."""
PLAIN = StepSettings(
    mixed_precision="no",
    dtype=torch.float32,
    device_type="cpu",
    use_gradient_checkpointing=True,
    use_gradient_checkpointing_offload=True,
    policy=BlockPolicy(selected=BlockStrategy(recompute=False)),
)


def every(strategy: BlockStrategy = RECOMPUTE) -> StepSettings:
    """Settings under which this happens to all blocks."""
    return replace(PLAIN, policy=BlockPolicy(selected=strategy))


SETTINGS = {
    "none": PLAIN,
    "every block": every(),
    "every block, dead ops run": replace(every(), skip_dead_ops=False),
    "every block, save attention": every(BlockStrategy(save_attention="keep")),
    "first half": replace(PLAIN, policy=BlockPolicy(select="first_k", n=NUM_BLOCKS // 2, selected=RECOMPUTE)),
    "offload every block": every(OFFLOAD),
    "none, micro-batch of 2": replace(PLAIN, micro_batch_size=2),
    "none, int8": replace(PLAIN, quantize="int8"),
    "every block, int8": replace(every(), quantize="int8"),
}
TINY_FORWARD, TINY_STEP, TINY_AGAIN = "forward pass", "step", "step with recompute"
"""Those with next to no tokens."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A small model of a released one's class, and its input.

    Attributes:
        release: its name.
        pixels: of what it makes.
        num_prompt_tokens: that it is conditioned on.
        ffn_dim: width of its feed-forward layers, where it is a setting.
    """

    release: str
    pixels: Pixels
    num_prompt_tokens: int = NUM_PROMPT_TOKENS
    ffn_dim: int | None = None

    @property
    def counted(self) -> CountedRelease:
        """The release."""
        return next(release for release in COUNTED if release.name == self.release)

    @contextmanager
    def family(self) -> Iterator[ModelFamily]:
        """Bound to a folder of the model."""
        changes = {**dict.fromkeys(self.counted.depths, NUM_BLOCKS), "num_attention_heads": NUM_HEADS}
        if self.ffn_dim is not None:
            changes["ffn_dim"] = self.ffn_dim
        with family_of(self.counted, changes) as family:
            yield family

    def conditioning(self, family: ModelFamily) -> Conditioning:
        """Of one sample."""
        whole = conditioning_of(family, self.counted, self.pixels)
        return {
            name: value[: self.num_prompt_tokens] if len(value) == NUM_PROMPT_TOKENS else value
            for name, value in whole.items()
        }


SUBJECTS = {
    "qwen": Subject(release="Qwen-Image", pixels=(256, 256, 1)),
    "wan": Subject(release="Wan 2.1 T2V 14B", pixels=(224, 128, 17), ffn_dim=13824 * NUM_HEADS // 40),
}


class RealStep:
    """Optimizer steps of a model on the CPU, as the trainer takes them."""

    def __init__(self, family: DiffusersFamily, subject: Subject, settings: StepSettings) -> None:
        torch.manual_seed(0)
        (component,) = family.trained
        model = family.component_class(component).from_config(family.folder.component_config(component))
        layers = targets(family, model)
        self._model = model.requires_grad_(False)
        if settings.quantize == "int8":
            quantize(self._model, quantizable_layers(model, family.block_lists))
        add_adapter(self._model, layers, rank=RANK, alpha=1, dropout=0, seed=0)
        self._model.train()
        self._trained = [weight for weight in self._model.parameters() if weight.requires_grad]
        self._optimizer = torch.optim.AdamW(self._trained, fused=True)
        self._family, size = family, settings.micro_batch_size
        self._engine = GradientEngine(
            policy=settings.policy,
            skip_dead_ops=settings.skip_dead_ops,
            use_gradient_checkpointing=settings.use_gradient_checkpointing,
            use_gradient_checkpointing_offload=settings.use_gradient_checkpointing_offload,
        )
        self._noisy = torch.randn(size, *family.latents_shape(*subject.pixels))
        self._sigma = torch.full((size,), 0.5)
        self._conditioning = [subject.conditioning(family)] * size

    def loss(self) -> Tensor:
        """The forward pass."""
        with gradient_engine(self._engine):
            estimate = self._family.predict(self._model, self._noisy, self._sigma, self._conditioning)
        return estimate.float().square().mean()

    def take(self) -> None:
        """One of them."""
        self.loss().backward()
        nn.utils.clip_grad_norm_(self._trained, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()


def quantize(model: nn.Module, names: Sequence[str]) -> None:
    """Keep these layers of a model in int8."""
    weights = {name: model.get_submodule(name).weight for name in names}
    Quantization(format=Int8(), layers=tuple(names), device=CPU).apply_to(model)
    for name, weight in weights.items():
        model.get_submodule(name).write(weight, 0)


def targets(family: ModelFamily, model: nn.Module) -> list[str]:
    """The layers with a LoRA."""
    return find_target_layers(
        model, family.default_target_modules, unused_modules=family.unused_modules(model)
    )


@dataclass(frozen=True)
class Probe:
    """What is timed to know a speed.

    Attributes:
        amount: operations or bytes of a run.
    """

    amount: float
    run: Callable[[], object]


def probes(num_tokens: int) -> dict[str, Probe]:
    """What shows the speeds of this CPU at the sizes of a model; bytes by their names in ``DeviceSpeed``.

    As in a step, what is read was not read just before, and what is written is kept.
    """
    count = -(-BEYOND_CACHES // (num_tokens * WIDTH * torch.float32.itemsize))
    rows = [torch.randn(num_tokens, WIDTH) for _ in range(count)]
    wide, up, square = (
        torch.randn(num_tokens, 4 * WIDTH),
        torch.randn(4 * WIDTH, WIDTH),
        torch.randn(WIDTH, WIDTH),
    )
    heads = [torch.randn(1, NUM_HEADS, num_tokens, HEAD_WIDTH).requires_grad_() for _ in range(3)]
    attended, gradient = functional.scaled_dot_product_attention(*heads), torch.randn_like(heads[0])
    weights = [torch.ones(4 * WIDTH, WIDTH, dtype=torch.int8) for _ in range(count)]
    scales = torch.ones(4 * WIDTH, 1)
    pairs = 2 * num_tokens**2 * WIDTH

    def elementwise(one: Tensor) -> tuple[Tensor, ...]:
        return one * one, one + one, functional.gelu(one), functional.layer_norm(one, (WIDTH,))

    return {
        "product": Probe(
            count * 2 * num_tokens * (4 + 1 + 4) * WIDTH**2,
            lambda: [(functional.linear(one, up), one @ square, wide @ up) for one in rows],
        ),
        "attention": Probe(2 * pairs, lambda: functional.scaled_dot_product_attention(*heads)),
        "attention backward": Probe(
            5 * pairs, lambda: torch.autograd.grad(attended, heads, gradient, retain_graph=True)
        ),
        "memory_bytes": Probe(
            count * (2 + 2 + 2 + 2) * rows[0].nbytes, lambda: [elementwise(one) for one in rows]
        ),
        "dequantised_bytes": Probe(
            count * (weights[0].nbytes + scales.nbytes + up.nbytes),
            lambda: [Int8().dense(one, scales, one.shape, torch.float32) for one in weights],
        ),
        "to_host_bytes": Probe(
            count * rows[0].nbytes, lambda: [torch.empty_like(one).copy_(one) for one in rows]
        ),
    }


@dataclass(frozen=True, kw_only=True)
class Measured:
    """CPU seconds of each round.

    Attributes:
        probes: by name.
        steps: of steps by settings.
        tiny: of what has next to no tokens.
    """

    probes: Mapping[str, Sequence[float]]
    steps: Mapping[str, Sequence[float]]
    tiny: Mapping[str, Sequence[float]]


def measure(
    family: ModelFamily, subject: Subject, tiny: Subject, tried: Mapping[str, Probe], num_rounds: int
) -> Measured:
    """Measure everything once a round, each round beginning with another one."""
    steps = {name: RealStep(family, subject, settings) for name, settings in SETTINGS.items()}
    calls = {**{name: probe.run for name, probe in tried.items()}, **{n: s.take for n, s in steps.items()}}
    plain, again = (RealStep(family, tiny, settings) for settings in (PLAIN, every()))
    calls |= {TINY_FORWARD: plain.loss, TINY_STEP: plain.take, TINY_AGAIN: again.take}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for number in range(num_rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            seconds[name].append(seconds_of(calls[name]))
    # The first round makes memory the process's own.
    seconds = {name: values[1:] for name, values in seconds.items()}
    return Measured(
        probes={name: seconds[name] for name in tried},
        steps={name: seconds[name] for name in SETTINGS},
        tiny={name: seconds[name] for name in (TINY_FORWARD, TINY_STEP, TINY_AGAIN)},
    )


def seconds_of(run: Callable[[], object]) -> float:
    """CPU seconds of this thread for one run; what takes next to nothing is run again."""
    num_runs, began = 0, time.thread_time()
    while num_runs == 0 or time.thread_time() - began < SHORTEST_SECONDS:
        run()
        num_runs += 1
    return (time.thread_time() - began) / num_runs


def speed_of(measured: Measured, tried: Mapping[str, Probe], tiny: MemoryCounter) -> DeviceSpeed:
    """The speed of this CPU.

    Args:
        tiny: counts steps with next to no tokens.
    """
    speeds = {name: tried[name].amount / statistics.median(times) for name, times in measured.probes.items()}
    product = speeds.pop("product")
    speed = DeviceSpeed(
        product_flops={torch.float32: product},
        attention_ratio=speeds.pop("attention") / product,
        attention_backward_ratio=speeds.pop("attention backward") / product,
        # Copies back are no other copies.
        to_device_bytes=speeds["to_host_bytes"],
        launch_seconds=dict.fromkeys(PARTS, 0.0),
        is_asynchronous=False,
        **speeds,
    )
    forward, step, again = (statistics.median(measured.tiny[name]) for name in measured.tiny)
    timer = StepTimer(tiny, speed)
    running, recomputing = timer.seconds(PLAIN), timer.seconds(every()) - timer.seconds(PLAIN)
    # What runs takes its part of both passes.
    part = 1 - running / step
    left = {
        "forward": part * forward,
        "backward": part * (step - forward),
        "recompute": again - step - recomputing,
    }
    return replace(speed, launch_seconds={name: left[name] / num_kernels(tiny, name) for name in PARTS})


PARTS: tuple[StepPart, ...] = ("forward", "recompute", "backward")


def num_kernels(counter: MemoryCounter, part: StepPart) -> float:
    """Kernels of a part of a step in which all blocks are recomputed."""
    nothing_but = DeviceSpeed(
        product_flops={torch.float32: math.inf},
        attention_ratio=1.0,
        attention_backward_ratio=1.0,
        memory_bytes=math.inf,
        dequantised_bytes=math.inf,
        to_host_bytes=math.inf,
        to_device_bytes=math.inf,
        launch_seconds={one: float(one == part) for one in PARTS},
        is_asynchronous=False,
    )
    return StepTimer(counter, nothing_but).seconds(every())


def compare(subject: Subject, num_rounds: int) -> None:
    """Print the table of a model."""
    tiny = replace(subject, pixels=(32, 32, 1), num_prompt_tokens=4)
    with subject.family() as family:
        num_tokens = family.num_tokens(family.latents_shape(*subject.pixels)) + NUM_PROMPT_TOKENS
        tried = probes(num_tokens)
        measured = measure(family, subject, tiny, tried, num_rounds)
        speed = speed_of(measured, tried, counter_of(family, tiny))
        timer = StepTimer(counter_of(family, subject), speed)
        predicted = {name: timer.seconds(settings) for name, settings in SETTINGS.items()}
    print_table(
        f"{subject.release}, {NUM_BLOCKS} blocks, {WIDTH} channels, {num_tokens} tokens with the prompt's. "
        f"{in_words(speed)}",
        [row(name, predicted, measured.steps) for name in SETTINGS],
    )


def counter_of(family: ModelFamily, subject: Subject) -> MemoryCounter:
    """Counts steps of a model."""
    return MemoryCounter(
        family,
        targets(family, family.empty_transformer()),
        rank=RANK,
        latents_shape=family.latents_shape(*subject.pixels),
        conditioning=subject.conditioning(family),
    )


def in_words(speed: DeviceSpeed) -> str:
    """What was measured of this CPU."""
    product = speed.product_flops[torch.float32]
    flops = (product, product * speed.attention_ratio, product * speed.attention_backward_ratio)
    sizes = (speed.memory_bytes, speed.dequantised_bytes, speed.to_host_bytes)
    return (
        f"GFLOPS of products, attention and its backward pass: {in_billions(flops, 0)}; GB/s of other "
        f"kernels, of weights made again and of copies: {in_billions(sizes, 1)}; microseconds that a kernel "
        "takes beside that in forward, recompute and backward: "
        + ", ".join(f"{1e6 * speed.launch_seconds[name]:.0f}" for name in PARTS)
    )


def in_billions(numbers: Sequence[float], num_digits: int) -> str:
    """Numbers in billions, with so many decimals."""
    return ", ".join(f"{number / 1e9:.{num_digits}f}" for number in numbers)


def row(name: str, predicted: Mapping[str, float], times: Mapping[str, Sequence[float]]) -> dict[str, str]:
    """Of one of the settings: by prediction, by measurement, and how far apart."""
    base, ratio = times["none"], predicted[name] / predicted["none"]
    measured = statistics.median(own / other for own, other in zip(times[name], base, strict=True))
    return {
        "blocks": name,
        "predicted, s": f"{predicted[name]:.3f}",
        "measured, s": f"{statistics.median(times[name]):.3f}",
        "ratio predicted": f"{ratio:.3f}",
        "ratio measured": ratio_of(times[name], base),
        "off by": f"{100 * (ratio / measured - 1):+.1f} %",
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, predict, and print a table of each model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--rounds", type=int, default=9, help="measured ones (default: %(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in options.model:
        compare(SUBJECTS[name], options.rounds)


if __name__ == "__main__":
    main()
