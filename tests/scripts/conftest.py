"""Makes the benchmarks importable by the names they import each other by."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
