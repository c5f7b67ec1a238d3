"""This file has processes that run each forward pass of a model together fail together, too."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class PeerFailedError(RuntimeError):
    """Another process failed, between two forward passes that all of them run together."""


class FailedWithinPassError(RuntimeError):
    """This process failed within a forward pass, in which the others wait for it: they cannot be told."""


class JointPasses:
    """Forward passes that the processes of a group run together.

    Args:
        group: of the processes.
        device: of the models.

    Attributes:
        device: as given.
    """

    def __init__(self, group: torch.distributed.ProcessGroup, device: torch.device) -> None:
        self.device = device
        self._group = group
        self._asks_before_forward = self._is_in_forward = False

    def watch(self, model: nn.Module) -> None:
        """Know of the forward passes of a model."""
        # Before hooks of others, which wait for the other processes.
        model.register_forward_pre_hook(lambda *_: self._begin_forward(), prepend=True)
        model.register_forward_hook(lambda *_: self._end_forward())

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Scope in which a process that fails between two forward passes makes the others fail at their next
        one, where they would wait for it; all of them enter it, and run as many passes.

        Raises:
            PeerFailedError: another process failed.
            FailedWithinPassError: this one did, within a pass.
        """
        self._asks_before_forward, self._is_in_forward = True, False
        try:
            yield
            self._require_all(succeeded=True)
        except PeerFailedError:
            raise
        except Exception as error:
            if self._is_in_forward:
                raise FailedWithinPassError(str(error)) from error
            self._require_all(succeeded=False)
            raise
        finally:
            self._asks_before_forward = False

    def _begin_forward(self) -> None:
        if self._asks_before_forward:
            self._require_all(succeeded=True)
        self._is_in_forward = True

    def _end_forward(self) -> None:
        self._is_in_forward = False

    def _require_all(self, *, succeeded: bool) -> None:
        answers = torch.tensor(int(succeeded), device=self.device)
        torch.distributed.all_reduce(answers, torch.distributed.ReduceOp.MIN, group=self._group)
        if succeeded and not answers:
            raise PeerFailedError("another process failed, and its error tells why")
