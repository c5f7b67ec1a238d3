"""Write the page of a run, or of several side by side, or show them live in a browser."""

import argparse
import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from diffsynth_lite.cli.console import print_lines
from diffsynth_lite.errors import Problems, UserError
from diffsynth_lite.run_folder.folder import find_runs

logger = logging.getLogger(__name__)

_PORT = 8712


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``diffsynth-lite report``."""
    parser.add_argument(
        "places", nargs="+", type=Path, metavar="RUN", help="run folder, or folder that holds some"
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="page to write (default: report.html in the run folder; for several runs in this one, too)",
    )
    parser.add_argument(
        "--serve",
        action="store_true",
        help="show the pages in a browser on this machine until Ctrl+C, with runs that start meanwhile",
    )
    parser.add_argument(
        "--port", metavar="N", type=int, help=f"for --serve; 0 for any that is free (default: {_PORT})"
    )


def run(parsed: argparse.Namespace) -> None:
    """Write or show the pages."""
    for place in parsed.places:
        if not place.is_dir():
            raise UserError(f"{place}: no such folder; give the output.dir of a run, or a folder of such")
        if not os.access(place, os.R_OK | os.X_OK):
            logger.warning("%s: may not be read, and is left out", place)
    if parsed.serve:
        if parsed.out is not None:
            raise UserError("--out has no effect with --serve, which writes nothing")
        _serve(parsed.places, _PORT if parsed.port is None else parsed.port)
        return
    if parsed.port is not None:
        raise UserError("--port has no effect without --serve")
    folders = find_runs(parsed.places)
    if not folders:
        places = ", ".join(map(str, parsed.places))
        raise UserError(f"no run in {places}: give the output.dir of a run, or a folder of such")
    _write(folders, parsed.out)


def _write(folders: Mapping[str, Path], out: Path | None) -> None:
    """A page of each run in its folder, and one of several side by side; of one with ``out`` only that."""
    pages = {folder / "report.html": {name: folder} for name, folder in folders.items()}
    if len(folders) > 1:
        pages[out or Path("report.html")] = dict(folders)
    elif out is not None:
        pages = {out: dict(folders)}
    problems = Problems()
    with ExitStack() as pending:  # each page is tried, whatever becomes of the others, the last one first
        for path, shown in reversed(pages.items()):
            pending.callback(problems.attempt, partial(_write_page, path, shown))
    problems.require_none()


def _write_page(path: Path, folders: Mapping[str, Path]) -> None:
    print_lines(f"Page: {write_page_of(path, folders)[0]}")


def write_page_of(path: Path, folders: Mapping[str, Path]) -> tuple[str, list[Any]]:
    """Write the page of one run, which can be read, or of several, as many as can be.

    Returns:
        The path as it is printed, and what the page shows of each run.
    """
    from diffsynth_lite.report.page import write_page
    from diffsynth_lite.report.run_report import read_any_run, read_run

    read = read_run if len(folders) == 1 else read_any_run
    # What leads from the page to each folder, in front of names of files there.
    bases = [Path(os.path.relpath(folder, path.parent)).as_posix() for folder in folders.values()]
    try:
        runs = [
            replace(read(folder, base="" if base == "." else f"{quote(os.fsencode(base))}/"), name=name)
            for (name, folder), base in zip(folders.items(), bases, strict=True)
        ]
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from None
    try:
        write_page(path, runs)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}; --out names another file") from None
    return str(path).encode(errors="replace").decode(), runs


def _serve(places: list[Path], port: int) -> None:
    from diffsynth_lite.report.server import RunPages
    from diffsynth_lite.ui.server import build_report, listen, serve

    with listen(port) as bound:
        print_lines(f"Open http://127.0.0.1:{bound.getsockname()[1]}/ in a browser; Ctrl+C ends it.")
        try:
            serve(build_report(RunPages(partial(find_runs, places))), [bound])
        except KeyboardInterrupt:
            logger.info("Ended.")
