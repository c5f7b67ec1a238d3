"""This file lets functions of ours run the calls of chosen torch functions inside a block.

A mode for functions costs a block about a microsecond a call. A mode for every operator under them, as
torch's own selective checkpointing uses, costs ten times that, so it is entered around the chosen calls only.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Handler = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""``handler(function, args, kwargs)`` runs a call and returns its value."""


class CallSites(TorchFunctionMode):
    """Scope in which calls of some torch functions go through handlers."""

    def __init__(self, handlers: Mapping[Any, Handler]) -> None:
        super().__init__()
        self._handlers = handlers

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = self._handlers.get(func)
        if handler is None:
            return func(*args, **(kwargs or {}))
        return handler(func, args, kwargs or {})


class Operators(TorchDispatchMode):
    """Scope in which every operator, below autograd, goes through ``operate``."""

    # Torch's class is not typed.
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.operate(func, args, kwargs or {})

    @abstractmethod
    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, or whatever stands for it."""


def module_of(block: Callable[..., Any]) -> nn.Module | None:
    """The module that ``block`` is, or whose bound method it is; None for any other callable."""
    owner = getattr(block, "__self__", block)
    return owner if isinstance(owner, nn.Module) else None


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` or a part of it is compiled: its calls are not seen, and modes would break it up."""
    # torch.compile wraps a module, module.compile() sets the other. To name the wrapper's class would import
    # the compiler, which takes seconds.
    if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
        return True
    return any(is_compiled(child) for child in module._modules.values() if child is not None)
