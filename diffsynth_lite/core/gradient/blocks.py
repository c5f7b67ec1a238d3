"""This file finds the blocks of a diffusers model, and makes each of them run through a function."""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

COMPILED = "_is_compiled_in_place"
"""Attribute of a block whose ``forward`` a ``BlockCompiler`` replaced."""


@contextmanager
def intercept_blocks(
    model: nn.Module,
    run: Callable[..., Any],
    *,
    blocks: Sequence[nn.Module] | None = None,
    hookless: Sequence[nn.Module] = (),
) -> Iterator[None]:
    """Scope in which every block call of ``model`` goes through ``run(index, block, *args, **kwargs)``.

    Args:
        model: a diffusers model, or one wrapped for distributed training. Its own gradient checkpointing
            hook is used, so ``run`` is not asked where gradients are disabled.
        run: must return what ``block(*args, **kwargs)`` returns. ``index`` counts the calls of the scope
            from 0.
        blocks: modules to use in place of the hook, for classes that have none or whose hook drops
            arguments (``ChromaTransformer2DModel`` drops its mask in diffusers 0.42). ``run`` then gets each
            module's ``forward`` as ``block``.
        hookless: modules in which no hook is looked for, such as the blocks where they are known: to search
            them takes longer than all else.
    """
    calls = itertools.count()

    def numbered(block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return run(next(calls), block, *args, **kwargs)

    def hook(block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Cosmos3 and PRX hand over the bound method block.__call__.
        return numbered(getattr(block, "__self__", block), *args, **kwargs)

    changes: dict[nn.Module, dict[str, Any]]
    if blocks is None:
        on = {"gradient_checkpointing": True, "_gradient_checkpointing_func": hook}
        changes = {module: on for module in _hooked(model, hookless)}
    elif not set(blocks) <= set(model.modules()):
        raise ValueError(f"blocks holds modules that {type(model).__name__} does not have")
    else:
        changes = {block: {"forward": functools.partial(numbered, block.forward)} for block in blocks}
    with changed_attributes(changes):
        yield


def blocks_of(model: nn.Module, block_lists: Sequence[str]) -> list[nn.Module]:
    """The blocks of ``model``, in the order of ``block_lists``.

    Nothing is computed, so ``model`` can be on the meta device.

    Args:
        block_lists: names of its module lists, such as ``("transformer_blocks",)``, or of single modules in
            one, such as ``"mid_block.resnets.1"``.
    """
    name = type(model).__name__
    if not getattr(model, "_supports_gradient_checkpointing", True):
        raise ValueError(f"{name} does not support gradient checkpointing")
    _hooked(model)
    blocks: list[nn.Module] = []
    named = dict(model.named_modules())
    for block_list in block_lists:
        modules = named.get(block_list)
        if modules is not None and isinstance(named[block_list.rpartition(".")[0]], nn.ModuleList):
            blocks.append(modules)
            continue
        if not isinstance(modules, nn.ModuleList):
            lists = [key for key, child in model.named_children() if isinstance(child, nn.ModuleList)]
            raise ValueError(f"{name} has no block list {block_list!r}; its module lists are {lists}")
        if not len(modules):
            raise ValueError(f"block list {block_list!r} of {name} is empty")
        blocks.extend(modules)
    return blocks


def count_blocks(model: nn.Module, block_lists: Sequence[str]) -> int:
    """The number of blocks of ``model``; arguments as of ``blocks_in``."""
    return len(blocks_in(model, block_lists))


def blocks_in(model: nn.Module, block_lists: Sequence[str]) -> list[nn.Module]:
    """The blocks of ``model``, unchecked, quickly enough for every forward pass.

    Args:
        model: a diffusers model, plain or wrapped for distributed training or by ``torch.compile``.
    """
    model = unwrapped(model)
    found = (model.get_submodule(block_list) for block_list in block_lists)
    return [
        block for modules in found for block in (modules if isinstance(modules, nn.ModuleList) else [modules])
    ]


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, without what DDP or ``torch.compile`` put around it."""
    for attribute in ("module", "_orig_mod"):
        while isinstance(getattr(model, attribute, None), nn.Module):
            model = getattr(model, attribute)
    return model


def find_submodule(module: nn.Module, name: str) -> nn.Module | None:
    """The part of ``module`` with a dotted name, or None."""
    found: nn.Module | None = module
    for part in name.split("."):
        found = found and found._modules.get(part)
    return found


def module_of(block: Callable[..., Any]) -> nn.Module | None:
    """The module that ``block`` is, or whose bound method it is; None for any other callable."""
    owner = getattr(block, "__self__", block)
    return owner if isinstance(owner, nn.Module) else None


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` or a part of it is compiled: its calls are not seen, and modes would break it up."""
    # torch.compile wraps a module, module.compile() sets the other. To name the wrapper's class would import
    # the compiler, which takes seconds.
    if "_orig_mod" in module._modules or module._compiled_call_impl is not None or COMPILED in vars(module):
        return True
    return any(is_compiled(child) for child in module._modules.values() if child is not None)


@contextmanager
def changed_attributes(changes: Mapping[nn.Module, Mapping[str, Any]]) -> Iterator[None]:
    """Scope in which modules have other attributes; afterwards each is as before, also if it was not set."""
    before = {
        module: {name: vars(module)[name] for name in attributes if name in vars(module)}
        for module, attributes in changes.items()
    }
    try:
        for module, attributes in changes.items():
            vars(module).update(attributes)
        yield
    finally:
        for module, attributes in changes.items():
            for name in attributes:
                del vars(module)[name]
            vars(module).update(before[module])


def _hooked(model: nn.Module, hookless: Sequence[nn.Module] = ()) -> list[nn.Module]:
    """The modules of ``model`` that ask diffusers' gradient checkpointing hook before they call a block."""
    modules = []
    passed_over = set(hookless)
    # This runs in every forward: with model.modules() and hasattr it took 5 % of a small model's step.
    # diffusers sets the attribute in __init__, so that it is in the module's own __dict__.
    found: list[nn.Module | None] = [model]
    for module in found:
        if module is None or module in passed_over:
            continue
        attributes = vars(module)
        if "gradient_checkpointing" in attributes:
            modules.append(module)
        # Most modules of a model with a LoRA are those of its adapters, around layers, which call no blocks.
        if "base_layer" not in attributes["_modules"]:
            found += attributes["_modules"].values()
    if not modules:
        raise ValueError(
            f"{type(model).__name__} has no gradient checkpointing hook: none of its modules has the "
            "attribute gradient_checkpointing"
        )
    return modules
