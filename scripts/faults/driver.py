"""Provokes faults one after the other, each in a child of this process, and prints what came of them."""

import argparse
import gc
import importlib
import os
import pkgutil
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

import faults
from faults.bench import Bench, Fault, Scale, end, forked, waited
from faults.golden import make_golden

_LAST_LINES = 30
_WIDTH = 400


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A fault that was tried: how often, with figures, or None where what it must hold did not."""

    result: str | None
    seconds: float
    log: Path

    def last_lines(self) -> str:
        """The end of what it printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_LAST_LINES:])


def all_faults() -> dict[str, Fault]:
    """The faults of all modules of this package, by name."""
    names = (module.name for module in pkgutil.iter_modules(faults.__path__))
    modules = [
        importlib.import_module(f"faults.{name}")
        for name in names
        if not name.endswith(("_train", "__main__"))
    ]
    found = [value for module in modules for value in vars(module).values() if isinstance(value, Fault)]
    return {fault.name: fault for fault in sorted(found, key=lambda fault: fault.name)}


def main(known: Mapping[str, Fault], arguments: Sequence[str] | None = None) -> int:
    """Provoke the chosen faults and print the table; returns 1 if one of them was not survived."""
    options = _parser(known).parse_args(arguments)
    if options.remake_golden:
        with tempfile.TemporaryDirectory() as folder:
            make_golden(Path(folder))
        return 0
    chosen = list(known) if options.only is None else options.only.split(",")
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise SystemExit(f"--only: {unknown} are not among {', '.join(known)}")
    # A child inherits these: what collects garbage then need not look at all that torch has imported.
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    # Ctrl+C is ignored where a shell has started this in the background, and so by all that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    progress = Console(stderr=True, width=_WIDTH, highlight=False, markup=False)
    table = Table("id", "what", "must hold", "tried", "s", box=MARKDOWN)
    failed = False
    with tempfile.TemporaryDirectory(prefix="faults-", dir=options.folder) as folder:
        for fault in (known[name] for name in chosen):
            if missing := fault.missing():
                cell, seconds = f"not tried: no {', '.join(missing)}", "0"
            else:
                outcome = tried(fault, Path(folder), scale=options.scale, seed=options.seed)
                failed |= outcome.result is None
                cell, seconds = outcome.result or "**FAILED**", f"{outcome.seconds:.0f}"
                progress.print("" if outcome.result else outcome.last_lines(), end="")
            table.add_row(fault.name, fault.what, fault.bar, cell, seconds)
            progress.print(f"{fault.name}: {cell} ({seconds} s)")
    console = Console(width=_WIDTH, highlight=False, markup=False)
    console.print(f"Faults, --{options.scale}, seed {options.seed}, {os.cpu_count()} CPU cores")
    console.print(table)
    return int(failed)


def tried(fault: Fault, folder: Path, *, scale: Scale, seed: int) -> Outcome:
    """Provoke one fault in a child of this process, which is killed when it takes too long."""
    bench = Bench(root=folder / fault.name, models=folder / "models", scale=scale, seed=seed)
    bench.root.mkdir()
    log, result = folder / f"{fault.name}.log", bench.root / "result.txt"
    started_at = time.monotonic()
    child = forked(lambda: result.write_text(fault.prove(bench)) * 0, log)
    limit_s = fault.limit_s * {"ci": 1, "quick": 2, "full": 20}[scale]
    code = waited(child, limit_s)
    seconds = time.monotonic() - started_at
    if code is None:
        end(child)
        with log.open("a") as file:
            file.write(f"killed after {limit_s} s\n")
    return Outcome(result=result.read_text() if code == 0 else None, seconds=seconds, log=log)


def _parser(known: Mapping[str, Fault]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Provoke faults, and check that runs survive them.")
    scale = parser.add_mutually_exclusive_group()
    for name, effect in (
        ("ci", "a few of each, in a minute"),
        ("quick", "some of each, in minutes (default)"),
        ("full", "hundreds, in an hour"),
    ):
        scale.add_argument(f"--{name}", dest="scale", action="store_const", const=name, help=effect)
    parser.set_defaults(scale="quick")
    parser.add_argument("--only", metavar="K1,D3", help=f"some of {', '.join(known)} (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of random moments (default: %(default)s)")
    parser.add_argument("--folder", help="where runs are made (default: the system's for temporary files)")
    parser.add_argument("--remake-golden", action="store_true", help="of the present schema; nothing else")
    return parser
