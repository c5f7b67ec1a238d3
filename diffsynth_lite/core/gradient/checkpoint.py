"""This file runs block calls: each by its engine and strategy, in the forward pass and in its recompute."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from diffsynth_lite.core.autocast import drop_cast
from diffsynth_lite.core.gradient.arguments import put_tensors, take_tensors
from diffsynth_lite.core.gradient.blocks import (
    blocks_in,
    find_submodule,
    intercept_blocks,
    unwrapped,
)
from diffsynth_lite.core.gradient.engine import GradientEngine, GradientFlags
from diffsynth_lite.core.gradient.frames import changed_in_place
from diffsynth_lite.core.gradient.policies import BlockPolicy, BlockStrategy
from diffsynth_lite.core.gradient.recompute import RecomputeSavings


@dataclass(frozen=True, slots=True)
class BlockCall:
    """How one block is to be called.

    Attributes:
        unused_matmuls: names of layers in the block whose matrix products the recompute may not need.
    """

    engine: GradientEngine
    strategy: BlockStrategy
    unused_matmuls: Sequence[str] = ()


_engine: ContextVar[GradientEngine | None] = ContextVar("gradient_engine", default=None)
_block_call: ContextVar[BlockCall | None] = ContextVar("block_call", default=None)
_runs_again: ContextVar[bool] = ContextVar("runs_again", default=False)


@contextmanager
def gradient_engine(engine: GradientEngine) -> Iterator[None]:
    """Scope in which ``gradient_checkpoint_forward`` works through ``engine``."""
    token = _engine.set(engine)
    try:
        yield
    finally:
        _engine.reset(token)


def gradient_flags() -> GradientFlags:
    """The two switches of the engine in scope; both off outside of any scope."""
    engine = _engine.get()
    off = GradientFlags(use_gradient_checkpointing=False, use_gradient_checkpointing_offload=False)
    return engine.flags if engine else off


def runs_again() -> bool:
    """Whether the block that is running is checkpointed: what it would save, a second run gives."""
    return _runs_again.get()


def current_engine() -> GradientEngine:
    """The engine of the innermost ``gradient_engine`` scope; outside of any, a new one for one block call."""
    # No other call would ever make room for its tensors.
    return _engine.get() or GradientEngine(resident_blocks=0, prefetched_blocks=0)


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

    The engine of the ``gradient_engine`` scope adds its policy for a selected block. Where some
    blocks have another strategy, run them by ``checkpoint_blocks`` or ``block_runner``, which know the place
    of each.

    Args:
        model: a block. It runs twice with equal arguments: containers that hold tensors reach it as copies,
            others must not be changed by it.
        use_gradient_checkpointing: recompute the block in backward.
        use_gradient_checkpointing_offload: recompute it, and keep its input tensors in host memory between
            forward and backward, through the engine of the ``gradient_engine`` scope.

    Raises:
        RuntimeError: in backward, when an input was changed in place after the call, or the state of the
            engine is another one.
    """
    call = _take_block_call()
    permitted = call.strategy.under(use_gradient_checkpointing, use_gradient_checkpointing_offload)
    call.engine.count(blocks_run=1)
    if not permitted.recompute or not torch.is_grad_enabled():
        return model(*args, **kwargs)
    return _checkpointed(call, permitted, model, args, kwargs)


def _take_block_call() -> BlockCall:
    """What ``block_runner`` set, once; any other call uses the engine in scope, as a selected block.

    A block that has blocks of its own runs them alike in forward, where this is set, and in its recompute.
    """
    call = _block_call.get()
    if call is not None:
        _block_call.set(None)
        return call
    engine = current_engine()
    return BlockCall(engine, engine.policy.selected)


def _checkpointed(
    call: BlockCall,
    strategy: BlockStrategy,
    block: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    # Kept by the closure below: a ContextVar that is set here is not set on autograd's worker threads.
    engine = call.engine
    engine.count(blocks_checkpointed=1)
    tensors, template = take_tensors((args, kwargs))
    savings = RecomputeSavings(engine, strategy, block, call.unused_matmuls)
    state, has_run = engine.state(), False

    def run(*inputs: Tensor | _NotOffloaded) -> Any:
        nonlocal has_run
        if has_run:
            engine.recomputing(state)
        scope = savings.recompute() if has_run else savings.forward()
        has_run = True
        given = _unwrapped(inputs)
        run_args, run_kwargs = put_tensors(template, given)
        # On autograd's worker threads no scope is around the blocks that this one may have.
        with gradient_engine(engine), _running_again(), scope:
            output = block(*run_args, **run_kwargs)
        # Inputs stay until the recompute, and nothing else of this run does.
        for tensor in given:
            drop_cast(tensor)
        return output

    with engine.frame() as context:
        if strategy.checkpoint is not None:
            return strategy.checkpoint(run, *tensors)
        if not strategy.offload:
            return checkpoint(run, *tensors, use_reentrant=False)
        inputs = [
            tensor if engine.can_offload(tensor) else _NotOffloaded(tensor, tensor._version)
            for tensor in tensors
        ]
        with context.of_saved_tensors():
            return checkpoint(run, *inputs, use_reentrant=False)


@contextmanager
def _running_again() -> Iterator[None]:
    """Scope of each run of a checkpointed block."""
    token = _runs_again.set(True)
    try:
        yield
    finally:
        _runs_again.reset(token)


class _NotOffloaded(NamedTuple):
    """A tensor that stays on the device, with the version that it had.

    Torch looks into tuples for RNG states and the device, but not for its saved-tensor hooks. Those would
    give a parameter or a tensor of another class back as a plain tensor.
    """

    tensor: Tensor
    version: int


def _unwrapped(inputs: Sequence[Tensor | _NotOffloaded]) -> list[Tensor]:
    """The tensors of ``inputs``, once it is sure that none of them was changed since the forward pass."""
    for item in inputs:
        if isinstance(item, _NotOffloaded) and item.tensor._version != item.version:
            raise changed_in_place(item.tensor.shape)
    return [item.tensor if isinstance(item, _NotOffloaded) else item for item in inputs]


@contextmanager
def checkpoint_blocks(
    model: nn.Module,
    block_lists: Sequence[str],
    forward: Callable[..., Any],
    use_gradient_checkpointing: bool = False,
    use_gradient_checkpointing_offload: bool = False,
    *,
    policy: BlockPolicy | None = None,
    unused_matmuls: Sequence[str] = (),
    by_hook: bool = True,
) -> Iterator[None]:
    """Scope in which the forward pass of ``model`` runs each of its blocks through ``forward``.

    Where the model calls ``block(*args, **kwargs)``, ``forward(block, use_gradient_checkpointing,
    use_gradient_checkpointing_offload, *args, **kwargs)`` is called in its place.

    Args:
        model: a diffusers model, plain or wrapped for distributed training; its forward is called once.
        block_lists: names of its module lists in call order, or of single modules in one.
        policy: which blocks the two switches are for; None is the policy of the ``gradient_engine`` scope.
        unused_matmuls: names of layers in the blocks, such as ``"ff.net.2"``, whose results often are needed
            by no gradient. Their matrix products wait in the recompute until something reads the result.
        by_hook: through diffusers' own hook for gradient checkpointing. Without, for classes that have none
            or whose hook drops arguments, by their ``forward``.
    """
    blocks = blocks_in(model, block_lists)
    for name in unused_matmuls:
        if not any(find_submodule(unwrapped(block), name) for block in blocks):
            raise ValueError(f"unused_matmuls: no block of {type(unwrapped(model)).__name__} has {name!r}")
    run = block_runner(
        len(blocks),
        use_gradient_checkpointing,
        use_gradient_checkpointing_offload,
        policy=policy,
        unused_matmuls=unused_matmuls,
        forward=forward,
    )
    with intercept_blocks(model, run, blocks=None if by_hook else blocks, hookless=blocks):
        yield


def block_runner(
    num_blocks: int,
    use_gradient_checkpointing: bool,
    use_gradient_checkpointing_offload: bool,
    *,
    policy: BlockPolicy | None = None,
    unused_matmuls: Sequence[str] = (),
    forward: Callable[..., Any] = gradient_checkpoint_forward,
) -> Callable[..., Any]:
    """A ``run`` for ``intercept_blocks``: each block by ``gradient_checkpoint_forward`` and the policy.

    Args:
        num_blocks: block calls of one forward pass.
        use_gradient_checkpointing: as in ``gradient_checkpoint_forward``, for the blocks that the policy
            recomputes.
        use_gradient_checkpointing_offload: the same, for the blocks that it offloads.
        policy: None is that of the ``gradient_engine`` scope.
        unused_matmuls: as in ``checkpoint_blocks``; names that a block does not have are passed over.

    Returns:
        A function for one forward pass.
    """
    # One for the whole pass, also outside of any scope.
    engine = current_engine()
    chosen = policy or engine.policy
    chosen.selection(num_blocks)

    def run(index: int, block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        token = _block_call.set(BlockCall(engine, chosen.strategy(index, num_blocks), unused_matmuls))
        try:
            return forward(
                block, use_gradient_checkpointing, use_gradient_checkpointing_offload, *args, **kwargs
            )
        finally:
            _block_call.reset(token)

    return run
