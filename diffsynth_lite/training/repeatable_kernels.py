"""This file makes kernels repeatable: the same input gives the same bits each time that it is computed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from diffsynth_lite.errors import UserError

_NONE_THERE = "does not have a deterministic implementation"
"""torch has no class for this error, only these words."""


@contextmanager
def repeatable_kernels() -> Iterator[None]:
    """Scope in which torch takes kernels that sum in the same order each time.

    Flash and memory-efficient attention then sum in order in the backward pass, and cuDNN's attention is left
    out. On the CPU nothing changes that this package computes.

    cuBLAS is repeatable where ``CUBLAS_WORKSPACE_CONFIG`` was ``:4096:8`` or ``:16:8`` when it was first
    used; torch raises where it was not.

    Raises:
        UserError: something has no such kernel on this device.
    """
    empty_memory: Any = torch.utils.deterministic
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    filled = empty_memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    # It exposes reads of memory that nobody wrote by writing all of it, and parked blocks are gigabytes.
    empty_memory.fill_uninitialized_memory = False
    try:
        yield
    except RuntimeError as error:
        what, found, _ = str(error).partition(_NONE_THERE)
        if not found:
            raise
        raise UserError(
            f"train.deterministic: true, but torch {torch.__version__} has no repeatable kernel for what "
            f"this model needs on this device: {what.strip()}. Set it to false"
        ) from error
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark
        empty_memory.fill_uninitialized_memory = filled
