"""Publish a run's LoRA on the hub of Hugging Face, with its model card and that card's images."""

import argparse
import logging
from pathlib import Path

from diffsynth_lite.cli.console import print_lines
from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.run_folder.folder import RunFolder

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``diffsynth-lite publish``."""
    parser.add_argument("folder", type=Path, metavar="RUN", help="run folder")
    parser.add_argument(
        "--to", required=True, metavar="USER/NAME", help="repository; created if it does not exist"
    )
    parser.add_argument(
        "--lora",
        choices=("last", "best", "ema"),
        default="last",
        help="the latest (default), that with the lowest loss on held-out data, or the moving average",
    )
    parser.add_argument("--private", action="store_true", help="create a private repository")
    parser.add_argument(
        "--dry-run", action="store_true", help="list what would be published, and send nothing"
    )


def run(parsed: argparse.Namespace) -> None:
    """List the files, and publish them."""
    from diffsynth_lite.run_folder.publishing import Publication  # takes a second to import

    folder = RunFolder(parsed.folder.expanduser())
    loras = {"last": folder.lora_folder, "best": folder.best_lora_folder, "ema": folder.ema_lora_folder}
    publication = Publication.of_run(folder, loras[parsed.lora], parsed.to)
    print_lines(
        f"To {parsed.to}{', private' if parsed.private else ''}:",
        *(f"  {name}  {format_bytes(size)}" for name, size in publication.sizes.items()),
    )
    if parsed.dry_run:
        print_lines("Nothing was sent.")
        return
    logger.info("Published: %s", publication.send(private=parsed.private))
