"""A score of the quickstart, the first argument, that draws with 8 steps, which show what its 20 do."""

import runpy
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart"
sys.path.insert(0, str(EXAMPLE))

import comparison  # noqa: E402

if __name__ == "__main__":
    comparison.NUM_STEPS = 8
    sys.argv = sys.argv[1:]
    runpy.run_path(str(EXAMPLE / sys.argv[0]), run_name="__main__")
