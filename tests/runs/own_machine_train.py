"""Training processes of torchrun's agent, each the only one of a machine with its own run and cache folder.

The agent forks them; those of torchrun import the libraries, each for itself. The arguments are the number of
processes, the folder of all machines, and those of the training command.
"""

import os
import sys
from pathlib import Path

from torch.distributed.launcher import LaunchConfig, elastic_launch

from diffsynth_lite.cli.train import main


def train(machines: str, *arguments: str) -> None:
    """The training command of one process."""
    own = Path(machines) / f"machine {os.environ['RANK']}"
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    code = main([*arguments, f"output.dir={own / 'run'}", f"data.cache_dir={own / 'cache'}"])
    if code:
        sys.exit(code)


if __name__ == "__main__":
    agent = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=int(sys.argv[1]),
        run_id="run",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="fork",
    )
    elastic_launch(agent, train)(*sys.argv[2:])
