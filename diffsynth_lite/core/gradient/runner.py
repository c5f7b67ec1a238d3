"""This file runs the blocks of a model one by one, each with what the policy says for its place."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from diffsynth_lite.core.gradient.blocks import blocks_in, blocks_run_by
from diffsynth_lite.core.gradient.checkpoint import gradient_checkpoint_forward
from diffsynth_lite.core.gradient.policies import BlockPolicy
from diffsynth_lite.core.gradient.scope import BlockAtHand, current_engine


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
