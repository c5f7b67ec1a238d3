"""This file keeps torch's global random state out of the run: it is only ever used inside a scope."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def random_state_scope(device: torch.device, seed: int | None = None) -> Iterator[None]:
    """A scope after which the global random state is as before, on the CPU and on ``device``.

    Dropout has no generator argument, so its masks are decided by seeding the global state in such a scope.

    Args:
        device: of the model.
        seed: set at the start of the scope; None starts from the present state.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        if seed is not None and device.type == "cpu":
            # torch.manual_seed formats a traceback for each backend that is not in use: 1 % of a small step.
            torch.default_generator.manual_seed(seed)
        elif seed is not None:
            torch.manual_seed(seed)
        yield
