"""This file says what a run runs on, and how a batch is shared out."""

from collections import Counter
from collections.abc import Iterable

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from diffsynth_lite.config import Config
from diffsynth_lite.data import BatchLayout


def device_name(device: torch.device) -> str:
    """The name of a graphics card; of other devices their kind."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()


def num_data_ranks(config: Config, num_processes: int) -> int:
    """Groups of processes that each compute samples of their own; who fills a cache may be less than one."""
    return max(1, num_processes // config.train.context_parallel)


def batch_layout(config: Config, num_processes: int, process_index: int = 0) -> BatchLayout:
    """How the samples of an optimizer step are shared out: processes of one group have the same.

    Raises:
        UserError: the global batch is not a whole number of micro-batches for each group.
    """
    return BatchLayout(
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        num_processes=num_data_ranks(config, num_processes),
        process_index=process_index // config.train.context_parallel,
    )


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


def _counted(names: Iterable[str]) -> str:
    """Each kind of device, with how many of it there are; processes on the CPU share one."""
    kinds = Counter(names)
    return ", ".join("the CPU" if name == "CPU" else f"{count} x {name}" for name, count in kinds.items())
