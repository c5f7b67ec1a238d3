"""``diffsynth-lite train``, as a file that launchers start: ``torchrun ... train.py --config my.yaml``."""

import sys

from diffsynth_lite.cli.train import main

if __name__ == "__main__":
    sys.exit(main())
