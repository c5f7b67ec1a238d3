"""This file has what all model functions share: the run of their blocks, and batches of their inputs."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from inspect import Parameter
from typing import Any, TypedDict, TypeVar, Unpack, cast

import torch
from torch import nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from diffsynth_lite.core.gradient import BlockPolicy, checkpoint_blocks
from diffsynth_lite.pipelines.base.family import Conditioning, ModelFamily

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
    *,
    more: Sequence[str] = (),
    **checkpointing: Unpack[Checkpointing],
) -> AbstractContextManager[None]:
    """Scope in which ``forward`` runs each block of ``model``; see :func:`checkpoint_blocks`.

    Args:
        more: lists of blocks next to ``block_lists`` that this forward pass calls.
    """
    lists = (*cast("Sequence[str]", family.block_lists), *more)
    unused, by_hook = family.unused_matmuls, family.blocks_by_hook
    return checkpoint_blocks(model, lists, forward, unused_matmuls=unused, by_hook=by_hook, **checkpointing)


def pad_tokens(
    rows: Sequence[torch.Tensor],
    *,
    length: int = 0,
    multiple: int = 1,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sequences padded with zeros on the right, and which of their tokens are real.

    Args:
        rows: each (L_i, D); or (L_i, ..., D), alike but for the first axis.
        length: of the result at least; it is that of the longest row if that is more.
        multiple: of which the length of the result is one.
        device: of both results; None is that of the rows.
        dtype: of the tokens; None is that of the rows.

    Returns:
        (B, L, D), or (B, L, ..., D), and its mask (B, L) with 1 for a token and 0 for padding; None where
        nothing is padded, which spares the attention a mask.
    """
    lengths = [len(row) for row in rows]
    longest = -(-max(length, *lengths) // multiple) * multiple
    if min(lengths) == longest:
        return torch.stack(list(rows)).to(device, dtype), None
    tokens_bld = pad_sequence(list(rows), batch_first=True)
    of_each = (0, 0) * (tokens_bld.ndim - 2)
    tokens_bld = pad(tokens_bld, (*of_each, 0, longest - tokens_bld.shape[1]))
    mask = (torch.arange(longest)[None] < torch.tensor(lengths)[:, None]).long()
    return tokens_bld.to(device, dtype), mask.to(device)


def mask_of(tokens_bld: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """A mask (B, L), of ones where there is none."""
    return tokens_bld.new_ones(tokens_bld.shape[:2], dtype=torch.long) if mask is None else mask


def padded_together(
    prompts: Mapping[str, Conditioning], mask_name: str, like: Mapping[str, Any], *, length: int = 0
) -> dict[str, torch.Tensor]:
    """The prompts of a preview, padded to one length, and their masks, as arguments of a pipeline.

    Args:
        prompts: by what the names of each begin with there.
        mask_name: of the masks, (1, L), which are of ones where nothing is padded.
        length: at least.
    """
    rows = [prompt["prompt_embeds"] for prompt in prompts.values()]
    embeds_bld, mask = pad_tokens(rows, length=length, **like)
    named = {"prompt_embeds": embeds_bld, mask_name: mask_of(embeds_bld, mask)}
    return {
        f"{prefix}{name}": of_each[place, None]
        for name, of_each in named.items()
        for place, prefix in enumerate(prompts)
    }


def without_padding(tokens_bld: torch.Tensor, mask: torch.Tensor | None) -> list[torch.Tensor]:
    """The opposite of :func:`pad_tokens`: the real tokens of each sequence, on the CPU.

    Args:
        tokens_bld: (B, L, D), or (B, L, ..., D), padded at any place.
        mask: (B, L), 1 or True for a token; None where nothing is padded.

    Returns:
        Each (L_i, D), or (L_i, ..., D), a copy.
    """
    if mask is None:
        return [row.cpu().clone() for row in tokens_bld]
    return [row[is_token].cpu() for row, is_token in zip(tokens_bld, mask.bool(), strict=True)]


def stacked(conditioning: Sequence[Conditioning], name: str, like: Mapping[str, Any]) -> torch.Tensor:
    """A tensor of each sample of a batch, (B, ...), with these arguments of ``Tensor.to``."""
    return torch.stack([sample[name] for sample in conditioning]).to(**like)


INPUT = "input_latents_"
"""Start of the names of an item's input images among its conditioning; their places follow, from 0."""


def stack_inputs(conditioning: Sequence[Conditioning], like: Mapping[str, Any]) -> list[torch.Tensor]:
    """Each (B, ...), in the order of the images; none where the items have none.

    Args:
        conditioning: of the items of one bucket, whose images are alike in number and sizes.
    """
    rows = [
        [sample[f"{INPUT}{place}"] for place in range(sum(name.startswith(INPUT) for name in sample))]
        for sample in conditioning
    ]
    # The model lays all samples of a batch out as the first one, without an error.
    assert len({tuple(latents.shape for latents in row) for row in rows}) == 1
    return [torch.stack(column).to(**like) for column in zip(*rows, strict=True)]
