"""H4: runs whose numbers are not finite any more, and how they continue from what their message names."""

from collections.abc import Callable
from functools import partial

import torch

from diffsynth_lite.training import trainer
from diffsynth_lite.training.builder import TrainingObjects
from faults.bench import PLAIN, Bench, assert_ended, assert_same, at_call, fault

STEPS, LAST_GOOD = 14, 6
SETTINGS = (*PLAIN, f"train.steps={STEPS}", "output.checkpoint_every_steps=1", "train.ema_decay=0.6")
SLOWER = ("train.learning_rate=0.005", "resume.allow=[train.learning_rate]")

Spoil = Callable[[torch.nn.Parameter], object]


# The first is finite, and its products are not.
WAYS: dict[str, Spoil] = {
    "ruined": lambda weight: weight.fill_(1e30),
    "infinite": lambda weight: weight.fill_(torch.inf),
}


@fault("H4", "exit 3; the last good checkpoint stays, is named, and is continued with a lower rate")
def diverge(bench: Bench) -> str:
    """Weights ruined or infinite in a run that saves after each step."""
    run = bench.images(*SETTINGS)
    whole = run.finish("whole", "output.keep_checkpoints=100")
    for way, spoil in WAYS.items():
        folder = run.root / way
        with at_call(trainer, "train_step", LAST_GOOD + 1, partial(_spoil_all, spoil), after=True):
            assert run.exit_code(folder, "output.keep_checkpoints=1") == 3
        status = assert_ended(folder, "diverged", 3)
        named = f"checkpoints/step-{LAST_GOOD:08d}"
        assert f"resume from {named}" in status["message"], status
        assert_same(whole, folder, LAST_GOOD)  # No save after it took it away.
        for place, source in ((folder, folder / named), (f"{way}, undisturbed", whole / named)):
            run.finish(place, "--resume", str(source), *SLOWER)
        assert_same(run.root / f"{way}, undisturbed", folder, STEPS)
        assert_ended(folder, "finished", 0)
    return f"{len(WAYS)} runs"


def _spoil_all(spoil: Spoil, built: TrainingObjects, _step: int) -> None:
    with torch.no_grad():
        for weight in built.trained_parameters:
            spoil(weight)
