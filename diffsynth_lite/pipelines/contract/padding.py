"""This file makes a batch of token sequences of different lengths."""

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence


def pad_tokens(rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sequences padded with zeros on the right, and which of their tokens are real.

    Args:
        rows: each (L_i, D).

    Returns:
        (B, L, D), and its mask (B, L) with 1 for a token and 0 for padding; None where nothing is padded,
        which spares the attention a mask.
    """
    tokens_bld = pad_sequence(list(rows), batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    mask = (torch.arange(tokens_bld.shape[1])[None] < lengths[:, None]).long()
    return tokens_bld, None if bool(mask.all()) else mask
