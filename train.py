"""Train a LoRA from a clone: ``accelerate launch train.py --config qwen_lora.yaml``."""

import sys

from diffsynth_lite.cli.train import main

if __name__ == "__main__":
    sys.exit(main())
