"""This file judges in a sentence how well a run learns, by named rules on its losses on fixed noise.

The loss of a training step jumps with its noise, so it is not judged. The losses used here are measured on
the same data with the same noise each time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MIN_EVALUATIONS = 5
"""Fewer are not judged."""
CLEAR_RATIO = 0.02
"""A smaller part of a loss is not called a change."""
RECENT_RATIO = 1 / 4
"""The last evaluations that are compared with all before; at least two."""

Points = Sequence[tuple[int, float]]
"""Steps, ascending, and the loss at each."""
Rule = Literal["rises", "unchanged", "rebounds", "stalled", "levels off", "falls", "items", "scores"]


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A sentence on how well a run learns.

    Attributes:
        rule: that applied.
        kind: how it is shown: ``warn`` where the user should look at something.
        step: whose previews are worth a look; None where no step stands out.
    """

    rule: Rule
    kind: Literal["info", "good", "warn"]
    text: str
    step: int | None = None


def judge(held_out: Points, fixed_noise: Points, *, has_finished: bool) -> Judgement | None:
    """Judge the loss on held-out data, or else that on training data; None below five evaluations.

    The first rule that applies decides:

    - ``rises``: the loss was never lower than at the start, and is higher.
    - ``unchanged``: it was never lower than at the start.
    - ``rebounds``: it is higher than its lowest value.
    - ``stalled``: the recent evaluations have no lower value than those before.
    - ``levels off``: they have one, but by less than 2 %.
    - ``falls``: they have one, by 2 % or more.
    """
    is_held_out = len(held_out) >= MIN_EVALUATIONS
    points = held_out if is_held_out else fixed_noise
    if len(points) < MIN_EVALUATIONS or min(loss for _, loss in points) <= 0:
        return None
    name = f"The loss on {'held-out data' if is_held_out else 'fixed noise'}"
    (first_step, first), (_, last) = points[0], points[-1]
    best, best_step = min((loss, step) for step, loss in points)
    if best > first * (1 - CLEAR_RATIO):
        if last >= first * (1 + CLEAR_RATIO):
            text = f"{name} is {_percent(last / first - 1)} higher than at step {first_step}."
            return Judgement(rule="rises", kind="warn", text=f"{text} The learning rate may be too high.")
        text = f"{name} has not fallen since step {first_step}."
        return Judgement(rule="unchanged", kind="warn", text=f"{text} The learning rate may be too low.")
    recent = max(2, math.ceil(len(points) * RECENT_RATIO))
    earlier_best, earlier_step = min((loss, step) for step, loss in points[:-recent])
    recent_best = min(loss for _, loss in points[-recent:])
    is_stalled = recent_best >= earlier_best
    fell = f"{name} fell by {_percent(1 - best / first)}"
    if last >= best * (1 + CLEAR_RATIO):
        text = f"{fell} until step {best_step} and is {_percent(last / best - 1)} higher now."
        if not is_stalled:
            return Judgement(rule="rebounds", kind="info", text=text, step=best_step)
        text = text.replace(" and is", ", has not improved since, and is")
        if is_held_out:
            text += " The LoRA overfits from there on."
        return Judgement(rule="rebounds", kind="warn", text=text, step=best_step)
    if is_stalled:
        text = f"{fell} and has not improved since step {best_step}. Little is left to learn."
        return Judgement(rule="stalled", kind="info", text=text, step=best_step)
    if recent_best > earlier_best * (1 - CLEAR_RATIO):
        text = f"{fell}, but by less than {_percent(CLEAR_RATIO)} since step {earlier_step}."
        text += " Little is left to learn."
        return Judgement(rule="levels off", kind="info", text=text, step=earlier_step)
    end = " and was still falling at the end. More steps may help." if has_finished else " and still falls."
    return Judgement(rule="falls", kind="good", text=f"{fell}{end}")


def judge_items(courses: Sequence[Sequence[float]], *, noun: str) -> Judgement | None:
    """The number of items whose loss rose; None where none did, or below five evaluations.

    Args:
        courses: the losses of each item on fixed noise, the first one first.
        noun: what the items are, in the plural.
    """
    judged = [course for course in courses if len(course) >= MIN_EVALUATIONS]
    num_worse = sum(course[-1] > course[0] * (1 + CLEAR_RATIO) for course in judged)
    if not num_worse:
        return None
    are = "is" if num_worse == 1 else "are"
    text = f"{num_worse} of {len(judged)} {noun} {are} worse than at the start."
    return Judgement(rule="items", kind="warn", text=text)


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.0f} %"
