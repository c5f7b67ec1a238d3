"""This file describes the devices of a run, divides a batch among them, and averages their gradients."""

from collections import Counter
from collections.abc import Iterable

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from diffsynth_lite.config import Config
from diffsynth_lite.data.schedule import BatchLayout


def device_name(device: torch.device) -> str:
    """The name of a GPU, or the kind of another device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()


def num_data_ranks(config: Config, num_processes: int) -> int:
    """Groups of processes that each compute samples of their own; fewer processes than one may fill a
    cache."""
    return max(1, num_processes // config.train.context_parallel)


def batch_layout(config: Config, num_processes: int, process_index: int = 0) -> BatchLayout:
    """How the samples of an optimizer step are divided: processes of one group have the same."""
    return BatchLayout(
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        num_processes=num_data_ranks(config, num_processes),
        process_index=process_index // config.train.context_parallel,
    )


def count_nodes(accelerator: Accelerator) -> int:
    """Machines that the processes of a run are on; call it on all processes."""
    here = [bool(accelerator.is_local_main_process)]
    return sum(here if accelerator.num_processes == 1 else gather_object(here))


def describe_run(config: Config, accelerator: Accelerator) -> str:
    """Processes, machines, devices, precision and batch of a run as one line; call it on all processes."""
    layout = batch_layout(config, accelerator.num_processes)
    here = (device_name(accelerator.device), accelerator.is_local_main_process)
    everywhere = [here] if accelerator.num_processes == 1 else gather_object([here])
    num_machines = sum(is_first for _, is_first in everywhere)
    processes = f"{accelerator.num_processes} process{'es' * (accelerator.num_processes > 1)}"
    parallel, kind = config.train.context_parallel, config.train.context_parallel_kind
    groups = processes
    if parallel > 1:
        groups = f"{layout.num_processes} x {parallel} processes that share each sample ({kind})"
    tokens = config.train.micro_batch_tokens
    quantized = "" if config.model.quantize == "none" else f" and {config.model.quantize}"
    shared = {"no": "", "node": ", one copy a machine", "all": ", one copy in all"}[config.memory.shard_base]
    return (
        f"{processes}{f' of {num_machines} machines' if num_machines > 1 else ''} on "
        f"{_counted(name for name, _ in everywhere)}; mixed precision {config.train.mixed_precision}, "
        f"base in {config.model.dtype}{quantized}{shared}; global batch {layout.global_batch_size} = "
        f"micro-batch {layout.micro_batch_size} x accumulation {layout.num_micro_steps} x {groups}"
        f"{'' if tokens is None else f' (micro-batches of up to {tokens} tokens)'}"
    )


def mean_gradients(
    parameters: Iterable[torch.nn.Parameter], accelerator: Accelerator, *, context_parallel: int = 1
) -> None:
    """Give each parameter the mean of its gradients over all samples, which all processes call together.

    All gradients go through one exchange, in their own dtype. The numbers are those of torch's
    ``DistributedDataParallel``: divided first, and then added.

    Args:
        context_parallel: processes that share each sample: their parts of its gradient are added up.
        parameters: the same on all processes. A missing gradient counts as zero where another process has
            one, as for the expert of another noise level; where none has, it stays missing.
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


def _counted(names: Iterable[str]) -> str:
    """Each kind of device, with how many of it there are; processes on the CPU share one."""
    kinds = Counter(names)
    return ", ".join("the CPU" if name == "CPU" else f"{count} x {name}" for name, count in kinds.items())
