"""The config is read before anything slow is imported."""

import subprocess
import sys

HEAVY = {"torch", "transformers", "diffusers", "accelerate", "peft", "datasets", "numpy", "PIL", "wandb"}


def test_loading_a_config_imports_no_heavy_library():
    code = (
        "import sys, diffsynth_lite.config as config, diffsynth_lite.config.reference\n"
        "config.load_config('quickstart.yaml', ['train.steps=20'])\n"
        "print(*sorted(name for name in sys.modules if '.' not in name))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "omegaconf" in loaded
    assert not loaded & HEAVY
