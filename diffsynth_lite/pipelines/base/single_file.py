"""This file reads models from one file of weights, in diffusers' layout or the model's original one.

Names and layouts are converted by diffusers' own functions for single files; those that read nothing but the
tensors: the settings of the model are the pipeline's.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from diffusers.loaders.single_file_utils import (
    CHECKPOINT_KEY_NAMES,
    convert_ldm_unet_checkpoint,
    convert_ldm_vae_checkpoint,
    convert_open_clip_checkpoint,
    infer_diffusers_model_type,
)
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from diffsynth_lite.core.weights.formats import MissingKernelsError
from diffsynth_lite.core.weights.gguf import GgufTensors
from diffsynth_lite.core.weights.loading import StoredTensors
from diffsynth_lite.core.weights.stored_formats import StoredFormatError
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines.base.folder import ComponentFile

Conversion: TypeAlias = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
"""From tensors by the names in a file to those of a model of diffusers or transformers."""

_SUFFIXES = (".safetensors", ".sft", ".gguf")
_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "transformer.")
"""What the names of a model's tensors begin with where a file could hold other models, too."""
_PREFIXES_OF_OTHERS = MappingProxyType(
    {
        "AnimaTextConditioner": tuple(f"{start}llm_adapter." for start in ("net.", *_PREFIXES, "")),
        # After a prefix that begins with it.
        "AuraFlowTransformer2DModel": (*_PREFIXES, "model."),
        "AutoencoderKL": ("first_stage_model.",),
        "CLIPTextModel": ("conditioner.embedders.0.transformer.",),
        "CLIPTextModelWithProjection": ("conditioner.embedders.1.model.",),
    }
)
"""Also of the other models in a checkpoint of SDXL or Anima, by their classes."""
_OF_ANOTHER_MODEL = (KeyError, IndexError, ValueError, AttributeError, RuntimeError)
"""What diffusers' functions raise where they miss a tensor, or cannot split one of another shape."""
_LATER_BLOCK = re.compile(r"\.[1-9]\d*\.")
"""In names of tensors that another file of the same model may lack."""
_LORA = re.compile(r"\.lora\.|\.(lora|hada|lokr)_")
_KINDS = MappingProxyType(
    {
        r"^distilled_guidance_layer\.norms\.0\.weight": "a Chroma in diffusers' layout",
        r"^context_embedder_2\.": "a HunyuanVideo 1.5 in diffusers' layout",
        r"^context_embedder\.token_refiner\.": "a HunyuanVideo in diffusers' layout",
        r"^time_embed\.timestep_embedder\.": "a LongCat-Image in diffusers' layout",
        r"^single_transformer_blocks\.\d+\.norm\.linear\.": "a FLUX.1 in diffusers' layout",
        r"^time_text_embed\.text_embedder\.": "a Stable Diffusion 3 in diffusers' layout",
        r"^double_stream_modulation_img\.linear\.": "a FLUX.2 in diffusers' layout",
        r"^early_stream_modulations\.image\.linear\.": "a FLUX.3 in diffusers' layout",
        r"^time_step_proj\.linear_1\.": "an AuraFlow in diffusers' layout",
        r"^layers\.0\.adaLN_sa_ln\.": "an ERNIE-Image",
        r"^double_stream_blocks\.": "a HiDream-I1",
        r"^llm_cond_proj\.": "an Ideogram 4",
        r"^visual_transformer_blocks\.": "a Kandinsky 5",
        r"^text_fusion\.projector\.": "a Krea 2 in diffusers' layout",
        r"^time_caption_embed\.caption_embedder\.": "a Lumina 2 in diffusers' layout",
        r"^joint_blocks\.": "a Stable Diffusion 3",
        r"^txt_norm\.": "a Qwen-Image",
        r"^caption_norm\.": "a Sana in diffusers' layout",
        r"^vace_patch_embedding\.": "a Wan VACE",
        r"^condition_embedder\.time_embedder\.": "a Wan in diffusers' layout",
        r"^time_embed\.t_embedder\.": "an Anima in diffusers' layout",
        r"^(net\.)?x_embedder\.proj\.1\.": "an Anima",
        r"^patch_embed\.text_proj\.": "a CogVideoX in diffusers' layout",
        r"^adaln_t_table": "a pruned MiniMax-H3, which diffusers does not read; take the one that is not",
        r"^token_refiner\.refiner_blocks\.": "a MiniMax-H3 in diffusers' layout",
        r"^audio_(proj_in|patchify_proj)\.": "an LTX-2",
        r"^proj_in\.": "an LTX-Video in diffusers' layout",
        r"^down_blocks\.1\.attentions\.0\.proj_in\.": "a UNet in diffusers' layout",
        r"^label_emb\.": "a UNet of SDXL, or of its refiner",
        r"^input_blocks\.": "a UNet of Stable Diffusion 1 or 2",
        r"^(text_model|model\.layers|model\.language_model|encoder\.block|shared)\.": "a text encoder",
        r"^(decoder|first_stage_model|vae)\.": "an autoencoder",
    }
)
"""What a file holds, by the name of some tensor in it."""


def component_files(given: Mapping[str, str | None], components: Sequence[str]) -> dict[str, ComponentFile]:
    """The files that components are read from.

    Args:
        given: file or None by the setting that names it, for each of ``components`` and perhaps more.
    """
    files = {}
    for place, (key, path) in enumerate(given.items()):
        if path is None:
            continue
        if place >= len(components):
            has = "has one transformer" if components else "is of a family that reads no such file"
            raise UserError(f"{key}: {path} has no effect, as this pipeline {has}; remove it")
        files[components[place]] = ComponentFile(path=Path(path).expanduser(), key=key)
    return files


def names_in(file: ComponentFile) -> frozenset[str]:
    """Names of the tensors in a safetensors file; none of what :func:`read_single_file` refuses."""
    try:
        with safe_open(file.path, framework="pt") as opened:
            return frozenset(opened.keys())
    except (SafetensorError, OSError):
        return frozenset()


def holds(names: Collection[str], model_class: type) -> bool:
    """Whether some of a checkpoint's tensors are those of another model than the one that removes noise."""
    return any(name.startswith(_PREFIXES_OF_OTHERS[model_class.__name__]) for name in names)


def read_single_file(file: ComponentFile, model: nn.Module) -> StoredTensors:
    """The tensors of a model by its own names, and others that seem to be its own; only headers are read.

    Args:
        model: of a class of diffusers or transformers, with the settings of the pipeline's folder; on the
            meta device.
    """
    stored = _stored_in(file)
    found, prefix = _converted(file, stored, model)
    if lacking := found.lacking(model):
        is_named_so = found.tensors.keys() >= set(lacking)
        kind = "one of another size or version" if is_named_so else _kind(stored.tensors, prefix)
        problem = _misfit(found, lacking, model)
        raise UserError(f"{file.key}: {file.path} {problem}; it seems to be {kind}")
    if left_over := found.scales_left_over(model):
        raise UserError(
            f"{file.key}: {file.path} is not read: {len(left_over)} of its scales belong to no layer of the "
            f"model, such as that of {left_over[0]}; get the file again"
        )
    return found


def num_blocks_in(file: ComponentFile, model: nn.Module, block_lists: Iterable[str]) -> dict[str, int]:
    """How many blocks a file has of each of a model's lists, of those of which it has any."""
    found, _ = _converted(file, _stored_in(file), model)
    nums = {}
    for block_list in block_lists:
        matches = (re.match(rf"{re.escape(block_list)}\.(\d+)\.", name) for name in found.tensors)
        numbers = {int(match[1]) for match in matches if match}
        if numbers and numbers == set(range(len(numbers))):
            nums[block_list] = len(numbers)
    return nums


def _converted(file: ComponentFile, stored: StoredTensors, model: nn.Module) -> tuple[StoredTensors, str]:
    """What a file holds, by the model's names where it is one, and what the names begin with in the file."""
    names = stored.tensors.keys()
    if _LORA.search("\n".join(names)):
        raise UserError(
            f"{file.key}: {file.path} is a LoRA, not a model; name it as lora.init_from to start from it"
        )
    prefixes = _PREFIXES_OF_OTHERS.get(type(model).__name__, _PREFIXES)
    prefix = next((one for one in prefixes if any(name.startswith(one) for name in names)), "")
    try:
        return stored.converted(_conversion(names, prefix, model)), prefix
    except StoredFormatError as error:
        raise UserError(f"{file.key}: {file.path} is not read: {error}") from error
    except _OF_ANOTHER_MODEL:
        return stored, prefix


def _conversion(names: Collection[str], prefix: str, model: nn.Module) -> Conversion:
    """How what a file holds by these names gets those of a model, and its layout.

    Returns:
        A function that makes views, but for a few small tensors, and leaves out what does not have the
        prefix. It raises various errors where the tensors are those of another model.
    """
    own = {name: name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    convert_own = _converter(model)
    if {name for name in model.state_dict() if not _LATER_BLOCK.search(name)} <= set(own.values()):
        convert_own = None

    def convert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        named = {inner: tensors[name] for name, inner in own.items()}
        if convert_own is None:
            return named
        with _PartsInPlace():
            converted = convert_own(named, model)
        # What it used it has taken out of ``named``.
        return named | {name: tensor for name, tensor in converted.items() if tensor is not None}

    return convert


_Converter: TypeAlias = Callable[[dict[str, Tensor], Any], Mapping[str, Tensor | None]]
"""Takes tensors without a prefix, which it takes out, and the model."""


def _converter(model: nn.Module) -> _Converter | None:
    class_name = type(model).__name__
    if class_name in _CONVERTERS:
        return _CONVERTERS[class_name]
    classes = (SINGLE_FILE_LOADABLE_CLASSES.get(one.__name__) for one in type(model).__mro__)
    functions = next(filter(None, classes), None)
    if functions is None:
        return None
    convert = functions["checkpoint_mapping_fn"]
    return lambda tensors, one: convert(checkpoint=tensors, config=dict(one.config))


def _unet(tensors: dict[str, Tensor], model: Any) -> Mapping[str, Tensor]:
    prefixed = {f"{_PREFIXES[0]}{name}": tensor for name, tensor in _taken(tensors).items()}
    converted: dict[str, Tensor] = convert_ldm_unet_checkpoint(prefixed, dict(model.config))
    return converted


def _vae(tensors: dict[str, Tensor], model: Any) -> Mapping[str, Tensor]:
    converted: dict[str, Tensor] = convert_ldm_vae_checkpoint(_taken(tensors), dict(model.config))
    return converted


def _clip(tensors: dict[str, Tensor], model: Any) -> Mapping[str, Tensor]:
    # transformers 5 has no such level in its CLIPTextModel, and no table of positions in any.
    level = "" if hasattr(model, "text_model") else "text_model."
    named = {name.removeprefix(level): tensor for name, tensor in _taken(tensors).items()}
    return {name: tensor for name, tensor in named.items() if not name.endswith("position_ids")}


def _open_clip(tensors: dict[str, Tensor], model: Any) -> Mapping[str, Tensor]:
    converted: dict[str, Tensor] = convert_open_clip_checkpoint(model, _taken(tensors), prefix="")
    return converted


def _ltx2(tensors: dict[str, Tensor], model: Any) -> Mapping[str, Tensor]:
    # diffusers 0.42.1 leaves out what LTX-2.3 has beyond LTX-2: how its blocks read the prompt.
    named = {
        name.replace("prompt_adaln_single.", "prompt_adaln."): tensor
        for name, tensor in _taken(tensors).items()
    }
    convert = SINGLE_FILE_LOADABLE_CLASSES[type(model).__name__]["checkpoint_mapping_fn"]
    converted: dict[str, Tensor] = convert(checkpoint=named)
    return converted


def _longcat_image(tensors: dict[str, Tensor], model: Any) -> Mapping[str, Tensor]:
    # ComfyUI's file of it, for which diffusers 0.42.1 has no converter: FLUX.1's without an embedding.
    missing = {f"vector_in.{side}_layer.{kind}" for side in ("in", "out") for kind in ("weight", "bias")}
    convert = SINGLE_FILE_LOADABLE_CLASSES["FluxTransformer2DModel"]["checkpoint_mapping_fn"]
    converted = convert(checkpoint=_taken(tensors) | dict.fromkeys(missing, torch.empty(0)))
    return {
        name.replace("time_text_embed.", "time_embed."): tensor
        for name, tensor in converted.items()
        if ".text_embedder." not in name
    }


def _taken(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """All of them, taken out."""
    taken = dict(tensors)
    tensors.clear()
    return taken


_CONVERTERS: Mapping[str, _Converter] = MappingProxyType(
    {
        "LTX2VideoTransformer3DModel": _ltx2,
        "AutoencoderKL": _vae,
        "CLIPTextModel": _clip,
        "CLIPTextModelWithProjection": _open_clip,
        "LongCatImageTransformer2DModel": _longcat_image,
        "UNet2DConditionModel": _unet,
    }
)
"""Those of LTX-2, LongCat-Image, and of the classes whose layouts are known by whole checkpoints of SDXL."""


class _PartsInPlace(TorchFunctionMode):
    """Scope in which one tensor joined to nothing is itself: some converters copy parts so."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.cat and len(args[0]) == 1:
            return args[0][0]
        return func(*args, **(kwargs or {}))


def _stored_in(file: ComponentFile) -> StoredTensors:
    path, problem = file.path, None
    if path.is_dir():
        problem = "is a folder; name a file, or give the folder of a whole pipeline as model.path"
    elif not path.is_file():
        problem = "is not there; give a file on this machine, as none is downloaded"
    elif path.suffix not in _SUFFIXES:
        problem = "is not a .safetensors, .sft or .gguf file, and no other kind is read; get the model as one"
    if problem is not None:
        raise UserError(f"{file.key}: {path} {problem}")
    try:
        return GgufTensors.in_file(path) if path.suffix == ".gguf" else StoredTensors.in_files([path])
    except MissingKernelsError as error:
        raise UserError(
            f"{file.key}: {path} needs {error}, which is not installed: pip install {error}"
        ) from error
    except StoredFormatError as error:
        raise UserError(f"{file.key}: {path} is not read: {error}") from error
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file.key}: {path} cannot be read ({error}); get that file again") from error


def _misfit(converted: StoredTensors, lacking: Sequence[str], model: nn.Module) -> str:
    wanted, example, how = model.state_dict(), lacking[0], "is missing"
    if example in converted.tensors:
        how = f"is {list(converted.shape(example))}, not {list(wanted[example].shape)}"
    own_names_only = "" if _converter(model) else " (by diffusers' names: it knows no others of that class)"
    return (
        f"does not fit model.path: of the {len(wanted)} tensors of its {type(model).__name__} {len(lacking)} "
        f"are missing or of another shape, such as {example}, which {how}{own_names_only}"
    )


def _kind(tensors: Mapping[str, Tensor], prefix: str) -> str:
    """What the tensors of a file seem to be, by their names."""
    own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    for pattern, kind in _KINDS.items():
        if any(re.search(pattern, name) for name in own):
            return kind
    for named in (own, tensors):
        try:
            known = infer_diffusers_model_type(named)
        except _OF_ANOTHER_MODEL:
            continue
        # v1 is also what it answers where it knows nothing.
        if known != "v1" or CHECKPOINT_KEY_NAMES["v1"] in named:
            return f"what diffusers calls {known}"
    return f"no model that is known here: its tensors have names such as {', '.join(sorted(own)[:3])}"
