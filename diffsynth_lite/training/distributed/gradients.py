"""This file exchanges gradients between processes, once for each optimizer step."""

from collections.abc import Iterable

import torch
from accelerate import Accelerator


def mean_gradients(parameters: Iterable[torch.nn.Parameter], accelerator: Accelerator) -> None:
    """Give each parameter the mean of its gradients over all processes, which all call this together.

    All gradients go through one exchange, in their own dtype. The numbers are those of torch's
    ``DistributedDataParallel``: divided first, and then added.

    Args:
        parameters: those without a gradient are the same on all processes, and keep none.
    """
    if accelerator.num_processes == 1:
        return
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [parameter.grad.flatten() for parameter in trained if parameter.grad is not None]
    flat = torch.cat(gradients).mul_(1 / accelerator.num_processes)
    torch.distributed.all_reduce(flat)
    parts = torch.split(flat, [one.numel() for one in gradients])
    for parameter, part in zip(trained, parts, strict=True):
        parameter.grad = part.view_as(parameter)
