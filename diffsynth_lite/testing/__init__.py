"""Tokenizers and tiny models of the real classes, built offline: for tests of families here and elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator inside the ``with`` block and restore it afterwards.

    Only the CPU generator is touched (``torch.manual_seed`` would reseed the accelerators for good), so
    modules have to be created on the CPU.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
