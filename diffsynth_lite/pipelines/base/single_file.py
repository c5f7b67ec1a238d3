"""This file reads a transformer from one safetensors file, in diffusers' layout or the model's original one.

Names and layouts are converted by diffusers' own functions for single files; those that read nothing but the
tensors: the settings of the model are the pipeline's.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from diffusers.loaders.single_file_utils import CHECKPOINT_KEY_NAMES, infer_diffusers_model_type
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from diffsynth_lite.core.weights import StoredFormatError, StoredTensors
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines.base.folder import ComponentFile

Conversion: TypeAlias = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
"""From tensors by the names in a file to those of a model of diffusers; what is of no model is kept."""

_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "transformer.")
"""What the names of a model's tensors begin with where a file could hold other models, too."""
_OF_ANOTHER_MODEL = (KeyError, IndexError, ValueError, AttributeError, RuntimeError)
"""What diffusers' functions raise where they miss a tensor, or cannot split one of another shape."""
_LORA = re.compile(r"\.lora\.|\.(lora|hada|lokr)_")
_KINDS = MappingProxyType(
    {
        r"^distilled_guidance_layer\.norms\.0\.weight": "a Chroma in diffusers' layout",
        r"^time_text_embed\.text_embedder\.": "a FLUX.1 in diffusers' layout",
        r"^double_stream_modulation_img\.linear\.": "a FLUX.2 in diffusers' layout",
        r"^txt_norm\.": "a Qwen-Image",
        r"^caption_norm\.": "a Sana in diffusers' layout",
        r"^condition_embedder\.time_embedder\.": "a Wan in diffusers' layout",
        r"^proj_in\.": "an LTX-Video in diffusers' layout",
        r"^down_blocks\.1\.attentions\.0\.proj_in\.": "a UNet in diffusers' layout",
        r"^(text_model|model\.layers|model\.language_model|encoder\.block|shared)\.": "a text encoder",
        r"^(decoder|first_stage_model|vae)\.": "an autoencoder",
    }
)
"""What a file holds, by the name of some tensor in it."""


def component_files(given: Mapping[str, str | None], components: Sequence[str]) -> dict[str, ComponentFile]:
    """The files that components are read from.

    Args:
        given: file or None by the setting that names it, for each of ``components`` and perhaps more.
        components: a family's ``denoisers``.

    Raises:
        UserError: a file is given that there is no component for.
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


def read_single_file(file: ComponentFile, model: nn.Module) -> StoredTensors:
    """The tensors of a model by its own names, and whatever else is in its file; only headers are read.

    Args:
        model: of a class of diffusers, with the settings of the pipeline's folder; on the meta device.

    Raises:
        UserError: the file is missing, damaged or something else, and the message says what it seems to be.
    """
    stored = _stored_in(file)
    names = stored.tensors.keys()
    if _LORA.search("\n".join(names)):
        raise UserError(
            f"{file.key}: {file.path} is a LoRA, not a model; name it as lora.init_from to start from it"
        )
    prefix = next((one for one in _PREFIXES if any(name.startswith(one) for name in names)), "")
    try:
        found = stored.converted(_conversion(names, prefix, model))
    except StoredFormatError as error:
        raise UserError(f"{file.key}: {file.path} is not read: {error}") from error
    except _OF_ANOTHER_MODEL:
        found = stored
    if lacking := found.lacking(model):
        is_named_so = found.tensors.keys() >= set(lacking)
        kind = "one of another size or version" if is_named_so else _kind(stored.tensors, prefix)
        problem = _misfit(found.tensors, lacking, model)
        raise UserError(f"{file.key}: {file.path} {problem}; it seems to be {kind}")
    return found


def _conversion(names: Collection[str], prefix: str, model: nn.Module) -> Conversion:
    """How what a file holds by these names gets those of a model, and its layout.

    Returns:
        A function that makes views, but for a few small tensors. It raises various errors where the tensors
        are those of another model.
    """
    own = {name: name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    classes = (SINGLE_FILE_LOADABLE_CLASSES.get(one.__name__) for one in type(model).__mro__)
    functions = next(filter(None, classes), None)
    if model.state_dict().keys() <= set(own.values()):
        functions = None

    def convert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        left = {name: tensor for name, tensor in tensors.items() if name not in own}
        named = {inner: tensors[name] for name, inner in own.items()}
        if functions is None:
            return left | named
        config: Any = model.config
        with _PartsInPlace():
            converted = functions["checkpoint_mapping_fn"](checkpoint=named, config=dict(config))
        # What it used it has taken out of ``named``.
        return left | named | {name: tensor for name, tensor in converted.items() if tensor is not None}

    return convert


class _PartsInPlace(TorchFunctionMode):
    """Scope in which one tensor joined to nothing is itself: some converters copy so what they cut apart."""

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
    elif path.suffix != ".safetensors":
        problem = "is no .safetensors file, and no other kind is read; get the model as one"
    if problem is not None:
        raise UserError(f"{file.key}: {path} {problem}")
    try:
        return StoredTensors.in_files([path])
    except StoredFormatError as error:
        raise UserError(f"{file.key}: {path} is not read: {error}") from error
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file.key}: {path} cannot be read ({error}); get that file again") from error


def _misfit(converted: Mapping[str, Tensor], lacking: Sequence[str], model: nn.Module) -> str:
    wanted, example = model.state_dict(), lacking[0]
    found = converted.get(example)
    how = "is missing" if found is None else f"is {list(found.shape)}, not {list(wanted[example].shape)}"
    return (
        f"does not fit model.path: of the {len(wanted)} tensors of its {type(model).__name__} {len(lacking)} "
        f"are missing or of another shape, such as {example}, which {how}"
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
