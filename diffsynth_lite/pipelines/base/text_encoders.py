"""This file keeps text encoders in less memory while they encode: quantised, or streamed layer by layer."""

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from diffsynth_lite.core.gradient import IneffectiveSwitchError
from diffsynth_lite.core.transfer.backends import backend_for, smallest_worth_moving
from diffsynth_lite.core.transfer.shared_memory import HostMemory
from diffsynth_lite.core.weights.formats import WeightFormat
from diffsynth_lite.core.weights.frozen_linear import Quantization, QuantizationReport
from diffsynth_lite.core.weights.packing import HostBlocks, frozen_weights, packed_bytes
from diffsynth_lite.core.weights.stream import WeightStream
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines.base.quantized import linear_layers_in

logger = logging.getLogger(__name__)

_Prompts = TypeVar("_Prompts")
_Encoded = TypeVar("_Encoded")


def transformer_layers(encoder: nn.Module) -> list[list[nn.Module]]:
    """The transformer layers of a text encoder, in call order: of the text, and of images if it sees any.

    They are those that transformers can checkpoint.

    Args:
        encoder: of transformers; may be on the meta device.
    """
    stacks: dict[str, list[nn.Module]] = {}
    for name, module in encoder.named_modules():
        if isinstance(module, GradientCheckpointingLayer):
            stacks.setdefault(name.rpartition(".")[0], []).append(module)
    return list(stacks.values())


def quantizable_encoder_layers(encoder: nn.Module) -> list[str]:
    """Full names of the linear layers in a text encoder's transformer layers that can be quantised.

    Args:
        encoder: of transformers; may be on the meta device.
    """
    return linear_layers_in(encoder, chain.from_iterable(transformer_layers(encoder)))


def encoder_quantizations(
    encoders: Mapping[str, nn.Module], weight_format: WeightFormat, device: torch.device
) -> dict[str, Quantization]:
    """Of all that can be quantised in text encoders, by component; nothing of those where nothing can be.

    Args:
        encoders: of transformers, by component; may be on the meta device.
    """
    layers = {name: tuple(quantizable_encoder_layers(encoder)) for name, encoder in encoders.items()}
    return {
        name: Quantization(format=weight_format, layers=of_encoder, device=device)
        for name, of_encoder in layers.items()
        if of_encoder
    }


class TextEncoderMemory:
    """How the text encoders of a pipeline are kept: by default plain, and on the device.

    Args:
        quantizations: of linear layers in their transformer layers, by component.
        num_slots: transformer layers that have their weights on the device at once, where these are streamed;
            0 leaves all on the device.
        min_bytes: as of :class:`~diffsynth_lite.core.weights.stream.WeightStream`.
    """

    def __init__(
        self,
        *,
        quantizations: Mapping[str, Quantization] = MappingProxyType({}),
        num_slots: int = 0,
        min_bytes: int | None = None,
    ) -> None:
        self.quantizations = dict(quantizations)  # a mapping proxy goes to no other process
        self._num_slots, self._min_bytes = num_slots, min_bytes
        self._placed: tuple[QuantizationReport, WeightStream] | None = None

    def host_blocks(self, device: torch.device) -> HostBlocks | None:
        """Where text encoders are loaded to, in place of the device; None where they are not streamed."""
        if not self._num_slots:
            return None
        return HostBlocks(
            lambda encoder: list(chain.from_iterable(self.streamed_layers([encoder]))),
            device,
            min_bytes=smallest_worth_moving(device, self._min_bytes),
            memory=HostMemory(backend_for(device)),
        )

    def streamed_layers(self, encoders: Sequence[nn.Module]) -> list[list[nn.Module]]:
        """The layers that are streamed: those of each stack that has more of them than there are slots."""
        stacks = [stack for encoder in encoders for stack in transformer_layers(encoder)]
        return [stack for stack in stacks if 0 < self._num_slots < len(stack)]

    def num_bytes(self, encoders: Sequence[nn.Module], device: torch.device) -> tuple[int, int]:
        """What the weights of text encoders take on the device, slots included, and in host memory.

        Args:
            encoders: on any device, or on meta; frozen, in their dtypes and formats.
        """
        total = sum(weight.nbytes for weight in nn.ModuleList(encoders).parameters())
        min_bytes = smallest_worth_moving(device, self._min_bytes)
        moving = [
            frozen_weights(layer, min_bytes) for stack in self.streamed_layers(encoders) for layer in stack
        ]
        slots = self._num_slots * max(map(packed_bytes, moving), default=0)
        left = sum(weight.nbytes for weights in moving for weight in weights)
        return total - left + slots, sum(map(packed_bytes, moving))

    def place(
        self, encoders: Sequence[nn.Module], device: torch.device, loaded: HostBlocks | None = None
    ) -> None:
        """Put all text encoders of a pipeline on the device, but for the weights that are streamed.

        Args:
            loaded: of :meth:`host_blocks`, where they were loaded so.
        """
        everything = nn.ModuleList(encoders).requires_grad_(False)  # what trains is not streamed
        try:
            stream = WeightStream(
                self.streamed_layers(encoders),
                device,
                num_slots=self._num_slots,
                min_bytes=self._min_bytes,
                loaded=loaded,
            )
        except ValueError as error:
            raise UserError(f"memory.stream_text_encoder: {error}") from error
        stream.start_report()
        everything.to(device)
        self._placed = QuantizationReport.of(everything), stream

    def watched(self, load: Callable[[], Callable[[_Prompts], _Encoded]]) -> Callable[[_Prompts], _Encoded]:
        """The encoder that ``load`` gives; after the first prompts it logs what was quantised and streamed.

        Args:
            load: loads the text encoders, and hands them to ``place``.
        """
        encode = load()
        placed, self._placed = self._placed, None
        if not self.quantizations and not self._num_slots:
            return encode
        if placed is None or (self.quantizations and not placed[0].num_layers):
            raise UserError(
                "model.text_encoder_quantize, memory.stream_text_encoder: no effect, as this family loads "
                "its text encoder in a way of its own; leave both out"
            )
        quantised, stream = placed
        is_first = True

        def watched(prompts: _Prompts) -> _Encoded:
            nonlocal is_first
            encoded = encode(prompts)
            if is_first:
                is_first = False
                _report(quantised, stream)
            return encoded

        return watched


def _report(quantised: QuantizationReport, stream: WeightStream) -> None:
    streamed = stream.report()
    try:
        streamed.require_effect("stream_text_encoder")
    except IneffectiveSwitchError as error:
        raise UserError(f"memory.{error}") from None
    for line in (*quantised.lines(), *streamed.lines()):
        logger.info("text encoder, first caption: %s", " ".join(line.split()))
