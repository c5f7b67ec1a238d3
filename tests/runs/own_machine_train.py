"""The training command of the only process of a machine, which has a run folder and a cache of its own.

The first argument is the folder of all machines; the others are those of the training command.
"""

import os
import sys
from pathlib import Path

from diffsynth_lite.cli.train import main

if __name__ == "__main__":
    own = Path(sys.argv[1]) / f"machine {os.environ['RANK']}"
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    sys.exit(main([*sys.argv[2:], f"output.dir={own / 'run'}", f"data.cache_dir={own / 'cache'}"]))
