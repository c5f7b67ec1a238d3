"""This file takes a block call all the way: its engine and treatment, its forward pass, its recompute."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from diffsynth_lite.core.gradient.arguments import put_tensors, take_tensors
from diffsynth_lite.core.gradient.blocks import blocks_in, blocks_run_by
from diffsynth_lite.core.gradient.engine import GradientEngine
from diffsynth_lite.core.gradient.frames import changed_in_place
from diffsynth_lite.core.gradient.policies import BlockPolicy, Treatment
from diffsynth_lite.core.gradient.savings import Savings

_engine: ContextVar[GradientEngine | None] = ContextVar("gradient_engine", default=None)
_block: ContextVar[tuple[GradientEngine, Treatment] | None] = ContextVar("block_at_hand", default=None)


@contextmanager
def gradient_engine(engine: GradientEngine) -> Iterator[None]:
    """Scope in which ``gradient_checkpoint_forward`` works through ``engine``."""
    token = _engine.set(engine)
    try:
        yield
    finally:
        _engine.reset(token)


def current_engine() -> GradientEngine:
    """The engine of the innermost ``gradient_engine`` scope; outside of any, a new one for one block call.

    A new one skips no dead operations, because it forgets them: finding them takes longer than running them.
    """
    # No other call would ever make room for its tensors.
    return _engine.get() or GradientEngine(resident_blocks=0, prefetched_blocks=0, skip_dead_ops=False)


class BlockAtHand:
    """Scope of one block call, whose engine and treatment are known: it is entered for every block."""

    __slots__ = ("_token", "_value")

    def __init__(self, engine: GradientEngine, treatment: Treatment) -> None:
        self._value = engine, treatment

    def __enter__(self) -> None:
        self._token = _block.set(self._value)

    def __exit__(self, *_error: object) -> None:
        _block.reset(self._token)


def take_engine_and_treatment() -> tuple[GradientEngine, Treatment]:
    """Those of the ``BlockAtHand`` scope, once; for other calls, the engine's for a selected block.

    A block that has blocks of its own runs them alike in forward, inside the scope, and in its recompute.
    """
    at_hand = _block.get()
    if at_hand is not None:
        _block.set(None)
        return at_hand
    engine = current_engine()
    return engine, engine.policy.selected


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


@contextmanager
def blocks_through(
    model: nn.Module,
    block_lists: Sequence[str],
    forward: Callable[..., Any],
    use_gradient_checkpointing: bool,
    use_gradient_checkpointing_offload: bool,
    *,
    policy: BlockPolicy | None = None,
    by_hook: bool = True,
) -> Iterator[None]:
    """Scope in which the forward pass of ``model`` runs each of its blocks through ``forward``.

    Where the model calls ``block(*args, **kwargs)``, ``forward(block, use_gradient_checkpointing,
    use_gradient_checkpointing_offload, *args, **kwargs)`` is called in its place.

    Args:
        model: a diffusers model, plain or wrapped for distributed training; its forward is called once.
        block_lists: names of its module lists in call order, or of single modules in one.
        forward: ``gradient_checkpoint_forward``, or what in the end calls it.
        use_gradient_checkpointing: handed on.
        use_gradient_checkpointing_offload: handed on.
        policy: which blocks the two switches are for; None is the policy of the ``gradient_engine`` scope.
        by_hook: through diffusers' own hook for gradient checkpointing. Without, for classes that have none
            or whose hook drops arguments, by their ``forward``.

    Raises:
        ValueError: as ``blocks_run_by`` and ``block_runner`` do.
    """
    blocks = blocks_in(model, block_lists)
    run = block_runner(
        len(blocks),
        use_gradient_checkpointing,
        use_gradient_checkpointing_offload,
        policy=policy,
        forward=forward,
    )
    with blocks_run_by(model, run, blocks=None if by_hook else blocks):
        yield


def block_runner(
    num_blocks: int,
    use_gradient_checkpointing: bool,
    use_gradient_checkpointing_offload: bool,
    *,
    policy: BlockPolicy | None = None,
    forward: Callable[..., Any] = gradient_checkpoint_forward,
) -> Callable[..., Any]:
    """A ``run`` for ``blocks_run_by``: ``gradient_checkpoint_forward`` with a policy for the single blocks.

    Args:
        num_blocks: block calls of one forward pass.
        use_gradient_checkpointing: as in ``gradient_checkpoint_forward``, for the blocks that the policy
            recomputes.
        use_gradient_checkpointing_offload: the same, for the blocks that it parks.
        policy: None is that of the ``gradient_engine`` scope.
        forward: what is called with each block.

    Returns:
        A function for one forward pass.

    Raises:
        ValueError: the policy names blocks that do not exist, or selects none; later, more than
            ``num_blocks`` blocks were called.
    """
    # One for the whole pass, also outside of any scope.
    engine = current_engine()
    chosen = policy or engine.policy
    chosen.selection(num_blocks)

    def run(index: int, block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with BlockAtHand(engine, chosen.treatment(index, num_blocks)):
            return forward(
                block, use_gradient_checkpointing, use_gradient_checkpointing_offload, *args, **kwargs
            )

    return run
