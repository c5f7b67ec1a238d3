"""Makes the meters of the benchmarks importable, as they are for ``scripts/fault_injection.py``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
