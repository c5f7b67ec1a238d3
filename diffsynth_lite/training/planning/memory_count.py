"""This file counts what a training step takes on the device and in host memory, before anything is loaded.

The settings of a folder are enough: the model is built on torch's meta device, with a few blocks in place of
all. What kernels, the allocator and the driver take for themselves is not counted.
"""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor, nn

from diffsynth_lite.core.gradient import BlockPolicy, GradientEngine, blocks_in, gradient_engine
from diffsynth_lite.core.planning import (
    ON_CUDA,
    CountedStep,
    CountingMeter,
    CudaAutocast,
    FusedKernels,
    HostBackend,
    IgnoresTensors,
    StepBytes,
    backward_in_scope,
    count_step,
)
from diffsynth_lite.core.transfer.backends import smallest_worth_moving
from diffsynth_lite.core.weights import (
    Quantization,
    counted_format,
    frozen_weights,
    packed_bytes,
    spread_evenly,
)
from diffsynth_lite.lora import adapter_size, add_adapter, layers_ending_in
from diffsynth_lite.pipelines import Conditioning, ModelFamily
from diffsynth_lite.pipelines.base.quantized import kept_in_fp32, quantizable_layers
from diffsynth_lite.training.planning.few_blocks import BlockLists, FewBlocks

_META = torch.device("meta")
_MOMENTS = 2
"""Numbers that AdamW keeps of each one that trains."""


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """What decides how much memory a step of a model takes, by the names of the settings.

    Attributes:
        accumulates: whether a step has several micro-batches, whose gradients are added up.
        policy: which blocks are checkpointed, and what they keep.
        has_average: whether a moving average of the LoRA is kept.
    """

    micro_batch_size: int = 1
    accumulates: bool = False
    has_average: bool = False
    mixed_precision: Literal["no", "bf16"] = "bf16"
    use_gradient_checkpointing: bool = True
    use_gradient_checkpointing_offload: bool = False
    policy: BlockPolicy = BlockPolicy()  # noqa: RUF009 (frozen)
    resident_blocks: int = 1
    prefetched_blocks: int = 1
    skip_dead_ops: bool = True
    min_bytes: int | None = None
    dtype: torch.dtype = torch.bfloat16
    quantize: Literal["none", "int8", "nf4"] = "none"
    quantize_skip: tuple[str, ...] = ()
    stream_blocks: int | Literal["all"] = 0
    stream_slots: int = 2

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
            # Where weights are changes no activation, nor does an average.
            stream_blocks=0,
            stream_slots=2,
            has_average=False,
        )

    @property
    def offloads(self) -> bool:
        """Whether anything that blocks keep goes to host memory."""
        applied = self.in_effect().policy
        return any(one.offload or one.save_attention == "park" for one in (applied.selected, applied.others))


@dataclass(frozen=True, kw_only=True)
class MemoryCount:
    """Bytes that training holds, on the device but where it says otherwise.

    Attributes:
        weights: frozen, and all the time on the device.
        slots: that streamed weights visit.
        lora: weights of the LoRA, and of its moving average.
        optimizer: AdamW's state.
        gradients: of the LoRA, at the end of the backward pass.
        step: what a step holds beside these, its gradients included.
        weights_on_host: frozen, in host memory.
    """

    weights: int
    slots: int
    lora: int
    optimizer: int
    gradients: int
    step: StepBytes
    weights_on_host: int

    @property
    def device(self) -> int:
        """Most on the device at once."""
        return self.weights + self.slots + self.lora + self.optimizer + self.step.peak

    @property
    def host(self) -> int:
        """Most in host memory at once."""
        return self.weights_on_host + self.step.host


@dataclass(frozen=True)
class _Sample:
    latents_shape: tuple[int, ...]
    conditioning: Conditioning


class MemoryCounter:
    """Counts steps of what a family trains, with a LoRA on some of its layers, at one size.

    Of several models that are trained the first runs in a step; weights and LoRA are those of all.

    Args:
        family: bound to a folder, with or without weights.
        layers: full names, in the family's ``empty_transformer()``, of those with a LoRA.
        rank: of the LoRA.
        dropout: of the LoRA.
        latents_shape: of one sample.
        conditioning: of one sample; its values do not matter.

    Attributes:
        num_blocks: of one model.
        lora_bytes: of the weights of the LoRA, in fp32.
    """

    def __init__(
        self,
        family: ModelFamily,
        layers: Sequence[str],
        *,
        rank: int,
        dropout: float = 0.0,
        latents_shape: Sequence[int],
        conditioning: Conditioning,
    ) -> None:
        self._family = family
        self._rank, self._dropout = rank, dropout
        self._sample = _Sample(tuple(latents_shape), conditioning)
        model = family.empty_transformer()
        self.lora_bytes = torch.float32.itemsize * adapter_size(model, layers, rank=rank)
        # Names within the first model, which runs.
        prefix = "" if len(family.trained) == 1 else f"{family.trained[0]}."
        first = [name.removeprefix(prefix) for name in layers if name.startswith(prefix)]
        self._first = type(family)(family.folder, trained=family.trained[:1])
        part = family.parts_of(model)[family.trained[0]]
        self._block_lists = BlockLists(part, family.block_lists, first)
        self.num_blocks = self._block_lists.num_blocks
        self._weights: dict[Any, list[_ModelBytes]] = {}
        self._models: dict[Any, _MetaModel] = {}
        self._steps: dict[Any, CountedStep] = {}

    def count(self, settings: StepSettings) -> MemoryCount:
        """What training under these settings holds.

        Raises:
            UserError: ``quantize_skip`` names layers that are not there.
        """
        models = self._model_bytes(settings)
        streamed = [block for model in models for block in model.streamed(settings.stream_blocks).values()]
        resident = sum(model.total for model in models) - sum(block.plain for block in streamed)
        return MemoryCount(
            weights=resident,
            slots=settings.stream_slots * max((block.packed for block in streamed), default=0),
            lora=self.lora_bytes * (2 if settings.has_average else 1),
            optimizer=_MOMENTS * self.lora_bytes,
            gradients=self.lora_bytes,
            step=self._step_bytes(settings),
            weights_on_host=sum(block.packed for block in streamed),
        )

    def streamed_bytes(self, settings: StepSettings) -> dict[int, int]:
        """Bytes that a copy to a slot takes, of each streamed block of one model, by its place.

        Raises:
            UserError: as ``count``.
        """
        streamed = self._model_bytes(settings)[0].streamed(settings.stream_blocks)
        return {place: block.packed for place, block in streamed.items() if block.packed}

    def _model_bytes(self, settings: StepSettings) -> list["_ModelBytes"]:
        """Of each model that is trained."""
        key = settings.dtype, settings.quantize, settings.quantize_skip, settings.min_bytes
        if key not in self._weights:
            min_bytes = smallest_worth_moving(_META) if settings.min_bytes is None else settings.min_bytes
            parts = list(self._family.parts_of(self._family.empty_transformer()).values())
            self._weights[key] = []
            for part in parts:
                kept, blocks = _cast(part, settings), list[nn.Module]()
                # What else is trained, such as text encoders, is neither quantised nor streamed.
                if type(part) is type(parts[0]):
                    kept = self._quantized(kept, settings)
                    blocks = blocks_in(kept, self._family.block_lists)
                self._weights[key].append(_ModelBytes.of(kept, blocks, min_bytes))
        return self._weights[key]

    def _quantized(self, model: nn.Module, settings: StepSettings) -> nn.Module:
        """The model with its blocks in the settings' format."""
        if settings.quantize == "none":
            return model
        names = quantizable_layers(model, self._family.block_lists)
        owner = f"the blocks of {type(model).__name__}"
        skipped = layers_ending_in(names, settings.quantize_skip, key="model.quantize_skip", owner=owner)
        layers = tuple(name for name in names if name not in set(skipped))
        Quantization(format=counted_format(settings.quantize), layers=layers, device=_META).apply_to(model)
        return model

    def counted_as(self, settings: StepSettings) -> Any:
        """Equal for settings whose activations one count tells, which takes a second or more."""
        return self._count_of(settings)[0]

    def _count_of(self, settings: StepSettings) -> tuple[tuple[StepSettings, tuple[int, ...]], FewBlocks]:
        """What is counted for these settings, and the blocks that stand for theirs."""
        settings = settings.in_effect()
        few = self._few_blocks(settings)
        return (replace(settings, policy=few.policy), few.kinds), few

    def _step_bytes(self, settings: StepSettings) -> StepBytes:
        """What a step holds; each kind of step is counted once, and stands for models of any length."""
        key, few = self._count_of(settings)
        counted = key[0]
        if key not in self._steps:
            self._steps[key] = self._counted(counted, few)
        found, lasting = self._steps[key].stretched(few.repeats), self._model_of(counted, few).lasting
        added = self.lora_bytes if counted.accumulates else 0
        return replace(found, kept=found.kept + lasting, peak=found.peak + lasting + added)

    def _counted(self, settings: StepSettings, few: FewBlocks) -> CountedStep:
        """A step of the first model with a few of its blocks."""
        meter = CountingMeter(_META)
        step = self._step_of(settings, few, meter)
        step.warm_up(settings)
        if settings.accumulates:
            for parameter in step.model.parameters():
                parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        return count_step(
            step.forward, step.backward, step.blocks, meter, step.engine, autocast=step.autocast
        )

    def step_on_meta(self, settings: StepSettings, meter: IgnoresTensors) -> "MetaStep":
        """A step of the first model, with a few of its blocks in place of all.

        Args:
            settings: of the step.
            meter: is told what stands for host memory.

        Raises:
            UserError: as ``count``.
        """
        return self._step_of(settings, self._few_blocks(settings), meter)

    def _few_blocks(self, settings: StepSettings) -> FewBlocks:
        num_neighbours = max(1, settings.resident_blocks, settings.prefetched_blocks)
        return self._block_lists.few(settings.policy, num_neighbours=num_neighbours)

    def _step_of(self, settings: StepSettings, few: FewBlocks, meter: IgnoresTensors) -> "MetaStep":
        model = self._model_of(settings, few)
        model.model.zero_grad()
        return MetaStep(model, self._first, self._sample, settings, meter, few)

    def _model_of(self, settings: StepSettings, few: FewBlocks) -> "_MetaModel":
        formats = settings.dtype, settings.quantize, settings.quantize_skip, settings.mixed_precision
        key = few.kinds, formats, settings.micro_batch_size
        if key not in self._models:
            made, meter = self._built(settings, few, settings.mixed_precision), CountingMeter(_META)
            with torch.no_grad(), meter:
                MetaStep(made, self._first, self._sample, settings, meter, few).forward()
            self._models[key] = replace(made, lasting=meter.num_bytes)
        return self._models[key]

    def _built(self, settings: StepSettings, few: FewBlocks, precision: str) -> "_MetaModel":
        model = self._first.empty_transformer()
        layers = self._block_lists.keep_in(model, few)
        model = self._quantized(_cast(model, settings), settings)
        add_adapter(model, layers, rank=self._rank, alpha=1, dropout=self._dropout, seed=0)
        return _MetaModel.of(model, precision)

    def model_that_draws(self, settings: StepSettings) -> nn.Module:
        """The first model, with a few of its blocks and its LoRA, on meta, as it is called for previews."""
        # Of several models the pipeline calls each by itself; what is prepared is all of them as one.
        precision = settings.mixed_precision if len(self._family.trained) == 1 else "no"
        return self._built(settings, self._few_blocks(settings), precision).model.eval()


def _cast(model: nn.Module, settings: StepSettings) -> nn.Module:
    """The model, frozen, in the settings' dtype but for what stays in fp32."""
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        if not kept_in_fp32(model, name):
            parameter.data = parameter.data.to(settings.dtype)
    return model


@dataclass(frozen=True)
class _BlockBytes:
    """What the weights of a block take that can be streamed: where they are now, and packed in a slot."""

    plain: int
    packed: int


@dataclass(frozen=True)
class _ModelBytes:
    """What the weights of a model take, and those of its blocks that can be streamed, in call order."""

    total: int
    blocks: list[_BlockBytes]

    @classmethod
    def of(cls, model: nn.Module, blocks: Sequence[nn.Module], min_bytes: int) -> "_ModelBytes":
        movable = [frozen_weights(block, min_bytes) for block in blocks]
        return cls(
            total=sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())),
            blocks=[
                _BlockBytes(sum(weight.nbytes for weight in weights), packed_bytes(weights))
                for weights in movable
            ],
        )

    def streamed(self, number: int | Literal["all"]) -> dict[int, _BlockBytes]:
        """The blocks that ``memory.stream_blocks`` streams, by their places."""
        if not number or not self.blocks:
            return {}
        wanted = len(self.blocks) if number == "all" else number
        return {place: self.blocks[place] for place in spread_evenly(len(self.blocks), wanted)}


@dataclass(frozen=True)
class _MetaModel:
    """A model on meta with a few blocks and its LoRA, as a run of a precision has it.

    Attributes:
        autocast: of its forward pass; None where the run has none.
        lasting: bytes of what it keeps of its first step, such as rotary tables.
    """

    model: nn.Module
    autocast: CudaAutocast | None
    lasting: int = 0

    @classmethod
    def of(cls, model: nn.Module, precision: str) -> "_MetaModel":
        """The model under a precision, ready to train."""
        for parameter in model.parameters():
            parameter.data = parameter.data.to(_META)
        autocast = CudaAutocast() if precision == "bf16" else None
        if autocast:
            _wrap_forward(model, autocast)
        return cls(model.train(), autocast)


class MetaStep:
    """Forward and backward of a model on meta, as on a GPU and under the run's precision.

    Attributes:
        model: with its adapters.
        blocks: that its forward pass calls, in call order.
        repeats: which of them stand for more.
        engine: runs them.
        autocast: of the forward pass; None where the run has none.
    """

    def __init__(
        self,
        model: _MetaModel,
        family: ModelFamily,
        sample: _Sample,
        settings: StepSettings,
        meter: IgnoresTensors,
        few: FewBlocks,
    ) -> None:
        self.model, self.autocast = model.model, model.autocast
        self.blocks = blocks_in(self.model, family.block_lists)
        self.repeats = few.repeats
        self.engine = GradientEngine(
            min_bytes=settings.min_bytes,
            # Nothing is allocated, so that no memory of this machine limits it.
            host_bytes=sys.maxsize,
            resident_blocks=settings.resident_blocks,
            prefetched_blocks=settings.prefetched_blocks,
            backend=HostBackend(_META, meter),
            policy=few.policy,
            skip_dead_ops=settings.skip_dead_ops,
            use_gradient_checkpointing=settings.use_gradient_checkpointing,
            use_gradient_checkpointing_offload=settings.use_gradient_checkpointing_offload,
        )
        self._kernels = FusedKernels(ON_CUDA)
        self._family, size = family, settings.micro_batch_size
        self._conditioning = [sample.conditioning] * size
        self._noisy = torch.empty(size, *sample.latents_shape, device=_META)
        self._sigma = torch.full((size,), 0.5, device=_META)

    def warm_up(self, settings: StepSettings) -> None:
        """Take a step where one is needed before what the steps do is always the same."""
        if settings.offloads:
            # In the first step an engine learns what blocks share.
            self.backward(self.forward())
            self.model.zero_grad()

    def forward(self) -> Tensor:
        """The loss."""
        with self._kernels, gradient_engine(self.engine):
            estimate = self._family.predict(self.model, self._noisy, self._sigma, self._conditioning)
            return estimate.float().square().mean()

    def backward(self, loss: Tensor) -> None:
        """The backward pass of the loss; gradients are kept."""
        with self._kernels, self.autocast or nullcontext():
            backward_in_scope(loss)


def _wrap_forward(model: nn.Module, autocast: CudaAutocast) -> None:
    """As ``accelerator.prepare`` does: autocast in the forward pass, and its result in fp32."""
    forward = model.forward

    def under_autocast(*args: Any, **kwargs: Any) -> Any:
        with autocast.forward():
            return forward(*args, **kwargs)

    vars(model)["forward"] = convert_outputs_to_fp32(under_autocast)
