"""This file loads frozen models of transformers: each tensor in its format, to where it is going to be.

Files of one model differ in the names of their tensors with the version that wrote them, weights are tied,
some are kept in float32, and tables are computed; only transformers knows how. So its own loader is run on
stand-ins for the tensors in the files, which have their shapes and no numbers, and remember which they are.
The places that it gave them, in the dtypes that it chose, are then filled with the numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from diffsynth_lite.core.transfer.shared_memory import HostMemoryError
from diffsynth_lite.core.weights.formats import NotFiniteError
from diffsynth_lite.core.weights.frozen_linear import Quantization
from diffsynth_lite.core.weights.loading import StoredTensors, load_frozen
from diffsynth_lite.core.weights.packing import HostBlocks
from diffsynth_lite.core.weights.stored_formats import StoredFormatError
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines.base.folder import PipelineFolder
from diffsynth_lite.pipelines.base.quantized import lacking_by, require_fitting
from diffsynth_lite.pipelines.base.release_folder import empty_model
from diffsynth_lite.pipelines.base.single_file import read_single_file

_KEYS = "model.text_encoder_quantize, memory.stream_text_encoder"


def load_frozen_encoder(
    model_class: Any,
    folder: PipelineFolder,
    component: str,
    dtype: torch.dtype,
    quantization: Quantization | None = None,
    host_blocks: HostBlocks | None = None,
) -> nn.Module:
    """As :func:`~diffsynth_lite.pipelines.base.quantized.load_frozen_component`, for a class of transformers.

    Raises:
        UserError: as there; or the files are quantised already, or weights are computed from several of them;
            or the system has too little host memory.
        safetensors.SafetensorError: a file is damaged.
        OSError: a file is not there, or cannot be read.
    """
    files = _stored_tensors(model_class, folder, component)
    model: nn.Module
    model, loading = model_class.from_pretrained(
        None,
        config=model_class.config_class.from_pretrained(folder.place(component).path),
        state_dict={name: _StandIn.of(files.shape(name), name) for name in files.tensors},
        dtype=dtype,
        ignore_mismatched_sizes=True,  # they are listed then, and refused below
        output_loading_info=True,
    )
    require_fitting(folder, component, model_class, lacking_by(loading))
    sources = _emptied(model)
    stored = files.converted(lambda one: {name: one[source] for name, source in sources.items()})
    if quantization is not None:
        quantization.apply_to(model)
    placing = host_blocks or quantization
    device = torch.device("cpu") if placing is None else placing.device
    try:
        load_frozen(model, stored, device=device, host_blocks=host_blocks)
    except NotFiniteError as error:
        raise UserError(f"{folder.place_of(component, error.tensor)}: {error}; get it again") from error
    except HostMemoryError as error:
        raise UserError(f"memory.stream_text_encoder: {error}") from error
    return model.eval()


def _stored_tensors(model_class: Any, folder: PipelineFolder, component: str) -> StoredTensors:
    config = folder.component_config(component)
    if component in folder.files:
        return read_single_file(folder.files[component], empty_model(model_class, config))
    where = folder.place(component).path
    if folder.is_quantised(component):
        raise UserError(
            f"{_KEYS}: the weights in {where} are quantised already (quantization_config in config.json); "
            "leave both out"
        )
    try:
        return StoredTensors.in_files(folder.files_to_load(component))
    except StoredFormatError as error:
        raise UserError(f"model.path: the weights in {where} cannot be read: {error}") from error


def _emptied(model: nn.Module) -> dict[str, str]:
    """Put empty parameters in the place of stand-ins; the names of their tensors, by names in the model."""
    sources: dict[str, str] = {}
    empty: dict[Tensor, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, _StandIn) or tensor.source is None:
            raise UserError(
                f"{_KEYS}: this version of transformers computes {name} of a {type(model).__name__} from "
                "other weights when it loads one; leave both out"
            )
        sources[name] = tensor.source
        if tensor not in empty:  # else it is tied to one before
            empty[tensor] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            if isinstance(tensor, nn.Parameter):
                empty[tensor] = nn.Parameter(empty[tensor], requires_grad=False)
        prefix, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(prefix), leaf, empty[tensor])
    return sources


class _StandIn(Tensor):
    """Has the shape of a stored tensor and no numbers, and keeps its name wherever it is moved or cast.

    Attributes:
        source: the tensor's name; None where something was computed from it.
    """

    source: str | None = None

    @classmethod
    def of(cls, shape: Sequence[int], source: str) -> "_StandIn":
        stand_in = torch.empty(shape, device="meta").as_subclass(cls)
        stand_in.source = source
        return stand_in

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func is Tensor.to:
            # There are no numbers that another device could have.
            given.pop("device", None)
        result = super().__torch_function__(func, types, args, given)  # type: ignore[no-untyped-call]
        if func in (Tensor.to, Tensor.detach, Tensor.__getitem__) and result.shape == args[0].shape:
            result.source = args[0].source
        return result
