"""The training command where no library of models can be imported: to try is an error with a traceback."""

import sys

sys.modules.update(dict.fromkeys(("torch", "diffusers", "transformers", "peft", "accelerate")))

from diffsynth_lite.cli.train import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
