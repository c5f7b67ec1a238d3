"""Print what a report of a problem needs: versions, devices, and the environment variables that matter."""

import argparse
import json
import os

from diffsynth_lite.cli.console import print_lines
from diffsynth_lite.redaction import redacted

_VARIABLES = (
    *("ACCELERATE_", "CUDA_", "DIFFSYNTH_LITE_", "HF_", "HIP_", "NCCL_", "OMP_", "PYTORCH_", "TORCH_"),
    *("TRANSFORMERS_", "WANDB_", "XDG_CACHE_HOME"),
)
"""What the names begin with of the environment variables that are printed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``diffsynth-lite env``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(parsed: argparse.Namespace) -> None:
    """Print the facts, with secrets masked."""
    from diffsynth_lite.doctor.machine import machine_table

    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)}
    facts = redacted(machine_table() | variables)
    if parsed.json:
        print_lines(json.dumps(facts, indent=2))
    else:
        print_lines(*(f"{name}: {value}" for name, value in facts.items()))
