"""The training command, whose steps say that they take 47 seconds each."""

import dataclasses
import sys

from diffsynth_lite.cli.train import main
from diffsynth_lite.run_folder.progress import StepResult
from diffsynth_lite.training import trainer
from diffsynth_lite.training.builder import TrainingObjects

_train_step = trainer.train_step


def _train_step_slowly(built: TrainingObjects, step: int) -> StepResult:
    return dataclasses.replace(_train_step(built, step), seconds=47.0)


if __name__ == "__main__":
    trainer.train_step = _train_step_slowly
    sys.exit(main())
