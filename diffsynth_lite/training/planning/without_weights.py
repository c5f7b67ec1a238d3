"""This file has a family load models without numbers, so that its calls of them can be counted."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel

from diffsynth_lite.core.planning.stand_ins import StandIns, one_pixel, zeros_like
from diffsynth_lite.core.weights.loading import StoredTensors
from diffsynth_lite.core.weights.packing import HostBlocks
from diffsynth_lite.core.weights.stored_formats import StoredFormatError
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines import ModelFamily
from diffsynth_lite.pipelines.base import vae_tiles
from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily
from diffsynth_lite.pipelines.base.quantized import set_formats
from diffsynth_lite.testing import tokenizers

_TOKENIZERS = MappingProxyType(
    {
        "CLIP": tokenizers.clip_tokenizer,
        "Gemma": tokenizers.gemma_tokenizer,
        "Llama": tokenizers.llama3_tokenizer,
        "Pixtral": tokenizers.mistral_tokenizer,
        "PreTrainedTokenizerFast": tokenizers.llama3_tokenizer,  # of HiDream-I1
        "Qwen2": tokenizers.qwen2_tokenizer,
        "Qwen3VL": tokenizers.qwen2_tokenizer,
        "T5": tokenizers.t5_tokenizer,
        "TokenizersBackend": tokenizers.mistral_tokenizer,  # what transformers 5 saves for any; ERNIE-Image's
    }
)
"""By the beginning of class names: small ones, which truncate and pad a prompt as those of releases do."""
_IMAGE_TOKENS = ("<|image_pad|>", "<image>")
"""Of the text encoders that see images here: Qwen's, and LLaVA."""


def frozen_component(family: ModelFamily, name: str, dtype: torch.dtype) -> nn.Module:
    """A component that is not trained, on the meta device, in the dtypes that its library loads it in."""
    model = family.empty_component(name)
    if model is None:
        raise UserError(
            f"model.family: {type(family).__name__} does not define {name} (empty_component), "
            "so that it cannot be counted"
        )
    model.eval().requires_grad_(False)
    if isinstance(model, PreTrainedModel):
        _cast_as_loaded(model, dtype)
    else:
        set_formats(model, dtype, None)
    return model


def _cast_as_loaded(model: Any, dtype: torch.dtype) -> None:
    """Cast a model of transformers to a dtype, but for the weights that its loader keeps in fp32."""
    kept = set(model._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        kept |= set(model._keep_in_fp32_modules or ())
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point():
            is_kept = not kept.isdisjoint(name.split("."))
            tensor.data = tensor.data.to(torch.float32 if is_kept else dtype)


def copied_bytes(family: ModelFamily, location: str, name: str, weights: nn.Module) -> int:
    """Bytes of host memory that a component takes while its library loads it.

    Weights in the dtype of their files are read in place; others are cast, all of them.
    """
    dtypes = _stored_dtypes(family, location, name)
    return sum(weight.nbytes for weight in weights.parameters() if weight.dtype not in dtypes)


def _stored_dtypes(family: ModelFamily, location: str, name: str) -> set[torch.dtype]:
    """Dtypes in a component's files, or of a release that is known; empty where neither is at hand."""
    folder = family.folder
    files = [folder.files[name].path] if name in folder.files else folder.files_to_load(name)
    try:
        stored = StoredTensors.in_files(files)
    except (OSError, SafetensorError, StoredFormatError):
        return set()
    found = {tensor.dtype for tensor in stored.tensors.values()}
    named = [release for release in family.releases if release.hub_id.lower() == location.lower()]
    released = [release.components[name].dtype for release in named if name in release.components]
    return found or {getattr(torch, dtype) for dtype in released if dtype is not None}


class WithoutWeights(DiffusersFamily):
    """The first base class of a family that loads models without numbers.

    Attributes:
        loaded: those that it has loaded, by component.
    """

    counted: StandIns
    loaded: dict[str, Any]

    def load_component(self, name: str, dtype: torch.dtype, encoder_blocks: HostBlocks | None = None) -> Any:
        model = self.loaded[name] = frozen_component(self, name, dtype)
        if self.edits.prompt_sees_images and name in self.text_encoders:
            # Not where the release has it, if the tokenizer is a small one.
            settings: Any = model.config
            tokenizer = self.load_tokenizer(self.prompt_tokenizer)
            known = tokenizer.get_vocab()
            [settings.image_token_id] = [known[token] for token in _IMAGE_TOKENS if token in known]
        if name in self.text_encoder_memory.quantizations:
            self.text_encoder_memory.quantizations[name].apply_to(model)
        if name != "vae":
            return self.counted.put(model, with_parts=name in self.text_encoders)
        if self.vae_tiles is not None:
            self.vae_tiles.apply_to(model)
        is_tiled_when_full = self.vae_tiles is None and self.known_vae_tiles is not None
        decoded = _FirstFull() if is_tiled_when_full else one_pixel
        for blend in ("blend_v", "blend_h", "blend_t"):
            # Each of its thousand operations holds but a line of pixels.
            vars(model)[blend] = lambda _before, tile, _extent: tile
        returned = {"encode": zeros_like, "decode": decoded}
        return self.counted.put(model, returned, repeated=("encoder", "decoder"))

    def load_tokenizer(self, name: str = "tokenizer") -> Any:
        _, class_name = self.folder.parts().get(name, ("", None))
        files = [path for path in self.folder.place(name).path.glob("*") if not path.stem.endswith("_config")]
        make = [make for start, make in _TOKENIZERS.items() if (class_name or "").startswith(start)]
        return make[0]() if make and not files else super().load_tokenizer(name)


class _FirstFull:
    """The decoded result; the first time the device counts as full, so that the next one is in tiles."""

    def __init__(self) -> None:
        self._is_first = True

    def __call__(self, tensor: Tensor) -> Tensor:
        if self._is_first:
            self._is_first = False
            raise torch.OutOfMemoryError("as counted")
        return one_pixel(tensor)


def without_weights(
    family: ModelFamily, counted: StandIns, *, trained: Sequence[str], vae_tiling: bool = False
) -> WithoutWeights:
    """The family as it is bound, but with models without numbers, on the CPU."""
    given = type(family)
    if not isinstance(family, DiffusersFamily):
        raise UserError(
            f"model.family: {given.__name__} loads its models in a way of its own, so that only its training "
            "steps can be counted"
        )
    copied: WithoutWeights = type(given.__name__, (WithoutWeights, given), {})(family.folder, trained=trained)
    copied.counted, copied.loaded = counted, {}
    copied.learn_as(family)
    copied.vae_tiles = copied.known_vae_tiles if vae_tiling else None
    return copied


@contextmanager
def counted_silently() -> Iterator[None]:
    """Scope without warnings of prompts that are too long, or images too large: they are meant to be."""
    loggers = [logging.getLogger(name) for name in ("diffusers", "transformers", vae_tiles.__name__)]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
