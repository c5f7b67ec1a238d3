"""This file holds the stages of a run up to the loop: choose memory, find the start, encode, build."""

import hashlib
import json
import logging
import os
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers.training_utils import free_memory

from diffsynth_lite.config import load_yaml
from diffsynth_lite.core.gradient import BlockCompiler
from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.core.weights.sharding import local_bytes
from diffsynth_lite.core.weights.stream import WeightStream
from diffsynth_lite.errors import RunInterrupted, UserError
from diffsynth_lite.files import replacing, write_json
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.metrics import MetricsFile, read_items, start_trackers
from diffsynth_lite.run_folder.progress import is_logged
from diffsynth_lite.training.builder import (
    TrainingObjects,
    build_compiler,
    build_noise_levels,
    build_run,
    build_transformer,
)
from diffsynth_lite.training.checkpoint.comfyui_copies import ComfyuiCopies
from diffsynth_lite.training.checkpoint.divergence import Divergence
from diffsynth_lite.training.checkpoint.resume import data_fingerprint, extended_lineage, resolve_checkpoint
from diffsynth_lite.training.checks import recheck_model
from diffsynth_lite.training.data_settings import num_tokens_of
from diffsynth_lite.training.distilled import load_training_adapter
from diffsynth_lite.training.distributed.agreement import (
    from_main_process,
    on_all_processes,
    on_main_process,
    tensors_from_main_process,
)
from diffsynth_lite.training.distributed.context import split_model
from diffsynth_lite.training.distributed.devices import describe_run, device_name
from diffsynth_lite.training.encoding.dataset import find_cache_group
from diffsynth_lite.training.encoding.hold_out import write_held_out
from diffsynth_lite.training.encoding.run_encoding import TrainingData, encode_run, sealed_data
from diffsynth_lite.training.frozen_weights import (
    place_weights,
    quantizable_bytes,
    share_host_memory,
    streamable_bytes,
)
from diffsynth_lite.training.layer_groups import adapter_kind, default_size, rank_overrides
from diffsynth_lite.training.lora_file import read_initial_lora
from diffsynth_lite.training.optimization.optimizers import build_average, build_optimizer
from diffsynth_lite.training.planning.automatic import choose_memory, needs_auto_memory, suggest_settings
from diffsynth_lite.training.saver import require_disk_space, restore, warn_of_previews
from diffsynth_lite.training.scoring.job import cut_back
from diffsynth_lite.training.session import Run, Start
from diffsynth_lite.training.shortages import Workload, out_of_memory_explained, shortages_explained
from diffsynth_lite.training.slider.images import generate_images, slider_data

logger = logging.getLogger(__name__)


def with_chosen_memory(run: Run) -> Run:
    """The run with what its config leaves open of ``memory`` chosen, before anything is encoded."""
    with run.clock.stage("checks"):
        if needs_auto_memory(run.config):
            earlier = from_main_process(run.accelerator, run.resume_policy.earlier_choices)
            choice = choose_memory(run.config, run.family, run.accelerator, earlier=earlier)
            run = replace(
                run,
                loaded=replace(run.loaded, config=choice.config),
                checked=recheck_model(run.checked, choice.config, run.accelerator),
                predicted_bytes=choice.predicted_bytes,
                chosen=choice.lasting,
            )
    logger.info("Runs in %s.", describe_run(run.config, run.accelerator))
    return run


def find_start(run: Run) -> Start:
    """The checkpoint that the run resumes, or a new start; the same on all processes."""
    fingerprint = run.fingerprint(build_noise_levels(run.config, run.family).shift)
    checkpoint = resolve_checkpoint(run.accelerator, run.resume_policy, fingerprint)
    if checkpoint is None:
        on_main_process(run.accelerator, _replace_settings, run)
    run_id = checkpoint.documents["state"]["run_id"] if checkpoint else uuid.uuid4().hex[:12]
    has_finished = from_main_process(run.accelerator, _has_finished, run.folder)
    start = Start(checkpoint=checkpoint, fingerprint=fingerprint, run_id=run_id)
    return replace(start, is_finished=has_finished and start.step >= run.config.train.steps)


def _replace_settings(run: Run) -> None:
    """Replace the settings of a start that did not come to training, of which there is no fingerprint."""
    if not run.folder.fingerprint_file.is_file():
        run.write_settings()


def _has_finished(folder: RunFolder) -> bool:
    status = folder.read_status()
    if folder.has_lost_status():
        logger.warning(
            "%s is missing or damaged; the checkpoints show how far the run is.", folder.status_file
        )
    return status is not None and status.get("state") == "finished"


def initial_lora(run: Run, start: Start) -> dict[str, torch.Tensor] | None:
    """The values that the adapter of a new run starts from; None where they are random or restored."""
    location = run.config.lora.init_from
    if location is None or start.checkpoint is not None:
        return None
    size = default_size(run.config)
    return tensors_from_main_process(
        run.accelerator,
        read_initial_lora,
        run.family,
        location,
        layers=run.checked.target_layers,
        rank=size.rank,
        alpha=size.alpha,
        own=rank_overrides(run.checked.groups),
        kind=adapter_kind(run.config),
    )


def encode(run: Run, start: Start) -> TrainingData:
    """Encode the data; from then on only tensors are needed, and the records are dropped."""
    config, checked, accelerator = run.config, run.checked, run.accelerator
    on_main_process(accelerator, require_disk_space, run, start)
    on_main_process(accelerator, warn_of_previews, run, start)
    contract = start.checkpoint.documents["contract"] if start.checkpoint else None
    on_main_process(accelerator, ComfyuiCopies.of(config, run.family).require_free, contract)
    with run.clock.stage("encoding"):
        encode = encode_run if config.data.sealed is None else sealed_data
        on_main_process(accelerator, write_held_out, config, checked.held_out)
        data = (slider_data if config.generates_data else encode)(config, checked, accelerator)
        checked.drop_records()
        free_memory()
    # Again: the cache may be on the same disk.
    on_main_process(accelerator, require_disk_space, run, start)
    return data


def begin_run_folder(run: Run, start: Start, data: TrainingData) -> Start:
    """Add the data's fingerprint to the start, cut the folder back to its step, and start the trackers.

    Raises:
        DifferentRunError: the run was started with other data.
    """
    accelerator, policy = run.accelerator, run.resume_policy
    batch_size = run.config.train.micro_batch_size
    fingerprint = start.fingerprint | data_fingerprint(data.identity, micro_batch_size=batch_size)
    changes = from_main_process(accelerator, policy.changed_settings, fingerprint, start.checkpoint)
    earlier = from_main_process(accelerator, policy.earlier_starts, start.checkpoint)
    lineage = extended_lineage(
        earlier, start.checkpoint, changes, accelerator, began_at=run.clock.began_at, chosen=run.chosen
    )
    start = replace(start, fingerprint=fingerprint, lineage=lineage)
    on_main_process(accelerator, _write_start, run, start)
    settings = run.config.logging
    on_main_process(
        accelerator,
        start_trackers,
        accelerator,
        names=settings.trackers,
        project=settings.project,
        # Unresolved: no tracker gets the value of an environment variable.
        settings=load_yaml(run.loaded.resolved_yaml) if settings.trackers else {},
        folder=run.folder.path / "trackers",
        run_name=settings.run_name,
        run_id=start.run_id,
        wandb_mode=settings.wandb_mode,
    )
    return start


@shortages_explained()  # here, so that all processes end alike
def _write_start(run: Run, start: Start) -> None:
    """Write fingerprint, lineage and config, and cut metrics and checkpoints back to this start's step."""
    folder = run.folder
    write_json(folder.fingerprint_file, start.fingerprint)
    write_json(folder.lineage_file, start.lineage)
    run.write_settings()
    read_items(folder.items_file)  # Warns of damaged rows before the run continues.
    # A new start also drops what an earlier one logged before its first checkpoint.
    for file in folder.row_files:
        MetricsFile(file).cut_back_to(start.step or -1)
    run.store.cut_back_to(start.step)
    cut_back(folder.scores_file, folder.scored_folder, start.step)
    _warn_of_lost_rows(run, start)


def _warn_of_lost_rows(run: Run, start: Start) -> None:
    """Warn where the metrics lack the last row that was logged before the checkpoint of this run folder."""
    checkpoint = start.checkpoint
    if checkpoint is None or checkpoint.path.parent != run.store.folder:
        return
    every_steps = load_yaml(checkpoint.documents["config"])["logging"]["every_steps"]
    if not isinstance(every_steps, int):
        return  # ${...}, whose value is kept nowhere
    # Only of the start that wrote it: the interval may have been another one before.
    starts = checkpoint.lineage
    own_steps = range(checkpoint.step, starts[-1]["step"] if starts else checkpoint.step, -1)
    last = next((step for step in own_steps if is_logged(step, every_steps)), None)
    if last is not None:
        MetricsFile(run.folder.metrics_file).warn_of_lost_rows(last)


def build(
    run: Run, start: Start, data: TrainingData, initial: Mapping[str, torch.Tensor] | None
) -> TrainingObjects:
    """Load the model, restore the checkpoint, and build the other objects of the training loop.

    Args:
        initial: values that the adapter of a new run starts from; random where None.
    """
    config, checkpoint = run.config, start.checkpoint
    with run.clock.stage("model"):
        logger.info("Loading the transformer.")
        transformer, compiler, weights = _load_model(run, initial)
        optimizer = build_optimizer(config, transformer, run.checked.groups)
        averaged = build_average(config, transformer, optimizer)
        if checkpoint is not None:
            restore(checkpoint, transformer, optimizer, averaged, accelerator=run.accelerator)
        built = build_run(
            config,
            run.checked,
            data,
            accelerator=run.accelerator,
            transformer=transformer,
            weights=weights,
            compiler=compiler,
            optimizer=optimizer,
            averaged=averaged,
            start_step=start.step,
            folder=run.folder,
        )
    if checkpoint is not None:
        built.divergence = Divergence.of_checkpoint(checkpoint.documents["state"])
    built.divergence.rate_setting = config.train.rate_setting
    return built


def _load_model(
    run: Run, initial: Mapping[str, torch.Tensor] | None
) -> tuple[torch.nn.Module, BlockCompiler, WeightStream]:
    """The transformer with its adapter, what compiles its blocks, and the stream of weights on the host."""
    config, family, accelerator = run.config, run.family, run.accelerator
    host_blocks = share_host_memory(config, family, accelerator)
    adapter = load_training_adapter(config, family, accelerator, run.checked.training_adapter)
    loaded: list[torch.nn.Module] = []
    # Together: no process may read shared memory before it is filled.
    on_all_processes(
        accelerator,
        lambda: loaded.append(build_transformer(config, run.checked, initial, host_blocks, adapter)),
    )
    if family.context is not None:
        split_model(family, family.context, loaded[0])
    compiler = build_compiler(config, family, loaded[0])
    weights = place_weights(config, family, loaded[0], accelerator.device, host_blocks)
    return loaded[0], compiler, weights


@contextmanager
def stopped_compiler_explained(run: Run) -> Iterator[None]:
    """Scope of the steps: Ctrl+C reaches compilers, too, whose end is then no error.

    Raises:
        RunInterrupted: a step that cannot be finished, as its blocks were being compiled.
    """
    try:
        yield
    except RuntimeError as error:
        # Named, not imported: torch loads its compiler only where something is compiled.
        is_compilers = type(error).__name__ == "InductorError"
        if not is_compilers or not run.requests.signals.asked:
            raise
        message = "stopped while blocks were compiled, without this step; the same command continues"
        raise RunInterrupted(f"{message}{run.requests.signals.command}") from error


@contextmanager
def compiled_code_kept(run: Run) -> Iterator[None]:
    """Scope of the steps: blocks compile from what earlier runs kept, and what they compiled is kept.

    Raises:
        UserError: somebody else may have written what is kept, which torch runs as code.
    """
    config = run.config
    if not config.train.compile_cache:
        yield
        return
    # Never where a config or a folder of others says: whoever writes there would run code here.
    folder = Path.home() / ".cache" / "diffsynth_lite" / "compiled"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    # What a run did not use is not written again, so runs of other sizes have files of their own.
    sizes = ("width", "height", "resolutions", "sizes", "bucket_step", "max_aspect_ratio", "frame_counts")
    train = {"micro_batch_size", "mixed_precision"}
    include: Any = {"model": True, "lora": True, "data": set(sizes), "train": train}
    settings = config.model_dump(include=include) | {"torch": torch.__version__}
    settings["device"] = device_name(run.accelerator.device)
    file = folder / hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]
    known: set[str] = set()
    if file.exists():
        for place, found in ((place, place.stat()) for place in (folder, file)):
            if sys.platform != "win32" and (found.st_uid != os.getuid() or found.st_mode & 0o022):
                raise UserError(
                    f"train.compile_cache: others may write to {place}, which torch runs as code; "
                    "remove it, or set it to false"
                )
        known = _names_of(torch.compiler.load_cache_artifacts(file.read_bytes()))
        logger.info("train.compile_cache: %d parts of compiled code are there from earlier runs.", len(known))
    try:
        yield
    finally:
        made = torch.compiler.save_cache_artifacts() if run.is_main else None
        if made is not None and not _names_of(made[1]) <= known:
            with replacing(file) as temporary:
                temporary.touch(mode=0o600)
                temporary.write_bytes(made[0])
            logger.info(
                "train.compile_cache: kept compiled code in %s (%s).", file, format_bytes(len(made[0]))
            )


def _names_of(artifacts: Any) -> set[str]:
    """Kinds and names of what torch compiled; none where it could not be read."""
    found = {} if artifacts is None else artifacts.artifacts
    return {f"{kind} {name}" for kind, names in found.items() for name in names}


def generate_data(run: Run, data: TrainingData, built: TrainingObjects) -> None:
    """Have the base model generate the images of a slider that the cache lacks; others have none."""
    if not data.generated:
        return
    config, accelerator = run.config, run.accelerator
    is_first = find_cache_group(config, accelerator).is_first

    def work() -> None:
        if is_first or built.runs_together:
            generate_images(config, run.family, data.generated, built.transformer)

    with run.clock.stage("images of the slider"):
        on_all_processes(accelerator, work)


def memory_explained(run: Run, data: TrainingData, built: TrainingObjects) -> AbstractContextManager[None]:
    """Scope in which a full device ends the run with an account of its memory and of settings that help."""
    config, family = run.config, run.family
    train, transformer, weights = config.train, built.transformer, built.weights
    model = family.folder.component_config(family.trained[0])
    heads, head_width = (model.get(name) for name in ("num_attention_heads", "attention_head_dim"))
    num_tokens = max(num_tokens_of(bucket, family) for bucket in data.items.buckets)
    frozen = [weight for weight in transformer.parameters() if not weight.requires_grad]
    float32_bytes = local_bytes(weight for weight in frozen if weight.dtype == torch.float32)
    workload = Workload(
        tokens=num_tokens // train.context_parallel,
        width=heads * head_width if isinstance(heads, int) and isinstance(head_width, int) else None,
        micro_batch_size=train.micro_batch_size,
        num_blocks=run.checked.num_blocks,
        streamable_bytes=streamable_bytes(config, family, transformer, weights),
        quantizable_bytes=quantizable_bytes(family, transformer),
        num_checkpointed=run.checked.num_selected_blocks if train.use_gradient_checkpointing else 0,
        offloads=train.use_gradient_checkpointing_offload,
        # In the backward pass those of one block, and those that are fetched ahead.
        blocks_on_device=max(config.memory.resident_blocks, 1 + config.memory.prefetched_blocks),
        has_token_budget=train.micro_batch_tokens is not None,
        float32_bytes=float32_bytes if config.model.dtype == "float32" else 0,
    )
    return out_of_memory_explained(
        workload,
        transformer,
        built.optimizer,
        plan=partial(suggest_settings, config, family, run.accelerator),
        slot_bytes=weights.slot_bytes,
    )
