"""Fills the cache of a run on Ray: one task for each part, on whatever machines and GPUs the cluster has.

Example: python fill_on_ray.py --config my.yaml --parts 64 --gpus 1
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_WRONG_INPUT = 2
"""Exit code of what another try does not mend: a setting, a path, an image."""


@dataclass(frozen=True)
class Ended:
    """How a part came out: the exit code of its command, and the last line that it wrote."""

    part: str
    code: int
    last_line: str


class PartStopped(Exception):
    """A part ended with an exit code that another try may mend: killed, no memory, a machine that failed."""


def build_parser() -> argparse.ArgumentParser:
    """The arguments of this program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", required=True, action="append", dest="configs", metavar="FILE")
    parser.add_argument(
        "--parts",
        required=True,
        type=_number_of_parts,
        metavar="N",
        help="several for each GPU",
    )
    parser.add_argument(
        "--gpus", type=float, default=0, help="of each task; a share such as 0.5 is shared by two"
    )
    parser.add_argument("--cpus", type=float, default=1, help="of each task")
    parser.add_argument(
        "--retries", type=int, default=2, help="of a part that stopped, not of one that is wrong"
    )
    parser.add_argument("--address", help="of the cluster; without it Ray starts on this machine")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as for train.py")
    return parser


def _number_of_parts(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text}: a whole number above 0")
    return int(text)


def commands(parsed: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """Name and command line of each part; every machine finds the configs at these paths."""
    paths = [str(Path(path).expanduser().absolute()) for path in parsed.configs]
    configs = [word for path in paths for word in ("--config", path)]
    for index in range(parsed.parts):
        part = f"{index}/{parsed.parts}"
        fill = ["-m", "diffsynth_lite.cli.main", "cache", "fill", *configs, "--part", part]
        yield part, [sys.executable, *fill, *parsed.overrides]


def run_part(part: str, command: Sequence[str], folder: str) -> Ended:
    """Run the command of a part, as a process of its own: its memory and its GPU are free when it ends.

    Raises:
        PartStopped: it ended in a way that another try may mend.
    """
    last_line = ""
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr or ():
            print(f"part {part}: {line}", end="", flush=True)
            last_line = line.strip() or last_line
    if process.returncode not in (0, _WRONG_INPUT):
        raise PartStopped(f"exit code {process.returncode}: {last_line}")
    return Ended(part, process.returncode, last_line)


def fill(parsed: argparse.Namespace) -> list[Ended]:
    """Run all parts as tasks, and log each that ends; how those that are not in the cache came out."""
    import ray

    ray.init(address=parsed.address)
    task = ray.remote(
        num_gpus=parsed.gpus,
        num_cpus=parsed.cpus,
        max_retries=parsed.retries,
        retry_exceptions=[PartStopped],
    )(run_part)
    waiting = {task.remote(part, command, str(Path.cwd())): part for part, command in commands(parsed)}
    failed = []
    while waiting:
        [done], _ = ray.wait(list(waiting))
        part = waiting.pop(done)
        try:
            ended = ray.get(done)
        except ray.exceptions.RayError as error:  # all tries stopped, or the machine was lost with the task
            ended = Ended(part, 1, str(getattr(error, "cause", error)))
        if ended.code:
            failed.append(ended)
        print(f"part {part}: {'failed' if ended.code else 'in the cache'}, {len(waiting)} to go", flush=True)
    return failed


def main() -> int:
    """The exit code: 0 where all parts are in the cache, 2 where input is wrong, else 1."""
    parsed = build_parser().parse_args()
    failed = fill(parsed)
    print(f"{parsed.parts - len(failed)} of {parsed.parts} parts are in the cache", flush=True)
    for ended in failed:
        print(f"part {ended.part} failed: {ended.last_line}", flush=True)
    if not failed:
        return 0
    return _WRONG_INPUT if all(ended.code == _WRONG_INPUT for ended in failed) else 1


if __name__ == "__main__":
    sys.exit(main())
