"""This file generates samples: it checks, encodes and loads as a run does, and samples as its previews do.

The model stays loaded from one request to the next.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from accelerate import Accelerator
from diffusers.training_utils import free_memory

from diffsynth_lite.config import Config
from diffsynth_lite.core.evaluation_mode import evaluation_mode
from diffsynth_lite.core.randomness import random_state_scope
from diffsynth_lite.core.weights.frozen_linear import QuantizationReport
from diffsynth_lite.errors import Problems, RunStoppedError, UserError
from diffsynth_lite.files import write_text
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
from diffsynth_lite.sampling.captioned import CaptionedItem
from diffsynth_lite.sampling.request import GivenLora, SampleRequest, made_folder
from diffsynth_lite.training.builder import load_frozen_transformer
from diffsynth_lite.training.checkpoint.resume import choices_in
from diffsynth_lite.training.checks import bind_family, check_loading, find_blocks, with_placeholders
from diffsynth_lite.training.encoding.run_encoding import encode_previews
from diffsynth_lite.training.frozen_weights import place_weights, share_host_memory
from diffsynth_lite.training.lora_file import read_lora
from diffsynth_lite.training.planning.automatic import choose_memory, needs_auto_memory
from diffsynth_lite.training.planning.kept_counts import KeptCounts
from diffsynth_lite.training.planning.phases import Phase, PhaseCounter
from diffsynth_lite.training.planning.subject import (
    counter_of,
    step_settings,
)
from diffsynth_lite.training.preview_requests import check_previews
from diffsynth_lite.training.previews import (
    OUT_OF_MEMORY_ADVICE,
    before_passes,
    generating,
    generation_parameters,
    model_name,
    preview_grid,
    save_generated,
    save_media,
    save_png,
)
from diffsynth_lite.training.session import build_accelerator, deterministic_kernels
from diffsynth_lite.training.shortages import shortages_explained

logger = logging.getLogger(__name__)

_ITEMS_AT_ONCE = 8
"""Items of training data that are in memory before they are written; lost where the command is stopped."""


@dataclass(frozen=True, kw_only=True)
class _ReadLora:
    """The contents of a LoRA file, by peft's names."""

    given: GivenLora
    tensors: Mapping[str, torch.Tensor]
    settings: Mapping[str, Any]

    @property
    def kind(self) -> object:
        """Equal for those whose values can take each other's place on a model."""
        shapes = {name: tensor.shape for name, tensor in self.tensors.items()}
        return self.settings.get("lora_alpha"), shapes


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The files of a request.

    Attributes:
        columns: the images of each column of the grid by its title, each prompt's seeds after each other; of
            a clip or of layers the strip, with the MP4 or the folder next to it.
    """

    grid: Path
    columns: Mapping[str, Sequence[Path]]


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


class SampleSession:
    """A base model that generates for one request after the other, each time as if it were the first.

    The transformer is loaded by the first request, when its prompts are encoded. For new prompts of later
    ones the text encoder is loaded next to it and freed; where both do not fit, the transformer is freed
    first and loaded again. It is also loaded again for LoRAs on other layers, or of another rank, than those
    that are on it.

    Args:
        config: with the chosen memory settings.
    """

    def __init__(self, config: Config, family: ModelFamily, accelerator: Accelerator) -> None:
        self.config, self.family, self.accelerator = config, family, accelerator
        self.device = accelerator.device
        self._empty = family.empty_transformer()
        self._transformer: torch.nn.Module | None = None
        self._kinds: dict[str, object] = {}

    @classmethod
    def open(cls, config: Config, run: RunFolder | None = None) -> Self:
        """Check the base model, and choose what ``memory`` leaves open; no weights are needed.

        Args:
            config: all but its section ``validation`` stays.
            run: its choices of memory settings are taken.
        """
        if config.train.cpu_threads is not None:
            torch.set_num_threads(config.train.cpu_threads)
        accelerator = build_accelerator(config, Path(config.output.dir) / "trackers")
        if accelerator.num_processes > 1:
            raise UserError(
                f"sample: needs one process, not {accelerator.num_processes}; start it without a launcher"
            )
        family = bind_family(config)
        _check_loading(family, with_placeholders(config), accelerator.device)
        if needs_auto_memory(config):
            config = choose_memory(config, family, accelerator, earlier=_earlier_choices(run)).config
            _check_loading(family, config, accelerator.device)
        return cls(config, family, accelerator)

    def close(self) -> None:
        """Free the transformer; another request loads it again."""
        self._transformer, self._kinds = None, {}
        self.accelerator.free_memory()
        free_memory()  # accelerate collects before it lets go

    def generate(self, request: SampleRequest) -> Samples:
        """Generate each prompt from each seed at each scale, of each step where these are compared.

        What ``progress_log.watched`` raises ends it also between two passes of the model; others may follow.

        Args:
            request: of its config only the section ``validation`` is read.

        Raises:
            UserError: something that the user can fix, before weights load wherever that is possible.
            RunStoppedError: the device is full.
        """
        with self._computing(request) as config, ExitStack() as held:
            loras = self._check(config, request)
            folder = held.enter_context(made_folder(request))
            previews = self._encode(config)
            requests = [replace(preview, seed=seed) for preview in previews for seed in request.seeds]
            strips, columns = [], dict[str, Sequence[Path]]()
            for column in _columns(request):
                if column.lora is not None:
                    loras = [_read(self.family, column.lora)]
                model = self._with_loras(loras, column.scale)
                logger.info("Generating: %s.", column.title)
                generated = self._sample(model, requests, column.scale)
                used = [lora.given for lora in loras]
                columns[column.title] = self._save(folder, requests, generated, column, used)
                strips.append([frame_strip(frames_of(one)) for one in generated])
                free_memory()  # of the decoder, which is loaded for each column as for each preview
        grid = folder / "grid.png"
        save_png(grid, preview_grid(list(zip(*strips, strict=True)), _labels(requests), list(columns)))
        return Samples(grid=grid, columns=columns)

    def generate_items(self, request: SampleRequest, items: Sequence[CaptionedItem], folder: Path) -> None:
        """Generate items of training data: an image or clip of each, with its caption next to it.

        Args:
            request: with their captions as prompts, in their order, one scale, and one seed.
            folder: gets the items, each as soon as a few are done.
        """
        with self._computing(request) as config, made_folder(replace(request, out=folder)):
            if self.family.default_num_layers:
                raise UserError("--from-captions: layers are no training data; use a family without them")
            loras, (scale,) = self._check(config, request), request.scales
            previews = [
                replace(preview, seed=item.seed(request.seeds[0]))
                for item, preview in zip(items, self._encode(config), strict=True)
            ]
            model, used = self._with_loras(loras, scale), [lora.given for lora in loras]
            for start in range(0, len(items), _ITEMS_AT_ONCE):
                part = slice(start, start + _ITEMS_AT_ONCE)
                generated = self._sample(model, previews[part], scale)
                for item, preview, one in zip(items[part], previews[part], generated, strict=True):
                    path = folder / f"{item.name}.png"
                    path.parent.mkdir(parents=True, exist_ok=True)
                    # Before the image, which then never lacks it.
                    write_text(folder / f"{item.name}.txt", f"{item.caption}\n")
                    save_media(path, one, fps=preview.fps, parameters=self._parameters(preview, used, scale))
                free_memory()  # of the decoder

    @contextmanager
    def _computing(self, request: SampleRequest) -> Iterator[Config]:
        """Scope in which models compute for a request; yields its config."""
        kernels = deterministic_kernels() if self.config.train.deterministic else nullcontext()
        with shortages_explained(), kernels, _full_device_explained():
            yield self.config.model_copy(update={"validation": request.config.validation})

    def generate_requests(
        self, requests: Sequence[PreviewRequest], loras: Sequence[GivenLora]
    ) -> Sequence[Generated]:
        """Generate what is encoded already, with LoRAs or, without any, by the base model.

        Raises:
            UserError: something that the user can fix, before weights load wherever that is possible.
            RunStoppedError: the device is full.
        """
        kernels = deterministic_kernels() if self.config.train.deterministic else nullcontext()
        with shortages_explained(), kernels, _full_device_explained():
            read = [self._read_fitting(lora) for lora in loras]
            self.family.folder.download_weights(self.family.components)
            generated = self._sample(self._with_loras(read, 1.0), requests, 1.0)
            free_memory()  # of the decoder
        return generated

    def count_bytes(self, request: SampleRequest, kept: Path | None = None) -> Phase:
        """The estimated memory of the session with a request, without what torch takes for itself.

        Args:
            kept: folder of the counts of earlier plans; None is none.

        Returns:
            ``device`` with the text encoder next to the model, as new prompts are encoded; ``least_device``
            with one at a time, as where both do not fit.

        Raises:
            UserError: the request is wrong, or the family loads its models in a way of its own.
        """
        validation = request.config.validation.model_copy(update={"model_path": None})
        config = self.config.model_copy(update={"validation": validation})
        loras = [lora.tensors for lora in self._check(config, request)]
        num_values = sum(tensor.numel() for tensors in loras for tensor in tensors.values())
        subject = config, self.family
        phases = PhaseCounter(*subject, counter_of(*subject, KeptCounts(kept, self.family)))
        return phases.sampling(step_settings(*subject), torch.float32.itemsize * num_values)

    def _check(self, config: Config, request: SampleRequest) -> list[_ReadLora]:
        """Check all of a request that can be checked before weights load; its LoRAs."""
        problems = Problems()
        if not config.validation.prompts:
            problems.append(
                "--prompt: is missing, and validation.prompts of the config is empty; give a prompt"
            )
        problems.attempt(check_previews, config, self.family)
        found = [problems.attempt(self._read_fitting, given) for given in request.loras]
        loras = [lora for lora in found if lora is not None]
        for other in list(request.by_step.values())[1:]:
            problems.attempt(self._read_fitting, other)  # Only checked: each is read again for its column.
        uncombined = [lora for lora in loras if excludes_other_loras(lora.tensors)]
        if uncombined and len(loras) > 1:
            problems.append(
                f"--lora {uncombined[0].given.place}: is a DoRA or a LoKr, which cannot be combined with "
                "other LoRAs here; give only this one"
            )
        problems.require_none()
        return loras

    def _read_fitting(self, given: GivenLora) -> _ReadLora:
        lora = _read(self.family, given)
        require_fit(self._empty, lora.tensors, place=f"--lora {given.place}")
        return lora

    def _encode(self, config: Config) -> list[PreviewRequest]:
        self.family.folder.download_weights(self.family.components)
        with random_state_scope(self.device):
            previews = self._encode_where_it_fits(config)
            free_memory()  # of the encoder
        return previews

    def _encode_where_it_fits(self, config: Config) -> list[PreviewRequest]:
        try:
            return encode_previews(config, self.family, self.accelerator)
        except (torch.OutOfMemoryError, RunStoppedError) as error:
            is_full = isinstance(error.__cause__ or error, torch.OutOfMemoryError)
            if self._transformer is None or not is_full:
                raise
        logger.info("The text encoder does not fit next to the transformer, which is loaded again after it.")
        self.close()
        return encode_previews(config, self.family, self.accelerator)

    def _with_loras(self, loras: Sequence[_ReadLora], scale: float) -> torch.nn.Module:
        """The model with these LoRAs, in this order, and no others."""
        names = self._places_of(loras)
        if self._transformer is None or names is None:
            self.close()
            names = [f"sampled_{place}" for place, _ in enumerate(loras)]
            with random_state_scope(self.device):
                self._transformer = self._load(dict(zip(names, loras, strict=True)))
        else:
            for name, lora in zip(names, loras, strict=True):
                load_finished_lora(self._transformer, name, lora.tensors)
        weights = {name: lora.given.weight * scale for name, lora in zip(names, loras, strict=True)}
        set_lora_weights(self._transformer, weights)
        return self._transformer

    def _places_of(self, loras: Sequence[_ReadLora]) -> list[str] | None:
        """The adapters of the model that can take these LoRAs; None where it lacks one."""
        free, names = dict(self._kinds), []
        for lora in loras:
            name = next((name for name, kind in free.items() if kind == lora.kind), None)
            if name is None:
                return None
            del free[name]
            names.append(name)
        return names

    def _load(self, loras: Mapping[str, _ReadLora]) -> torch.nn.Module:
        logger.info("Loading the transformer.")
        config, family, device = self.config, self.family, self.device
        host_blocks = share_host_memory(config, family, self.accelerator)
        transformer = load_frozen_transformer(config, family, host_blocks)
        for name, lora in loras.items():
            on = None if host_blocks is None else host_blocks.device
            add_finished_lora(transformer, name, lora.tensors, lora.settings, device=on)
        # Before weights are placed: those of a LoRA that takes part count as trained, and are not streamed.
        set_lora_weights(transformer, {name: lora.given.weight for name, lora in loras.items()})
        place_weights(config, family, transformer, device, host_blocks)
        for line in QuantizationReport.of(transformer).lines():
            logger.info("%s", line)
        self._kinds = {name: lora.kind for name, lora in loras.items()}
        # Under the mixed precision of the run, as its previews.
        prepared: torch.nn.Module = self.accelerator.prepare_model(transformer, evaluation_mode=True)
        return prepared

    def _sample(
        self, model: torch.nn.Module, requests: Sequence[PreviewRequest], scale: float
    ) -> Sequence[Generated]:
        """The frames of each sample."""
        vae_dtype = getattr(torch, self.config.model.vae_dtype)
        try:
            with (
                random_state_scope(self.device),
                evaluation_mode(model),
                generating(len(requests)) as report,
                before_passes(self.family.parts_of(model), report),
            ):
                return self.family.sample(model, vae_dtype, requests)
        except FloatingPointError as error:
            remedy = (
                "take a smaller one" if scale else "--scale 0 is the base model: see model.dtype, vae_dtype"
            )
            raise UserError(f"--scale {scale:g}: numbers overflow, {error}; {remedy}") from error

    def _save(
        self,
        folder: Path,
        requests: Sequence[PreviewRequest],
        generated: Sequence[Generated],
        column: _Column,
        loras: Sequence[GivenLora],
    ) -> list[Path]:
        """Write the files, each with the parameters that it was generated with."""
        num_seeds = len({request.seed for request in requests})  # of each prompt, one after the other
        paths = []
        for number, (request, one) in enumerate(zip(requests, generated, strict=True)):
            text = self._parameters(request, loras, column.scale)
            name = f"prompt-{number // num_seeds:02d}-seed-{request.seed}-{column.name}.png"
            paths.append(folder / name)
            save_generated(paths[-1], one, fps=request.fps, parameters=text)
        return paths

    def _parameters(self, request: PreviewRequest, loras: Sequence[GivenLora], scale: float) -> str:
        shown = [(lora.name, lora.weight * scale) for lora in loras if scale]
        model = model_name(self.family, self.config.model.path)
        return generation_parameters(request, shown, model=model, sampler=self.family.sampler)


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


def _check_loading(family: ModelFamily, config: Config, device: torch.device) -> None:
    problems = Problems()
    transformer = family.empty_transformer().requires_grad_(False)
    blocks = problems.attempt(find_blocks, family, transformer) or []
    check_loading(problems, family, transformer, config, device, num_blocks=len(blocks))
    problems.require_none()


def _earlier_choices(run: RunFolder | None) -> dict[str, Any] | None:
    """The settings that ``memory.auto`` chose for a run and that it keeps; None where there is no run."""
    if run is None or not run.lineage_file.exists():
        return None
    reader = TolerantReader(run.path)
    lineage = reader.sequence(run.lineage_file.name)
    for problem in reader.problems:
        logger.warning("%s: %s", run.path, problem)
    return choices_in(entry for entry in lineage if isinstance(entry, dict))


def _read(family: ModelFamily, given: GivenLora) -> _ReadLora:
    tensors, settings = read_lora(family, str(given.place), key="--lora")
    return _ReadLora(given=given, tensors=tensors, settings=settings)


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
