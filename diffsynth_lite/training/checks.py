"""This file checks a whole run before any weights are loaded, and reports all that is wrong at once."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import diffusers
import torch
from accelerate import Accelerator

from diffsynth_lite.config import Config
from diffsynth_lite.core.attention import WITHOUT_MASKS, has_backends, require_backend
from diffsynth_lite.core.gradient import BlockPolicy, BlockStrategy, blocks_of, require_compiler
from diffsynth_lite.data.records import WHOLE, Part, Record
from diffsynth_lite.data.sources import FoundRecords
from diffsynth_lite.errors import Problems, UserError
from diffsynth_lite.lora import adapter_shapes
from diffsynth_lite.pipelines import ModelFamily, load_family, require_family, resolve_folder
from diffsynth_lite.pipelines.base.single_file import component_files
from diffsynth_lite.run_folder.metrics import require_trackers
from diffsynth_lite.scores.features import FeatureModels
from diffsynth_lite.training.checkpoint.comfyui_copies import require_comfyui_names
from diffsynth_lite.training.checkpoint.store import SavedBytes
from diffsynth_lite.training.data_settings import check_records, check_slider, plan_rules, set_learned
from diffsynth_lite.training.distilled import (
    find_preview_family,
    training_adapter_digest,
    warning_of_distilled,
)
from diffsynth_lite.training.distributed.agreement import (
    from_main_process,
    on_all_processes,
    problems_of_all,
)
from diffsynth_lite.training.distributed.context import check_split, check_tokens_of_previews
from diffsynth_lite.training.distributed.devices import batch_layout
from diffsynth_lite.training.distributed.same_run import require_same_model, require_same_settings
from diffsynth_lite.training.encoding.dataset import CheckedData, read_records
from diffsynth_lite.training.frozen_weights import check_stream, text_encoder_memory, transformer_quantization
from diffsynth_lite.training.layer_groups import (
    LayerGroup,
    adapter_kind,
    default_group,
    find_targets,
    layer_groups,
    rank_overrides,
    rates_without_effect,
    require_kind,
)
from diffsynth_lite.training.optimization.optimizer_state import OptimizerFacts
from diffsynth_lite.training.optimization.optimizers import (
    build_group_rates,
    build_learning_rate,
    examine_optimizer,
)
from diffsynth_lite.training.preview_requests import check_previews, preview_size

logger = logging.getLogger(__name__)

_HEAD_WIDTH = 128
"""Of attention whose model's config has no single one; most have it."""


@dataclass(frozen=True, kw_only=True)
class CheckedRun(CheckedData):
    """The facts that the checks found about the base model and the data.

    Attributes:
        target_layers: full names of the layers that get a LoRA.
        groups: the same, by how they are trained.
        num_blocks: transformer blocks that checkpointing covers.
        num_selected_blocks: those of them that the policy checkpoints.
        training_adapter: digest of the frozen adapter that is on the model in training; None without.
    """

    target_layers: Sequence[str]
    groups: Sequence[LayerGroup]
    num_blocks: int
    num_selected_blocks: int
    saved: SavedBytes
    training_adapter: str | None = None

    def drop_records(self) -> None:
        """Let go of the records, which take 0.7 KB each, when all is encoded."""
        self.training.records.clear()
        self.held_out.records.clear()


def check_run(config: Config, accelerator: Accelerator, part: Part = WHOLE) -> CheckedRun:
    """Check as :func:`check_before_download`, and download the weights when there is nothing wrong."""
    checked = check_before_download(config, accelerator, part)
    download_model(checked, accelerator)
    return checked


def download_model(checked: CheckedRun, accelerator: Accelerator) -> None:
    """Get the weights of a model of the hub, and check that all processes have the same."""
    for each in (checked.family, checked.preview_family):
        on_all_processes(accelerator, each.folder.download_weights, each.components)
    require_same_model(accelerator, checked.family)


def check_before_download(config: Config, accelerator: Accelerator, part: Part = WHOLE) -> CheckedRun:
    """Check paths, data, sizes, targets and blocks; no weights are needed.

    Args:
        part: whose training records are read; the held-out ones are all there.
    """
    require_same_settings(accelerator, config)
    on_all_processes(accelerator, _require_cache_folder, config)
    problems = Problems()
    problems.attempt(_check_batch_size, config, accelerator.num_processes)
    problems.attempt(build_learning_rate, config)
    problems.attempt(_check_output_is_outside_data, config)
    problems.attempt(_check_compiler, config, accelerator.device)
    problems.attempt(require_trackers, config.logging.trackers)
    if config.validation.scores and accelerator.is_main_process:
        problems.attempt(FeatureModels.find, config.validation.score_models)
    training, held_out = read_records(config, accelerator, problems, part)
    family, checked = None, None
    if not problems or Path(config.model.path).expanduser().is_dir():  # No download for nothing.
        family = problems.attempt(bind_family, config)
    if family is not None:
        checked = _check_model(
            problems, family, config, accelerator.device, training=training, held_out=held_out
        )
        for found in (training, held_out):
            problems.attempt(check_records, found.records, family)
    problems.attempt(check_held_out, training.records, held_out.records)
    # The same on all processes, whichever found them.
    problems_of_all(accelerator, problems).require_none()
    assert family is not None
    assert checked is not None
    distilled, rates = warning_of_distilled(config, family), rates_without_effect(config, checked.groups)
    for warning in (family.notice, distilled, rates):
        if warning is not None:
            logger.warning("%s", warning)
    adapter = from_main_process(accelerator, training_adapter_digest, config, family)
    return replace(checked, training_adapter=adapter)


def with_placeholders(config: Config) -> Config:
    """A config that can be checked before ``memory.auto`` chooses: its number of streamed blocks may not be
    valid."""
    memory = config.memory.model_copy(update={"stream_blocks": "auto"})
    return config.model_copy(update={"memory": memory}) if config.memory.auto else config


def recheck_model(checked: CheckedRun, config: Config, accelerator: Accelerator) -> CheckedRun:
    """A checked run under other settings of its memory, or another format."""
    problems = Problems()
    again = _check_model(
        problems,
        checked.family,
        config,
        accelerator.device,
        training=checked.training,
        held_out=checked.held_out,
    )
    problems_of_all(accelerator, problems).require_none()
    assert again is not None
    return replace(again, training_adapter=checked.training_adapter)


def _check_batch_size(config: Config, num_processes: int) -> None:
    try:
        batch_layout(config, num_processes)
    except UserError as error:
        shared = config.train.context_parallel
        each = f" (a process here is {shared} that share a sample)" if shared > 1 else ""
        raise UserError(f"train.{error}{each}") from None


def _check_compiler(config: Config, device: torch.device) -> None:
    compiled = config.train.compile
    try:
        if compiled != "off":
            require_compiler(device)
    except ValueError as error:
        raise UserError(f"train.compile: {compiled} {error}") from None


def _check_backends(config: Config, family: ModelFamily, transformer: torch.nn.Module) -> None:
    backend, train = config.model.attention, config.train
    if backend is None:
        return
    is_batched = train.micro_batch_size > 1 or train.micro_batch_tokens is not None
    if not (family.dispatches_attention and has_backends(transformer)):
        reason = "computes its attention by torch and lets nobody choose"
    elif backend in WITHOUT_MASKS and has_masks(family, in_batches=False):
        reason = "gives its attention masks, which this kernel does not take"
    elif backend in WITHOUT_MASKS and has_masks(family, in_batches=is_batched):
        reason = "masks the padding of prompts, which this kernel cannot; set train.micro_batch_size: 1"
    else:
        return
    raise UserError(
        f"model.attention: {backend} is not for model.family {config.model.family}: diffusers "
        f"{diffusers.__version__} {reason}, or model.attention: null"
    )


def has_masks(family: ModelFamily, *, in_batches: bool) -> bool:
    """Whether attention of a family's model has masks: of single samples, or in batches with others."""
    if family.masks_attention == "padding":
        return in_batches and not (family.splits_batches or family.keeps_padding)
    return family.masks_attention == "always"


def check_attention(config: Config, family: ModelFamily, device: torch.device) -> None:
    """Try the kernel of ``model.attention`` on the device of a run, with the heads of its model."""
    backend = config.model.attention
    if backend is None:
        return
    width = family.folder.component_config(family.trained[0]).get("attention_head_dim")
    dtype = "bfloat16" if config.train.mixed_precision == "bf16" else config.model.dtype
    try:
        require_backend(
            backend,
            device,
            getattr(torch, dtype),
            head_width=width if isinstance(width, int) else _HEAD_WIDTH,
        )
    except ValueError as error:
        raise UserError(f"model.attention: {backend} {error}; set it to null") from error


def check_held_out(records: Sequence[Record], held_out: Sequence[Record]) -> None:
    """Check that no file is both trained on and held out: folders are read with their subfolders."""
    if not held_out:
        return
    trained = {os.path.realpath(record.target) for record in records}
    if both := [record.name for record in held_out if os.path.realpath(record.target) in trained]:
        raise UserError(
            f"validation.data: {len(both)} of its {len(held_out)} items are also trained on, such as "
            f"{both[0]}; move them out of the data, or remove validation.data to measure on training items"
        )


def _require_cache_folder(config: Config) -> None:
    """Check, before anything is read from the cache, that it is or can be a folder."""
    cache = Path(config.data.cache_dir).expanduser()
    there = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    if not there.is_dir():
        raise UserError(f"data.cache_dir: {there} is a file; name a folder")


def _check_output_is_outside_data(config: Config) -> None:
    output = Path(config.output.dir).expanduser().resolve()
    for key, source in config.data.sources_by_key.items():
        if source.path and output.is_relative_to(Path(source.path).expanduser().resolve()):
            raise UserError(
                f"output.dir: {config.output.dir} is inside {key}.path {source.path}, where its previews "
                "would be taken for data; name a folder outside"
            )


def bind_family(config: Config, *, with_weights: bool = True) -> ModelFamily:
    """The model family that the config names, bound to the folder of the base model.

    Args:
        with_weights: whether those in folders of the user's must be there. Of the hub only small files are
            fetched.
    """
    model = config.model
    family_class = load_family(model.family)
    folder = resolve_folder(
        model.path,
        revision=model.revision,
        variant=model.variant,
        known=[release.hub_id for release in family_class.releases],
    )
    require_family(family_class, folder)
    family = family_class(folder, trained=config.lora.components)
    given = {f"model.{name}": getattr(model, name) for name in ("transformer_file", "transformer_2_file")}
    set_learned(config, family)
    family.take_files(component_files(given, family.denoisers))
    if config.objective.guidance_target is not None:
        family.training_guidance = config.objective.guidance_target
    family.check_folder(with_weights=with_weights)
    family.check_vae_dtype(getattr(torch, model.vae_dtype))
    if model.vae_tiling:
        family.tile_vae()
    return family


def _check_model(
    problems: Problems,
    family: ModelFamily,
    config: Config,
    device: torch.device,
    *,
    training: FoundRecords,
    held_out: FoundRecords,
) -> CheckedRun | None:
    """The facts about the model before its weights load; None where a problem was found."""
    problems.attempt(plan_rules, config, family)
    problems.attempt(_check_weighting, config, family)
    problems.attempt(check_slider, config, family)
    if config.objective.shift == "resolution":
        size = preview_size(config, family)
        problems.attempt(lambda: family.resolution_shift(family.latents_shape(*size, num_frames=1)))
    # Frozen as in a run: the adapter is not a part of it yet.
    transformer = family.empty_transformer().requires_grad_(False)
    blocks = problems.attempt(find_blocks, family, transformer)
    problems.attempt(_check_backends, config, family, transformer)
    problems.attempt(check_split, config, family, transformer)
    problems.attempt(check_tokens_of_previews, config, family, *preview_size(config, family))
    layers = problems.attempt(find_targets, family, transformer, config) if blocks else []
    # Before layers get the formats of the run, whose shapes are others.
    groups = problems.attempt(layer_groups, config, family, layers) if layers else []
    preview_family = problems.attempt(find_preview_family, config, family, layers or [])
    problems.attempt(check_previews, config, preview_family or family)
    groups = groups or [default_group(config)]  # the optimizer is tried, whatever is wrong with the layers
    problems.attempt(build_group_rates, config, groups)
    rank, own, kind = config.lora.rank, rank_overrides(groups), adapter_kind(config)
    shapes = adapter_shapes(transformer, layers or [], rank=rank, own=own, kind=kind)
    problems.attempt(require_kind, config)
    optimizer = problems.attempt(examine_optimizer, config, groups, shapes, device)
    problems.attempt(_check_averaging, config, family, optimizer)
    if layers:
        problems.attempt(family.lora_files.settle, transformer, layers, rank=rank, kind=kind)
    problems.attempt(require_comfyui_names, config, family, layers or [])
    selected = problems.attempt(select_blocks, config, len(blocks)) if blocks else []
    check_loading(problems, family, transformer, config, device, num_blocks=len(blocks or []))
    if preview_family is not None and preview_family is not family:
        preview_family.text_encoder_memory, preview_family.quantization = (
            family.text_encoder_memory,
            family.quantization,
        )
    if preview_family is None or optimizer is None:
        return None
    return CheckedRun(
        family=family,
        training=training,
        held_out=held_out,
        target_layers=layers or [],
        groups=groups,
        num_blocks=len(blocks or []),
        num_selected_blocks=len(selected or []),
        saved=SavedBytes.of(
            sum(number * tensor.size for tensor, number in shapes.items()),
            num_in_vectors=sum(number * one.size for one, number in shapes.items() if len(one.shape) == 1),
            optimizer_bytes=optimizer.state_bytes,
            lora_dtype=getattr(torch, config.output.lora_dtype),
            has_average=config.train.ema_decay is not None or optimizer.has_average,
        ),
        preview_family=preview_family,
    )


def check_loading(
    problems: Problems,
    family: ModelFamily,
    transformer: torch.nn.Module,
    config: Config,
    device: torch.device,
    *,
    num_blocks: int,
) -> None:
    """Check how the weights of text encoders and blocks are to be kept, and have the family load them so.

    Args:
        transformer: on the meta device, frozen; it has the formats of the run afterwards.
        num_blocks: of one model; 0 where they were not found, which is a problem already.
    """
    memory = problems.attempt(text_encoder_memory, config, family, device)
    family.text_encoder_memory = memory or family.text_encoder_memory
    if num_blocks:
        family.quantization = problems.attempt(
            lambda: transformer_quantization(family, transformer, config, device)
        )
        problems.attempt(check_stream, config, family, transformer, num_blocks, device)


def find_blocks(family: ModelFamily, transformer: torch.nn.Module) -> list[torch.nn.Module]:
    """The blocks of one of the models that a family trains, in call order."""
    try:
        # One pass runs one of them: the one that removes noise, or one of several experts of one size.
        return blocks_of(family.parts_of(transformer)[family.trained[0]], family.block_lists)
    except ValueError as error:
        raise UserError(f"train.use_gradient_checkpointing: {error}") from None


def block_policy(config: Config) -> BlockPolicy:
    """Which blocks are checkpointed, and what they keep, where the two gradient switches are on."""
    memory = config.memory
    return BlockPolicy(
        select=memory.policy,
        n=memory.policy_n,
        blocks=tuple(memory.policy_blocks),
        selected=BlockStrategy(offload=True, save_attention=memory.save_attention),
    )


def select_blocks(config: Config, num_blocks: int) -> list[int]:
    """The blocks that ``memory.policy`` checkpoints."""
    key = "policy_n" if config.memory.policy_n else "policy_blocks"
    try:
        return block_policy(config).selection(num_blocks)
    except ValueError as error:
        raise UserError(f"memory.{key}: {error}") from None


def _check_weighting(config: Config, family: ModelFamily) -> None:
    weighting, known = config.objective.loss_weighting, family.noise_path.loss_weightings
    if weighting not in known:
        raise UserError(
            f"objective.loss_weighting: {weighting} is defined on another path from data to noise than this "
            f"family's; use {' or '.join(known)}"
        )


def _check_averaging(config: Config, family: ModelFamily, optimizer: OptimizerFacts | None) -> None:
    if optimizer is not None and optimizer.has_average and len(family.noise_ranges) > 1:
        raise UserError(
            f"train.optimizer: {config.train.optimizer} counts every step into its average, and a step "
            f"trains one of {' and '.join(family.trained)} only; train each in a run of its own "
            "(lora.components), or take another optimizer"
        )
