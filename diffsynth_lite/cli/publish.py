"""Publish a run's LoRA on the hub of Hugging Face, with its model card and that card's images."""

import argparse
import logging
from pathlib import Path

from diffsynth_lite.cli.console import print_lines
from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.errors import UserError
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.loras import chosen_or, exports_of, find_lora_place, run_of

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``diffsynth-lite publish``."""
    parser.add_argument(
        "folder", metavar="RUN[@STEP]", help="run folder; also @1000, @last, @best, @ema or @chosen of it"
    )
    parser.add_argument(
        "--to", required=True, metavar="USER/NAME", help="repository; created if it does not exist"
    )
    parser.add_argument(
        "--lora",
        choices=("last", "best", "ema"),
        help="the latest, that with the lowest loss on held-out data, or the moving average (default: the "
        "chosen one, else the latest)",
    )
    parser.add_argument("--private", action="store_true", help="create a private repository")
    parser.add_argument(
        "--license",
        metavar="ID",
        help="licence in the header of the card that is sent, as the hub names it, such as apache-2.0 "
        "(default: the card's own, which is that of the base model)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="list what would be published, and send nothing"
    )


def run(parsed: argparse.Namespace) -> None:
    """List the files, and publish them."""
    from diffsynth_lite.run_folder.publishing import Publication  # takes a second to import

    given = parsed.folder if parsed.lora else chosen_or(parsed.folder)
    folder = Path(given).expanduser()
    if folder.exists() or "@" not in given:
        run, lora = RunFolder(folder), exports_of(RunFolder(folder))[parsed.lora or "last"]
    elif parsed.lora is None:
        lora = find_lora_place(given)
        run = run_of(lora) or RunFolder(folder)
    else:
        raise UserError(f"--lora {parsed.lora}: {parsed.folder} names a LoRA already; leave one of them out")
    publication = Publication.of_run(run, lora, parsed.to, parsed.license)
    print_lines(
        f"To {parsed.to}{', private' if parsed.private else ''}:",
        *(f"  {name}  {format_bytes(size)}" for name, size in publication.sizes.items()),
        f"Licence: {publication.licence or 'none; name it with --license, or in the header of the card'}",
    )
    if parsed.dry_run:
        print_lines("Nothing was sent.")
        return
    logger.info("Published: %s", publication.send(private=parsed.private))
