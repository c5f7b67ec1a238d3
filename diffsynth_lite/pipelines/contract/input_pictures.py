"""This file makes a batch of the latents of the pictures that edits start from."""

from collections.abc import Sequence

import torch

from diffsynth_lite.pipelines.contract.samples import Conditioning

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
