"""Provokes faults in real runs of tiny pipelines, and prints a table of what they survived.

    python scripts/faults --quick                # minutes
    python scripts/faults --full --seed 1        # hundreds of kills
    python scripts/faults --only K1,D3
    python scripts/faults --remake-golden        # when the schema of checkpoints has changed

docs/reliability.md says what the items promise. Needs what the tests need, whose models, runs and corpora it
uses, and Linux.
"""

import os
import sys
from pathlib import Path

# Before torch is imported; and no run of these may reach for the network or an accelerator.
os.environ |= {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
ROOT = Path(__file__).parents[2]
# In place of this folder: its modules are those of the package `faults`.
sys.path[:1] = [
    *(str(ROOT / name) for name in ("scripts", "scripts/benchmarks", "tests")),
    *(
        str(ROOT / "tests" / name)
        for name in ("config", "data", "pipelines", "runs", "training", "training/checkpoint")
    ),
]

from faults.driver import all_faults, main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(all_faults()))
