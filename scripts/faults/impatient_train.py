"""The training command, whose data workers hang in reading one file of the cache, and which is impatient.

The first argument is the file, the second how many seconds a worker has; the others are those of the training
command. Whoever opens the file waits for a writer of it that never comes, as on a file system that hangs.
"""

import os
import sys
from pathlib import Path

from diffsynth_lite.cli.train import main
from diffsynth_lite.data import batches
from diffsynth_lite.run_folder.progress import StepResult
from diffsynth_lite.training import trainer
from diffsynth_lite.training.builder import TrainingObjects

_train_step = trainer.train_step


def _train_step_after_the_file_hangs(built: TrainingObjects, step: int) -> StepResult:
    if not FILE.is_fifo():
        FILE.unlink()
        os.mkfifo(FILE)
    return _train_step(built, step)


if __name__ == "__main__":
    FILE = Path(sys.argv[1])
    batches.WORKER_TIMEOUT_S = float(sys.argv[2])
    trainer.train_step = _train_step_after_the_file_hangs
    sys.exit(main(sys.argv[3:]))
