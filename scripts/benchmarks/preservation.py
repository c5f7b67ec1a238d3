"""What preservation keeps, by what is preserved: the quickstart's new colours, taught to its mini Qwen-Image.

    python scripts/benchmarks/preservation.py [--steps 150] [--seeds 0 1 2]

Each way is trained from each seed as the quickstart is, with one in five samples preserved. Columns as in
``taught_colours.py``; of each figure the median over the seeds, with the lowest and the highest.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from meters import print_table
from methods import with_preserved
from taught_colours import TaughtColours, shapes, spread_row


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=150, help="of each run (default: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2), help="default: %(default)s")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        bench = TaughtColours(Path(folder), steps=options.steps)
        rows = [spread_row("preserved", "before training", [bench.base()])]
        for name, sources in ways(bench).items():
            runs = [bench.taught(seed=seed, sources=sources) for seed in options.seeds]
            rows.append(spread_row("preserved", name, runs))
            print(rows[-1], file=sys.stderr)
        print_table(f"{options.steps} steps of 8 pictures, seeds {list(options.seeds)}", rows)


def ways(bench: TaughtColours) -> dict[str, list[str]]:
    """The sources of each way."""
    pictures = bench.pictures

    def with_same(*settings: str) -> list[str]:
        preserved = ", ".join((f"path: {pictures}", "preserve: true", "weight: 0.25", *settings))
        return [f"{{path: {pictures}}}", f"{{{preserved}}}"]

    return {
        "nothing": [],
        "the same, without a caption": with_same("captions: none"),
        "the same, `a shape`": with_same("captions: none", "trigger: a shape"),
        "the same, known colours named": with_same(f"metadata: {naming_known_colours(bench)}"),
        "pictures of known colours": with_preserved(bench),
    }


def naming_known_colours(bench: TaughtColours) -> Path:
    """A table of the training set whose captions name any known colours in place of the new ones."""
    rng, rows = random.Random(0), []
    for picture in sorted(bench.pictures.glob("*.png")):
        colour, caption = picture.name.partition("_")[0], picture.with_suffix(".txt").read_text().strip()
        text = caption.replace(colour, rng.choice(list(shapes.KNOWN_COLOURS)))
        rows.append(json.dumps({"file_name": picture.name, "text": text}) + "\n")
    table = bench.folder / "known.jsonl"
    table.write_text("".join(rows))
    return table


if __name__ == "__main__":
    main()
