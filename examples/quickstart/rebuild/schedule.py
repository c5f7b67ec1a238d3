"""The learning rate and the progress lines that both trainings share."""

import math
import time


def learning_rate(peak: float, step: int, num_steps: int, num_warmup_steps: int) -> float:
    """Linear warm-up, then half a cosine down to 2 % of the peak at the last step."""
    warmup = min(1.0, (step + 1) / num_warmup_steps)
    return peak * warmup * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / num_steps)))


class Progress:
    """Prints the mean loss of the last 200 steps and the time that is left."""

    def __init__(self, name: str, num_steps: int):
        self._name = name
        self._num_steps = num_steps
        self._losses: list[float] = []
        self._start = time.monotonic()

    def step(self, loss: float) -> None:
        """Count a step; every 200 steps and at the end, print a line."""
        self._losses.append(loss)
        done = len(self._losses)
        if done % 200 and done != self._num_steps:
            return
        elapsed = time.monotonic() - self._start
        recent = self._losses[-200:]
        left = elapsed / done * (self._num_steps - done)
        print(
            f"{self._name}: step {done}/{self._num_steps}, loss {sum(recent) / len(recent):.4f}, "
            f"{elapsed:.0f} s, {left:.0f} s left",
            flush=True,
        )
