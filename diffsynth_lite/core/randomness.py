"""This file makes every random draw a pure function of (seed, purpose, position).

A draw keeps no state, so a run that resumes, or runs on another number of devices or workers, repeats the
draws of the uninterrupted run. numpy's Philox is the source: torch's CPU generator uses only the low 32
bits of its seed.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def counter_generator(seed: int, purpose: str, position: int) -> np.random.Generator:
    """Generator whose stream overlaps with that of no other position, purpose or seed.

    Args:
        purpose: what is drawn, such as "noise"; purposes of one position are independent.
        position: global index of what the draw is for, in [0, 2**128).
    """
    if seed < 0 or not 0 <= position < 2**128:
        raise ValueError(f"seed {seed} must be >= 0 and position {position} in [0, 2**128)")
    key = hashlib.blake2b(f"{seed}:{purpose}".encode(), digest_size=16).digest()
    # The counter has 256 bits: the low 128 count the words drawn for one position and never run over.
    philox = np.random.Philox(key=int.from_bytes(key, "little"), counter=position << 128)
    return np.random.Generator(philox)


def normal(seed: int, purpose: str, position: int, shape: tuple[int, ...]) -> Tensor:
    """Standard normal numbers of ``shape``, float32, on the CPU."""
    generator = counter_generator(seed, purpose, position)
    return torch.from_numpy(generator.standard_normal(shape, dtype=np.float32))


def uniform(seed: int, purpose: str, position: int) -> float:
    """One number in [0, 1) that float32 holds exactly, so that it stays below 1 in a float32 tensor."""
    return float(counter_generator(seed, purpose, position).random(dtype=np.float32))


def permutation(seed: int, purpose: str, epoch: int, length: int) -> npt.NDArray[np.int64]:
    """The numbers 0 to ``length - 1`` in the order of pass number ``epoch``, (length,)."""
    return counter_generator(seed, purpose, epoch).permutation(length)


def torch_seed(seed: int, purpose: str, position: int) -> int:
    """Seed in [0, 2**63) for a scoped fork of torch's global generator, which dropout draws from."""
    return int(counter_generator(seed, purpose, position).integers(2**63))


@contextmanager
def random_state_scope(device: torch.device, seed: int | None = None) -> Iterator[None]:
    """A scope after which the global random state is as before, on the CPU and on ``device``.

    Dropout has no generator argument, so its masks are decided by seeding the global state in such a scope.

    Args:
        seed: set at the start of the scope; None starts from the present state.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        if seed is not None and device.type == "cpu":
            # torch.manual_seed formats a traceback for each backend that is not in use: 1 % of a small step.
            torch.default_generator.manual_seed(seed)
        elif seed is not None:
            torch.manual_seed(seed)
        yield
