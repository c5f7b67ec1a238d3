"""This file generates previews while a LoRA trains: a file for each prompt and step, and one grid of all.

A video is kept as an MP4 and as a strip of some of its frames, which the grid shows; layers are kept as a PNG
each, in a folder, and as a strip. Each file but the grid holds the parameters it was generated with.
"""

import hashlib
import json
import logging
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

import torch
from accelerate import Accelerator
from diffusers.training_utils import free_memory
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from diffsynth_lite import __version__
from diffsynth_lite.config import Config
from diffsynth_lite.core.evaluation_mode import evaluation_mode
from diffsynth_lite.core.parallel import FailedWithinPassError
from diffsynth_lite.core.randomness import random_state_scope
from diffsynth_lite.data.video import write_video
from diffsynth_lite.errors import RunStoppedError
from diffsynth_lite.files import replacing
from diffsynth_lite.lora import (
    adapter_settings,
    adapter_tensors,
    add_finished_lora,
    at_strength,
    is_adapter_active,
    without_training_adapter,
)
from diffsynth_lite.lora.adapter import OWN_ADAPTER
from diffsynth_lite.lora.layers import COMFYUI_SCALE
from diffsynth_lite.lora.spelling import DIFFUSERS
from diffsynth_lite.lora.updates import tensors_of, updates_of
from diffsynth_lite.media import (
    STRIP_FRAMES,
    ClipWithAudio,
    Generated,
    evenly_spread,
    frame_strip,
    frames_of,
    jpeg_url,
)
from diffsynth_lite.pipelines import ModelFamily, PreviewRequest
from diffsynth_lite.pipelines.base.release_folder import find_base_model
from diffsynth_lite.progress_log import Phase, current_watch, watched
from diffsynth_lite.redaction import redacted
from diffsynth_lite.training.frozen_weights import load_for_previews
from diffsynth_lite.training.stopping import PreviewsStoppedError

logger = logging.getLogger(__name__)

_FILE_NAME = re.compile(r"step-(\d{8})-prompt-.*\.png")
OUT_OF_MEMORY_ADVICE = (
    "smaller ones (validation.width, validation.height, validation.num_frames), memory.stream_blocks: all, "
    "model.vae_tiling: true, model.vae_dtype: bfloat16"
)
"""What helps where previews do not fit on the device."""

_PREVIEWED = "previewed"
"""peft's name of the LoRA on a model that is loaded only for previews."""
_MAX_COLUMNS = 12
_MIN_CELL_PX = 128
_MAX_CELL_PX = 384
_MARGIN_PX = 8
_LABEL_WIDTH_PX = 190
_HEADER_PX = 28
_FONT_PX = 14
_LINE_CHARACTERS = 25
_THUMBNAIL_PX = 256


@dataclass(frozen=True, kw_only=True)
class Previews:
    """The previews that are generated at chosen steps, always from the same noise.

    Attributes:
        requests: one a prompt.
        model: name of the base model for people to read, never a path.
        sampler: class of its sampler.
        vae_dtype: dtype of the decoder, which is loaded for the previews and freed again.
        other: config with the formats of the model that generates, loaded and freed each time; None where it
            is the trained one.
        generated_by: identity of the model that generates, in the names of the files; None leaves it out.
        writes: whether this process writes the files.
        has_grid: whether a grid of them is kept, too.
        strengths: of a slider, at each of which a preview is generated, as a strip; empty of other LoRAs.
    """

    family: ModelFamily
    folder: Path
    requests: Sequence[PreviewRequest]
    model: str
    sampler: str
    vae_dtype: torch.dtype
    other: Config | None = None
    generated_by: str | None = None
    writes: bool = True
    has_grid: bool = True
    strengths: Sequence[float] = ()

    def generate(self, transformer: torch.nn.Module, step: int) -> Path | None:
        """Generate all previews and refresh the grid; a failure is logged, and training continues.

        The model's mode and the global random state are as before.

        Where the base or the sequences are shared all processes generate, together.

        Returns:
            The grid's file; None without one, without prompts, after a failure, or where another process
            writes it.

        Raises:
            RunStoppedError: a process failed where the others wait for it.
        """
        if not self.requests:
            return None
        number = len(self.requests)
        logger.info("After step %d: generating %d preview%s.", step, number, "s" if number > 1 else "")
        try:
            previews = self._sample(transformer)
            if self.writes:
                # Before the first step a LoRA changes nothing.
                self.save(previews, step, [(f"step-{step:08d}", 1.0)] if step else [])
            return self._save_grid(step) if self.writes and self.has_grid else None
        except PreviewsStoppedError:
            logger.warning("The previews of step %d are left out, as the run is to stop.", step)
            return None
        except FailedWithinPassError as error:
            raise RunStoppedError(
                f"previews at step {step} failed where the processes, which share the work, wait for each "
                f"other: {str(error).partition(chr(10))[0]} What helps: {OUT_OF_MEMORY_ADVICE}"
            ) from error
        except torch.OutOfMemoryError as error:
            logger.warning(
                "Previews at step %d failed, out of memory: %s Training continues. What helps: %s",
                step,
                str(error).partition("\n")[0],
                OUT_OF_MEMORY_ADVICE,
            )
            return None
        except Exception as error:  # a failed preview must not end the run: a full disk, a broken scheduler
            logger.warning(
                "Previews at step %d failed; training continues: %s",
                step,
                error,
                exc_info=not isinstance(error, OSError | FloatingPointError),
            )
            return None
        finally:
            free_memory()

    def _sample(self, transformer: torch.nn.Module) -> Sequence[Generated]:
        # Processes that share sequences are among those that share a base.
        shared = self.family.shards or self.family.context
        together = nullcontext() if shared is None else shared.failing_together()
        device = next(transformer.parameters()).device
        as_used = without_training_adapter(transformer)
        on = nullcontext(transformer) if self.other is None else self._other_model(self.other, transformer)
        with ExitStack() as held:
            for scope in (random_state_scope(device), evaluation_mode(transformer), together, as_used):
                held.enter_context(scope)
            report = held.enter_context(generating(len(self.requests)))
            model = held.enter_context(on)
            held.enter_context(before_passes(self.family.parts_of(model), report))
            if not self.strengths:
                return self.family.sample(model, self.vae_dtype, self.requests)
            adapter = OWN_ADAPTER if self.other is None else _PREVIEWED
            shown = []
            for strength in self.strengths:
                with at_strength(model, strength, adapter):
                    shown.append(self.family.sample(model, self.vae_dtype, self.requests))
            return [[frame_strip([*chain(*map(frames_of, one))])] for one in zip(*shown, strict=True)]

    @contextmanager
    def _other_model(self, config: Config, transformer: torch.nn.Module) -> Iterator[torch.nn.Module]:
        """Scope in which the model that generates is loaded, with the present LoRA of the trained model.

        Args:
            transformer: with an adapter that trains, on the device.
        """
        updates = updates_of(adapter_tensors(transformer), adapter_settings(transformer))
        device = next(transformer.parameters()).device
        # As in the LoRA file: alpha is folded, so that each layer's is its rank.
        of_file = tensors_of(updates, DIFFUSERS).items()
        tensors = {name: tensor for name, tensor in of_file if not name.endswith(COMFYUI_SCALE)}

        def put_on(loaded: torch.nn.Module) -> None:
            if is_adapter_active(transformer):
                add_finished_lora(loaded, _PREVIEWED, tensors, {}, device=device)

        model = load_for_previews(config, self.family, device, put_on)
        # One of its own, as the run's would keep the model.
        prepared = Accelerator(mixed_precision=config.train.mixed_precision).prepare_model(
            model, evaluation_mode=True
        )
        with evaluation_mode(prepared):
            yield prepared

    def are_missing(self, step: int) -> bool:
        """Whether a step lacks a preview of any prompt."""
        return bool(self.requests) and step not in self.generated_steps()

    def thumbnail(self, step: int) -> str | None:
        """A small image of the first prompt, from the last previews after training up to a step.

        Returns:
            A data URL, of a video its middle frame; None without a readable preview.
        """
        if not self.requests:
            return None
        trained = [shown for shown in self.generated_steps() if 0 < shown <= step]
        if not trained:
            return None
        try:
            image = _open(self.file(trained[-1], 0))
        except (OSError, SyntaxError) as error:  # PIL's errors for a damaged PNG
            logger.warning("The LoRA has no thumbnail of step %d: %s", trained[-1], error)
            return None
        first = self.requests[0]
        count = len(self.strengths) or first.num_layers or min(first.num_frames, STRIP_FRAMES)
        width = image.width // count
        middle = image.crop((count // 2 * width, 0, (count // 2 + 1) * width, image.height))
        middle.thumbnail((_THUMBNAIL_PX, _THUMBNAIL_PX))
        return jpeg_url(middle)

    def save(self, previews: Sequence[Generated], step: int, loras: Sequence[tuple[str, float]]) -> None:
        """Write the files of a step.

        Args:
            loras: name and weight of each that generated them.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for place, preview in enumerate(previews):
            request, file = self.requests[place], self.file(step, place)
            text = generation_parameters(
                request, loras, model=self.model, sampler=self.sampler, strengths=self.strengths
            )
            save_generated(file, preview, fps=request.fps, parameters=text)

    def _save_grid(self, step: int) -> Path:
        steps = evenly_spread([known for known in self.generated_steps() if known <= step], _MAX_COLUMNS)
        rows = [[_open(self.file(known, place)) for known in steps] for place in range(len(self.requests))]
        path = self.folder / "grid.png"
        prompts = redacted([request.prompt for request in self.requests])
        save_png(path, preview_grid(rows, prompts, [f"step {shown}" for shown in steps]))
        return path

    def file(self, step: int, place: int) -> Path:
        """File of one preview; its name changes with the prompt and with how it is generated."""
        return self.folder / f"step-{step:08d}-prompt-{place:02d}-{self.marks[place]}.png"

    @cached_property
    def marks(self) -> list[str]:
        """What each preview is generated from and how, in the names of its files."""
        return [_mark(request, self.generated_by) for request in self.requests]

    def generated_steps(self) -> list[int]:
        """Steps that have a file for every prompt, also from before a resume."""
        matches = [match for path in self.folder.glob("*") if (match := _FILE_NAME.fullmatch(path.name))]
        steps = sorted({int(match[1]) for match in matches})
        return [
            step
            for step in steps
            if all(self.file(step, place).is_file() for place in range(len(self.requests)))
        ]


@contextmanager
def generating(num_previews: int) -> Iterator[Callable[[], None]]:
    """Scope in which all that takes long is reported as a part of the previews; yields what reports again.

    There a run that is to stop raises PreviewsStoppedError.
    """
    report, counts = current_watch(), (0, num_previews)

    def watch(phase: Phase, done: int, total: int) -> None:
        nonlocal counts
        counts = (done, total) if phase == "generating" else counts
        report("generating", *counts)

    with watched(watch):
        yield lambda: report("generating", *counts)


@contextmanager
def before_passes(parts: Mapping[str, torch.nn.Module], call: Callable[[], None]) -> Iterator[None]:
    """Scope in which something is called before each forward pass, and so between denoising steps."""
    with ExitStack() as hooks:
        for part in parts.values():
            # Before hooks of others, which wait for the other processes.
            hooks.callback(part.register_forward_pre_hook(lambda *_: call(), prepend=True).remove)
        yield


def _mark(request: PreviewRequest, generated_by: str | None) -> str:
    is_guided = request.guidance_scale > 1
    generated_as: tuple[object, ...] = (
        *(request.prompt, request.negative_prompt if is_guided else "", request.guidance_scale),
        *(request.width, request.height, request.num_frames, request.seed, request.num_inference_steps),
    )
    # Nothing is added for the trained model and without layers: files of earlier versions have these names.
    generated_as += () if generated_by is None else (generated_by,)
    generated_as += (f"{request.num_layers} layers",) if request.num_layers else ()
    digest = hashlib.blake2b(repr(generated_as).encode(), digest_size=3)
    for image in (*request.inputs, *request.control, *request.inpaint_mask, *request.face):
        digest.update(repr(image.size).encode() + image.tobytes())
    return digest.hexdigest()


def save_generated(path: Path, generated: Generated, *, fps: float | None, parameters: str) -> None:
    """Write an image; of a video an MP4, with its audio, and a strip of its frames as the image.

    Layers are written to a folder, with a strip of them as the image.

    Args:
        path: of the image; the MP4, or the folder with a PNG of each layer, is next to it.
        generated: RGB frames, a single one for an image; RGBA frames are the layers of an image.
        fps: frames per second of a video.
        parameters: how it was generated; written into the files, with secrets masked.
    """
    frames = frames_of(generated)
    if frames[0].mode == "RGBA":
        layers = path.with_suffix("")
        layers.mkdir(exist_ok=True)
        for place, layer in enumerate(frames, start=1):
            save_png(layers / f"layer-{place}.png", layer, redacted(parameters))
    elif len(frames) > 1:
        save_media(path, generated, fps=fps, parameters=parameters)
    save_png(path, frame_strip(frames), redacted(parameters))


def save_media(path: Path, generated: Generated, *, fps: float | None, parameters: str) -> None:
    """Write an image, or only the MP4 of a video; see :func:`save_generated`."""
    parameters, frames = redacted(parameters), frames_of(generated)
    if len(frames) == 1:
        save_png(path, frames[0], parameters)
        return
    assert fps is not None, "a family of videos has a frame rate"
    audio = generated.audio if isinstance(generated, ClipWithAudio) else None
    write_video(path.with_suffix(".mp4"), frames, fps=fps, audio=audio, comment=parameters)


def save_png(path: Path, image: Image.Image, parameters: str | None = None) -> None:
    """Write an image atomically, with the parameters that it was generated with."""
    texts = PngInfo()
    if parameters is not None:
        texts.add_text("parameters", parameters)  # as UTF-8 where it is not Latin-1
    with replacing(path) as temporary:
        image.save(temporary, "PNG", pnginfo=texts)


def model_name(family: ModelFamily, location: str) -> str:
    """The name of a family's base model for people to read: never a path.

    Args:
        location: of its pipeline, as given.
    """
    folder = family.folder
    base = find_base_model(family.releases, location, folder)
    names = [base.hub_id or folder.path.resolve().name, *(file.path.stem for file in folder.files.values())]
    return " + ".join(names)


def generation_parameters(
    request: PreviewRequest,
    loras: Sequence[tuple[str, float]],
    *,
    model: str,
    sampler: str,
    strengths: Sequence[float] = (),
) -> str:
    """How an image or a video was generated, as AUTOMATIC1111's web UI writes it into files.

    Civitai, ComfyUI's managers and others read this format. Source: ``create_infotext`` in its
    ``modules/processing.py``, and ``re_param_code`` in ``modules/infotext_utils.py``, which reads it.

    Args:
        loras: name and weight of each.
        strengths: by which the weights are multiplied in each image of a strip; empty of a single one.
    """
    tags = [f"<lora:{name}:{weight:g}>" for name, weight in loras]
    lines = [" ".join([request.prompt, *tags])]
    if request.guidance_scale > 1 and request.negative_prompt.strip():
        lines.append(f"Negative prompt: {request.negative_prompt}")
    settings: dict[str, object] = {
        "Steps": request.num_inference_steps,
        "Sampler": sampler,
        "CFG scale": f"{request.guidance_scale:g}",
        "Seed": request.seed,
        "Size": f"{request.width}x{request.height}",
        "Model": model,
    }
    if request.num_frames > 1:
        settings |= {"Frames": request.num_frames, "FPS": f"{request.fps:g}"}
    if request.num_layers:
        settings["Layers"] = request.num_layers
    if strengths:
        settings["Strengths"] = " ".join(f"{strength:g}" for strength in strengths)
    settings["Version"] = f"diffsynth_lite {__version__}"
    quoted = {
        name: json.dumps(value, ensure_ascii=False) if re.search("[,:\n]", str(value)) else value
        for name, value in settings.items()
    }
    lines.append(", ".join(f"{name}: {value}" for name, value in quoted.items()))
    return "\n".join(lines)


def _open(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB")


def preview_grid(
    rows: Sequence[Sequence[Image.Image]], prompts: Sequence[str], titles: Sequence[str]
) -> Image.Image:
    """One image of all previews, with prompts on the left and the titles of columns on top.

    Args:
        rows: for each prompt its previews, one a column, all of one size.
        prompts: one a row.
        titles: one a column.
    """
    # The longer side is between the two bounds, and the shape kept.
    first, longer = rows[0][0], max(rows[0][0].size)
    scale = min(max(longer, _MIN_CELL_PX), _MAX_CELL_PX) / longer
    width, height = round(first.width * scale), round(first.height * scale)
    lefts = [_LABEL_WIDTH_PX + column * (width + _MARGIN_PX) for column in range(len(titles))]
    font = ImageFont.load_default(_FONT_PX)
    size = (
        _LABEL_WIDTH_PX + len(titles) * (width + _MARGIN_PX) + _MARGIN_PX,
        _HEADER_PX + len(rows) * (height + _MARGIN_PX) + _MARGIN_PX,
    )
    grid = Image.new("RGB", size, "white")
    canvas = ImageDraw.Draw(grid)
    for left, title in zip(lefts, titles, strict=True):
        canvas.text((left, _MARGIN_PX), title, fill="black", font=font)
    for row, (prompt, previews) in enumerate(zip(prompts, rows, strict=True)):
        top = _HEADER_PX + row * (height + _MARGIN_PX)
        label = textwrap.fill(
            prompt, _LINE_CHARACTERS, max_lines=max(1, height // (_FONT_PX + 4)), placeholder=" ..."
        )
        canvas.multiline_text((_MARGIN_PX, top), label, fill="black", font=font)
        for left, preview in zip(lefts, previews, strict=True):
            grid.paste(preview.resize((width, height), Image.Resampling.LANCZOS), (left, top))
    return grid
