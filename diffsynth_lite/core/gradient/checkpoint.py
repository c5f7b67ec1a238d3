"""This file runs one block so that its activations are recomputed, and its inputs parked, until backward."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from diffsynth_lite.core.gradient.arguments import put_tensors, take_tensors
from diffsynth_lite.core.gradient.engine import current_engine
from diffsynth_lite.core.gradient.parking import changed_in_place


def gradient_checkpoint_forward(
    model: Callable[..., Any],
    use_gradient_checkpointing: bool,
    use_gradient_checkpointing_offload: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """``model(*args, **kwargs)``, keeping less memory occupied until its backward pass.

    Values and gradients are the same whatever the switches. With both off, or with gradients disabled, this
    is the plain call. Otherwise the activations inside ``model`` are dropped and recomputed in backward;
    tensors are found in positional and keyword arguments, also in tuples, lists, dicts and dataclasses.

    Args:
        model: a block. It runs twice with equal arguments: containers that hold tensors reach it as copies,
            others must not be changed by it.
        use_gradient_checkpointing: recompute the block in backward.
        use_gradient_checkpointing_offload: recompute it, and park its input tensors in host memory between
            forward and backward, through the engine of the ``gradient_engine`` scope.
        *args: positional arguments of the block.
        **kwargs: keyword arguments of the block.

    Raises:
        RuntimeError: in backward, when an input was changed in place after the call.
    """
    # Kept by the closure below: a ContextVar that is set here is not set on autograd's worker threads.
    engine = current_engine()
    engine.count(blocks_run=1)
    offload = use_gradient_checkpointing_offload
    if not (use_gradient_checkpointing or offload) or not torch.is_grad_enabled():
        return model(*args, **kwargs)

    engine.count(blocks_checkpointed=1)
    tensors, template = take_tensors((args, kwargs))
    has_run = False

    def run(*inputs: Tensor | _Left) -> Any:
        nonlocal has_run
        if has_run:
            engine.recomputing()
        has_run = True
        run_args, run_kwargs = put_tensors(template, _unwrapped(inputs))
        return model(*run_args, **run_kwargs)

    with engine.frame() as parking:
        if not offload:
            return checkpoint(run, *tensors, use_reentrant=False)
        inputs = [tensor if engine.parks(tensor) else _Left(tensor, tensor._version) for tensor in tensors]
        with parking.of_saved_tensors():
            return checkpoint(run, *inputs, use_reentrant=False)


class _Left(NamedTuple):
    """A tensor that stays on the device, with the version that it had.

    Torch looks into tuples for RNG states and the device, but not for its saved-tensor hooks. Those would
    give a parameter or a tensor of another class back as a plain tensor.
    """

    tensor: Tensor
    version: int


def _unwrapped(inputs: Sequence[Tensor | _Left]) -> list[Tensor]:
    """The tensors of ``inputs``, once it is sure that none of them was changed since the forward pass."""
    for item in inputs:
        if isinstance(item, _Left) and item.tensor._version != item.version:
            raise changed_in_place(item.tensor.shape)
    return [item.tensor if isinstance(item, _Left) else item for item in inputs]
