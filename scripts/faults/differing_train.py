"""The training command, in which process 1 is as on another machine: with packages and settings of its own.

The first argument is json: where process 1 looks for packages first (``packages``), and what is added to its
command (``settings``). The others are those of the training command.
"""

import json
import os
import sys

if __name__ == "__main__":
    other, arguments = json.loads(sys.argv[1]), sys.argv[2:]
    if os.environ["RANK"] == "1":
        sys.path[:0] = other["packages"]
        arguments += other["settings"]

    from diffsynth_lite.cli.train import main

    sys.exit(main(arguments))
