"""This file finds the part of a sample that one of several processes computes, and estimates the exchange."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from diffsynth_lite.core.parallel import ContextKind
from diffsynth_lite.pipelines import Conditioning, ModelFamily

_COPIES_OF_ULYSSES = 6
"""Of a share of queries: before and after each exchange, queries, keys and values are copied as a whole. As
diffusers 0.42 is written; not measured on a GPU."""
_GRADIENTS_OF_A_RING = 7
"""Of a share of queries, in fp32: gradients of queries, keys and values, and twice those of the last two on
their way. Not measured on a GPU."""


def share_of(latents_shape: Sequence[int], num_processes: int) -> tuple[int, ...]:
    """A shape with one of so many parts of the tokens, or a few more: its longest sides are cut."""
    channels, *sides = latents_shape
    for factor in _prime_factors(num_processes):
        place = sides.index(max(sides))
        step = 2 - sides[place] % 2  # an even side may be one of patches
        sides[place] = -(-sides[place] // (factor * step)) * step
    return channels, *sides


def is_prompt_split(family: ModelFamily) -> bool:
    """Whether the tokens of prompts are split as those of images are, and attend with them."""
    return family.sequence_split is not None and family.sequence_split.prompts != "whole"


def shared_conditioning(family: ModelFamily, conditioning: Conditioning, num_processes: int) -> Conditioning:
    """The input of one of the processes: a part of a prompt, where it is split."""
    if num_processes == 1 or not is_prompt_split(family):
        return conditioning
    prompt = conditioning["prompt_embeds"]
    return conditioning | {"prompt_embeds": prompt[: -(-len(prompt) // num_processes)]}


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """The memory of processes that share samples, in addition to that of their parts.

    Attributes:
        embeds_whole: whether all tokens are there until the first block.
    """

    num_processes: int
    kind: ContextKind
    tokens: int
    prompt_tokens: int
    width: int
    num_blocks: int
    embeds_whole: bool

    def num_bytes(self, micro_batch_size: int, itemsize: int) -> int:
        """Its peak, with numbers of this many bytes."""
        token = micro_batch_size * self.width * itemsize
        share = (self.tokens + self.prompt_tokens) * token
        embedded = (self.num_processes - 1) * self.tokens * token if self.embeds_whole else 0
        if self.kind == "ulysses":
            return embedded + _COPIES_OF_ULYSSES * share
        gradients = _GRADIENTS_OF_A_RING * share * torch.float32.itemsize // itemsize
        # Own keys and values, and those of all; the results of all blocks, which no checkpointing frees.
        return embedded + (2 + 2 * self.num_processes + self.num_blocks) * share + gradients


def _prime_factors(number: int) -> Iterator[int]:
    factor = 2
    while number > 1:
        if number % factor:
            factor += 1
        else:
            yield factor
            number //= factor
