"""This file makes a batch of the conditioning of samples: their prompts, and the pictures they start from."""

from collections.abc import Sequence

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from diffsynth_lite.pipelines.base.family import Conditioning


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


INPUT = "input_latents_"
"""Start of the names of an item's input pictures among its conditioning; their places follow, from 0."""


def stack_inputs(conditioning: Sequence[Conditioning]) -> list[torch.Tensor]:
    """Each (B, ...), in the order of the pictures; none where the items have none.

    Args:
        conditioning: of the items of one bucket, whose pictures are alike in number and sizes.
    """
    rows = [
        [sample[f"{INPUT}{place}"] for place in range(sum(name.startswith(INPUT) for name in sample))]
        for sample in conditioning
    ]
    # The model lays all samples of a batch out as the first one, and says nothing.
    assert len({tuple(latents.shape for latents in row) for row in rows}) == 1
    return [torch.stack(column) for column in zip(*rows, strict=True)]
