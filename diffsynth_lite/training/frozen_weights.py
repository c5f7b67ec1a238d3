"""This file decides in which format frozen weights are kept, and which of them live in host memory."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import torch
from accelerate import Accelerator

from diffsynth_lite.config import Config
from diffsynth_lite.core.gradient import blocks_in
from diffsynth_lite.core.transfer.backends import backend_for, smallest_worth_moving
from diffsynth_lite.core.transfer.host_pool import available_host_bytes, num_local_processes
from diffsynth_lite.core.transfer.shared_memory import HostMemory
from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.core.weights.formats import Int8, MissingKernelsError, WeightFormat, weight_format
from diffsynth_lite.core.weights.frozen_linear import Quantization
from diffsynth_lite.core.weights.packing import HostBlocks, frozen_weights, packed_bytes
from diffsynth_lite.core.weights.sharding import is_sharded, local_bytes
from diffsynth_lite.core.weights.stream import SLOTS_TO_GENERATE, WeightStream, require_saving, spread_evenly
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora import layers_ending_in
from diffsynth_lite.pipelines import ModelFamily
from diffsynth_lite.pipelines.base.quantized import quantizable_layers, require_finite_weights, set_formats
from diffsynth_lite.pipelines.base.text_encoders import (
    TextEncoderMemory,
    encoder_quantizations,
    transformer_layers,
)
from diffsynth_lite.training.distributed.agreement import on_all_processes


def require_format(name: str, *, key: str) -> WeightFormat:
    """The format of a name."""
    try:
        return weight_format(name)
    except MissingKernelsError as error:
        raise UserError(
            f"{key}: {name} needs {error}, which is not installed: pip install {error}; or set int8"
        ) from None


def transformer_quantization(
    family: ModelFamily, transformer: torch.nn.Module, config: Config, device: torch.device
) -> Quantization | None:
    """The format of the linear layers in the trained model's blocks; None where they are not quantised."""
    name, skipped = config.model.quantize, config.model.quantize_skip
    if name == "none":
        return None
    weights = require_format(name, key="model.quantize")
    model = family.parts_of(transformer)[family.trained[0]]
    layers = quantizable_layers(model, family.block_lists)
    if not layers:
        raise UserError(
            f"model.quantize: {name} has no effect, as the blocks of this model have no linear layers; "
            "set it to none"
        )
    owner = f"the blocks of {type(model).__name__}"
    left_out = set(layers_ending_in(layers, skipped, key="model.quantize_skip", owner=owner))
    if left_out == set(layers):
        raise UserError(
            f"model.quantize_skip: {', '.join(skipped)} leave out all {len(layers)} layers; "
            "take some off the list, or set model.quantize: none"
        )
    kept = tuple(layer for layer in layers if layer not in left_out)
    return Quantization(format=weights, layers=kept, device=device)


def text_encoder_memory(config: Config, family: ModelFamily, device: torch.device) -> TextEncoderMemory:
    """The format and the place of the family's text encoders while they encode."""
    quantizes, streams = config.model.text_encoder_quantize != "none", config.memory.stream_text_encoder
    if not quantizes and not streams:
        return TextEncoderMemory()
    encoders = _frozen_text_encoders(family)
    if not any(map(transformer_layers, encoders.values())):
        key = "model.text_encoder_quantize" if quantizes else "memory.stream_text_encoder"
        reason = "lora.components names the text encoders, which stay in model.dtype, on the device"
        if set(family.text_encoders) - set(family.trained):
            reason = "the text encoder has no known transformer layers"
        raise UserError(f"{key}: has no effect, as {reason}; leave it out")
    weights = None
    if quantizes:
        weights = require_format(config.model.text_encoder_quantize, key="model.text_encoder_quantize")
    memory = TextEncoderMemory(
        quantizations=encoder_quantizations(encoders, weights, device) if weights else {},
        num_slots=config.memory.stream_slots if streams else 0,
        min_bytes=config.memory.min_bytes,
    )
    if streams:
        _check_stream(config, memory, encoders, device)
    return memory


def _frozen_text_encoders(family: ModelFamily) -> dict[str, torch.nn.Module]:
    """Those that are not trained, by component, on the meta device, where they can be built so."""
    names = [name for name in family.text_encoders if name not in family.trained]
    built = {name: family.empty_component(name) for name in names}
    return {name: encoder.requires_grad_(False) for name, encoder in built.items() if encoder is not None}


def _check_stream(
    config: Config,
    memory: TextEncoderMemory,
    encoders: Mapping[str, torch.nn.Module],
    device: torch.device,
) -> None:
    for name, encoder in encoders.items():
        encoder.to(getattr(torch, config.model.text_encoder_dtype))
        if name in memory.quantizations:
            memory.quantizations[name].apply_to(encoder)
    stacks = memory.streamed_layers(list(encoders.values()))
    if not stacks:
        raise UserError(
            "memory.stream_text_encoder: the text encoder has no more layers than memory.stream_slots, "
            f"{config.memory.stream_slots}, so that all would stay on the device; take fewer slots, or set "
            "it to false"
        )
    num_slots, min_bytes = config.memory.stream_slots, config.memory.min_bytes
    try:
        require_saving(stacks, device, num_slots=num_slots, min_bytes=min_bytes)
    except ValueError as error:
        raise UserError(f"memory.stream_text_encoder: {error}") from None
    _, num_bytes = memory.num_bytes(list(encoders.values()), device)
    # Each process encodes when it has something to encode, and loads for itself.
    total, available = num_local_processes() * num_bytes, available_host_bytes()
    if available is not None and total > available:
        raise UserError(
            f"memory.stream_text_encoder: the layers take {format_bytes(total)} of host memory, a copy for "
            f"each process, and {format_bytes(available)} are available; set model.text_encoder_quantize, or "
            "end what else runs on this machine"
        )


def streamed_blocks(
    config: Config, family: ModelFamily, transformer: torch.nn.Module
) -> list[list[torch.nn.Module]]:
    """The blocks of each model whose weights ``memory.stream_blocks`` keeps in host memory, in call order.

    Args:
        transformer: may be on the meta device.
    """
    if config.memory.stream_blocks == 0:
        return []
    return [_streamed_of(config, blocks) for blocks in blocks_by_model(family, transformer)]


def blocks_by_model(family: ModelFamily, transformer: torch.nn.Module) -> list[list[torch.nn.Module]]:
    """The blocks of the trained model: one list, or one for each of several experts."""
    return [blocks_in(part, family.block_lists) for part in _models(family, transformer)]


def _models(family: ModelFamily, transformer: torch.nn.Module) -> list[torch.nn.Module]:
    parts = family.parts_of(transformer)
    # Experts have equal blocks; text encoders, which may train with a model, do not.
    kind = type(parts[family.trained[0]])
    return [part for part in parts.values() if type(part) is kind]


def _streamed_of(config: Config, blocks: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    count = config.memory.stream_blocks
    assert count != "auto", "a number was chosen before"
    return [blocks[place] for place in spread_evenly(len(blocks), len(blocks) if count == "all" else count)]


def check_stream(
    config: Config, family: ModelFamily, transformer: torch.nn.Module, num_blocks: int, device: torch.device
) -> None:
    """Check that to stream weights saves memory of the device, and that the host has enough.

    Args:
        transformer: on the meta device; it has the formats of the run afterwards.
    """
    memory = config.memory
    if memory.stream_blocks in (0, "auto"):
        return
    require_as_many_blocks(config, num_blocks)
    blocks = _blocks_as_loaded(config, family, transformer)
    try:
        require_saving(blocks, device, num_slots=memory.stream_slots, min_bytes=memory.min_bytes)
    except ValueError as error:
        raise UserError(f"memory.stream_blocks: {error}") from None
    _require_host_memory(
        config,
        _packed_bytes(config, blocks, device),
        available_host_bytes(),
        num_processes=num_local_processes(),
    )


def require_as_many_blocks(config: Config, num_blocks: int) -> None:
    """Check that a model has as many blocks as ``memory.stream_blocks`` streams."""
    number = config.memory.stream_blocks
    if isinstance(number, int) and number > num_blocks:
        raise UserError(
            f"memory.stream_blocks: {number}; the model has {num_blocks} blocks: give fewer, or all"
        )


def share_host_memory(config: Config, family: ModelFamily, accelerator: Accelerator) -> HostBlocks | None:
    """The streamed blocks, with the host memory that their weights are loaded to; None where there are none.

    The processes of a machine share it where they can; all of them call this together.
    """
    if config.memory.stream_blocks == 0:
        return None
    device, available = accelerator.device, available_host_bytes()
    blocks = _blocks_as_loaded(config, family, family.empty_transformer().requires_grad_(False))
    num_bytes = _packed_bytes(config, blocks, device)

    def require(num_copies: int, num_processes: int) -> None:
        copies = {"num_copies": num_copies, "num_processes": num_processes}
        on_all_processes(accelerator, _require_host_memory, config, num_bytes, available, **copies)

    # Less memory may be available than when the run was checked; all of it is taken at once.
    require(1, num_local_processes())
    memory = HostMemory.of_machine(
        num_bytes,
        (family.fingerprint(), config.model, config.memory),
        backend_for(device),
        lambda value: on_all_processes(accelerator, lambda: value),
    )
    require(1 if memory.is_shared else memory.num_processes, memory.num_processes)
    return _host_blocks(config, family, device, memory)


def load_for_previews(
    config: Config,
    family: ModelFamily,
    device: torch.device,
    prepare: Callable[[torch.nn.Module], None],
) -> torch.nn.Module:
    """A family's model, frozen, next to one that is on the device already; in this process only.

    Its blocks are streamed from host memory, where that has room and it saves device memory.

    Args:
        prepare: called with the model before its weights are on the device.
    """
    memory = config.memory.model_copy(update={"stream_blocks": "all", "stream_slots": SLOTS_TO_GENERATE})
    streamed = config.model_copy(update={"memory": memory})
    blocks = _blocks_as_loaded(streamed, family, family.empty_transformer().requires_grad_(False))
    host = None
    if _can_stream(streamed, blocks, device):
        host = _host_blocks(streamed, family, device, HostMemory(backend_for(device)))
    else:
        streamed = config.model_copy(update={"memory": memory.model_copy(update={"stream_blocks": 0})})
    family.host_blocks = host
    try:
        model = family.load_transformer(getattr(torch, config.model.dtype))
    finally:
        family.host_blocks = None
    prepare(model)
    place_weights(streamed, family, model, device, host)
    return model


def _can_stream(config: Config, models: Sequence[Sequence[torch.nn.Module]], device: torch.device) -> bool:
    """Whether streaming these blocks, on the meta device, saves device memory and the host has room."""
    try:
        require_saving(
            models, device, num_slots=config.memory.stream_slots, min_bytes=config.memory.min_bytes
        )
    except ValueError:
        return False
    available = available_host_bytes()
    return available is None or _packed_bytes(config, models, device) <= available


def _host_blocks(config: Config, family: ModelFamily, device: torch.device, memory: HostMemory) -> HostBlocks:
    return HostBlocks(
        lambda model: _streamed_of(config, blocks_in(model, family.block_lists)),
        device,
        min_bytes=smallest_worth_moving(device, config.memory.min_bytes),
        memory=memory,
    )


def place_weights(
    config: Config,
    family: ModelFamily,
    transformer: torch.nn.Module,
    device: torch.device,
    loaded: HostBlocks | None = None,
) -> WeightStream:
    """Put the transformer on the device, but for the weights that ``memory.stream_blocks`` keeps on the host.

    Before the optimizer is built and restored: its state is made where the parameters are.

    Args:
        loaded: blocks that are in host memory already; others are copied there.
    """
    try:
        # First: all tensors that are still parameters go to the device.
        weights = WeightStream(
            streamed_blocks(config, family, transformer),
            device,
            num_slots=config.memory.stream_slots,
            min_bytes=config.memory.min_bytes,
            loaded=loaded,
        )
    except ValueError as error:
        raise UserError(f"memory.stream_blocks: {error}") from error
    if family.shards is None:
        transformer.to(device)
    else:
        # Shards were loaded there, and are torch's to move.
        for tensor in (*transformer.parameters(), *transformer.buffers()):
            tensor.data = tensor.data if is_sharded(tensor) else tensor.data.to(device)
    # Weights in a format, in shards or on the host were checked as they were read.
    for name, part in family.parts_of(transformer).items():
        require_finite_weights(family.folder, name, part)
    return weights


def streamable_bytes(
    config: Config, family: ModelFamily, transformer: torch.nn.Module, weights: WeightStream
) -> int:
    """How much less of the device would be taken if all blocks were streamed.

    Args:
        transformer: on the device.
    """
    min_bytes = smallest_worth_moving(next(transformer.parameters()).device, config.memory.min_bytes)
    sizes = [
        packed_bytes(frozen_weights(block, min_bytes))
        for blocks in blocks_by_model(family, transformer)
        for block in blocks
    ]
    slots = max(config.memory.stream_slots * max(sizes), weights.slot_bytes)
    return max(sum(sizes) + weights.slot_bytes - slots, 0)


def quantizable_bytes(family: ModelFamily, transformer: torch.nn.Module) -> int:
    """How much less the plain linear layers in blocks would take of the device in int8.

    Args:
        transformer: on the device, but for weights that are streamed, which are not counted.
    """
    saved = 0
    for block in chain.from_iterable(blocks_by_model(family, transformer)):
        for name, module in block.named_modules():
            if ".lora_" in name:  # of a frozen adapter
                continue
            weight = module._parameters.get("weight")
            if type(module) is torch.nn.Linear and weight is not None and not weight.requires_grad:
                quantised = Int8().empty(module.out_features, module.in_features, torch.device("meta"))
                here = local_bytes([weight]) / weight.nbytes
                saved += int(here * (weight.nbytes - sum(part.nbytes for part in quantised)))
    return saved


def _blocks_as_loaded(
    config: Config, family: ModelFamily, transformer: torch.nn.Module
) -> list[list[torch.nn.Module]]:
    """The streamed blocks of each model, which is on the meta device and gets the formats of the run."""
    for model in _models(family, transformer):
        set_formats(model, getattr(torch, config.model.dtype), family.quantization)
    return streamed_blocks(config, family, transformer)


def _packed_bytes(config: Config, models: Sequence[Sequence[torch.nn.Module]], device: torch.device) -> int:
    min_bytes = smallest_worth_moving(device, config.memory.min_bytes)
    return sum(packed_bytes(frozen_weights(block, min_bytes)) for blocks in models for block in blocks)


def _require_host_memory(
    config: Config, num_bytes: int, available: int | None, *, num_copies: int = 1, num_processes: int
) -> None:
    """Check that a machine holds the streamed weights, and each of its devices the share of them."""
    total = num_copies * num_bytes
    if available is not None and total > available:
        copies = f" in {num_copies} copies, as processes cannot share them," if num_copies > 1 else ""
        raise UserError(
            f"memory.stream_blocks: the streamed weights{copies} take {format_bytes(total)} of host memory, "
            f"and {format_bytes(available)} are available; stream fewer blocks, set model.quantize, or end "
            "what else runs on this machine"
        )
    limit, share = config.memory.host_gib, total // num_processes
    if limit is not None and share > limit * 1024**3:
        raise UserError(
            f"memory.host_gib: {limit:.3g} GiB for each device do not hold its share of the streamed "
            f"weights, {format_bytes(share)}; raise it, or stream fewer blocks"
        )
