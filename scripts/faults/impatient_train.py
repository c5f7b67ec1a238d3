"""The training command, whose data workers hang in reading one file of the cache, and which is impatient.

The first argument is the file, the second how many seconds a worker has; the others are those of the training
command. Whoever opens the file waits for a writer of it that never comes, as on a file system that hangs.
"""

import os
import sys
from pathlib import Path

from diffsynth_lite.cli.train import main
from diffsynth_lite.data import batches
from diffsynth_lite.training.optimizer_step import OptimizerStep, StepResult

_take = OptimizerStep.take


def _take_after_the_file_hangs(self: OptimizerStep, step: int) -> StepResult:
    if not FILE.is_fifo():
        FILE.unlink()
        os.mkfifo(FILE)
    return _take(self, step)


if __name__ == "__main__":
    FILE = Path(sys.argv[1])
    batches.WORKER_TIMEOUT_S = float(sys.argv[2])
    OptimizerStep.take = _take_after_the_file_hangs  # type: ignore[method-assign]
    sys.exit(main(sys.argv[3:]))
