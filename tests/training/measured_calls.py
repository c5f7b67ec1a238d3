"""What calls of a family's real models hold on the CPU, for comparison with a count."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from diffsynth_lite.core.planning.meters import CountingMeter


@dataclass
class MeasuredCalls:
    """The calls of models.

    Attributes:
        weights: bytes of each model.
        peaks: most bytes at once in each call, by model and method.
    """

    weights: dict[str, int] = field(default_factory=dict)
    peaks: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        return max(max(peaks) for peaks in self.peaks.values())

    def measuring(self, load: Callable[..., Any]) -> Callable[..., Any]:
        """What loads components, and has their calls measured from then on."""

        def loaded(name: str, *args: Any) -> Any:
            component = load(name, *args)
            self.measure(component, name, *(("encode", "decode") if name == "vae" else ("forward",)))
            return component

        return loaded

    def measure(self, model: torch.nn.Module, name: str, *methods: str) -> None:
        """Measure the calls of these methods from now on."""
        self.weights[name] = sum(parameter.nbytes for parameter in model.parameters())
        for method in methods:
            vars(model)[method] = self._measured(getattr(model, method), (name, method))

    def _measured(self, method: Callable[..., Any], key: tuple[str, str]) -> Callable[..., Any]:
        def measured(*args: Any, **kwargs: Any) -> Any:
            with CountingMeter() as meter:
                meter.start()
                given = [copied(one) for one in args]  # as they come from elsewhere to the device
                named = {name: copied(one) for name, one in kwargs.items()}
                result = method(*given, **named)
                self.peaks.setdefault(key, []).append(meter.peak_bytes)
            return result

        return measured


def copied(value: Any) -> Any:
    if isinstance(value, list):
        return [copied(one) for one in value]
    is_copied = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.clone() if is_copied else value
