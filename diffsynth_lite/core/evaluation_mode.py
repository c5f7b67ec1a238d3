"""This file has a model compute without being trained, between what trains it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; training mode is restored afterwards, also after an error."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
