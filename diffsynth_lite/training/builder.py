"""This file builds the objects that a run trains with from its config: settings become things here, once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from accelerate import Accelerator

from diffsynth_lite.config import Config
from diffsynth_lite.core.attention import use_backend
from diffsynth_lite.core.gradient import BlockCompiler, GradientEngine
from diffsynth_lite.core.noise.losses import LossBreakdown, SampleLosses
from diffsynth_lite.core.randomness import random_state_scope, torch_seed
from diffsynth_lite.core.transfer.shared_memory import HostMemoryError
from diffsynth_lite.core.weights.frozen_linear import QuantizationReport
from diffsynth_lite.core.weights.packing import HostBlocks
from diffsynth_lite.core.weights.sharding import local_bytes
from diffsynth_lite.core.weights.stream import WeightStream
from diffsynth_lite.data.batches import Batch, BatchStream
from diffsynth_lite.data.schedule import SampleSchedule, micro_batch_sizes
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora import UpdateSizes, add_adapter, add_training_adapter, load_adapter_tensors
from diffsynth_lite.lora.updates import LoraFile
from diffsynth_lite.pipelines import ModelFamily
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.metrics import MetricsFile
from diffsynth_lite.run_folder.speed import StepTimer
from diffsynth_lite.training.checkpoint.divergence import Divergence
from diffsynth_lite.training.checks import CheckedRun, block_policy
from diffsynth_lite.training.data_settings import data_sources, num_tokens_of
from diffsynth_lite.training.distributed.devices import batch_layout
from diffsynth_lite.training.distributed.sharding import require_sharded
from diffsynth_lite.training.encoding.run_encoding import TrainingData
from diffsynth_lite.training.evaluation import (
    FixedNoiseErrors,
    FixedNoiseLoss,
    ItemLosses,
    LayerUpdates,
    SampleLossLog,
)
from diffsynth_lite.training.frozen_weights import blocks_by_model
from diffsynth_lite.training.layer_groups import adapter_kind, default_size, rank_overrides
from diffsynth_lite.training.objective import DenoisingObjective, NoiseLevels
from diffsynth_lite.training.optimization.averages import AveragedWeights
from diffsynth_lite.training.optimization.optimizers import (
    build_group_rates,
    build_learning_rate,
    measures_average,
)
from diffsynth_lite.training.previews import Previews, model_name
from diffsynth_lite.training.scoring.job import ScoreJob, StepScores, scored_images
from diffsynth_lite.training.slider.objective import SHOWN_STRENGTHS, SliderObjective


@dataclass(kw_only=True)
class TrainingObjects:
    """The objects of the training loop.

    Attributes:
        transformer: with its adapter, under the run's mixed precision.
        losses: the parts of the loss of a micro-batch, scalars, each with a backward pass before the next;
            knows the model, which the loop does not.
        learning_rate: at a step counted from 0.
        group_rates: the same for each group of the optimizer, as :func:`build_group_rates` has it.
        max_grad_norm: gradients are scaled down to it; infinity never clips.
        seed: decides the dropout masks.
        batches: the micro-batches of this process for each optimizer step, in order.
        totals_by_kind: (12,) on the device, the losses of a step for each kind of sample, or (0,).
        totals_by_noise: (20,) on the device, those of a step as :class:`StepResult` has them, or (0,).
        weights: brings the frozen weights that live in host memory to the device.
        runs_together: whether the processes share the frozen weights or the sequences, and so run the model
            together.
    """

    accelerator: Accelerator
    transformer: torch.nn.Module
    optimizer: torch.optim.Optimizer
    losses: Callable[[torch.nn.Module, Batch], Iterator[torch.Tensor]]
    learning_rate: Callable[[int], float]
    max_grad_norm: float
    averaged: AveragedWeights | None
    seed: int
    batches: Iterator[Sequence[Batch]]
    totals_by_kind: Callable[[], torch.Tensor]
    totals_by_noise: Callable[[int], torch.Tensor]
    validation_loss: FixedNoiseLoss
    item_losses: ItemLosses
    sample_losses: SampleLossLog
    layer_updates: LayerUpdates
    previews: Previews
    scores: StepScores
    weights: WeightStream
    compiler: BlockCompiler
    runs_together: bool = False
    group_rates: Mapping[str, Callable[[int], float]] = field(default_factory=dict)
    context_parallel: int = 1
    divergence: Divergence = field(default_factory=Divergence)
    timer: StepTimer = field(default_factory=StepTimer)

    @property
    def trained_parameters(self) -> list[torch.nn.Parameter]:
        """The parameters of all groups of the optimizer."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def generate(self, step: int) -> None:
        """Generate the previews of a step, and score it where that is due."""
        self.previews.generate(self.transformer, step)
        self.scores.record(self.transformer, step)

    def lacks_images(self, step: int) -> bool:
        """Whether a step lacks a preview, or its scores."""
        return self.previews.are_missing(step) or self.scores.are_missing(step)

    def parts_of_loss(self, batch: Batch) -> Iterator[torch.Tensor]:
        """The parts of the loss of a micro-batch, each computed when asked for, with the same dropout."""
        # Dropout has no generator argument: its random numbers follow a seed set for this micro-batch.
        seed, parts = (
            torch_seed(self.seed, "dropout", batch.positions[0]),
            self.losses(self.transformer, batch),
        )
        while True:
            with random_state_scope(self.accelerator.device, seed):
                part = next(parts, None)
            if part is None:
                return
            yield part

    @property
    def num_bytes_held(self) -> int:
        """On the device between two steps: weights, slots of streamed ones, average, optimizer."""
        averaged = {} if self.averaged is None else self.averaged.tensors()
        state = (value for entry in self.optimizer.state.values() for value in entry.values())
        held = [*self.transformer.parameters(), *self.transformer.buffers(), *averaged.values(), *state]
        num_bytes = local_bytes(tensor for tensor in held if isinstance(tensor, torch.Tensor))
        return num_bytes + self.weights.slot_bytes


def build_transformer(
    config: Config,
    checked: CheckedRun,
    initial: Mapping[str, torch.Tensor] | None = None,
    host_blocks: HostBlocks | None = None,
    training_adapter: LoraFile | None = None,
) -> torch.nn.Module:
    """The frozen transformer with its adapter, where it was loaded.

    Args:
        initial: values of the adapter; random where None.
    """
    transformer = load_frozen_transformer(config, checked.family, host_blocks)
    size = default_size(config)
    add_adapter(
        transformer,
        checked.target_layers,
        rank=size.rank,
        alpha=size.alpha,
        own=rank_overrides(checked.groups),
        kind=adapter_kind(config),
        # Weights that are in host memory are read where all others are, so that no number depends on it.
        device=None if host_blocks is None else host_blocks.device,
        dropout=config.lora.dropout,
        seed=torch_seed(config.train.seed, "lora-init", 0),
    )
    if initial is not None:
        load_adapter_tensors(transformer, initial)
    if training_adapter is not None:
        add_training_adapter(transformer, *training_adapter)
    if config.model.attention is not None:
        use_backend(transformer, config.model.attention)
    return transformer.train()


def load_frozen_transformer(
    config: Config, family: ModelFamily, host_blocks: HostBlocks | None
) -> torch.nn.Module:
    """The model that the family trains, without an adapter, where it was loaded."""
    # For this load only: previews may load a part that is not trained.
    family.host_blocks = host_blocks
    try:
        transformer = family.load_transformer(getattr(torch, config.model.dtype))
    except HostMemoryError as error:
        raise UserError(f"memory.stream_blocks: {error}") from error
    finally:
        family.host_blocks = None
    if family.quantization is not None and not QuantizationReport.of(transformer).num_layers:
        raise UserError(
            f"model.quantize: {config.model.quantize} has no effect, as {config.model.family} loads its "
            "model in a way of its own; set it to none"
        )
    require_sharded(config, family, transformer)
    return transformer


def build_compiler(config: Config, family: ModelFamily, transformer: torch.nn.Module) -> BlockCompiler:
    """The compiler of the blocks, before anything else wraps them; of no blocks where it is off."""
    compiles = config.train.compile == "blocks"
    return BlockCompiler([*chain(*blocks_by_model(family, transformer))] if compiles else [])


def build_run(
    config: Config,
    checked: CheckedRun,
    encoded: TrainingData,
    *,
    accelerator: Accelerator,
    transformer: torch.nn.Module,
    weights: WeightStream,
    compiler: BlockCompiler,
    optimizer: torch.optim.Optimizer,
    averaged: AveragedWeights | None,
    start_step: int,
    folder: RunFolder,
) -> TrainingObjects:
    """Put the objective, the batches and the evaluation around a transformer and its optimizer."""
    objective = _build_objective(config, checked.family, accelerator)
    errors = FixedNoiseErrors(
        objective=objective,
        seed=config.validation.seed,
        purpose="validation-noise",
        batch_size=config.train.micro_batch_size,
    )
    is_main = accelerator.is_main_process
    previews = _build_previews(config, checked, encoded, folder.previews_folder, writes=is_main)
    return TrainingObjects(
        accelerator=accelerator,
        # Not wrapped for several processes, which exchange gradients by themselves.
        transformer=accelerator.prepare_model(transformer, evaluation_mode=True),
        optimizer=optimizer,
        losses=objective.losses,
        learning_rate=build_learning_rate(config),
        group_rates=build_group_rates(config, checked.groups),
        averaged=averaged,
        max_grad_norm=float("inf") if config.train.max_grad_norm is None else config.train.max_grad_norm,
        seed=config.train.seed,
        batches=iter(_build_batches(config, checked.family, encoded, accelerator, start_step)),
        totals_by_kind=partial(objective.totals_by_kind, accelerator),
        totals_by_noise=partial(objective.totals_by_noise, accelerator, config.logging.every_steps),
        validation_loss=FixedNoiseLoss(
            name="validation_loss" if config.holds_out else "train_fixed_noise_loss",
            items=encoded.validation_items,
            errors=errors,
        ),
        item_losses=ItemLosses(
            items=encoded.tracked_items,
            errors=replace(errors, purpose="item-noise"),
            is_average=measures_average(config, averaged),
            folder=folder,
            writes=is_main,
        ),
        sample_losses=SampleLossLog(
            losses=objective.sample_losses,
            file=MetricsFile(folder.sample_losses_file),
            accelerator=accelerator,
            every_steps=config.logging.every_steps,
        ),
        layer_updates=LayerUpdates(
            UpdateSizes(transformer, accelerator.device),
            MetricsFile(folder.layers_file),
            last_step=config.train.steps,
            rate_setting=config.train.rate_setting,
            writes=is_main,
        ),
        previews=previews,
        scores=_build_scores(config, encoded, previews, folder),
        weights=weights,
        compiler=compiler,
        runs_together=checked.family.shards is not None or checked.family.context is not None,
        context_parallel=config.train.context_parallel,
        timer=StepTimer(accelerator.device),
    )


def build_noise_levels(config: Config, family: ModelFamily) -> NoiseLevels:
    """The noise levels that a run draws from; needs no weights."""
    objective = config.objective
    static = objective.shift_value or 1.0
    shifts: dict[str, Callable[[Sequence[int]], float]] = {
        "family": family.family_shift,
        "resolution": family.resolution_shift,
        "static": lambda _shape: static,
        "none": lambda _shape: 1.0,
    }
    return NoiseLevels(
        density=objective.timestep_density,
        logit_mean=objective.logit_mean,
        logit_std=objective.logit_std,
        mode_scale=objective.mode_scale,
        shift=shifts[objective.shift],
        sigma_min=objective.sigma_min,
        sigma_max=objective.sigma_max,
        ranges=family.noise_ranges,
    )


def _build_objective(config: Config, family: ModelFamily, accelerator: Accelerator) -> DenoisingObjective:
    are_alike = all(not source.preserve and source.loss_weight == 1 for source in data_sources(config))
    slider = config.objective.slider
    build: Callable[..., DenoisingObjective] = DenoisingObjective
    if slider is not None:
        own = slider.model_dump(include={"target", "eta", "anchor_weight"})
        are_alike, build = False, partial(SliderObjective, **own)
    return build(
        family=family,
        noise_levels=build_noise_levels(config, family),
        weighting=config.objective.loss_weighting,
        min_snr_gamma=config.objective.min_snr_gamma,
        huber_delta=config.objective.huber_delta if config.objective.loss == "huber" else None,
        guidance_target=config.objective.guidance_target,
        device=accelerator.device,
        is_counted=accelerator.process_index % config.train.context_parallel == 0,
        sample_losses=SampleLosses.of_run(
            seed=config.train.seed, num_samples=config.train.steps * config.train.global_batch_size
        ),
        losses_by_kind=None if are_alike and not family.with_audio else LossBreakdown(),
        audio_loss_weight=config.objective.audio_loss_weight,
        own_audio_levels=config.objective.audio_noise == "own",
        train_silent_clips=config.data.silent_clips == "learn",
    )


def _build_batches(
    config: Config, family: ModelFamily, encoded: TrainingData, accelerator: Accelerator, start_step: int
) -> BatchStream:
    items, sources = encoded.items, data_sources(config)
    schedule = SampleSchedule(
        items.groups,
        passes=[source.passes for source in sources] or [Fraction(1)],
        sizes=micro_batch_sizes(
            [num_tokens_of(bucket, family) for bucket in items.buckets],
            micro_batch_size=config.train.micro_batch_size,
            micro_batch_tokens=config.train.micro_batch_tokens,
        ),
        seed=config.train.seed,
        orders=encoded.orders,
    )
    return BatchStream(
        items,
        encoded.tensors,
        schedule,
        batch_layout(config, accelerator.num_processes, accelerator.process_index),
        seed=config.train.seed,
        num_workers=0 if encoded.is_live else config.data.num_workers,
        start_step=start_step,
        caption_dropout=config.data.caption_dropout,
        with_unconditional=config.objective.guidance_target is not None,
        sources=sources,
        runs_together=family.shards is not None,
        anchors=encoded.anchors,
    )


def _build_previews(
    config: Config, checked: CheckedRun, encoded: TrainingData, folder: Path, *, writes: bool
) -> Previews:
    family = checked.preview_family
    return Previews(
        family=family,
        other=None if family is checked.family else config,
        generated_by=None if family is checked.family else family.fingerprint(),
        folder=folder,
        writes=writes,
        requests=encoded.previews[: len(config.validation.prompts)],
        model=model_name(family, config.validation.model_path or config.model.path),
        sampler=family.sampler,
        vae_dtype=getattr(torch, config.model.vae_dtype),
        strengths=() if config.objective.slider is None else SHOWN_STRENGTHS,
    )


def _build_scores(config: Config, encoded: TrainingData, previews: Previews, folder: RunFolder) -> StepScores:
    requests, job = encoded.previews[len(config.validation.prompts) :], None
    images = scored_images(config, folder, replace(previews, requests=requests), encoded.scored)
    if requests and previews.writes:
        job = ScoreJob.of(config, folder, encoded.scored, images)
    return StepScores(
        images=images, every_steps=config.score_every_steps, last_step=config.train.steps, job=job
    )


def build_engine(config: Config, weights: WeightStream) -> GradientEngine:
    """The gradient engine of all blocks, which shares streams and host memory with ``weights``."""
    memory = config.memory
    host_bytes = None
    if memory.host_gib is not None:
        host_bytes = max(int(memory.host_gib * 1024**3) - weights.host_bytes, 0)
    return GradientEngine(
        min_bytes=memory.min_bytes,
        host_bytes=host_bytes,
        resident_blocks=memory.resident_blocks,
        prefetched_blocks=memory.prefetched_blocks,
        backend=weights.backend,
        policy=block_policy(config),
        skip_dead_ops=memory.skip_dead_ops,
        use_gradient_checkpointing=config.train.use_gradient_checkpointing,
        use_gradient_checkpointing_offload=config.train.use_gradient_checkpointing_offload,
    )
