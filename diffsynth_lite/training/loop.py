"""This file is the training loop; it knows no model, no data and no settings."""

from collections.abc import Callable, Sequence

from diffsynth_lite.training.optimizer_step import StepResult


def run_loop(
    take_step: Callable[[int], StepResult],
    *,
    start_step: int,
    total_steps: int,
    after_step: Sequence[Callable[[StepResult], None]],
    should_stop: Callable[[], bool],
) -> int:
    """Take optimizer steps until the last one, or until somebody asks to stop.

    Args:
        take_step: takes the 0-based optimizer step.
        start_step: optimizer steps already done.
        total_steps: optimizer steps of the whole run.
        after_step: called in this order after each step.
        should_stop: asked after each step; the same answer on all processes.

    Returns:
        Optimizer steps done, less than ``total_steps`` when stopped.
    """
    for step in range(start_step, total_steps):
        result = take_step(step)
        for action in after_step:
            action(result)
        if should_stop():
            return result.step
    return total_steps
