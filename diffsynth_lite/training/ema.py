"""This file keeps the exponential moving average (EMA) of the adapter's weights while they are trained."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from diffusers.training_utils import EMAModel
from torch import nn

from diffsynth_lite.training.checkpoint.manifest import CheckpointError


class AveragedWeights:
    """The exponential moving average of a model's trained parameters, by diffusers' ``EMAModel``.

    The decay of update n is n / (n + 9), at most ``decay``, so that the average follows the first steps
    closely: with ``decay`` 0.9999 it is 0.917 at update 100.

    Args:
        model: with its adapter, not wrapped.
        decay: part of the average that an update keeps, in (0, 1).
    """

    def __init__(self, model: nn.Module, *, decay: float) -> None:
        self._parameters = {
            name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
        }
        self._average = EMAModel(list(self._parameters.values()), decay=decay, foreach=True)

    @property
    def num_updates(self) -> int:
        """Steps averaged over; the decay depends on them."""
        return int(self._average.optimization_step)

    def update(self) -> None:
        """Take the parameters' present values into the average."""
        self._average.step(self._parameters.values())

    def tensors(self) -> dict[str, torch.Tensor]:
        """The average by parameter name: the live tensors, not copies."""
        return dict(zip(self._parameters, self._average.shadow_params, strict=True))

    def restart(self) -> None:
        """Begin anew at the parameters' present values."""
        self._average.optimization_step = 0
        for shadow, parameter in zip(self._average.shadow_params, self._parameters.values(), strict=True):
            shadow.copy_(parameter.detach())

    def load(self, tensors: Mapping[str, torch.Tensor], num_updates: int) -> None:
        """Continue from what ``tensors`` and ``num_updates`` gave.

        Raises:
            CheckpointError: the names or shapes are not those of the parameters.
        """
        present = self.tensors()
        given = {name: tensor.shape for name, tensor in tensors.items()}
        if given != {name: tensor.shape for name, tensor in present.items()}:
            raise CheckpointError("the averaged weights in the checkpoint are not those of this adapter")
        for name, tensor in present.items():
            tensor.copy_(tensors[name])
        self._average.optimization_step = num_updates

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Scope in which the model has the averaged weights; afterwards its own, bit for bit."""
        parameters = list(self._parameters.values())
        own = [parameter.detach().clone() for parameter in parameters]
        self._average.copy_to(parameters)
        try:
            yield
        finally:
            for parameter, values in zip(parameters, own, strict=True):
                parameter.data.copy_(values)
