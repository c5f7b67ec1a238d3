"""This file decides which linear layers of a model get an adapter."""

import difflib
import re
from collections.abc import Collection, Sequence

from torch import nn

from diffsynth_lite.errors import UserError, join_names

_RANGE = re.compile(r"([0-9]+)-([0-9]+)")
"""A range of numbers, such as those of blocks."""


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
            of a name, as in ``single_transformer_blocks.*.proj_out``, and ``0-9`` for a number from 0 to 9.
        unused_modules: full names of the modules whose output nobody uses, and that of all layers in them.
    """
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not target_modules:
        raise UserError(
            "lora.target_modules is empty; name at least one ending, or leave it out for the default"
        )
    matched = layers_ending_in(linear, target_modules, key="lora.target_modules", owner=type(model).__name__)
    layers = [name for name in matched if not any(_is_in(name, module) for module in unused_modules)]
    if not layers:
        raise UserError(
            f"lora.target_modules: {', '.join(target_modules)} match only layers whose output "
            "nobody uses; add others"
        )
    return layers


def layers_ending_in(names: Sequence[str], endings: Sequence[str], *, key: str, owner: str) -> list[str]:
    """The linear layers whose names end in one of the endings.

    Args:
        endings: as ``target_modules`` of :func:`find_target_layers`.
    """
    unmatched = [ending for ending in endings if not any(_ends_in(name, ending) for name in names)]
    if unmatched:
        raise UserError(f"{key}: {_describe_unmatched(unmatched, names, owner)}")
    return [name for name in names if any(_ends_in(name, ending) for ending in endings)]


def layers_with(names: Sequence[str], pattern: str) -> list[str]:
    """The layers whose names contain the parts of a pattern in a row, anywhere.

    Args:
        pattern: such as ``transformer_blocks.0-9`` or ``attn.to_q``.
    """
    wanted = pattern.split(".")

    def has(parts: list[str]) -> bool:
        starts = range(len(parts) - len(wanted) + 1)
        return any(_are_parts(wanted, parts[start : start + len(wanted)]) for start in starts)

    return [name for name in names if has(name.split("."))]


def _is_in(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _ends_in(name: str, target: str) -> bool:
    wanted = target.split(".")
    ending = name.split(".")[-len(wanted) :]
    return len(ending) == len(wanted) and _are_parts(wanted, ending)


def _are_parts(wanted: Sequence[str], parts: Sequence[str]) -> bool:
    """Whether the parts of a name match the wanted ones, in equal number."""
    return all(_is_part(asked, part) for asked, part in zip(wanted, parts, strict=True))


def _is_part(asked: str, part: str) -> bool:
    if asked in ("*", part):
        return True
    numbers = _RANGE.fullmatch(asked)
    return numbers is not None and part.isdigit() and int(numbers[1]) <= int(part) <= int(numbers[2])


def _describe_unmatched(unmatched: Sequence[str], names: Sequence[str], owner: str) -> str:
    endings = sorted({ending_of(name) for name in names})
    close = [match for target in unmatched for match in difflib.get_close_matches(target, endings, n=1)]
    hint = f"did you mean {join_names(list(dict.fromkeys(close)))}? " if close else ""
    return (
        f"{join_names(unmatched)} match no linear layer of {owner}; "
        f"{hint}its layers end in: {join_names(endings)}"
    )


def ending_of(name: str) -> str:
    """What names a layer in all blocks: ``attn.to_out.0`` of ``transformer_blocks.3.attn.to_out.0``."""
    parts = name.split(".")
    first_index = next((place for place, part in enumerate(parts[:-1]) if part.isdigit()), None)
    return name if first_index is None else ".".join(parts[first_index + 1 :])
