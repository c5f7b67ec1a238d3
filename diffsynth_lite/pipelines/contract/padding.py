"""This file makes a batch of token sequences of different lengths, and takes one apart."""

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence


def pad_tokens(
    rows: Sequence[torch.Tensor], *, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sequences padded with zeros on the right, and which of their tokens are real.

    Args:
        rows: each (L_i, D).
        device: of both results; None is that of the rows.
        dtype: of the tokens; None is that of the rows.

    Returns:
        (B, L, D), and its mask (B, L) with 1 for a token and 0 for padding; None where nothing is padded,
        which spares the attention a mask.
    """
    tokens_bld = pad_sequence(list(rows), batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    mask = (torch.arange(tokens_bld.shape[1])[None] < lengths[:, None]).long()
    return tokens_bld.to(device, dtype), None if bool(mask.all()) else mask.to(device)


def without_padding(tokens_bld: torch.Tensor, mask: torch.Tensor | None) -> list[torch.Tensor]:
    """The opposite of :func:`pad_tokens`: the real tokens of each sequence, on the CPU.

    Args:
        tokens_bld: (B, L, D), padded on the right.
        mask: (B, L), 1 or True for a token; None where nothing is padded.

    Returns:
        Each (L_i, D), a copy.
    """
    lengths = [tokens_bld.shape[1]] * len(tokens_bld) if mask is None else mask.bool().sum(1).tolist()
    return [row[:length].cpu().clone() for row, length in zip(tokens_bld, lengths, strict=True)]
