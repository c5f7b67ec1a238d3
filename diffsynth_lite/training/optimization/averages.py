"""This file has the averages of the adapter's weights: a moving one (EMA), and that of an optimizer."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, TypeGuard

import torch
from diffusers.training_utils import EMAModel
from torch import nn

from diffsynth_lite.errors import CheckpointError


class AveragedWeights(ABC):
    """An average of a model's trained parameters.

    Args:
        model: with its adapter, not wrapped.

    Attributes:
        is_result: whether the average is exported as the result of the run, rather than the trained values.
    """

    is_result = False

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {
            name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
        }

    def update(self) -> None:
        """Include the parameters' present values in the average."""
        return  # an optimizer averages by itself

    @abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]:
        """The average by parameter name, read-only."""

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Scope in which the model has the averaged weights; afterwards its own, bit for bit."""
        parameters = list(self._parameters.values())
        own = [parameter.detach().clone() for parameter in parameters]
        self._put()
        try:
            yield
        finally:
            self._put_back()
            for parameter, values in zip(parameters, own, strict=True):
                parameter.data.copy_(values)

    @abstractmethod
    def _put(self) -> None:
        """Give the parameters the averaged values."""

    def _put_back(self) -> None:
        """Called before the parameters get their own values again."""
        return


class MovingAverage(AveragedWeights):
    """The exponential moving average of a model's trained parameters, by diffusers' ``EMAModel``.

    The decay of update n is n / (n + 9), at most ``decay``, so that the average follows the first steps
    closely: with ``decay`` 0.9999 it is 0.917 at update 100.

    Args:
        decay: part of the average that an update keeps, in (0, 1).
    """

    def __init__(self, model: nn.Module, *, decay: float) -> None:
        super().__init__(model)
        self._average = EMAModel(list(self._parameters.values()), decay=decay, foreach=True)

    @property
    def num_updates(self) -> int:
        """Steps averaged over; the decay depends on them."""
        return int(self._average.optimization_step)

    def update(self) -> None:
        self._average.step(self._parameters.values())

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(zip(self._parameters, self._average.shadow_params, strict=True))

    def restart(self) -> None:
        """Start again from the parameters' present values."""
        self._average.optimization_step = 0
        for shadow, parameter in zip(self._average.shadow_params, self._parameters.values(), strict=True):
            shadow.copy_(parameter.detach())

    def load(self, tensors: Mapping[str, torch.Tensor], num_updates: int) -> None:
        """Continue from the values of ``tensors`` and ``num_updates``.

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

    def _put(self) -> None:
        self._average.copy_to(list(self._parameters.values()))


class OptimizerWithModes(Protocol):
    """An optimizer that averages the weights as it goes, as schedule-free ones do."""

    def train(self) -> None:
        """Give the parameters the values that gradients are taken at."""

    def eval(self) -> None:
        """Give the parameters the averaged values."""


class AverageOfOptimizer(AveragedWeights):
    """The average of a schedule-free optimizer (Defazio et al. 2024, arXiv:2405.15682).

    It follows from the parameters and the optimizer's state: there is nothing to update or load.
    """

    is_result = True

    def __init__(self, model: nn.Module, optimizer: OptimizerWithModes) -> None:
        super().__init__(model)
        self._optimizer = optimizer

    def tensors(self) -> dict[str, torch.Tensor]:
        with self.applied():
            return {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    def _put(self) -> None:
        self._optimizer.eval()

    def _put_back(self) -> None:
        # Its own way back would change last digits.
        self._optimizer.train()


def has_modes(optimizer: object) -> TypeGuard[OptimizerWithModes]:
    """Whether an optimizer averages weights as it goes: it then has a training mode and another one."""
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))
