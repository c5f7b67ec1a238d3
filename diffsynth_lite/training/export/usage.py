"""This file writes code that generates the previews of a run with its LoRA in diffusers."""

import inspect
import re
from collections.abc import Collection, Iterator
from typing import Any

import diffusers
from diffusers import ModularPipeline
from diffusers.loaders.lora_base import LORA_WEIGHT_NAME_SAFE

from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily
from diffsynth_lite.pipelines.base.family import ModelFamily, PreviewRequest
from diffsynth_lite.pipelines.base.preview_request import Code
from diffsynth_lite.pipelines.base.tokenizer import is_misread

_IMPORTED = {
    "diffusers.pipelines.ltx2": ("LTX2ReferenceCondition", "LTX2VideoCondition"),
    "diffusers.utils": ("encode_video", "export_to_video", "load_image", "load_video"),
    "PIL": ("Image", "ImageOps"),
    "transformers": ("LlamaForCausalLM", "PreTrainedTokenizerFast"),
}
"""Names that the code imports where it has them, by their module."""
_SAVE_LAYERS = """\
for place, layer in enumerate(result.images[0], start=1):
    layer.save(f"layer-{place}.png")"""
_SAVE_WITH_AUDIO = """\
encode_video(
    result.{clips}[0],
    fps={fps:g},
    audio=result.audio[0].float().cpu(),
    audio_sample_rate={rate},
    output_path="video.mp4",
)"""


def usage_code(
    family: ModelFamily,
    request: PreviewRequest,
    *,
    base: str,
    dtype: str,
    lora: str,
    prompt: str,
    negative_prompt: str,
    fps: float | None,
) -> str | None:
    """A program that generates a preview from its prompt, with a GPU.

    Args:
        base: hub id or folder of the pipeline.
        lora: repository or folder of the LoRA.
        negative_prompt: used where the guidance runs the model twice.

    Returns:
        Its lines; None where the family's pipeline is not one of diffusers, or nothing of diffusers loads the
        LoRA.
    """
    if not isinstance(family, DiffusersFamily) or not family.lora_files.loaded_by_diffusers:
        return None
    pipeline_class = family.pipeline_for(request)
    if not hasattr(diffusers, pipeline_class.__name__):
        return None
    takes, parts = _taken_by(pipeline_class)
    call = {
        "prompt": prompt,
        **_guidance(family, request.guidance_scale, negative_prompt, takes, parts),
        **_shape(family, request, takes),
        "num_inference_steps": request.num_inference_steps,
        **family.usage_arguments(request),
    }
    call.setdefault("generator", Code(f'torch.Generator("cpu").manual_seed({request.seed})'))
    setup = [
        *_opening(family, pipeline_class, base, dtype),
        *_tokenizers(family, base),
        *_loading(family, lora),
        *_guider(request.guidance_scale, takes, parts),
        *family.usage_setup(request),
    ]
    save = _saving(family, request, takes, fps)
    written = "\n".join([*setup, save, *(value for value in call.values() if isinstance(value, Code))])
    return "\n".join(
        [
            "import torch",
            f"from diffusers import {pipeline_class.__name__}",
            *_imports(written),
            "",
            *setup,
            "result = pipeline(",
            *(f"    {key}={value!r}," for key, value in call.items()),
            ")",
            save,
        ]
    )


def _imports(written: str) -> Iterator[str]:
    """The lines that import what code has; text in quotes, such as the name of a base, is not code."""
    code = re.sub(r"""'[^']*'|"[^"]*\"""", "", written)
    for module, names in _IMPORTED.items():
        if used := [name for name in names if re.search(rf"\b{name}\b", code)]:
            yield f"from {module} import {', '.join(used)}"


def _taken_by(pipeline_class: Any) -> tuple[Collection[str], Collection[str]]:
    """Names of the arguments of a pipeline's call, and of the pipeline's components."""
    if issubclass(pipeline_class, ModularPipeline):
        pipeline = pipeline_class()
        return [one.name for one in pipeline.blocks.inputs if one.name], pipeline.component_names
    return inspect.signature(pipeline_class.__call__).parameters, inspect.signature(pipeline_class).parameters


def _opening(family: DiffusersFamily, pipeline_class: Any, base: str, dtype: str) -> Iterator[str]:
    """The lines that load a pipeline."""
    name = pipeline_class.__name__
    yield '# In place of "cuda": "mps" on a Mac, "cpu" where there is no GPU.'
    if not issubclass(pipeline_class, ModularPipeline):
        given = f"dtype=torch.{dtype}"
        is_release = base in [release.hub_id for release in family.releases]
        others = family.folder.elsewhere if is_release else family.folder.lacking()
        for part, entry in others.items():
            weights = f", dtype=torch.{dtype}" if part in family.components else ""
            yield f"{part} = {entry.class_name}.from_pretrained({entry.location!r}{weights})"
            given += f", {part}={part}"
        yield f'pipeline = {name}.from_pretrained({base!r}, {given}).to("cuda")'
        return
    yield f"pipeline = {name}.from_pretrained({base!r})"
    parts = [*family.components, *family.components_without_weights]
    yield f"pipeline.load_components({parts!r}, dtype=torch.{dtype})"
    yield 'pipeline.to("cuda")'


def _tokenizers(family: DiffusersFamily, base: str) -> Iterator[str]:
    """The lines that load tokenizers again which the pipeline misreads."""
    classes = family.folder.parts()
    for part in family.tokenizers:
        if is_misread(family.folder.place(part).path, classes.get(part, ("", None))[1]):
            loaded = f'PreTrainedTokenizerFast.from_pretrained({base!r}, subfolder="{part}")'
            yield f"pipeline.{part} = {loaded}"


def _guidance(
    family: DiffusersFamily,
    scale: float,
    negative_prompt: str,
    takes: Collection[str],
    parts: Collection[str],
) -> dict[str, Any]:
    """The scale for a model with guidance embeddings; others run again with the negative prompt, above 1."""
    if family.folder.component_config(family.trainable[0]).get("guidance_embeds"):
        return {"guidance_scale": scale}
    name = "true_cfg_scale" if "true_cfg_scale" in takes else "guidance_scale"
    scales = {name: scale if scale > 1 else 0.0} if name in takes else {}  # else a guider has it
    # Where a pipeline uses zeros without a negative prompt, previews use them for a blank one.
    is_zeros = "force_zeros_for_empty_prompt" in parts and not negative_prompt.strip()
    if scale <= 1 or "negative_prompt" not in takes or is_zeros:
        return scales
    return {"negative_prompt": negative_prompt, **scales}


def _shape(family: DiffusersFamily, request: PreviewRequest, takes: Collection[str]) -> dict[str, Any]:
    """The size of an image or a video, and the number and rate of its frames."""
    shape: dict[str, Any] = {}
    if "width" in takes:
        shape |= {"width": request.width, "height": request.height}
    if family.frames_argument in takes:
        shape |= {family.frames_argument: request.num_frames, "output_type": "pil"}
    if "frame_rate" in takes:
        shape |= {"frame_rate": request.fps or family.default_fps}
    return shape


def _guider(scale: float, takes: Collection[str], parts: Collection[str]) -> Iterator[str]:
    """The line that sets the guidance scale of a pipeline whose call takes none."""
    if "guider" in parts and "guidance_scale" not in takes:
        yield f"pipeline.guider = pipeline.guider.new(guidance_scale={max(scale, 1.0)!r})"


def _saving(
    family: DiffusersFamily, request: PreviewRequest, takes: Collection[str], fps: float | None
) -> str:
    """The lines that save the result."""
    if "layers" in takes:
        return _SAVE_LAYERS
    if family.frames_argument not in takes:
        return f'result.{family.images_output}[0].save("image.png")'
    if request.num_frames == 1:
        return 'result.frames[0][0].save("image.png")'
    is_modular = issubclass(family.pipeline_for(request), ModularPipeline)
    clips = "videos" if is_modular else "frames"
    if family.with_audio:
        rate = "result.sampling_rate" if is_modular else "pipeline.vocoder.config.output_sampling_rate"
        return _SAVE_WITH_AUDIO.format(clips=clips, fps=fps, rate=rate)
    return f'export_to_video(result.{clips}[0], "video.mp4", fps={fps:g})'


def _loading(family: DiffusersFamily, lora: str) -> Iterator[str]:
    """The calls that load the LoRA."""
    lora_files = family.lora_files
    for file, components in lora_files.by_name.items():
        arguments = [repr(lora)]
        if file != LORA_WEIGHT_NAME_SAFE:
            arguments.append(f'weight_name="{file}"')
        if lora_files.pipeline_loads_lora and lora_files.pipeline_loads_adapter:
            if components == ["transformer_2"]:
                arguments.append("load_into_transformer_2=True")
            yield f"pipeline.load_lora_weights({', '.join(arguments)})"
            continue
        for component in components:
            loaded = [*arguments, f'prefix="{component}"', "use_safetensors=True"]
            yield f"pipeline.{component}.load_lora_adapter({', '.join(loaded)})"
