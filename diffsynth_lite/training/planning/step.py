"""This file takes a training step on torch's meta device, as a device would under given settings."""

import sys
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Literal

import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor, nn

from diffsynth_lite.core.gradient import BlockPolicy, GradientEngine, blocks_in, gradient_engine
from diffsynth_lite.core.planning.kernels import (
    ON_ALL_DEVICES,
    ON_CUDA,
    CudaAutocast,
    FusedKernels,
    backward_in_scope,
)
from diffsynth_lite.core.planning.meters import CountingMeter, HostBackend
from diffsynth_lite.core.transfer.backends import smallest_worth_moving
from diffsynth_lite.pipelines import Conditioning, ModelFamily, WithAudio

_META = torch.device("meta")


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """The settings that decide how much memory a step of a model takes, by their names.

    Attributes:
        has_anchors: whether each pass has half as many samples on top, the anchors of a slider.
        accumulates: whether a step has several micro-batches, whose gradients are added up.
        compiles: whether blocks are compiled, which is not counted: they show no attention to save.
        num_shards: processes over which the frozen weights are sharded.
        saves_attention: whether the result of attention can be saved: a ring computes it part by part,
            and kernels that are not torch's are not seen.
        device_type: kernels and autocast of CUDA and the CPU are not the same.
    """

    micro_batch_size: int = 1
    has_anchors: bool = False
    accumulates: bool = False
    has_average: bool = False
    compiles: bool = False
    mixed_precision: Literal["no", "bf16"] = "bf16"
    use_gradient_checkpointing: bool = True
    use_gradient_checkpointing_offload: bool = False
    policy: BlockPolicy = BlockPolicy()  # noqa: RUF009 (frozen)
    resident_blocks: int = 1
    prefetched_blocks: int = 1
    skip_dead_ops: bool = True
    min_bytes: int | None = None
    dtype: torch.dtype = torch.bfloat16
    quantize: Literal["none", "int8", "int8_convrot", "nf4"] = "none"
    quantize_skip: tuple[str, ...] = ()
    stream_blocks: int | Literal["all"] = 0
    stream_slots: int = 2
    num_shards: int = 1
    saves_attention: bool = True
    device_type: Literal["cuda", "cpu"] = "cuda"

    @property
    def num_samples(self) -> int:
        """Samples of a pass through the model."""
        return self.micro_batch_size + self.has_anchors * -(-self.micro_batch_size // 2)

    @property
    def smallest_moved(self) -> int:
        """Bytes of the smallest tensor that is offloaded or streamed."""
        return smallest_worth_moving(torch.device(self.device_type), self.min_bytes)

    @property
    def itemsize(self) -> int:
        """Bytes of a number that blocks compute with."""
        return 2 if self.mixed_precision == "bf16" else self.dtype.itemsize

    def in_effect(self) -> "StepSettings":
        """The same for all settings under which activations are: those with the same strategies."""
        selected, others = (
            strategy.under(self.use_gradient_checkpointing, self.use_gradient_checkpointing_offload)
            for strategy in (self.policy.selected, self.policy.others)
        )
        policy = BlockPolicy() if selected == others else self.policy
        return replace(
            self,
            use_gradient_checkpointing=selected.recompute or others.recompute,
            use_gradient_checkpointing_offload=selected.offload or others.offload,
            policy=replace(policy, selected=selected, others=others),
            # Neither the place of the weights nor an average changes activations.
            stream_blocks=0,
            stream_slots=2,
            num_shards=1,
            saves_attention=True,
            has_average=False,
        )

    @property
    def offloads(self) -> bool:
        """Whether anything that blocks keep goes to host memory."""
        applied = self.in_effect().policy
        return any(one.offload or one.save_attention == "park" for one in (applied.selected, applied.others))

    def recomputed_blocks(self, num_blocks: int) -> tuple[int, ...]:
        """The places of the blocks that run again in the backward pass."""
        policy = self.in_effect().policy
        return tuple(place for place in range(num_blocks) if policy.strategy(place, num_blocks).recompute)


@dataclass(frozen=True)
class Sample:
    """The model's inputs for one sample: the shapes of its latents, and its conditioning."""

    latents_shape: tuple[int, ...]
    conditioning: Conditioning
    audio_latents_shape: tuple[int, ...] | None = None
    own_audio_level: bool = False


@dataclass(frozen=True)
class MetaModel:
    """A model on meta with a few blocks and its LoRA, as a run of a precision has it.

    Attributes:
        lasting: bytes that it keeps after its first step, such as rotary tables.
    """

    model: nn.Module
    autocast: CudaAutocast | None
    lasting: int = 0

    @classmethod
    def of(cls, model: nn.Module, precision: str, device_type: str) -> "MetaModel":
        """The model under a precision, ready to train."""
        for parameter in model.parameters():
            parameter.data = parameter.data.to(_META)
        autocast = None
        if precision == "bf16":
            autocast = CudaAutocast() if device_type == "cuda" else CudaAutocast.of_the_cpu()
        if autocast:  # as ``accelerator.prepare`` does: in the forward pass, and its result in fp32
            forward = autocast.forward()(model.forward)
            vars(model)["forward"] = convert_outputs_to_fp32(forward)
        return cls(model.train(), autocast)


class MetaStep:
    """Forward and backward of a model on meta, as on a device and under the run's precision.

    Attributes:
        blocks: that its forward pass calls, in call order.
    """

    def __init__(
        self,
        model: MetaModel,
        family: ModelFamily,
        sample: Sample,
        settings: StepSettings,
        meter: CountingMeter,
    ) -> None:
        self.model, self.autocast = model.model, model.autocast
        self.blocks = blocks_in(family.parts_of(self.model)[family.trained[0]], family.block_lists)
        self.engine = GradientEngine(
            min_bytes=settings.smallest_moved,
            # Nothing is allocated, so that no memory of this machine limits it.
            host_bytes=sys.maxsize,
            resident_blocks=settings.resident_blocks,
            prefetched_blocks=settings.prefetched_blocks,
            backend=HostBackend(_META, meter),
            policy=settings.policy,
            skip_dead_ops=settings.skip_dead_ops,
            use_gradient_checkpointing=settings.use_gradient_checkpointing,
            use_gradient_checkpointing_offload=settings.use_gradient_checkpointing_offload,
        )
        self._kernels = FusedKernels(ON_CUDA if settings.device_type == "cuda" else ON_ALL_DEVICES)
        self._family, size = family, settings.num_samples
        self._conditioning = [sample.conditioning] * size
        self._noisy = torch.empty(size, *sample.latents_shape, device=_META)
        shape = sample.audio_latents_shape
        self._noisy_audio = None if shape is None else torch.empty(size, *shape, device=_META)
        self._sigma = torch.full((size,), 0.5, device=_META)
        self._audio_sigma = torch.full((size,), 0.5, device=_META) if sample.own_audio_level else None

    def warm_up(self, needed: Collection[nn.Module] | None) -> None:
        """Bring the engine into its state after a first step, which differs from later ones.

        Args:
            needed: layers whose products a recompute of these blocks needs; None takes a whole step for them.
        """
        loss = self.forward()  # shows which tensors blocks share
        if needed is None:
            self.backward(loss)
            self.model.zero_grad()
        else:
            self.engine.needed_matmuls.update(needed)

    def forward(self) -> Tensor:
        """The loss."""
        with self._kernels, gradient_engine(self.engine):
            if self._noisy_audio is None:
                estimate = self._family.predict(self.model, self._noisy, self._sigma, self._conditioning)
                return estimate.float().square().mean()
            assert isinstance(self._family, WithAudio), "the audio of no other is learned"
            own = {} if self._audio_sigma is None else {"audio_sigma": self._audio_sigma}
            parts = self._family.predict_with_audio(
                self.model, self._noisy, self._noisy_audio, self._sigma, self._conditioning, **own
            )
            return torch.stack([part.float().square().mean() for part in parts]).sum()

    def backward(self, loss: Tensor) -> None:
        """The backward pass of the loss; gradients are kept."""
        with self._kernels, self.autocast or nullcontext():
            backward_in_scope(loss)
