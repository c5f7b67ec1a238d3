"""Seconds until the parts of a plan are there while a config is edited, in a process that stays.

The process counts in a new folder, so that nothing is known from earlier plans. The goals, on two idle cores:
0.05 s to the whole answer for a setting that no plan reads, and 1.5 s to the first figure for another one.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from diffsynth_lite.serving import Served

QUESTIONS = ("", "train.steps=77", "data.trigger=star", "lora.rank=48", "train.micro_batch_size=2")


def seconds_of(served: Served, question: dict[str, object]) -> dict[str, float]:
    """Seconds after a question until each part of its answer was there, by name."""
    start, found = time.perf_counter(), dict[str, float]()
    name = served.ask(**question)
    while True:
        answers = served.answers(name)
        for one in answers:
            found.setdefault(one.get("part", one["state"]), round(time.perf_counter() - start, 3))
        if answers and answers[-1]["state"] != "part":
            return found
        time.sleep(0.002)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line of JSON for each question; the first has the start of the process in it."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", default="qwen_lora.yaml", metavar="FILE")
    parser.add_argument("--gpu", default="RTX 4090", metavar="NAME")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as caches:
        os.environ["XDG_CACHE_HOME"] = caches
        served = Served([sys.executable, "-m", "diffsynth_lite.cli.main", "plan", "--serve"], Path.cwd())
        for setting in QUESTIONS:
            overrides = [*given.overrides, *filter(None, [setting])]
            question = {"config": given.config, "gpu": given.gpu, "overrides": overrides}
            print(json.dumps({"setting": setting or "start", **seconds_of(served, question)}), flush=True)
        served.close()


if __name__ == "__main__":
    main()
