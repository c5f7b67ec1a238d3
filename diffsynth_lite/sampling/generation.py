"""This file generates samples: it checks, encodes and loads as a run does, and samples as its previews do."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from diffusers.training_utils import free_memory

from diffsynth_lite.config import Config
from diffsynth_lite.core.evaluation_mode import evaluation_mode
from diffsynth_lite.core.weights import QuantizationReport
from diffsynth_lite.errors import Problems, RunStoppedError, UserError
from diffsynth_lite.lora import (
    add_finished_lora,
    excludes_other_loras,
    load_finished_lora,
    require_fit,
    set_lora_weights,
)
from diffsynth_lite.media import Generated, frame_strip, frames_of
from diffsynth_lite.pipelines import ModelFamily, PreviewRequest
from diffsynth_lite.redaction import redacted
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.loras import LoraCopy
from diffsynth_lite.run_folder.reading import TolerantReader
from diffsynth_lite.sampling.request import GivenLora, SampleRequest, make_folder
from diffsynth_lite.training.builder import load_frozen_transformer
from diffsynth_lite.training.checkpoint.resume import choices_in
from diffsynth_lite.training.checks import bind_family, check_loading, find_blocks, with_placeholders
from diffsynth_lite.training.encoding.run_encoding import encode_previews
from diffsynth_lite.training.frozen_weights import place_weights, share_host_memory
from diffsynth_lite.training.lora_file import read_lora
from diffsynth_lite.training.planning.automatic import choose_memory, needs_auto_memory
from diffsynth_lite.training.preview_requests import check_previews
from diffsynth_lite.training.previews import (
    OUT_OF_MEMORY_ADVICE,
    generation_parameters,
    model_name,
    preview_grid,
    save_generated,
    save_png,
)
from diffsynth_lite.training.session import build_accelerator, deterministic_kernels
from diffsynth_lite.training.shortages import shortages_explained

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _ReadLora:
    """The contents of a LoRA file.

    Attributes:
        adapter: its name on the model.
        tensors: by peft's names.
    """

    given: GivenLora
    adapter: str
    tensors: Mapping[str, torch.Tensor]
    settings: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class _LoadedModel:
    """A base model with LoRAs on it.

    Attributes:
        config: with the chosen memory settings.
        transformer: with the LoRAs, on the device.
    """

    config: Config
    family: ModelFamily
    loras: Sequence[_ReadLora]
    transformer: torch.nn.Module

    def generate(self, requests: Sequence[PreviewRequest], scale: float) -> Sequence[Generated]:
        """The frames of each sample, with the weights of all LoRAs multiplied by ``scale``.

        Raises:
            UserError: numbers overflowed, which diffusers would show as black.
        """
        set_lora_weights(self.transformer, {one.adapter: one.given.weight * scale for one in self.loras})
        vae_dtype = getattr(torch, self.config.model.vae_dtype)
        try:
            with evaluation_mode(self.transformer):
                return self.family.sample(self.transformer, vae_dtype, requests)
        except FloatingPointError as error:
            remedy = (
                "take a smaller one" if scale else "--scale 0 is the base model: see model.dtype, vae_dtype"
            )
            raise UserError(f"--scale {scale:g}: numbers overflow, {error}; {remedy}") from error

    def with_lora(self, lora: _ReadLora) -> "_LoadedModel":
        """The same model with the values of another LoRA of the same run, in place of the first."""
        lora = replace(lora, adapter=self.loras[0].adapter)
        load_finished_lora(self.transformer, lora.adapter, lora.tensors)
        return replace(self, loras=[lora, *self.loras[1:]])

    def save(
        self,
        folder: Path,
        requests: Sequence[PreviewRequest],
        generated: Sequence[Generated],
        column: "_Column",
    ) -> None:
        """Write the files, each with the parameters that it was generated with."""
        scale = column.scale
        model = model_name(self.family, self.config.model.path)
        sampler = self.family.folder.component_config("scheduler")["_class_name"]
        loras = [(one.given.name, one.given.weight * scale) for one in self.loras if scale]
        num_prompts = len(self.config.validation.prompts)
        for number, (request, one) in enumerate(zip(requests, generated, strict=True)):
            text = generation_parameters(request, loras, model=model, sampler=sampler)
            place = number * num_prompts // len(requests)  # the seeds of a prompt follow each other
            name = f"prompt-{place:02d}-seed-{request.seed}-{column.name}.png"
            save_generated(folder / name, one, fps=request.fps, parameters=text)


@dataclass(frozen=True, kw_only=True)
class _Column:
    """A column of the grid.

    Attributes:
        name: part of the names of its files.
        lora: in place of the first one; None leaves that.
    """

    title: str
    name: str
    scale: float
    lora: GivenLora | None = None


def generate_samples(request: SampleRequest) -> Path:
    """Generate each prompt from each seed at each scale, of each step where these are compared, and one grid.

    Returns:
        The grid's file.

    Raises:
        UserError: something that the user can fix, before weights load wherever that is possible.
        RunStoppedError: the device is full.
    """
    if request.config.train.cpu_threads is not None:
        torch.set_num_threads(request.config.train.cpu_threads)
    accelerator = build_accelerator(request.config, Path(request.config.output.dir) / "trackers")
    kernels = deterministic_kernels() if request.config.train.deterministic else nullcontext()
    with shortages_explained(), kernels, _full_device_explained():
        config, family, loras = _check(request, accelerator)
        folder = make_folder(request)
        family.folder.download_weights(family.components)
        previews = encode_previews(config, family, accelerator)
        free_memory()  # of the encoder
        requests = [replace(preview, seed=seed) for preview in previews for seed in request.seeds]
        model = _load(config, family, loras, accelerator)
        columns, strips = list(_columns(request)), []
        for column in columns:
            logger.info("Generating: %s.", column.title)
            if column.lora is not None:
                model = model.with_lora(_read(family, 0, column.lora))
            generated = model.generate(requests, column.scale)
            model.save(folder, requests, generated, column)
            strips.append([frame_strip(frames_of(one)) for one in generated])
            free_memory()  # of the decoder, which is loaded for each column as for each preview
    grid = folder / "grid.png"
    titles = [column.title for column in columns]
    save_png(grid, preview_grid(list(zip(*strips, strict=True)), _labels(requests), titles))
    return grid


def _columns(request: SampleRequest) -> Iterator[_Column]:
    """One for each scale; of steps the base model once, then each step at each other scale."""
    only = request.loras[0] if len(request.loras) == 1 else None
    for scale in request.scales:
        if not (scale and request.by_step):
            yield _Column(title=_title(only, scale), name=f"scale-{scale:g}", scale=scale)
    for step, lora in request.by_step.items():
        for scale in filter(None, request.scales):
            name = f"step-{step:08d}-scale-{scale:g}"
            yield _Column(title=_title(lora, scale), name=name, scale=scale, lora=lora)


def _title(lora: GivenLora | None, scale: float) -> str:
    """Such as ``base``, ``scale 0.5``, ``step 40``, ``step 40 at 0.7, scale 0.5``."""
    if not scale:
        return "base"
    copy = lora and (LoraCopy.of(lora.place) or LoraCopy.of(lora.place.parent))
    words = [f"step {copy.step}"] if copy else []
    if lora and lora.weight != 1:
        words.append(f"at {lora.weight:g}" if words else f"weight {lora.weight:g}")
    at_scale = [f"scale {scale:g}"] if scale != 1 or not words else []
    return ", ".join(filter(None, [" ".join(words), *at_scale]))


def _check(request: SampleRequest, accelerator: Accelerator) -> tuple[Config, ModelFamily, list[_ReadLora]]:
    """Check all that can be checked before weights load, and choose what ``memory`` leaves open."""
    config, problems = with_placeholders(request.config), Problems()
    if not config.validation.prompts:
        problems.append("--prompt: is missing, and validation.prompts of the config is empty; give a prompt")
    if accelerator.num_processes > 1:
        problems.append(
            f"sample: needs one process, not {accelerator.num_processes}; start it without a launcher"
        )
    family = bind_family(config)
    problems.attempt(check_previews, config, family)
    empty = family.empty_transformer()
    found = [
        problems.attempt(_read_fitting, family, empty, *numbered) for numbered in enumerate(request.loras)
    ]
    loras = [lora for lora in found if lora is not None]
    for other in list(request.by_step.values())[1:]:
        problems.attempt(
            _read_fitting, family, empty, 0, other
        )  # Only checked: each is read again for its column.
    uncombined = [lora for lora in loras if excludes_other_loras(lora.tensors)]
    if uncombined and len(loras) > 1:
        problems.append(
            f"--lora {uncombined[0].given.place}: is a DoRA or a LoKr, which cannot be combined with other "
            "LoRAs here; give only this one"
        )
    _check_loading(problems, family, config, accelerator.device)
    problems.require_none()
    if needs_auto_memory(request.config):
        earlier = _earlier_choices(request.run)
        config = choose_memory(request.config, family, accelerator, earlier=earlier).config
        _check_loading(problems, family, config, accelerator.device)
        problems.require_none()
    return config, family, loras


def _check_loading(problems: Problems, family: ModelFamily, config: Config, device: torch.device) -> None:
    transformer = family.empty_transformer().requires_grad_(False)
    blocks = problems.attempt(find_blocks, family, transformer) or []
    check_loading(problems, family, transformer, config, device, num_blocks=len(blocks))


def _earlier_choices(run: RunFolder | None) -> dict[str, Any] | None:
    """The settings that ``memory.auto`` chose for a run and that it keeps; None where there is no run."""
    if run is None or not run.lineage_file.exists():
        return None
    reader = TolerantReader(run.path)
    lineage = reader.sequence(run.lineage_file.name)
    for problem in reader.problems:
        logger.warning("%s: %s", run.path, problem)
    return choices_in(entry for entry in lineage if isinstance(entry, dict))


def _read_fitting(family: ModelFamily, empty: torch.nn.Module, place: int, given: GivenLora) -> _ReadLora:
    lora = _read(family, place, given)
    require_fit(empty, lora.tensors, place=f"--lora {given.place}")
    return lora


def _read(family: ModelFamily, place: int, given: GivenLora) -> _ReadLora:
    tensors, settings = read_lora(family, str(given.place), key="--lora")
    return _ReadLora(given=given, adapter=f"sampled_{place}", tensors=tensors, settings=settings)


def _load(
    config: Config, family: ModelFamily, loras: Sequence[_ReadLora], accelerator: Accelerator
) -> _LoadedModel:
    logger.info("Loading the transformer.")
    host_blocks = share_host_memory(config, family, accelerator)
    transformer = load_frozen_transformer(config, family, host_blocks)
    for lora in loras:
        device = None if host_blocks is None else host_blocks.device
        add_finished_lora(transformer, lora.adapter, lora.tensors, lora.settings, device=device)
    # Before weights are placed: those of a LoRA that takes part count as trained, and are not streamed.
    set_lora_weights(transformer, {lora.adapter: lora.given.weight for lora in loras})
    place_weights(config, family, transformer, accelerator.device, host_blocks)
    for line in QuantizationReport.of(transformer).lines():
        logger.info("%s", line)
    # Under the mixed precision of the run, as its previews.
    prepared = accelerator.prepare_model(transformer, evaluation_mode=True)
    return _LoadedModel(config=config, family=family, loras=loras, transformer=prepared)


def _labels(requests: Sequence[PreviewRequest]) -> list[str]:
    """One a row of the grid: the prompt, and the seed where there are several."""
    has_seeds = len({request.seed for request in requests}) > 1
    return redacted([has_seeds * f"seed {request.seed}: " + request.prompt for request in requests])


@contextmanager
def _full_device_explained() -> Iterator[None]:
    """Scope in which a full device is explained."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        first_line, _, _ = str(error).partition("\n")
        raise RunStoppedError(f"out of memory: {first_line} What helps: {OUT_OF_MEMORY_ADVICE}") from error
