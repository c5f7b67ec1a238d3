"""This file estimates the device and host memory of a training step, before anything is loaded.

The settings of a folder are enough: the model is built on torch's meta device, with a few blocks in place of
all. What kernels, the allocator and the driver take for themselves is not counted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import torch
from diffusers.models.modeling_utils import no_init_weights
from torch import nn

from diffsynth_lite.core.gradient import blocks_in
from diffsynth_lite.core.planning.counts import BlockLists, CountedStep, FewBlocks, StepCost, count_step
from diffsynth_lite.core.planning.meters import CountingMeter, MetaResults
from diffsynth_lite.core.weights.formats import counted_format
from diffsynth_lite.core.weights.frozen_linear import Quantization
from diffsynth_lite.core.weights.packing import frozen_weights, packed_bytes
from diffsynth_lite.core.weights.stream import spread_evenly
from diffsynth_lite.lora import (
    LoraSize,
    adapter_size,
    add_adapter,
    add_training_adapter,
    layers_ending_in,
)
from diffsynth_lite.lora.kinds import LORA, AdapterKind
from diffsynth_lite.lora.updates import LoraFile, pairs_of
from diffsynth_lite.pipelines import Conditioning, ModelFamily
from diffsynth_lite.pipelines.base.quantized import kept_in_fp32, quantizable_layers
from diffsynth_lite.training.optimization.optimizer_state import OptimizerFacts
from diffsynth_lite.training.planning.kept_counts import KeptCounts
from diffsynth_lite.training.planning.split_sequences import Exchange
from diffsynth_lite.training.planning.step import MetaModel, MetaStep, Sample, StepSettings

_META = torch.device("meta")
_BLOCKS_GATHERED = 3
"""As torch's ``fully_shard`` overlaps gathering with computing; not measured on a GPU."""
_MOMENTS_OF_ADAMW = 2
"""Numbers that it keeps for each trained one."""


@dataclass(frozen=True, kw_only=True)
class MemoryCount:
    """Bytes that training holds, on the device unless noted.

    Attributes:
        slots: of streamed weights; with a sharded base, the weights that are gathered at once.
        step: memory of a step in addition, with its gradients, and its operations.
        exchanged: memory of processes that share samples, in addition to that of their parts.
    """

    weights: int
    slots: int
    lora: int
    optimizer: int
    step: StepCost
    weights_on_host: int
    exchanged: int = 0

    @property
    def between_steps(self) -> int:
        """On the device all the time."""
        return self.weights + self.slots + self.lora + self.optimizer

    @property
    def device(self) -> int:
        """Peak on the device."""
        return self.between_steps + self.step.peak + self.exchanged

    @property
    def host(self) -> int:
        """Peak in host memory."""
        return self.weights_on_host + self.step.host


class MemoryCounter:
    """Counts training steps of a family's model, with a LoRA on some of its layers, at one size.

    Where several experts are trained, the first one runs in a step; weights and LoRA are those of all.

    Args:
        layers: full names, in the family's ``empty_transformer()``, of those with a LoRA.
        optimizer: its state; that of AdamW where it is None.
        conditioning: of one sample; its values do not matter.
        training_adapter: a second, frozen one on the model.
        exchange: where sequences are split; the sample is then the part that one process computes.
        kept: counts of earlier plans; None is none.
        model: the family's ``empty_transformer()``, if it is there already; it is only looked at.

    Attributes:
        lora_bytes: of the weights of the LoRA, in fp32.
        training_adapter_bytes: of the frozen adapter, in fp32; they count as frozen weights.
        subject: all of the above that counts of activations depend on, by name.
    """

    def __init__(
        self,
        family: ModelFamily,
        layers: Sequence[str],
        *,
        rank: int,
        own: Mapping[str, LoraSize] = MappingProxyType({}),
        kind: AdapterKind = LORA,
        dropout: float = 0.0,
        optimizer: OptimizerFacts | None = None,
        latents_shape: Sequence[int],
        conditioning: Conditioning,
        audio_latents_shape: tuple[int, ...] | None = None,
        own_audio_level: bool = False,
        training_adapter: LoraFile | None = None,
        exchange: Exchange | None = None,
        kept: KeptCounts | None = None,
        model: nn.Module | None = None,
    ) -> None:
        self.family, self._exchange = family, exchange
        self.kept = KeptCounts(None, family) if kept is None else kept
        self._rank, self._dropout, self._kind = rank, dropout, kind
        self._sample = Sample(tuple(latents_shape), conditioning, audio_latents_shape, own_audio_level)
        model = family.empty_transformer() if model is None else model
        self.lora_bytes = torch.float32.itemsize * adapter_size(model, layers, rank=rank, own=own, kind=kind)
        # In addition to the trained weights, in fp32, too.
        self._constant_bytes = torch.float32.itemsize * sum(
            kind.num_constants(len(model.get_parameter(f"{layer}.weight"))) for layer in layers
        )
        adamw = OptimizerFacts(state_bytes=_MOMENTS_OF_ADAMW * self.lora_bytes, has_average=False)
        self.optimizer = adamw if optimizer is None else optimizer
        parts, first = family.parts_of(model), family.trained[0]
        # A step runs one of the experts; other trained parts, such as text encoders, run, too.
        others = [name for name, part in parts.items() if type(part) is not type(parts[first])]
        self._first = type(family)(family.folder, trained=[first, *others])
        self._first.learn_as(family)
        self._prefix = f"{first}." if others else ""
        self._other_layers = [name for name in layers if name.partition(".")[0] in others]
        prefix = "" if len(parts) == 1 else f"{first}."
        names = [name.removeprefix(prefix) for name in layers if name.startswith(prefix)]
        self._own_of_others = {name: size for name, size in own.items() if name in self._other_layers}
        self._own = {name: own[f"{prefix}{name}"] for name in names if f"{prefix}{name}" in own}
        ranks = {name: self._own[name].rank if name in self._own else rank for name in names}
        self._frozen, self._first_prefix = _FrozenAdapter(training_adapter), prefix
        self.training_adapter_bytes = self._frozen.num_bytes
        frozen = {
            name.removeprefix(prefix): width
            for name, width in self._frozen.ranks.items()
            if name.startswith(prefix) and name.partition(".")[0] not in others
        }
        both = {name: (ranks.get(name, 0), frozen.get(name, 0)) for name in dict.fromkeys([*ranks, *frozen])}
        self._block_lists = BlockLists(
            parts[first], family.block_lists, both, are_alike=family.is_counted_by_few_blocks
        )
        self._trained_layers, self._frozen_layers = set(ranks), set(frozen)
        self._other_frozen_layers = [name for name in self._frozen.ranks if name.partition(".")[0] in others]
        self.num_blocks = self._block_lists.num_blocks
        self.subject = {
            "layers": tuple(layers),
            "rank": rank,
            "own": dict(own),
            "kind": (kind.name, vars(kind)),
            "dropout": dropout,
            "training_adapter": self._frozen.described,
            "latents_shape": tuple(latents_shape),
            "conditioning": {name: (list(one.shape), str(one.dtype)) for name, one in conditioning.items()},
            "audio_latents_shape": audio_latents_shape,
            "own_audio_level": own_audio_level,
        }
        self._meta_results = MetaResults()
        self._weights: dict[Any, list[_ModelBytes]] = {}
        self._models: dict[Any, MetaModel] = {}
        self._steps: dict[Any, CountedStep] = {}
        self._costs: dict[StepSettings, StepCost] = {}
        self._needed_matmuls: dict[nn.Module, dict[tuple[int, ...], set[nn.Module]]] = {}

    def count(self, settings: StepSettings) -> MemoryCount:
        """The memory of training under these settings."""
        models, num_shards = self._model_bytes(settings), settings.num_shards
        streamed = [block for model in models for block in model.streamed(settings.stream_blocks).values()]
        resident = sum(model.share(num_shards) for model in models) - sum(block.plain for block in streamed)
        slots = settings.stream_slots * max((block.packed for block in streamed), default=0)
        exchanged = 0
        if self._exchange:
            exchanged = self._exchange.num_bytes(settings.num_samples, settings.itemsize)
        return MemoryCount(
            weights=resident + self._frozen.num_bytes,
            slots=slots + max(model.gathered(num_shards) for model in models),
            lora=self.lora_bytes * (2 if settings.has_average else 1) + self._constant_bytes,
            optimizer=self.optimizer.state_bytes,
            step=self._step_cost(settings),
            weights_on_host=sum(block.packed for block in streamed),
            exchanged=exchanged,
        )

    def streamed_bytes(self, settings: StepSettings) -> dict[int, int]:
        """Bytes that a copy to a slot takes, of each streamed block of one model, by its place."""
        streamed = self._model_bytes(settings)[0].streamed(settings.stream_blocks)
        return {place: block.packed for place, block in streamed.items() if block.packed}

    def _model_bytes(self, settings: StepSettings) -> list["_ModelBytes"]:
        """Of each model that is trained."""
        min_bytes = settings.smallest_moved
        key = settings.dtype, settings.quantize, settings.quantize_skip, min_bytes
        if key not in self._weights:
            parts = list(self.family.parts_of(self.family.empty_transformer()).values())
            self._weights[key] = []
            for part in parts:
                kept, blocks = _cast(part, settings), list[nn.Module]()
                # Other trained parts, such as text encoders, are neither quantised nor streamed.
                if type(part) is type(parts[0]):
                    kept = self._quantized(kept, settings)
                    blocks = blocks_in(kept, self.family.block_lists)
                self._weights[key].append(_ModelBytes.of(kept, blocks, min_bytes))
        return self._weights[key]

    def _quantized(self, model: nn.Module, settings: StepSettings) -> nn.Module:
        """The model with its blocks in the settings' format."""
        if settings.quantize == "none":
            return model
        names = quantizable_layers(model, self.family.block_lists)
        owner = f"the blocks of {type(model).__name__}"
        skipped = layers_ending_in(names, settings.quantize_skip, key="model.quantize_skip", owner=owner)
        layers = tuple(name for name in names if name not in set(skipped))
        Quantization(format=counted_format(settings.quantize), layers=layers, device=_META).apply_to(model)
        return model

    def counted_as(self, settings: StepSettings) -> tuple[StepSettings, tuple[int, ...]]:
        """Equal for settings that share a count of activations, which takes a second or more.

        The step that is counted for them, and the blocks that represent theirs.
        """
        settings = settings.in_effect()
        few = self.few_blocks(settings)
        return replace(settings, policy=few.policy), few.kinds

    def _step_cost(self, settings: StepSettings) -> StepCost:
        """The cost of a step; each kind of step is counted once, for any number of blocks."""
        settings = settings.in_effect()
        if settings not in self._costs:
            key, few = self.counted_as(settings), self.few_blocks(settings)
            counted, kinds = key
            if key not in self._steps:
                subject = {**self.subject, "step": repr(counted), "blocks": kinds}
                self._steps[key] = self.kept.of(
                    "step", subject, CountedStep, lambda: self._counted(counted, few)
                )
            cost = self._steps[key].stretched(few.repeats)
            gradients = self.lora_bytes if counted.accumulates else 0
            self._costs[settings] = replace(cost, peak=cost.peak + gradients)
        return self._costs[settings]

    def _counted(self, settings: StepSettings, few: FewBlocks) -> CountedStep:
        """A step of the first model with a few of its blocks."""
        meter = CountingMeter(_META, self._meta_results)
        model = self._model_of(settings, few)
        model.model.zero_grad()
        step = MetaStep(model, self._first, self._sample, settings, meter)
        recomputed = settings.recomputed_blocks(len(step.blocks))
        needed = self._needed_matmuls.setdefault(step.model, {})
        if settings.offloads:
            with CountingMeter(_META, self._meta_results):  # only for the results of operators that it knows
                step.warm_up(needed.get(recomputed))
        if settings.accumulates:
            for parameter in step.model.parameters():
                parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        counted = count_step(
            step.forward, step.backward, step.blocks, meter, step.engine, autocast=step.autocast
        )
        needed[recomputed] = set(step.engine.needed_matmuls)
        return replace(counted, lasting=model.lasting)

    def few_blocks(self, settings: StepSettings) -> FewBlocks:
        """The blocks that represent all."""
        num_neighbours = max(1, settings.resident_blocks, settings.prefetched_blocks)
        return self._block_lists.few(settings.policy, num_neighbours=num_neighbours)

    def _model_of(self, settings: StepSettings, few: FewBlocks) -> MetaModel:
        formats = settings.dtype, settings.quantize, settings.quantize_skip, settings.mixed_precision
        key = few.kinds, formats, settings.num_samples, settings.device_type
        if key not in self._models:
            made = self._built(settings, few, settings.mixed_precision)
            meter = CountingMeter(_META, self._meta_results)
            with torch.no_grad(), meter:
                MetaStep(made, self._first, self._sample, settings, meter).forward()
            self._models[key] = replace(made, lasting=meter.num_bytes)
        return self._models[key]

    def _built(self, settings: StepSettings, few: FewBlocks, precision: str) -> MetaModel:
        model = self._first.empty_transformer()
        first, *_ = (_cast(part, settings) for part in self._first.parts_of(model).values())
        kept = self._block_lists.keep_in(first, few)
        own = {f"{self._prefix}{name}": self._own[old] for name, old in kept.items() if old in self._own}
        self._quantized(first, settings)
        layers = [f"{self._prefix}{name}" for name, old in kept.items() if old in self._trained_layers]
        layers += self._other_layers
        own |= self._own_of_others
        sizes: dict[str, Any] = {"rank": self._rank, "alpha": 1, "own": own}
        with no_init_weights():  # its numbers do not matter
            add_adapter(model, layers, **sizes, dropout=self._dropout, seed=0, kind=self._kind)
        frozen = {
            f"{self._prefix}{name}": f"{self._first_prefix}{old}"
            for name, old in kept.items()
            if old in self._frozen_layers
        }
        self._frozen.add_to(model, frozen | {name: name for name in self._other_frozen_layers})
        return MetaModel.of(model, precision, settings.device_type)

    def preview_model(self, settings: StepSettings) -> nn.Module:
        """The first model, with a few of its blocks and its LoRA, on meta, as it is called for previews."""
        # The pipeline calls each of several models by itself; the prepared one is all of them in one.
        precision = settings.mixed_precision if len(self.family.trained) == 1 else "no"
        model = self._built(settings, self.few_blocks(settings), precision).model.eval()
        return self._first.parts_of(model)[self._first.trained[0]]


class _FrozenAdapter:
    """A frozen adapter in addition to the one that trains, or none; its numbers do not matter."""

    def __init__(self, adapter: LoraFile | None) -> None:
        tensors, self._settings = adapter or ({}, {})
        self._shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self.ranks = {layer: pair.rank for layer, pair in pairs_of(tensors, self._settings).items()}
        self.num_bytes = torch.float32.itemsize * sum(shape.numel() for shape in self._shapes.values())
        self.described = {name: list(shape) for name, shape in self._shapes.items()}, dict(self._settings)

    def add_to(self, model: nn.Module, layers: Mapping[str, str]) -> None:
        """Put it on some of its layers."""
        tensors = {
            f"{name}{half}": torch.zeros(self._shapes[f"{layer}{half}"])
            for name, layer in layers.items()
            for half in (".lora_A.weight", ".lora_B.weight")
        }
        if tensors:
            add_training_adapter(model, tensors, self._settings)
            model.to(_META)


def _cast(model: nn.Module, settings: StepSettings) -> nn.Module:
    """The model, frozen, in the settings' dtype but for the parts that stay in fp32."""
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        if not kept_in_fp32(model, name):
            parameter.data = parameter.data.to(settings.dtype)
    return model


@dataclass(frozen=True)
class _BlockBytes:
    """Bytes of a block's weights that can be streamed: where they are now, and packed in a slot."""

    plain: int
    packed: int


@dataclass(frozen=True)
class _ModelBytes:
    """Bytes of a model's weights, and of those of its blocks that can be streamed, in call order.

    Attributes:
        rows: number and bytes of the rows of each weight that can be sharded.
        whole_blocks: bytes of all weights of each block.
    """

    total: int
    blocks: list[_BlockBytes]
    rows: list[tuple[int, int]]
    whole_blocks: list[int]

    @classmethod
    def of(cls, model: nn.Module, blocks: Sequence[nn.Module], min_bytes: int) -> "_ModelBytes":
        movable = [frozen_weights(block, min_bytes) for block in blocks]
        return cls(
            total=sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())),
            blocks=[
                _BlockBytes(sum(weight.nbytes for weight in weights), packed_bytes(weights))
                for weights in movable
            ],
            rows=[(len(one), one[0].nbytes) for one in model.parameters() if one.ndim] if blocks else [],
            whole_blocks=[sum(weight.nbytes for weight in block.parameters()) for block in blocks],
        )

    def share(self, num_shards: int) -> int:
        """Bytes of the first process, whose share is the largest."""
        if num_shards == 1:
            return self.total
        elsewhere = sum((number - -(-number // num_shards)) * size for number, size in self.rows)
        return self.total - elsewhere

    def gathered(self, num_shards: int) -> int:
        """Bytes of the weights that each process has whole at once.

        Those outside of blocks, and three times the largest block: the one that computes, one that arrives,
        and the room that it arrives in.
        """
        if num_shards == 1 or not self.whole_blocks:
            return 0
        outside = sum(number * size for number, size in self.rows) - sum(self.whole_blocks)
        return outside + _BLOCKS_GATHERED * max(self.whole_blocks)

    def streamed(self, number: int | Literal["all"]) -> dict[int, _BlockBytes]:
        """The blocks that ``memory.stream_blocks`` streams, by their places."""
        if not number or not self.blocks:
            return {}
        wanted = len(self.blocks) if number == "all" else number
        return {place: self.blocks[place] for place in spread_evenly(len(self.blocks), wanted)}
