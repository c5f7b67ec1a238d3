"""This file runs the blocks of a model as the callers of every ``model_fn_<family>`` say."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from inspect import Parameter
from typing import Any, TypedDict, TypeVar, Unpack

from torch import nn

from diffsynth_lite.core.gradient import BlockPolicy, checkpoint_blocks
from diffsynth_lite.pipelines.base.family import ModelFamily

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Checkpointing(TypedDict, total=False):
    """The last parameters of every ``model_fn``, by name: how it runs the blocks of its model.

    Attributes:
        use_gradient_checkpointing: recompute each block in backward; off by default.
        use_gradient_checkpointing_offload: also offload each block's inputs to host memory; off by default.
        policy: which blocks the two flags are for; None is the policy of the gradient engine in scope.
    """

    use_gradient_checkpointing: bool
    use_gradient_checkpointing_offload: bool
    policy: BlockPolicy | None


def model_function(function: _Function) -> _Function:
    """Show the names in :class:`Checkpointing`, with their defaults, in the signature of a ``model_fn``."""
    *own, _ = inspect.signature(function).parameters.values()
    known = inspect.signature(checkpoint_blocks).parameters
    shared = [known[name].replace(kind=Parameter.KEYWORD_ONLY) for name in Checkpointing.__annotations__]
    function.__dict__["__signature__"] = inspect.signature(function).replace(parameters=[*own, *shared])
    return function


def checkpointed(
    family: type[ModelFamily],
    model: nn.Module,
    forward: Callable[..., Any],
    **checkpointing: Unpack[Checkpointing],
) -> AbstractContextManager[None]:
    """Scope in which ``forward`` runs each block of ``model``; see :func:`checkpoint_blocks`."""
    lists: Any = family.block_lists
    unused, by_hook = family.unused_matmuls, family.blocks_by_hook
    return checkpoint_blocks(model, lists, forward, unused_matmuls=unused, by_hook=by_hook, **checkpointing)
