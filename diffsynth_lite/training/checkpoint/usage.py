"""This file writes code that draws with a LoRA in diffusers, for the pipeline in a family's folder."""

import inspect
from collections.abc import Collection, Iterator
from typing import Any

import diffusers
from diffusers import ModularPipeline
from diffusers.loaders.lora_base import LORA_WEIGHT_NAME_SAFE

from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily
from diffsynth_lite.pipelines.base.family import ModelFamily, PreviewRequest
from diffsynth_lite.pipelines.base.tokenizer import is_misread

_SAVE_LAYERS = """\
for place, layer in enumerate(drawn.images[0], start=1):
    layer.save(f"layer-{place}.png")"""


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
    """A program that draws a picture or a clip from a prompt, as a preview is drawn, with a GPU.

    Args:
        family: bound to a folder.
        request: of the preview; its prompt is not read.
        base: hub id or folder of the pipeline.
        dtype: of its weights, as torch calls it.
        lora: repository or folder of the LoRA.
        negative_prompt: steered away from where the guidance runs the model twice.
        fps: frames per second of the clip's file.

    Returns:
        Its lines; None where the family's pipeline is not one of diffusers, or nothing of diffusers loads the
        LoRA.
    """
    if not isinstance(family, DiffusersFamily) or not hasattr(diffusers, family.folder.pipeline_class_name()):
        return None
    if not family.pipeline_loads_adapter and family.adapter_model is None:
        return None
    takes, parts = _taken_by(family.pipeline)
    name, makes_clips = family.folder.pipeline_class_name(), "num_frames" in takes
    pictures = _pictures(family, request, takes)
    # A pipeline whose call takes no size goes by that of its picture.
    size = "" if "width" in takes else f".resize(({request.width}, {request.height}))"
    if "layers" in takes:
        size = '.convert("RGBA")'  # it has areas of its own, in the shape of the picture
    call = {
        "prompt": prompt,
        **_guidance(family, request.guidance_scale, negative_prompt, takes),
        **_further_guidance(family, request.guidance_scale, takes),
        **_shape(family, request, takes, has_pictures=bool(pictures)),
        "num_inference_steps": request.num_inference_steps,
    }
    tools, save = ["load_image"] if pictures else [], 'drawn.images[0].save("picture.png")'
    if request.num_frames > 1:
        tools, save = (
            ["export_to_video", *tools],
            f'export_to_video(drawn.frames[0], "clip.mp4", fps={fps:g})',
        )
        if family.with_audio:
            tools[0], save = "encode_video", _saving_with_sound(fps)
    elif "layers" in takes:
        save = _SAVE_LAYERS
    elif makes_clips:
        save = 'drawn.frames[0][0].save("picture.png")'
    classes = family.folder.parts()
    misread = [
        part
        for part in family.tokenizers
        if is_misread(family.folder.place(part).path, classes.get(part, ("", None))[1])
    ]
    lines = [
        "import torch",
        f"from diffusers import {name}",
        *([f"from diffusers.utils import {', '.join(tools)}"] if tools else []),
        *(["from transformers import PreTrainedTokenizerFast"] if misread else []),
        "",
        *_opening(family.pipeline, name, base, dtype),
        *(
            f'pipeline.{part} = PreTrainedTokenizerFast.from_pretrained({base!r}, subfolder="{part}")'
            for part in misread
        ),
        *_loading(family, lora),
        *_guider(request.guidance_scale, takes, parts),
        "drawn = pipeline(",
        *(f"    {key}={value!r}," for key, value in call.items()),
        *(f'    {key}=load_image("{file}"){size},' for key, file in pictures.items()),
        f'    generator=torch.Generator("cpu").manual_seed({request.seed}),',
        ")",
        save,
    ]
    return "\n".join(lines)


def _taken_by(pipeline_class: Any) -> tuple[Collection[str], Collection[str]]:
    """Names of what a pipeline's call takes, and of what the pipeline is made of."""
    if issubclass(pipeline_class, ModularPipeline):
        pipeline = pipeline_class()
        return [one.name for one in pipeline.blocks.inputs if one.name], pipeline.component_names
    return inspect.signature(pipeline_class.__call__).parameters, inspect.signature(pipeline_class).parameters


def _opening(pipeline_class: Any, name: str, base: str, dtype: str) -> Iterator[str]:
    """The lines that load a pipeline, by its name in diffusers: a family may have one made of it."""
    if not issubclass(pipeline_class, ModularPipeline):
        yield f'pipeline = {name}.from_pretrained({base!r}, dtype=torch.{dtype}).to("cuda")'
        return
    yield f"pipeline = {name}.from_pretrained({base!r})"
    yield f"pipeline.load_components(dtype=torch.{dtype})"
    yield 'pipeline.to("cuda")'


def _saving_with_sound(fps: float | None) -> str:
    arguments = {
        "fps": f"{fps:g}",
        "audio": "drawn.audio[0].float().cpu()",
        "audio_sample_rate": "pipeline.vocoder.config.output_sampling_rate",
        "output_path": '"clip.mp4"',
    }
    given = "".join(f"    {name}={value},\n" for name, value in arguments.items())
    return f"encode_video(\n    drawn.frames[0],\n{given})"


def _guidance(
    family: DiffusersFamily, scale: float, negative_prompt: str, takes: Collection[str]
) -> dict[str, Any]:
    """The scale, told to a model that knows one; others also run with the negative prompt, above 1."""
    if family.folder.component_config(family.trainable[0]).get("guidance_embeds"):
        return {"guidance_scale": scale}
    if "guidance_schedule" in takes:  # has scales of its own unless told otherwise, and counts from 0
        return {"guidance_scale": max(scale, 1.0), "guidance_schedule": None}
    name = "true_cfg_scale" if "true_cfg_scale" in takes else "guidance_scale"
    if name not in takes:  # a part of the pipeline knows the scale
        return {"negative_prompt": negative_prompt} if scale > 1 and negative_prompt.strip() else {}
    if scale <= 1:
        return {name: 0.0}
    # Without any negative prompt, a pipeline with a ``true_cfg_scale`` runs the model once.
    is_given = "negative_prompt" in takes and (negative_prompt.strip() or name == "true_cfg_scale")
    return {**({"negative_prompt": negative_prompt} if is_given else {}), name: scale}


def _further_guidance(family: DiffusersFamily, scale: float, takes: Collection[str]) -> dict[str, float]:
    """What a pipeline that guides in further ways by default is told, to guide as previews are guided."""
    if "modality_scale" not in takes:
        return {}
    off = {"stg_scale": 0.0, "audio_stg_scale": 0.0}
    if scale <= 1:
        return {
            **dict.fromkeys(("audio_guidance_scale", "modality_scale", "audio_modality_scale"), 1.0),
            **off,
        }
    return {} if family.folder.component_config("transformer").get("perturbed_attn") else off


def _shape(
    family: DiffusersFamily, request: PreviewRequest, takes: Collection[str], *, has_pictures: bool
) -> dict[str, Any]:
    """What says how large a picture or a clip is, and how many layers it has."""
    pixels: dict[str, Any] = {}
    if "width" in takes:
        pixels |= {"width": request.width, "height": request.height}
    if has_pictures and "max_area" in takes:
        pixels |= {"max_area": request.width * request.height}
    if "num_frames" in takes:
        pixels |= {"num_frames": request.num_frames, "output_type": "pil"}
    if "frame_rate" in takes:
        pixels |= {"frame_rate": request.fps or family.default_fps}
    if "layers" in takes:
        pixels |= {"layers": request.num_layers, "resolution": _area_of_layers(request)}
    return pixels


def _area_of_layers(request: PreviewRequest) -> int:
    """The nearer one of the two edges that ``QwenImageLayeredPipeline`` draws squares of."""
    edge = (request.width * request.height) ** 0.5
    return min((640, 1024), key=lambda own: abs(own - edge))


def _guider(scale: float, takes: Collection[str], parts: Collection[str]) -> Iterator[str]:
    """The line that sets the scale of a pipeline whose call takes none."""
    if "guider" in parts and "guidance_scale" not in takes:
        yield f"pipeline.guider = pipeline.guider.new(guidance_scale={max(scale, 1.0)!r})"


def _pictures(family: DiffusersFamily, request: PreviewRequest, takes: Collection[str]) -> dict[str, str]:
    """Names of the files that stand for what is drawn from, by argument."""
    needs_one = family.needs_inputs or "ImageToVideo" in family.folder.pipeline_class_name()
    if "image" not in takes or not (request.inputs or needs_one):
        return {}
    # Wan 2.1 FLF2V always wants both.
    wants_last = family.folder.component_config(family.trainable[0]).get("pos_embed_seq_len") is not None
    is_led = "last_image" in takes and (len(request.inputs) > 1 or wants_last)
    masked = {"mask_image": "mask.png"} if "mask_image" in takes else {}
    return {"image": "input.png", **masked, **({"last_image": "last.png"} if is_led else {})}


def _loading(family: DiffusersFamily, lora: str) -> Iterator[str]:
    """The call, or calls, that take the LoRA in."""
    for file, components in lora_files(family).items():
        arguments = [repr(lora)]
        if file != LORA_WEIGHT_NAME_SAFE:
            arguments.append(f'weight_name="{file}"')
        if family.pipeline_loads_lora and family.pipeline_loads_adapter:
            if components == ["transformer_2"]:
                arguments.append("load_into_transformer_2=True")
            yield f"pipeline.load_lora_weights({', '.join(arguments)})"
            continue
        for component in components:
            loaded = [*arguments, f'prefix="{component}"', "use_safetensors=True"]
            yield f"pipeline.{component}.load_lora_adapter({', '.join(loaded)})"


def lora_files(family: DiffusersFamily) -> dict[str, list[str]]:
    """The components whose LoRA each file holds, by its name."""
    files: dict[str, list[str]] = {}
    for component in family.trained:
        files.setdefault(family.lora_file_name(component), []).append(component)
    return files
