"""This file runs one block so that its activations are recomputed, and its inputs parked, until backward."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from diffsynth_lite.core.gradient.arguments import put_tensors, take_tensors
from diffsynth_lite.core.gradient.engine import GradientEngine
from diffsynth_lite.core.gradient.parking import changed_in_place
from diffsynth_lite.core.gradient.policies import Treatment
from diffsynth_lite.core.gradient.savings import Savings
from diffsynth_lite.core.gradient.scope import gradient_engine, take_engine_and_treatment


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

    The engine of the ``gradient_engine`` scope adds what its policy says for a selected block. For a policy
    that treats some blocks differently, run the blocks by ``blocks_through`` or ``block_runner``, which know
    the place of each.

    Args:
        model: a block. It runs twice with equal arguments: containers that hold tensors reach it as copies,
            others must not be changed by it. Where the engine skips dead operations, a block of a new kind
            runs a third time, to find them.
        use_gradient_checkpointing: recompute the block in backward.
        use_gradient_checkpointing_offload: recompute it, and park its input tensors in host memory between
            forward and backward, through the engine of the ``gradient_engine`` scope.
        *args: positional arguments of the block.
        **kwargs: keyword arguments of the block.

    Raises:
        RuntimeError: in backward, when an input was changed in place after the call.
    """
    # Kept by the closures below: a ContextVar that is set here is not set on autograd's worker threads.
    engine, treatment = take_engine_and_treatment()
    permitted = treatment.under(use_gradient_checkpointing, use_gradient_checkpointing_offload)
    return _run_block(engine, permitted, model, args, kwargs)


def _run_block(
    engine: GradientEngine,
    treatment: Treatment,
    block: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    engine.count(blocks_run=1)
    if not treatment.recompute or not torch.is_grad_enabled():
        return block(*args, **kwargs)

    engine.count(blocks_checkpointed=1)
    tensors, template = take_tensors((args, kwargs))
    savings = Savings(engine, treatment, block)
    has_run = False

    def run(*inputs: Tensor | _Left) -> Any:
        nonlocal has_run
        given = _unwrapped(inputs)

        def call() -> Any:
            run_args, run_kwargs = put_tensors(template, given)
            return block(*run_args, **run_kwargs)

        scope: AbstractContextManager[Any] = nullcontext()
        if has_run:
            engine.recomputing()
            scope = savings.recompute(call, given, template)
        else:
            scope = savings.forward()
        has_run = True
        # On autograd's worker threads no scope is around the blocks that this one may have.
        with gradient_engine(engine), scope:
            return call()

    with engine.frame() as parking:
        if treatment.checkpoint is not None:
            return treatment.checkpoint(run, *tensors)
        if not treatment.park:
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
