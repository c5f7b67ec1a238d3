"""Ways to learn, side by side: the quickstart's four new colours, taught to its mini Qwen-Image in each.

    python scripts/benchmarks/methods.py [--method NAME ...] [--preserve]
    python scripts/benchmarks/methods.py --preservation

Each way is trained from three seeds as the quickstart is, with half its steps; then 16 prompts of new
colours, none of them a caption of the training set, and 24 of colours that the model knew before are
generated with plain diffusers, from the same noise each time, and their colours are measured. Of each figure
the median over the seeds, with the lowest and the highest:

    right        prompts of new colours whose generated colour is nearest to the named one, of 16
    new, known   how far a generated colour is from the named one, in RGB: 0 is exact, 441 black for white
    moved        how far the colours of the 24 are from those that the model generated before
    CPU s        seconds of the processor, one thread, the start of the run included

With ``--preserve`` 32 images of known colours are there, too, which are preserved: one in five samples. The
second form compares what may be preserved.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from meters import print_table
from PIL.Image import Image

from diffsynth_lite.cli.train import main as train

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "quickstart"
sys.path.insert(0, str(EXAMPLE))

import comparison  # noqa: E402
import score  # noqa: E402
import shapes  # noqa: E402
from measure import read_images, shape_colour, summarise  # noqa: E402

NEW = shapes.held_out_scenes()
KNOWN = shapes.known_scenes(24)
MODEL = EXAMPLE / "mini_qwen_image"

Figures = Mapping[str, float]
"""Of one run, by column."""
COLUMNS = ("right", "new", "known", "moved", "CPU s")
STEPS = 150
SEEDS = (0, 1, 2)
_RATE = "train.learning_rate={:g}"


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to learn.

    Attributes:
        rate: of the learning, the best of several in one run each of another seed.
        rate_setting: where it goes, with the place of the number.
    """

    settings: tuple[str, ...] = ()
    rate: float
    rate_setting: str = _RATE

    @property
    def overrides(self) -> tuple[str, ...]:
        """What the quickstart's config gets."""
        return *self.settings, self.rate_setting.format(self.rate)


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


class TaughtColours:
    """Trains and measures, with what all runs share in a folder.

    Args:
        folder: for images, cache and runs; the log of all runs is in it.
        steps: of each run.

    Attributes:
        folder: as given.
        images: the training set of the quickstart.
    """

    def __init__(self, folder: Path, *, steps: int) -> None:
        self.folder, self.images = folder, folder / "images"
        self._steps, self._num_runs = steps, 0
        make = [sys.executable, str(EXAMPLE / "make_data.py"), "--output", str(self.images)]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
        comparison.silence_loading_bars()
        self._pipeline = score.load_pipeline(MODEL)
        self._before = score.generate_prompts(self._pipeline, [*NEW, *KNOWN])

    def base(self) -> Figures:
        """The figures of the model before it is taught anything."""
        return self._figures(self._before)

    def taught(self, *settings: str, seed: int, sources: Sequence[str] = ()) -> Figures:
        """The figures of a run.

        Args:
            settings: next to those of the quickstart.
            sources: the entries of ``data.sources``; those of the quickstart where there are none.
        """
        run = self.folder / f"run {self._num_runs}"
        self._num_runs += 1
        listed = ", ".join(sources or [f"{{path: {self.images}}}"])
        places = (
            *(f"model.path={MODEL}", "data.path=null", f"data.sources=[{listed}]"),
            *(f"data.cache_dir={self.folder / 'cache'}", f"output.dir={run}"),
            *("validation.prompts=[]", "validation.loss_items=0", "validation.item_losses=0"),
            *(f"train.steps={self._steps}", f"train.seed={seed}", "train.use_gradient_checkpointing=false"),
        )
        started_at = time.process_time()
        with (self.folder / "log").open("a") as log, redirect_stdout(log), redirect_stderr(log):
            code = train(["--config", "quickstart.yaml", *places, *settings])
        seconds = time.process_time() - started_at
        if code:
            sys.exit((self.folder / "log").read_text())
        # The model itself takes adapters of every kind, its pipeline LoRAs only.
        transformer = self._pipeline.transformer
        transformer.load_lora_adapter(run / "lora", weight_name=comparison.LORA_FILE, prefix="transformer")
        try:
            generated = score.generate_prompts(self._pipeline, [*NEW, *KNOWN])
        finally:
            transformer.unload_lora()
        return {**self._figures(generated), "CPU s": seconds}

    def _figures(self, generated: Sequence[Image]) -> Figures:
        new = summarise(read_images(generated[: len(NEW)], NEW))
        known = summarise(read_images(generated[len(NEW) :], KNOWN))
        pairs = zip(self._before[len(NEW) :], generated[len(NEW) :], strict=True)
        moved = np.mean([np.linalg.norm(shape_colour(one) - shape_colour(other)) for one, other in pairs])
        return {
            "right": len(NEW) * new.accuracy,
            "new": new.distance,
            "known": known.distance,
            "moved": float(moved),
        }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table of the methods, or of the sweep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--method", action="append", choices=METHODS, help="these only")
    parser.add_argument("--preserve", action="store_true", help="images of known colours, too")
    parser.add_argument("--preservation", action="store_true", help="compare what may be preserved")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each run (default: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="default: %(default)s")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        bench = TaughtColours(Path(folder), steps=options.steps)
        heading, ways = "method", chosen_methods(bench, options)
        if options.preservation:
            heading, ways = "preserved", {name: ((), sources) for name, sources in preserved(bench).items()}
        rows = [spread_row(heading, "before training", [bench.base()])]
        for name, (overrides, sources) in ways.items():
            runs = [bench.taught(*overrides, seed=seed, sources=sources) for seed in options.seeds]
            rows.append(spread_row(heading, name, runs))
            print(rows[-1], file=sys.stderr)
        print_table(f"{options.steps} steps of 8 images, seeds {list(options.seeds)}", rows)


def chosen_methods(
    bench: TaughtColours, options: argparse.Namespace
) -> dict[str, tuple[tuple[str, ...], list[str]]]:
    """The settings and sources of each chosen method, by its name and rate."""
    sources = with_preserved(bench) if options.preserve else []
    chosen = {name: METHODS[name] for name in options.method or METHODS}
    return {f"{name}, {method.rate:g}": (method.overrides, sources) for name, method in chosen.items()}


def with_preserved(bench: TaughtColours) -> list[str]:
    """The training set, and as many images of known colours, a quarter of which a pass has to preserve."""
    folder, rng = bench.folder / "known", random.Random(0)
    folder.mkdir()
    for place in range(len(list(bench.images.glob("*.png")))):
        scene = shapes.random_known_scene(rng)
        shapes.draw_scene(scene, rng).save(folder / f"{place:02}.png")
        (folder / f"{place:02}.txt").write_text(scene.caption)
    return [f"{{path: {bench.images}}}", f"{{path: {folder}, preserve: true, weight: 0.25}}"]


def preserved(bench: TaughtColours) -> dict[str, list[str]]:
    """The sources of each way to preserve."""
    images = bench.images

    def with_same(*settings: str) -> list[str]:
        source = ", ".join((f"path: {images}", "preserve: true", "weight: 0.25", *settings))
        return [f"{{path: {images}}}", f"{{{source}}}"]

    return {
        "nothing": [],
        "the same, without a caption": with_same("captions: none"),
        "the same, `a shape`": with_same("captions: none", "trigger: a shape"),
        "the same, known colours named": with_same(f"metadata: {naming_known_colours(bench)}"),
        "images of known colours": with_preserved(bench),
    }


def naming_known_colours(bench: TaughtColours) -> Path:
    """A table of the training set whose captions name any known colours in place of the new ones."""
    rng, rows = random.Random(0), []
    for image in sorted(bench.images.glob("*.png")):
        colour, caption = image.name.partition("_")[0], image.with_suffix(".txt").read_text().strip()
        text = caption.replace(colour, rng.choice(list(shapes.KNOWN_COLOURS)))
        rows.append(json.dumps({"file_name": image.name, "text": text}) + "\n")
    table = bench.folder / "known.jsonl"
    table.write_text("".join(rows))
    return table


def spread_row(name: str, value: str, runs: Sequence[Figures]) -> dict[str, str]:
    """A row of a table: of each figure the median over the runs, with the lowest and the highest.

    Args:
        name: of the first column.
        value: in it.
    """
    return {name: value} | {
        column: _spread([run[column] for run in runs]) if column in runs[0] else "" for column in COLUMNS
    }


def _spread(values: Sequence[float]) -> str:
    middle, low, high = (f"{value:.0f}" for value in (statistics.median(values), min(values), max(values)))
    return middle if low == high else f"{middle} ({low} - {high})"


if __name__ == "__main__":
    main()
