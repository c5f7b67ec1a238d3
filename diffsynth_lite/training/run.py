"""This file is the life of a run: check, encode, load, train, save, conclude."""

import logging
import uuid
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from diffusers.training_utils import free_memory
from rich.console import Console

from diffsynth_lite.config import Config, LoadedConfig, load_yaml
from diffsynth_lite.core.gradient import BlockCompiler
from diffsynth_lite.core.weights import WeightStream
from diffsynth_lite.errors import ON_EACH_MACHINE, RunInterrupted
from diffsynth_lite.files import write_json, write_text
from diffsynth_lite.report.page import ReportWriter
from diffsynth_lite.run_folder.folder import RunFolder, outcome_recorded
from diffsynth_lite.run_folder.metrics import MetricsFile, read_items, start_trackers
from diffsynth_lite.run_folder.progress import is_logged
from diffsynth_lite.training.builder import (
    TrainingObjects,
    build_accelerator,
    build_compiler,
    build_noise_levels,
    build_run,
    build_transformer,
)
from diffsynth_lite.training.checkpoint.divergence import Divergence
from diffsynth_lite.training.checkpoint.manifest import Checkpoint
from diffsynth_lite.training.checkpoint.resume import (
    Lineage,
    RunFingerprint,
    data_fingerprint,
    extended_lineage,
    resolve_checkpoint,
)
from diffsynth_lite.training.checkpoint.saver import Saver, restore
from diffsynth_lite.training.checkpoint.store import CheckpointStore
from diffsynth_lite.training.checks import CheckedRun, check_run, checked_again
from diffsynth_lite.training.distilled import load_training_adapter
from diffsynth_lite.training.distributed.agreement import (
    from_main_process,
    on_all_processes,
    on_main_process,
    tensors_from_main_process,
)
from diffsynth_lite.training.distributed.context import check_context, context_of, split_model
from diffsynth_lite.training.distributed.devices import describe_run
from diffsynth_lite.training.distributed.sharding import check_sharding, shards_of
from diffsynth_lite.training.encoding.run_encoding import TrainingData, encode_run
from diffsynth_lite.training.encoding.sealed_start import sealed_data
from diffsynth_lite.training.evaluation import ValidationProtocol
from diffsynth_lite.training.export.card import CardWriter
from diffsynth_lite.training.export.disk_space import require_room, warn_of_previews
from diffsynth_lite.training.export.lora_facts import gather_lora_facts
from diffsynth_lite.training.layer_groups import adapter_kind, own_sizes, usual_size
from diffsynth_lite.training.lora_file import read_initial_lora
from diffsynth_lite.training.memory_report import workload_of
from diffsynth_lite.training.optimization.averages import AveragedWeights
from diffsynth_lite.training.optimization.optimizers import build_average, build_optimizer, measures_average
from diffsynth_lite.training.planning.automatic import before_choice, choose_memory, leaves_open, what_fits
from diffsynth_lite.training.run_context import RunContext, StartupClock, deterministic_kernels
from diffsynth_lite.training.shortages import out_of_memory_explained, shortages_explained
from diffsynth_lite.training.stopping import GracePeriod, StopRequest, remove_old_requests
from diffsynth_lite.training.streaming import place_weights, share_host_memory
from diffsynth_lite.training.trainer import train

logger = logging.getLogger(__name__)


def run_training(
    loaded: LoadedConfig, *, console: Console, clock: StartupClock, grace: GracePeriod | None = None
) -> None:
    """Train a LoRA from a loaded config to the exported file.

    Args:
        loaded: the config and its texts.
        console: where the progress line goes.
        clock: counts the start-up time.
        grace: how long the launcher waits for a run that it stops, where that is known.

    Raises:
        UserError: something the user can fix; before weights load wherever that is possible.
        RunStoppedError: the run had to stop.
        RunInterrupted: a signal stopped the run, after saving.
    """
    config = loaded.config
    if config.train.cpu_threads is not None:
        torch.set_num_threads(config.train.cpu_threads)
    folder = RunFolder(Path(config.output.dir).expanduser())
    with clock.stage("checks"), shortages_explained():
        accelerator = build_accelerator(config, folder.path / "trackers")
        checked = _checked(config, accelerator)
    run = RunContext(
        loaded=loaded,
        accelerator=accelerator,
        folder=folder,
        store=CheckpointStore(
            folder.checkpoints_folder,
            keep=config.output.keep_checkpoints,
            keep_every=config.output.keep_every_steps,
        ),
        checked=checked,
        page=ReportWriter(folder.path, is_main=accelerator.is_main_process),
        console=console,
        clock=clock,
        grace=grace,
    )
    stop = StopRequest()
    with ExitStack() as held, stop.listening(), shortages_explained(folder.path):
        on_main_process(accelerator, lambda: held.enter_context(folder.lock()))
        on_main_process(accelerator, lambda: remove_old_requests(folder.path))
        with clock.stage("checks"):
            run = _with_chosen_memory(run)
        config, checked = run.config, run.checked
        logger.info("Runs in %s.", describe_run(config, accelerator))
        fingerprint = run.fingerprint(build_noise_levels(config, checked.family).shift)
        checkpoint = resolve_checkpoint(accelerator, run.resume_policy, fingerprint)
        is_finished = from_main_process(accelerator, lambda: _is_finished(folder))
        if checkpoint and checkpoint.step >= config.train.steps and is_finished:
            run.page.restore()
            finished = f"This run is finished (step {checkpoint.step})"
            logger.info("%s. %s", finished, _results(folder), extra=ON_EACH_MACHINE)
            return
        start_step = checkpoint.step if checkpoint else 0
        recorded = outcome_recorded(
            folder,
            lambda: max(run.store.steps(), default=0),
            start_step=start_step,
            total_steps=config.train.steps,
        )
        kernels = deterministic_kernels() if config.train.deterministic else nullcontext()
        # Inside as well: the status says what the screen does.
        explained = shortages_explained(folder.path)
        with run.page.concluded(), ExitStack() as outcome, explained, kernels:
            told = on_main_process(accelerator, lambda: outcome.enter_context(recorded))
            step, divergence = _train(run, fingerprint, checkpoint, stop)
            remarks = divergence.remarks()
            if told is not None:
                told += remarks
            _conclude(run, step, remarks)


def _checked(config: Config, accelerator: Accelerator) -> CheckedRun:
    """The run as it can be checked before weights load, with what its processes share."""
    check_sharding(config, accelerator)
    check_context(config, accelerator)
    checked = check_run(before_choice(config), accelerator)
    checked.family.shards = shards_of(config, checked.family, accelerator)
    checked.family.context = context_of(config, checked.family, accelerator)
    return checked


def _is_finished(folder: RunFolder) -> bool:
    """Whether the run's status says that it is finished."""
    status = folder.read_status()
    if folder.has_lost_status():
        logger.warning(
            "%s is missing or damaged; what is saved tells how far the run is.", folder.status_file
        )
    return status is not None and status.get("state") == "finished"


def _with_chosen_memory(run: RunContext) -> RunContext:
    """The run with what its config leaves open chosen, before anything is encoded."""
    if not leaves_open(run.config):
        return run
    earlier = from_main_process(run.accelerator, run.resume_policy.earlier_choices)
    chosen = choose_memory(run.config, run.checked.family, run.accelerator, earlier=earlier)
    return replace(
        run,
        loaded=replace(run.loaded, config=chosen.config),
        checked=checked_again(run.checked, chosen.config, run.accelerator),
        predicted=chosen.predicted,
        chosen=chosen.lasting,
    )


def _train(
    run: RunContext, fingerprint: RunFingerprint, checkpoint: Checkpoint | None, stop: StopRequest
) -> tuple[int, Divergence]:
    """Encode, load, train, save; returns the optimizer steps done, and what was not finite in them."""
    start_step = checkpoint.step if checkpoint else 0
    initial = _initial_lora(run) if checkpoint is None else None
    saving = run.config, run.checked, run.store, start_step
    on_main_process(run.accelerator, lambda: require_room(*saving))
    on_main_process(run.accelerator, lambda: warn_of_previews(*saving))
    with run.clock.stage("encoding"):
        encoded = _encode(run)
    # Again: the cache may be on the same disk.
    on_main_process(run.accelerator, lambda: require_room(*saving))
    fingerprint |= data_fingerprint(encoded.identity, micro_batch_size=run.config.train.micro_batch_size)
    policy = run.resume_policy
    changes = from_main_process(run.accelerator, lambda: policy.changed_settings(fingerprint, checkpoint))
    earlier = from_main_process(run.accelerator, lambda: policy.earlier_starts(checkpoint))
    lineage = extended_lineage(earlier, checkpoint, changes, run.accelerator, chosen=run.chosen)
    run_id = checkpoint.documents["state"]["run_id"] if checkpoint else uuid.uuid4().hex[:12]
    on_main_process(run.accelerator, lambda: _start_run_folder(run, fingerprint, lineage, checkpoint))
    on_main_process(run.accelerator, lambda: _start_trackers(run, run_id))
    with run.clock.stage("model"):
        logger.info("Loading the transformer.")
        transformer, compiler, weights = _load_model(run, initial)
        optimizer = build_optimizer(run.config, transformer, run.checked.groups)
        averaged = build_average(run.config, transformer, optimizer)
        if checkpoint is not None:
            restore(checkpoint, transformer, optimizer, averaged, accelerator=run.accelerator)
        built = build_run(
            run.config,
            run.checked,
            encoded,
            accelerator=run.accelerator,
            transformer=transformer,
            weights=weights,
            compiler=compiler,
            optimizer=optimizer,
            averaged=averaged,
            start_step=start_step,
            folder=run.folder,
        )
    if checkpoint is not None:
        built.divergence = Divergence.of_checkpoint(checkpoint.documents["state"])
    built.divergence.rate_setting = run.config.train.rate_setting
    saver = _build_saver(run, built, encoded, fingerprint, lineage, run_id, checkpoint)
    try:
        with _memory_explained(run, encoded, transformer, optimizer, weights):
            step = train(run, built, saver, stop, start_step)
            total_steps = run.config.train.steps
            on_main_process(run.accelerator, lambda: saver.divergence.require_none(step, total_steps))
    finally:
        # What uses the process group goes before it: as the group's last owner a model deadlocked in torch's
        # destructor, in 1 of 7 runs on two gloo processes. Whoever started the run ends the group.
        del built
        run.accelerator.free_memory()
        for tracker in run.accelerator.trackers:
            tracker.finish()
    return step, saver.divergence


def _build_saver(
    run: RunContext,
    built: TrainingObjects,
    encoded: TrainingData,
    fingerprint: RunFingerprint,
    lineage: Lineage,
    run_id: str,
    checkpoint: Checkpoint | None,
) -> Saver:
    config, family = run.config, run.checked.family
    facts = gather_lora_facts(config, family, encoded, fingerprint)
    protocol = _validation_protocol(config, encoded, built.averaged)
    card_writer = CardWriter(
        config=config,
        family=family,
        facts=facts,
        previews=built.previews,
        loss_name=built.validation_loss.name,
        measures_average=protocol.is_average and not _exports_average(built),
        folder=run.folder,
        layers=run.checked.target_layers,
    )
    return Saver(
        folder=run.folder,
        store=run.store,
        family=family,
        transformer=built.transformer,
        optimizer=built.optimizer,
        averaged=built.averaged,
        optimizer_bytes=run.checked.optimizer.state_bytes,
        accelerator=run.accelerator,
        fingerprint=fingerprint,
        facts=facts,
        thumbnail=built.previews.thumbnail,
        write_card=card_writer.write,
        run_id=run_id,
        lineage=lineage,
        resolved_yaml=run.loaded.resolved_yaml,
        lora_dtype=getattr(torch, run.config.output.lora_dtype),
        divergence=built.divergence,
        keeps_best=config.output.keep_best and config.validation.data is not None,
        protocol=protocol,
        best=checkpoint.documents["state"].get("best") if checkpoint else None,
    )


def _exports_average(built: TrainingObjects) -> bool:
    return built.averaged is not None and built.averaged.is_result


def _memory_explained(
    run: RunContext,
    encoded: TrainingData,
    transformer: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    weights: WeightStream,
) -> AbstractContextManager[None]:
    """Scope in which a full device is explained."""
    return out_of_memory_explained(
        workload_of(run.config, run.checked, encoded, transformer, weights),
        transformer,
        optimizer,
        plan=partial(what_fits, run.config, run.checked.family, run.accelerator),
        slot_bytes=weights.slot_bytes,
    )


def _load_model(
    run: RunContext, initial: dict[str, torch.Tensor] | None
) -> tuple[torch.nn.Module, BlockCompiler, WeightStream]:
    """The transformer with its adapter, what compiles its blocks, and the stream of what is on the host."""
    config, family, accelerator = run.config, run.checked.family, run.accelerator
    host_blocks = share_host_memory(config, family, accelerator)
    adapter = load_training_adapter(config, family, accelerator, run.checked.training_adapter)
    loaded: list[torch.nn.Module] = []
    # Together: nobody may read what is shared before it is filled.
    on_all_processes(
        accelerator,
        lambda: loaded.append(build_transformer(config, run.checked, initial, host_blocks, adapter)),
    )
    if family.context is not None:
        split_model(family, family.context, loaded[0])
    compiler = build_compiler(config, family, loaded[0])
    weights = place_weights(config, family, loaded[0], accelerator.device, host_blocks)
    return loaded[0], compiler, weights


def _encode(run: RunContext) -> TrainingData:
    """Encode the data; from then on only tensors are needed, and the records are dropped."""
    config, checked, accelerator = run.config, run.checked, run.accelerator
    if config.data.sealed is not None:
        encoded = sealed_data(config, checked, accelerator)
    else:
        encoded = encode_run(config, checked, accelerator)
    checked.drop_records()
    free_memory()
    return encoded


def _initial_lora(run: RunContext) -> dict[str, torch.Tensor] | None:
    lora = run.config.lora
    if lora.init_from is None:
        return None
    size = usual_size(run.config)
    read = partial(
        read_initial_lora,
        run.checked.family,
        lora.init_from,
        layers=run.checked.target_layers,
        rank=size.rank,
        alpha=size.alpha,
        own=own_sizes(run.checked.groups),
        kind=adapter_kind(run.config),
    )
    return tensors_from_main_process(run.accelerator, read)


@shortages_explained()  # here, so that all processes end alike
def _start_run_folder(
    run: RunContext, fingerprint: RunFingerprint, lineage: Lineage, checkpoint: Checkpoint | None
) -> None:
    """Write fingerprint, lineage and config, and cut metrics and checkpoints back to this start's step."""
    folder, start_step = run.folder, lineage[-1]["step"]
    write_json(folder.fingerprint_file, fingerprint)
    write_json(folder.lineage_file, lineage)
    write_text(folder.config_file, run.loaded.source_text)
    write_text(folder.resolved_file, run.loaded.resolved_yaml)
    # A new start also drops what an earlier one logged before its first checkpoint.
    read_items(folder.items_file)  # What cannot be read is said before the run goes on.
    for file in folder.row_files:
        MetricsFile(file).cut_back_to(start_step or -1)
    run.store.cut_back_to(start_step)
    _warn_of_lost_rows(run, checkpoint)


def _warn_of_lost_rows(run: RunContext, checkpoint: Checkpoint | None) -> None:
    """Say where the metrics lack the last row that was logged before the checkpoint of this run folder."""
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


def _start_trackers(run: RunContext, run_id: str) -> None:
    settings = run.config.logging
    start_trackers(
        run.accelerator,
        names=settings.trackers,
        project=settings.project,
        # Unresolved: no tracker gets the value of an environment variable.
        settings=load_yaml(run.loaded.resolved_yaml),
        folder=run.folder.path / "trackers",
        run_name=settings.run_name,
        run_id=run_id,
        wandb_mode=settings.wandb_mode,
    )


def _validation_protocol(
    config: Config, encoded: TrainingData, averaged: AveragedWeights | None
) -> ValidationProtocol:
    return ValidationProtocol(
        data=encoded.validation_identity,
        num_items=len(encoded.validation_items),
        seed=config.validation.seed,
        is_average=measures_average(config, averaged),
    )


def _conclude(run: RunContext, step: int, remarks: Sequence[str]) -> None:
    steps = run.config.train.steps
    if step < steps:
        raise RunInterrupted(f"stopped after step {step} of {steps}, saved; the same command continues it")
    finished = "; ".join([f"Finished after {step} steps", *remarks])
    logger.info("%s. %s", finished, _results(run.folder), extra=ON_EACH_MACHINE)


def _results(folder: RunFolder) -> str:
    if not folder.path.is_dir():
        return f"Its folder is on the machine of the main process: {folder.path}"
    previews = f"previews: {folder.previews_folder}; " if folder.previews_folder.is_dir() else ""
    return f"Page: {folder.report_file}; LoRA: {folder.lora_folder}; {previews}metrics: {folder.metrics_file}"
