"""What a step takes with our LoRA layers and with peft's, which compute the same bits.

Memory is counted on torch's meta device at full size, under bf16 autocast as on CUDA, for a LoRA of rank 32
on the family's default layers and a batch of one, beside weights, LoRA and optimizer: between forward and
backward (kept), and the most in the step (peak). Time is that of forward and backward of narrower models with
a few blocks on the CPU, one thread. Both kinds of layers take turns on the same model; a ratio is ours over
peft's of the same round: the median, and the interval of 90 % of the medians of resampled rounds.

    python scripts/benchmarks/lora_layers.py [--model NAME ...] [--rounds 0]
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from families import HEADINGS
from family_inputs import COUNTED, CountedRelease
from family_subject import FamilySubject, family_of
from memory_tables import GIB, STEPS, counter_of
from meters import print_table, seconds_of
from peers import ratio_of
from peft.tuners.lora import Linear
from torch import Tensor

from diffsynth_lite.core.planning import StepBytes
from diffsynth_lite.lora.linear import LoraLinear

SHOWN = ("Qwen-Image", "Wan 2.1 T2V 14B", "FLUX.1 dev")
LAYERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "peft": lambda: patch.object(LoraLinear, "forward", Linear.forward),
    "ours": nullcontext,
}
PRECISIONS = ((torch.bfloat16, True), (torch.float32, True), (torch.bfloat16, False), (torch.float32, False))
"""Weights in, and whether under bf16 autocast."""


def memory_row(release: CountedRelease, name: str) -> dict[str, str]:
    """What a step holds with each kind of layers, where the strategy ``name`` happens to all blocks."""
    found: dict[str, StepBytes] = {}
    for kind, layers in LAYERS.items():
        with layers(), counter_of(release) as counter:
            found[kind] = counter.count(STEPS[name]).step
    peft, ours = found["peft"], found["ours"]
    return {
        "model": release.name,
        "recomputed": HEADINGS[name],
        "peft: kept, GiB": f"{peft.kept / GIB:.2f}",
        "peak": f"{peft.peak / GIB:.2f}",
        "ours: kept": f"{ours.kept / GIB:.2f}",
        "peak ": f"{ours.peak / GIB:.2f}",
        "ratio of peaks": f"{ours.peak / peft.peak:.3f}",
    }


def time_row(
    release: CountedRelease, dtype: torch.dtype, *, autocast: bool, num_rounds: int
) -> dict[str, str]:
    """How long a step takes with each kind of layers, and whether both give the same loss and gradients."""
    with family_of(release, release.small) as family:
        subject = FamilySubject(family, release, release.small_pixels, torch.device("cpu"), dtype)
        for weight in subject.trained():
            torch.nn.init.normal_(weight, std=0.02)
        times: dict[str, list[float]] = {kind: [] for kind in LAYERS}
        found: dict[str, list[Tensor]] = {}

        def take(kind: str) -> None:
            with LAYERS[kind]():
                found[kind] = step(subject, autocast)

        for number in range(num_rounds + 1):
            for kind in list(LAYERS) if number % 2 else reversed(LAYERS):
                times[kind].append(seconds_of(lambda kind=kind: take(kind), time.thread_time))
    is_same = all(torch.equal(one, other) for one, other in zip(*found.values(), strict=True))
    peft, ours = times["peft"][1:], times["ours"][1:]
    return {
        "model": release.name,
        "weights in": str(dtype).removeprefix("torch."),
        "autocast": "bf16" if autocast else "no",
        "peft, ms": f"{1000 * statistics.median(peft):.0f}",
        "ours over peft": ratio_of(ours, peft),
        "bits": "the same" if is_same else "DIFFERENT",
    }


def step(subject: FamilySubject, autocast: bool) -> list[Tensor]:
    """Forward and backward: the loss, and all gradients."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = subject.loss()
    subject.backward(loss)
    gradients = [weight.grad for weight in subject.trained() if weight.grad is not None]
    subject.model.zero_grad(set_to_none=True)
    return [loss.detach(), *gradients]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", action="append", choices=[release.name for release in COUNTED])
    parser.add_argument("--rounds", type=int, default=20, help="0: no times (default: %(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    releases = [release for release in COUNTED if release.name in (options.model or SHOWN)]
    held = [memory_row(one, name) for one in releases for name in ("none", "every block")]
    print_table("What a step holds.", held)
    if options.rounds:
        rows = [
            time_row(one, dtype, autocast=autocast, num_rounds=options.rounds)
            for one in releases
            for dtype, autocast in PRECISIONS
        ]
        print_table("How long it takes.", rows)


if __name__ == "__main__":
    main()
