"""This file names the blocks of a UNet, which differ in number and kind with its levels.

Source: diffusers ``unet_2d_condition.py`` and ``unet_2d_blocks.py``.
"""

from collections.abc import Iterator
from typing import Any


def unet_block_lists(config: Any) -> Iterator[str]:
    """Names of the modules and module lists that diffusers' checkpointing hook runs, in call order.

    These are the ResNet blocks and the transformer blocks. The hook leaves out the ResNet block that opens
    the middle, and the samplers between the levels.

    Args:
        config: the settings of a ``UNet2DConditionModel``, a mapping.
    """
    down_types, up_types = config["down_block_types"], config["up_block_types"]
    layers = config.get("layers_per_block", 2)
    num_layers = [layers] * len(down_types) if isinstance(layers, int) else list(layers)
    for place, (block_type, number) in enumerate(zip(down_types, num_layers, strict=True)):
        yield from _lists_of_level(f"down_blocks.{place}", block_type, number)
    if config.get("mid_block_type", "UNetMidBlock2DCrossAttn") == "UNetMidBlock2DCrossAttn":
        yield "mid_block.attentions.0.transformer_blocks"
        yield "mid_block.resnets.1"
    for place, (block_type, number) in enumerate(zip(up_types, reversed(num_layers), strict=True)):
        yield from _lists_of_level(f"up_blocks.{place}", block_type, number + 1)


def _lists_of_level(name: str, block_type: str, num_layers: int) -> Iterator[str]:
    for place in range(num_layers):
        yield f"{name}.resnets.{place}"
        if block_type.startswith("CrossAttn"):
            yield f"{name}.attentions.{place}.transformer_blocks"
