"""Ways to learn, side by side: the quickstart's four new colours, taught to its mini Qwen-Image in each.

    python scripts/benchmarks/methods.py [--method NAME ...] [--preserve] [--sweep]

Each way is trained from three seeds as the quickstart is, with half its steps. What is measured is in
``taught_colours.py``; of each figure the median over the seeds, with the lowest and the highest. With
``--preserve`` 32 pictures of known colours are there, too, which are preserved: one in five samples.

``--sweep`` is how the learning rates were chosen: one run of another seed for each rate, relative to the one
of the table, and the sum of the distances of new and of known colours.
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from meters import print_table
from taught_colours import Figures, TaughtColours, shapes, spread_row

STEPS = 150
SEEDS = (0, 1, 2)
SWEPT_SEED = 3
TIMES = (0.25, 0.5, 1.0, 2.0, 4.0)
_RATE = "train.learning_rate={:g}"


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to learn.

    Attributes:
        settings: those that it is.
        rate: of the learning, found by the sweep.
        rate_setting: where it goes, with the place of the number.
    """

    settings: tuple[str, ...] = ()
    rate: float
    rate_setting: str = _RATE

    def overrides(self, *, times: float = 1.0) -> tuple[str, ...]:
        """What the quickstart's config gets, with the rate multiplied."""
        return *self.settings, self.rate_setting.format(self.rate * times)


METHODS = {
    "AdamW": Method(rate=8e-3),
    "AdamW, Huber": Method(settings=("objective.loss=huber",), rate=8e-3),
    "Muon": Method(settings=("train.optimizer=muon",), rate=4e-3),
    "Prodigy": Method(
        settings=("train.optimizer=prodigy", "train.learning_rate=1"),
        rate=0.5,
        rate_setting="train.optimizer_options={{d_coef: {:g}}}",
    ),
    "schedule-free": Method(settings=("train.optimizer=schedule_free",), rate=16e-3),
    "LoRA+, ratio 4": Method(settings=("lora.loraplus_ratio=4",), rate=4e-3),
    "DoRA": Method(settings=("lora.kind=dora",), rate=8e-3),
    "LoKr": Method(settings=("lora.kind=lokr",), rate=16e-3),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table of the methods, or of the sweep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--method", action="append", choices=METHODS, help="these alone")
    parser.add_argument("--preserve", action="store_true", help="pictures of known colours, too")
    parser.add_argument("--sweep", action="store_true", help="try each with other learning rates")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each run (default: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="default: %(default)s")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    names = options.method or list(METHODS)
    with tempfile.TemporaryDirectory() as folder:
        bench = TaughtColours(Path(folder), steps=options.steps)
        if options.sweep:
            rows = [swept_row(bench, name) for name in names]
            print_table(f"Sum of both distances, {options.steps} steps, by learning rate", rows)
            return
        sources = with_preserved(bench) if options.preserve else []
        rows = [spread_row("method", "before", [bench.base()])]
        for name in names:
            method = METHODS[name]
            runs = [bench.taught(*method.overrides(), seed=seed, sources=sources) for seed in options.seeds]
            rows.append(spread_row("method", f"{name}, {method.rate:g}", runs))
            print(rows[-1], file=sys.stderr)
        print_table(f"{options.steps} steps of 8 pictures, seeds {list(options.seeds)}", rows)


def with_preserved(bench: TaughtColours) -> list[str]:
    """The training set, and as many pictures of known colours, a quarter of which a pass has to preserve."""
    folder, rng = bench.folder / "known", random.Random(0)
    folder.mkdir()
    for place in range(len(list(bench.pictures.glob("*.png")))):
        scene = shapes.random_known_scene(rng)
        shapes.draw_scene(scene, rng).save(folder / f"{place:02}.png")
        (folder / f"{place:02}.txt").write_text(scene.caption)
    return [f"{{path: {bench.pictures}}}", f"{{path: {folder}, preserve: true, weight: 0.25}}"]


def swept_row(bench: TaughtColours, name: str) -> dict[str, str]:
    """The distances of a method by its learning rate."""
    row = {"method": f"{name}, {METHODS[name].rate:g}"}
    for times in TIMES:
        run = bench.taught(*METHODS[name].overrides(times=times), seed=SWEPT_SEED)
        row[f"x {times:g}"] = _distances(run)
        print(row, file=sys.stderr)
    return row


def _distances(run: Figures) -> str:
    return f"{run['new'] + run['known']:.0f} ({run['new']:.0f} + {run['known']:.0f})"


if __name__ == "__main__":
    main()
