"""This file decides which linear layers of a model get an adapter."""

import difflib
from collections.abc import Collection, Sequence

from torch import nn

from diffsynth_lite.errors import UserError


def find_target_layers(
    model: nn.Module,
    target_modules: Sequence[str],
    *,
    unused_modules: Collection[str],
) -> list[str]:
    """Full names of the linear layers whose names end in one of the targets.

    Layers whose output nobody uses are left out: an adapter there never gets a gradient.

    Args:
        model: may be on the meta device.
        target_modules: endings of names, such as ``to_q`` or ``attn.to_out.0``; a ``*`` stands for one part
            of a name, as in ``single_transformer_blocks.*.proj_out``.
        unused_modules: full names of the modules whose output nobody uses, and that of all layers in them.

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
    used = [name for name in linear if not any(_is_in(name, module) for module in unused_modules)]
    layers = [name for name in used if any(_ends_in(name, target) for target in target_modules)]
    if not layers:
        raise UserError(
            f"lora.target_modules: {', '.join(target_modules)} match only layers whose output "
            "nobody uses; add others"
        )
    return layers


def _is_in(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _ends_in(name: str, target: str) -> bool:
    wanted = target.split(".")
    ending = name.split(".")[-len(wanted) :]
    return len(ending) == len(wanted) and all(
        asked in ("*", part) for asked, part in zip(wanted, ending, strict=True)
    )


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
