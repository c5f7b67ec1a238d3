"""This file builds what saves memory in a run, proves that it does, and advises where it is not enough."""

from accelerate import Accelerator

from diffsynth_lite.config import Config
from diffsynth_lite.core.gradient import GradientEngine
from diffsynth_lite.training.data_settings import num_tokens_of
from diffsynth_lite.training.encoding import TrainingData
from diffsynth_lite.training.memory_advice import Workload
from diffsynth_lite.training.preflight import CheckedRun, block_policy


def build_workload(config: Config, checked: CheckedRun, encoded: TrainingData) -> Workload:
    """What a step holds, for the answer to a full device."""
    train, family = config.train, checked.family
    model = family.folder.component_config(family.trained[0])
    heads, head_width = (model.get(name) for name in ("num_attention_heads", "attention_head_dim"))
    return Workload(
        tokens=max(num_tokens_of(bucket, family) for bucket in encoded.items.buckets),
        width=heads * head_width if isinstance(heads, int) and isinstance(head_width, int) else None,
        micro_batch_size=train.micro_batch_size,
        num_blocks=checked.num_blocks,
        num_checkpointed=checked.num_selected_blocks if train.use_gradient_checkpointing else 0,
        offloads=train.use_gradient_checkpointing_offload,
        # In the backward pass those of one block, and what is fetched ahead.
        blocks_on_device=max(config.memory.resident_blocks, 1 + config.memory.prefetched_blocks),
        has_token_budget=train.micro_batch_tokens is not None,
        in_float32=config.model.dtype == "float32",
    )


def build_engine(config: Config) -> GradientEngine:
    """The gradient engine that all blocks of the run share."""
    memory = config.memory
    return GradientEngine(
        min_bytes=memory.min_bytes,
        host_bytes=None if memory.host_gib is None else int(memory.host_gib * 1024**3),
        resident_blocks=memory.resident_blocks,
        prefetched_blocks=memory.prefetched_blocks,
        policy=block_policy(config),
        skip_dead_ops=memory.skip_dead_ops,
    )


def expected_block_calls(config: Config, checked: CheckedRun, accelerator: Accelerator) -> tuple[int, int]:
    """Calls of blocks that one step makes on a device, and how many of them the policy checkpoints."""
    train = config.train
    num_micro_steps = train.global_batch_size // (train.micro_batch_size * accelerator.num_processes)
    return checked.num_blocks * num_micro_steps, checked.num_selected_blocks * num_micro_steps
