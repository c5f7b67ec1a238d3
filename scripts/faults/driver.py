"""Provokes faults one after the other, each in a child of this process, and prints what came of them."""

import argparse
import gc
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from faults.bench import Bench, Result, Scale, forked
from faults.golden import make_golden

_RESULT = "result.json"
_LAST_LINES = 30
_WIDTH = 400


@dataclass(frozen=True)
class Item:
    """A fault.

    Attributes:
        what: is provoked.
        bar: what must hold; where it does not, ``prove`` raises.
        prove: provokes it.
        limit_s: by scale ``ci``, to end what hangs; a quick item may take twice, a full one 20 times as long.
        needs: programs without which it is not tried, and ``root`` where only that user can try it.
    """

    what: str
    bar: str
    prove: Callable[[Bench], Result]
    limit_s: float = 1800
    needs: Sequence[str] = ()

    def missing(self) -> list[str]:
        """What it needs and is not here."""
        is_here = {"root": os.geteuid() == 0}
        return [name for name in self.needs if not is_here.get(name, shutil.which(name) is not None)]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """An item that was tried; the result is None where it did not hold."""

    result: Result | None
    seconds: float
    log: Path

    def last_lines(self) -> str:
        """The end of what the item printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_LAST_LINES:])


def main(items: Mapping[str, Item], arguments: Sequence[str] | None = None) -> int:
    """Provoke the chosen faults and print the table; returns 1 if one of them was not survived."""
    options = _parser(items).parse_args(arguments)
    if options.remake_golden:
        with tempfile.TemporaryDirectory() as folder:
            make_golden(Path(folder))
        return 0
    chosen = list(items) if options.only is None else options.only.split(",")
    unknown = [name for name in chosen if name not in items]
    if unknown:
        raise SystemExit(f"--only: {unknown} are not among {', '.join(items)}")
    scale: Scale = options.scale
    # A child inherits these: what collects garbage then need not look at all that torch has imported.
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    # Ctrl+C is ignored where a shell has started this in the background, and so by all that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    progress = Console(stderr=True, width=_WIDTH, highlight=False, markup=False)
    table = Table(box=MARKDOWN)
    for column in ("id", "what", "how often", "bar", "result", "s"):
        table.add_column(column)
    failed = False
    with tempfile.TemporaryDirectory(prefix="faults-", dir=options.folder) as folder:
        for name in chosen:
            if missing := items[name].missing():
                table.add_row(
                    name, items[name].what, "not tried", items[name].bar, f"no {', '.join(missing)}", ""
                )
                progress.print(f"{name}: not tried, for it needs {', '.join(missing)}")
                continue
            outcome = tried(name, items[name], Path(folder), scale=scale, seed=options.seed)
            failed |= outcome.result is None
            found = outcome.result or Result("", "**FAILED**")
            row = (items[name].what, found.how_often, items[name].bar, found.outcome)
            table.add_row(name, *row, f"{outcome.seconds:.0f}")
            progress.print(f"{name}: {found.outcome} ({outcome.seconds:.0f} s)")
            if outcome.result is None:
                progress.print(outcome.last_lines())
    console = Console(width=_WIDTH, highlight=False, markup=False)
    console.print(f"Faults, --{scale}, seed {options.seed}, {os.cpu_count()} CPU cores")
    console.print(table)
    return int(failed)


def tried(name: str, item: Item, folder: Path, *, scale: Scale, seed: int) -> Outcome:
    """Provoke one fault in a child of this process, which is killed when it takes too long."""
    bench = Bench(root=folder / name, models=folder / "models", scale=scale, seed=seed)
    bench.root.mkdir()
    log = folder / f"{name}.log"
    started_at = time.monotonic()
    child = forked(lambda: _prove(item, bench), log)
    limit_s = item.limit_s * {"ci": 1, "quick": 2, "full": 20}[scale]
    code = waited(child, limit_s)
    seconds = time.monotonic() - started_at
    if code is None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with log.open("a") as file:
            file.write(f"killed after {limit_s} s\n")
    result = Result(**json.loads((bench.root / _RESULT).read_text())) if code == 0 else None
    return Outcome(result=result, seconds=seconds, log=log)


def waited(child: int, limit_s: float) -> int | None:
    """The exit code of a child, negative if a signal ended it; None if it runs longer than the limit."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    return None


def _prove(item: Item, bench: Bench) -> int:
    result = item.prove(bench)
    (bench.root / _RESULT).write_text(json.dumps(vars(result)))
    return 0


def _parser(items: Mapping[str, Item]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Provoke faults, and check that runs survive them.")
    scale = parser.add_mutually_exclusive_group()
    for name, effect in (
        ("ci", "a few of each, in a minute"),
        ("quick", "some of each, in minutes (default)"),
        ("full", "hundreds, in an hour"),
    ):
        scale.add_argument(f"--{name}", dest="scale", action="store_const", const=name, help=effect)
    parser.set_defaults(scale="quick")
    parser.add_argument("--only", metavar="K1,D3", help=f"some of {', '.join(items)} (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of random moments (default: %(default)s)")
    parser.add_argument("--folder", help="where runs are made (default: the system's for temporary files)")
    parser.add_argument("--remake-golden", action="store_true", help="of the present schema; nothing else")
    return parser
