"""This file loads models: by their library, or frozen ones of diffusers with each tensor in its format."""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights

from diffsynth_lite.core.gradient import blocks_in
from diffsynth_lite.core.weights.formats import NotFiniteError, is_finite
from diffsynth_lite.core.weights.frozen_linear import Quantization
from diffsynth_lite.core.weights.loading import StoredTensors, load_frozen
from diffsynth_lite.core.weights.packing import HostBlocks
from diffsynth_lite.core.weights.sharding import BaseShards, local_part
from diffsynth_lite.core.weights.stored_formats import StoredFormatError
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines.base.folder import ComponentFile, PipelineFolder
from diffsynth_lite.pipelines.base.model_settings import building
from diffsynth_lite.pipelines.base.single_file import read_single_file

logger = logging.getLogger(__name__)


def quantizable_layers(model: torch.nn.Module, block_lists: Sequence[str]) -> list[str]:
    """Full names of the linear layers in a model's blocks, as of :func:`linear_layers_in`."""
    return linear_layers_in(model, blocks_in(model, block_lists))


def linear_layers_in(model: torch.nn.Module, blocks: Iterable[torch.nn.Module]) -> list[str]:
    """Full names of the linear layers in blocks of a model, but for those that its library keeps in fp32.

    Not those of subclasses either: who asks for the weight of one, as torch's attention does, gets no numbers
    to compute with.

    Args:
        model: of diffusers or transformers; may be on the meta device.
    """
    names = {module: name for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    in_blocks = (module for block in blocks for module in block.modules())
    return [
        names[module] for module in in_blocks if module in names and not kept_in_fp32(model, names[module])
    ]


def set_formats(model: torch.nn.Module, dtype: torch.dtype, quantization: Quantization | None) -> None:
    """Let a model on the meta device have the dtypes and the layers that it is loaded with.

    Args:
        dtype: of all that is not quantised, but for what diffusers keeps in fp32.
    """
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if kept_in_fp32(model, name) else dtype)
    if quantization is not None:
        quantization.apply_to(model)


def load_frozen_component(
    model_class: Any,
    folder: PipelineFolder,
    component: str,
    dtype: torch.dtype,
    quantization: Quantization | None = None,
    host_blocks: HostBlocks | None = None,
    shards: BaseShards | None = None,
) -> torch.nn.Module:
    """A component as ``from_pretrained`` gives it, but frozen, and each tensor where it is going to be.

    Args:
        component: its folder, whose config it has; its weights may come from a file that ``folder`` names.
        quantization: of some of its layers, while they are read, from the numbers in the files; None is none.
        host_blocks: blocks whose weights go to host memory; None is none. All else goes to the device that
            this, ``shards`` or ``quantization`` names, or stays on the CPU.
        shards: which parts of the weights are loaded; None is all of them.

    Raises:
        HostMemoryError: the system has too little host memory for the blocks.
        UserError: the files do not hold what the component's config needs, weights that are not finite, or
            some in a format that is not read.
        safetensors.SafetensorError: a file is damaged.
        OSError: a file is not there, or cannot be read.
    """
    # As diffusers makes it: what a model computes when it is made is in the dtype too.
    with _default_dtype(dtype), init_empty_weights():
        model: torch.nn.Module = model_class.from_config(folder.component_config(component))
    placing = host_blocks or shards or quantization
    device = torch.device("cpu") if placing is None else placing.device
    stored = stored_component(folder, component, model)
    set_formats(model, dtype, quantization)
    try:
        load_frozen(model, stored, device=device, host_blocks=host_blocks, shards=shards)
    except NotFiniteError as error:
        raise UserError(f"{folder.place_of(component, error.tensor)}: {error}; get it again") from error
    return model.eval()


def stored_component(folder: PipelineFolder, component: str, model: torch.nn.Module) -> StoredTensors:
    """The weights of a component as they are stored, by a model's names; see :func:`load_frozen_component`.

    Args:
        model: of the component's class and settings, on the meta device.
    """
    given = folder.files.get(component)
    where = ComponentFile(path=folder.place(component).path, key="model.path") if given is None else given
    try:
        if given is not None:
            stored = read_single_file(given, model)
        else:
            stored = StoredTensors.in_files(folder.files_to_load(component))
            require_fitting(folder, component, type(model), stored.lacking(model))
    except StoredFormatError as error:
        raise UserError(f"{where.key}: the weights in {where.path} are not read: {error}") from error
    _warn_of_unused(where.path, model, stored)
    return stored


def load_plain_component(
    model_class: Any, folder: PipelineFolder, component: str, dtype: torch.dtype
) -> torch.nn.Module:
    """A component as ``from_pretrained`` gives it, on the CPU.

    Raises:
        UserError: the files do not hold what the component's config needs.
        safetensors.SafetensorError: a file is damaged.
        OSError: a file is not there, or cannot be read.
    """
    model: torch.nn.Module
    place = folder.place(component)
    with building(model_class, place.path):
        model, loading = model_class.from_pretrained(
            place.path,
            variant=place.variant,
            dtype=dtype,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are listed then, and refused below
            output_loading_info=True,
        )
    require_fitting(folder, component, model_class, lacking_by(loading))
    return model


def require_finite_weights(folder: PipelineFolder, component: str, model: torch.nn.Module) -> None:
    """Check that the weights of a component are numbers, but for those that are kept in a format.

    Args:
        model: on its device; with or without an adapter.
    """
    if folder.is_quantised(component):
        return
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not is_finite(local_part(parameter)):
            error = NotFiniteError(name.replace(".base_layer.", "."))
            raise UserError(f"{folder.place_of(component, error.tensor)}: {error}; get it again")


def lacking_by(loading: Mapping[str, Any]) -> list[str]:
    """Names of tensors that ``from_pretrained`` reports missing, or of another shape.

    It makes them up: transformers fills them with random numbers, and logs a table.
    """
    of_other_shapes = {name for name, *_ in loading["mismatched_keys"]}
    return sorted(of_other_shapes.union(loading["missing_keys"]))


def require_fitting(folder: PipelineFolder, component: str, model_class: Any, lacking: Sequence[str]) -> None:
    """Refuse weights that are not those of the component's config.

    Args:
        lacking: names of tensors that are missing, or of another shape.
    """
    if lacking:
        raise UserError(
            f"model.path: the weights in {folder.place(component)} do not fit their config.json: "
            f"{len(lacking)} of a {model_class.__name__} are missing or of another shape, such as "
            f"{lacking[0]}; get the folder again"
        )


def _warn_of_unused(place: Path, model: torch.nn.Module, stored: StoredTensors) -> None:
    expected: Sequence[str] = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    unused = [
        name
        for name in sorted(stored.tensors.keys() - model.state_dict().keys())
        if not any(re.search(pattern, name) for pattern in expected)
    ]
    if unused:
        logger.warning("%d tensors in %s are not used, such as %s.", len(unused), place, unused[0])


def kept_in_fp32(model: torch.nn.Module, name: str) -> bool:
    """Whether the library may keep a tensor, or a module, in fp32 whatever dtype is asked for."""
    kept: Sequence[str] = getattr(model, "_keep_in_fp32_modules", None) or ()
    return not set(kept).isdisjoint(name.split("."))


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
