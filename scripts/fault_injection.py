"""Provoke faults in real runs of tiny pipelines, and print a table of what they survived.

    python scripts/fault_injection.py --quick                # minutes
    python scripts/fault_injection.py --full --seed 1        # hundreds of kills
    python scripts/fault_injection.py --only K1,D3
    python scripts/fault_injection.py --remake-golden        # when the schema of checkpoints has changed

The items are in tests/faults; docs/reliability.md says what they promise. Needs what the tests need, and
Linux.
"""

import os
import sys
from pathlib import Path

# Before torch is imported; and no run of these may reach for the network or an accelerator.
os.environ |= {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / name) for name in ("", "config", "data", "runs", "training")]

from faults.driver import main  # noqa: E402
from faults.items import ITEMS  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(ITEMS))
