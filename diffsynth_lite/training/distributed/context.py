"""This file decides which processes share the tokens of a sample, and checks that they can.

``train.context_parallel`` neighbours share each sample, and their parts of its gradient are added up.
"""

import logging
import math
import warnings
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import diffusers
import torch
from accelerate import Accelerator
from PIL import Image

from diffsynth_lite.config import Config
from diffsynth_lite.core.parallel import MESH_DIMENSIONS, ContextParallel
from diffsynth_lite.data.buckets import Bucket
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines import ModelFamily
from diffsynth_lite.training.data_settings import num_preview_frames, num_preview_layers, num_tokens_of
from diffsynth_lite.training.distributed.agreement import ranks_by_machine
from diffsynth_lite.training.distributed.devices import num_data_ranks
from diffsynth_lite.training.distributed.watchdog import limit_waits

_MOST_DEVICES = 64
"""Larger numbers are not offered."""
_RING_DEVICES = ("cuda",)
"""Devices with a flash attention in torch that returns its log-sum-exp, which diffusers needs."""


def check_context(config: Config, accelerator: Accelerator) -> None:
    """Check that there are processes to split sequences over; all of them call this together."""
    wanted, kind = config.train.context_parallel, config.train.context_parallel_kind
    if wanted == 1:
        return
    num_processes = accelerator.num_processes
    if num_processes == 1:
        raise UserError(
            f"train.context_parallel: {wanted} splits each sample over {wanted} processes, and this is the "
            f"only one; start one for each device (torchrun --standalone --nproc_per_node {wanted} train.py "
            "...), or set 1"
        )
    if num_processes % wanted:
        raise UserError(
            f"train.context_parallel: {wanted} must divide the {num_processes} processes of the run; "
            f"{_divisors(num_processes)} would do"
        )
    machines = ranks_by_machine(accelerator, key=f"train.context_parallel: {wanted}")
    if any(len(ranks) % wanted for ranks in machines):
        common = math.gcd(*map(len, machines))
        raise UserError(
            f"train.context_parallel: {wanted} must divide the processes of each machine, which have "
            f"{', '.join(str(len(ranks)) for ranks in machines)}; {_divisors(common)} would do"
        )
    if kind == "ring":
        _check_ring(config, accelerator.device)


def _check_ring(config: Config, device: torch.device) -> None:
    key = "train.context_parallel_kind: ring"
    if device.type not in _RING_DEVICES:
        raise UserError(
            f"{key} needs an attention that returns its log-sum-exp, which torch has only for CUDA, and this "
            f"run is on {device.type}; set ulysses"
        )
    if device.type == "cuda" and config.model.dtype == "float32":
        raise UserError(
            f"{key} needs attention in 16 bits, and model.dtype: float32 keeps some of its inputs in 32; set "
            "model.dtype: bfloat16, or ulysses"
        )


def check_split(config: Config, family: ModelFamily, transformer: torch.nn.Module) -> None:
    """Check that the model of a family can be split as the config wants it.

    Args:
        transformer: on the meta device.
    """
    wanted, kind = config.train.context_parallel, config.train.context_parallel_kind
    if wanted == 1:
        return
    if family.with_audio:
        raise UserError(
            f"train.context_parallel: {wanted}: clips with audio are not split over processes; set 1, "
            "or data.audio: false"
        )
    model: Any = family.parts_of(transformer)[family.trained[0]]
    split = family.sequence_split
    if split is None or getattr(model, "_cp_plan", None) is None:
        raise UserError(
            f"train.context_parallel: {wanted} is not for model.family {config.model.family}: diffusers "
            f"{diffusers.__version__} has no plan to split the sequences of its model; set it to 1"
        )
    if kind not in split.kinds:
        raise UserError(
            f"train.context_parallel_kind: {kind} would compute other numbers in {config.model.family}, as "
            f"prompts are padded there and a {kind} does not mask the padding; set {' or '.join(split.kinds)}"
        )
    counts = {}
    if kind == "ulysses":
        counts["attention heads of the model"] = model.config.num_attention_heads
    if split.prompts == "split":
        counts["tokens of a prompt"] = family.max_prompt_tokens
    for what, count in counts.items():
        if count % wanted:
            raise UserError(
                f"train.context_parallel: {wanted} does not divide the {count} {what}; "
                f"{_divisors(math.gcd(*counts.values()))} would do"
            )


def check_tokens(
    config: Config, family: ModelFamily, sizes: Iterable[Bucket], *, owner: str = "the data"
) -> None:
    """Check before the first step and preview that the tokens of sizes can be split."""
    wanted = config.train.context_parallel
    if wanted == 1:
        return
    tokens = {size: num_tokens_of(size, family) for size in sizes}
    bad = [f"{size.name} ({count} tokens)" for size, count in tokens.items() if count % wanted]
    if bad:
        fitting = _divisors(math.gcd(*tokens.values()))
        raise UserError(
            f"train.context_parallel: {wanted} does not divide the tokens of {len(bad)} of the {len(tokens)} "
            f"sizes of {owner}: {', '.join(bad[:3])}; {fitting} would do, or other sizes"
        )


def check_tokens_of_previews(config: Config, family: ModelFamily, width: int, height: int) -> None:
    """Check that the tokens of the previews can be split."""
    if config.train.context_parallel == 1 or not config.validation.prompts:
        return
    num_frames, num_layers = num_preview_frames(config, family), num_preview_layers(config, family)
    size = Bucket(width=width, height=height, num_frames=num_frames, num_layers=num_layers)
    inputs = config.validation.inputs if "edit" in family.record_kinds else []
    sizes = []
    for path in (Path(each).expanduser() for each in inputs):
        if path.is_file():
            with Image.open(path) as image:
                sizes.append(replace(size, inputs=(family.edits.input_size(*image.size),)))
    check_tokens(config, family, sizes or [size], owner="the previews")


def context_of(config: Config, family: ModelFamily, accelerator: Accelerator) -> ContextParallel | None:
    """The split of a family's sequences, called on all processes; None where each computes whole ones."""
    wanted, kind = config.train.context_parallel, config.train.context_parallel_kind
    if wanted == 1:
        return None
    from torch.distributed.device_mesh import init_device_mesh

    groups = (wanted, 1) if kind == "ring" else (1, wanted)
    shape = (num_data_ranks(config, accelerator.num_processes), *groups)
    mesh = init_device_mesh(accelerator.device.type, shape, mesh_dim_names=MESH_DIMENSIONS)
    group = mesh[kind].get_group()
    # Torch returns the group of all processes where it is the same: that one waits for caches until steps
    # begin, and has its limit then.
    if group is not torch.distributed.group.WORLD:
        limit_waits(timedelta(minutes=config.train.step_timeout_minutes), group)
    split = family.sequence_split
    assert split is not None, "refused with the model"
    return ContextParallel(mesh, accelerator.device, kind=kind, split=split)


def split_model(family: ModelFamily, context: ContextParallel, model: torch.nn.Module) -> None:
    """Split the sequences of a family's trained models, after their adapters are added."""
    # diffusers warns of timesteps that all tokens share, which need not be split; torch of diffusers' calls.
    logging.getLogger("diffusers.hooks.context_parallel").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", ".*all_gather_tensor. is deprecated", FutureWarning)
    try:
        for part in family.parts_of(model).values():
            context.apply_to(part)
    except ValueError as error:
        raise UserError(f"train.context_parallel: {error}") from error


def _divisors(number: int) -> str:
    """The numbers that would do, as text."""
    most = min(number, _MOST_DEVICES)
    *few, last = [str(divisor) for divisor in range(1, most + 1) if number % divisor == 0]
    return f"{', '.join(few)} or {last}" if few else last
