"""This file decides which linear layers of a model get an adapter."""

import difflib
from collections.abc import Sequence

from torch import nn

from diffsynth_lite.errors import UserError


def find_target_layers(
    model: nn.Module,
    target_modules: Sequence[str],
    *,
    block_lists: Sequence[str],
    dead_in_last_block: Sequence[str],
) -> list[str]:
    """Full names of the linear layers whose names end in one of the targets.

    Layers of the last block whose output nobody uses are left out: an adapter there never gets a gradient.

    Args:
        model: may be on the meta device.
        target_modules: endings of names, such as ``to_q`` or ``attn.to_out.0``.
        block_lists: attributes of the model that hold its blocks, in call order.
        dead_in_last_block: endings of the names of unused layers in the last block.

    Raises:
        UserError: no target is given, or one of them matches no linear layer.
    """
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not target_modules:
        raise UserError(
            "lora.target_modules is empty; name at least one ending, or leave it out for the default"
        )
    unmatched = [target for target in target_modules if not any(_ends_in(name, target) for name in linear)]
    if unmatched:
        raise UserError(_describe_unmatched(unmatched, linear, type(model).__name__))
    dead = _dead_layers(model, block_lists, dead_in_last_block)
    layers = [name for name in linear if name not in dead and any(_ends_in(name, t) for t in target_modules)]
    if not layers:
        raise UserError(
            f"lora.target_modules: {', '.join(target_modules)} match only layers of the last block "
            "whose output nobody uses; add others"
        )
    return layers


def _dead_layers(model: nn.Module, block_lists: Sequence[str], dead_in_last_block: Sequence[str]) -> set[str]:
    if not dead_in_last_block:
        return set()
    last_list = block_lists[-1]
    last_block = len(model.get_submodule(last_list)) - 1  # type: ignore[arg-type]  # a ModuleList has a length
    return {f"{last_list}.{last_block}.{ending}" for ending in dead_in_last_block}


def _ends_in(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _describe_unmatched(unmatched: Sequence[str], linear: Sequence[str], model_class: str) -> str:
    endings = sorted({_without_indices(name) for name in linear})
    close = [match for target in unmatched for match in difflib.get_close_matches(target, endings, n=1)]
    hint = f"did you mean {', '.join(dict.fromkeys(close))}? " if close else ""
    return (
        f"lora.target_modules: {', '.join(unmatched)} match no linear layer of {model_class}; "
        f"{hint}its layers end in: {', '.join(endings)}"
    )


def _without_indices(name: str) -> str:
    """``transformer_blocks.3.attn.to_out.0`` as ``attn.to_out.0``: what follows the block's index."""
    parts = name.split(".")
    first_index = next((place for place, part in enumerate(parts[:-1]) if part.isdigit()), None)
    return name if first_index is None else ".".join(parts[first_index + 1 :])
