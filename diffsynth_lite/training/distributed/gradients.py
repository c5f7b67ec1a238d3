"""This file exchanges gradients between processes, once for each optimizer step."""

from collections.abc import Iterable

import torch
from accelerate import Accelerator


def mean_gradients(
    parameters: Iterable[torch.nn.Parameter], accelerator: Accelerator, *, context_parallel: int = 1
) -> None:
    """Give each parameter the mean of its gradients over all samples, which all processes call together.

    All gradients go through one exchange, in their own dtype. The numbers are those of torch's
    ``DistributedDataParallel``: divided first, and then added.

    Args:
        context_parallel: processes that share each sample: what they have of its gradient is added up.
        parameters: the same on all processes. One without a gradient counts as zero where another process has
            one, such as of the expert of another noise level; where none has, it keeps none.
    """
    if accelerator.num_processes == 1:
        return
    trained = list(parameters)
    is_used = torch.tensor([one.grad is not None for one in trained], device=trained[0].device)
    gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in trained]
    flat = torch.cat([*(one.flatten() for one in gradients), is_used.to(gradients[0].dtype)])
    torch.distributed.all_reduce(flat.mul_(context_parallel / accelerator.num_processes))
    *parts, uses = torch.split(flat, [*(one.numel() for one in trained), len(trained)])
    for parameter, part, use in zip(trained, parts, uses.tolist(), strict=True):
        parameter.grad = part.view_as(parameter) if use else None
