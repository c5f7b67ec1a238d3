"""Look at a data set as a run would use it, before any model is loaded, and write a page about it."""

import argparse
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from diffsynth_lite.cli.arguments import add_config_arguments, command, config_words
from diffsynth_lite.cli.console import importing_libraries, print_lines
from diffsynth_lite.config import load_config
from diffsynth_lite.errors import UserError
from diffsynth_lite.redaction import redacted
from diffsynth_lite.releases.families import require_family_name

if TYPE_CHECKING:  # Wrong arguments are reported before torch is imported, which takes seconds.
    from diffsynth_lite.doctor.findings import BucketFindings, Findings, NoiseFindings, SourceFindings

logger = logging.getLogger(__name__)

_PAGE = Path("doctor.html")
_MAX_NAMED = 10
_CANNOT = " items cannot be used: "
"""What the items and their reasons follow in the message of a run, which has no tables above it."""
_LISTED = " items cannot be used; they are listed above"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``diffsynth-lite doctor``."""
    add_config_arguments(parser)
    parser.add_argument(
        "--page",
        metavar="FILE",
        type=Path,
        help=f"HTML page to write (default: {_PAGE}; with --json: none)",
    )
    parser.add_argument(
        "--sheet",
        metavar="N",
        type=int,
        default=120,
        help="items on the page's contact sheet, and on that of held-out data (default: %(default)s)",
    )
    parser.add_argument(
        "--goal",
        choices=("likeness", "style", "motion", "edit"),
        help="what is trained: compares the number of items with what is usual for it",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(parsed: argparse.Namespace) -> None:
    """Examine, print, write the page."""
    loaded = load_config(parsed.config, parsed.overrides, presets=parsed.presets)
    require_family_name(loaded.config.model.family)
    # The libraries take seconds to import: a wrong config is refused before that.
    with importing_libraries():
        from diffsynth_lite.doctor.examination import examine
        from diffsynth_lite.doctor.findings import counted
        from diffsynth_lite.doctor.page import write_page

    for warning in loaded.warnings:
        logger.warning("%s", warning)
    page = parsed.page or (None if parsed.json else _PAGE)
    examination = examine(loaded.config, sheet_size=parsed.sheet if page else 0, goal=parsed.goal)
    findings = examination.findings
    if parsed.json:
        print_lines(json.dumps(redacted(findings.as_json()), indent=2))
    else:
        print_findings(Console(emoji=False), findings)
    if page:
        lead = f"{counted(findings.num_items, 'item')} for {loaded.config.model.family}, by {loaded.path}"
        try:
            write_page(page, findings, title=loaded.path.stem, lead=lead)
        except OSError as error:
            raise UserError(f"--page {page}: cannot be written: {error.strerror}") from None
    if page and not parsed.json:
        print_lines(f"Page with the items as the model sees them: {page}")
    try:
        examination.require_usable()
    except UserError as error:
        lines = (line.partition(_CANNOT) for line in str(error).splitlines())
        raise UserError("\n".join(f"{line}{found and _LISTED}" for line, found, _ in lines)) from None
    if not parsed.json:
        print_lines(*(f"Next: {command(name, *config_words(parsed))}" for name in ("plan", "train")))


def print_findings(console: Console, findings: "Findings") -> None:
    """The findings as tables, the advice last, so that it stays in view."""
    console.print(_pairs("Machine", findings.machine))
    console.print(_pairs("Model", findings.model))
    _print_data(console, findings, title="Data", unused="Not trained on")
    held_out = findings.held_out
    if held_out is not None:
        _print_data(console, held_out, title="Held out", unused="Not measured on")
        _print_names(console, "Equal to items that are trained on", _joined(" = ", held_out.trained))
        _print_names(console, "Look like items that are trained on", _joined(" ~ ", held_out.like_trained))
    for line in (*findings.advice, *(f"held out: {line}" for line in (held_out.advice if held_out else ()))):
        console.print(f"[bold yellow]>[/] {escape(line)}", soft_wrap=True)


def _print_data(console: Console, findings: "Findings", *, title: str, unused: str) -> None:
    _print_table(console, title, findings.sources, num_texts=2)
    console.print(_pairs("", findings.facts))
    _print_table(console, "Buckets", findings.buckets)
    levels = f"Noise levels ({findings.noise_level}): % of the steps"
    _print_table(console, levels, findings.noise, padding=0)
    dropped = [f"{name}: {why}" for name, why in findings.dropped.items()]
    _print_names(console, "What stops the run" if findings.remedy else unused, dropped)
    if findings.remedy:
        console.print(f"[bold red]>[/] {escape(findings.remedy)}", soft_wrap=True)
    _print_names(console, "Equal files", _joined(" = ", findings.equal))
    _print_names(console, "Look alike", _joined(" ~ ", findings.alike))


def _joined(sign: str, groups: Sequence[Sequence[str]]) -> list[str]:
    return [sign.join(names) for names in groups]


def _print_table(
    console: Console,
    title: str,
    rows: "Sequence[SourceFindings | BucketFindings | NoiseFindings]",
    *,
    num_texts: int = 1,
    padding: int = 1,
) -> None:
    """Print a table whose first columns hold texts, and the others numbers; none without rows."""
    if not rows:
        return
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, padding))
    for place, name in enumerate(rows[0].COLUMNS):
        table.add_column(name, justify="left" if place < num_texts else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row.cells))
    console.print(table)


def _pairs(title: str, facts: Mapping[str, str]) -> Table:
    table = Table(title=title or None, title_justify="left", show_header=False, box=box.SIMPLE)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(escape(name), escape(value))
    return table


def _print_names(console: Console, what: str, names: list[str]) -> None:
    if not names:
        return
    console.print(f"[bold]{what} ({len(names)})[/]")
    for name in names[:_MAX_NAMED]:
        console.print(f"  {escape(name)}", soft_wrap=True)
    if len(names) > _MAX_NAMED:
        console.print(f"  and {len(names) - _MAX_NAMED} more, on the page")
