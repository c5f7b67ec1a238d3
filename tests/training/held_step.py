"""What a training step on the CPU really holds, for comparison with a count."""

import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from diffsynth_lite.core.gradient import GradientEngine, blocks_in, gradient_engine
from diffsynth_lite.core.planning.counts import StepCost, count_step
from diffsynth_lite.core.planning.meters import CountingMeter, HostBackend
from diffsynth_lite.pipelines import Conditioning, ModelFamily
from diffsynth_lite.training.planning.step import StepSettings

CPU = torch.device("cpu")


def step_on_cpu(
    family: ModelFamily,
    model: torch.nn.Module,
    settings: StepSettings,
    *,
    latents_shape: Sequence[int],
    conditioning: Conditioning,
    audio_latents_shape: Sequence[int] | None = None,
    own_audio_level: bool = False,
) -> StepCost:
    """What a second step holds or, where the settings accumulate, a second micro-batch.

    Args:
        model: in training mode, with a LoRA, and with the autocast and the format of the settings.
        latents_shape: of one sample.
        conditioning: of one sample.
        audio_latents_shape: of its audio; None without.
        own_audio_level: whether that is at a noise level of its own.
    """
    size, meter = settings.micro_batch_size, CountingMeter()
    noisy, sigma = torch.zeros(size, *latents_shape), torch.full((size,), 0.5)
    engine = GradientEngine(
        min_bytes=settings.min_bytes,
        host_bytes=sys.maxsize,
        backend=HostBackend(CPU, meter),
        policy=settings.policy,
        use_gradient_checkpointing=settings.use_gradient_checkpointing,
        use_gradient_checkpointing_offload=settings.use_gradient_checkpointing_offload,
    )

    conditionings = [conditioning] * size
    audio = None if audio_latents_shape is None else torch.zeros(size, *audio_latents_shape)
    audio_sigma = torch.full((size,), 0.5) if own_audio_level else None

    def loss() -> torch.Tensor:
        with gradient_engine(engine):
            if audio is None:
                return family.predict(model, noisy, sigma, conditionings).float().square().mean()
            parts = family.predict_with_audio(
                model, noisy, audio, sigma, conditionings, audio_sigma=audio_sigma
            )
            return torch.stack([part.float().square().mean() for part in parts]).sum()

    with meter:
        loss().backward()
        model.zero_grad()
    lasting = meter.num_bytes
    if settings.accumulates:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    blocks = blocks_in(family.parts_of(model)[family.trained[0]], family.block_lists)
    held = count_step(loss, torch.Tensor.backward, blocks, meter, engine).stretched()
    return replace(held, kept=held.kept + lasting, peak=held.peak + lasting)


def assert_same_cost(counted: StepCost, held: StepCost) -> None:
    """Memory is the same to the byte, and so are operations; bytes that are read and written nearly.

    On meta some operators are split: up to 3.3 % of the bytes of a tiny model's forward pass.
    """
    assert (counted.kept, counted.peak, counted.host) == (held.kept, held.peak, held.host)
    for one, other in ((counted.forward, held.forward), (counted.backward, held.backward)):
        assert (one.flops, one.attention_flops) == (other.flops, other.attention_flops)
        assert one.num_bytes == pytest.approx(other.num_bytes, rel=0.05)
