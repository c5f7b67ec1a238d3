"""What preservation keeps: the quickstart's four new colours, taught to its mini Qwen-Image with and without.

    python scripts/benchmarks/preservation.py [--steps 150] [--seeds 0 1 2] [--weight 0.25]

Each way is trained from each seed as the quickstart is. Then 16 prompts of new colours, none of them a
caption of the training set, and 24 of colours that the model knew before are drawn with plain diffusers, from
the same noise for all. Of each figure the median over the seeds, with the lowest and the highest:

    right        prompts of new colours whose drawn colour is nearest to the one that is named
    new, known   how far a drawn colour is from the one that is named, in RGB: 0 is exact, 441 black for white
    moved        how far the colours drawn for the 24 are from those that the model drew before
    CPU          seconds of the processor, one thread, the start of the run included
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
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
from measure import read_pictures, shape_colour, summarise  # noqa: E402

NEW = shapes.held_out_scenes()
KNOWN = shapes.known_scenes(24)
MODEL = EXAMPLE / "mini_qwen_image"
Figures = dict[str, float]


class Bench:
    """Trains with different sources of data, and measures what came of it.

    Args:
        folder: for pictures, cache and runs; the log of all runs is in it.
        steps: of each run.
        weight: of what is preserved, in a pass over the data.
    """

    def __init__(self, folder: Path, *, steps: int, weight: float) -> None:
        self._folder, self._steps, self._num_runs = folder, steps, 0
        self.ways = _ways(folder, weight)
        comparison.silence_loading_bars()
        self._pipeline = score.load_pipeline(MODEL)
        self._before = score.draw_prompts(self._pipeline, [*NEW, *KNOWN])

    def base(self) -> Figures:
        """The figures of the model before it is taught anything."""
        return self._figures(self._before)

    def taught(self, sources: Sequence[str], seed: int) -> Figures:
        """The figures of a run."""
        run = self._folder / f"run {self._num_runs}"
        self._num_runs += 1
        settings = (
            *(f"model.path={MODEL}", "data.path=null", f"data.sources=[{', '.join(sources)}]"),
            *(f"data.cache_dir={self._folder / 'cache'}", f"output.dir={run}"),
            *("validation.prompts=[]", "validation.loss_items=0", "validation.item_losses=0"),
            *(f"train.steps={self._steps}", f"train.seed={seed}", "train.use_gradient_checkpointing=false"),
        )
        started_at = time.process_time()
        with (self._folder / "log").open("a") as log, redirect_stdout(log), redirect_stderr(log):
            code = train(["--config", "quickstart.yaml", *settings])
        seconds = time.process_time() - started_at
        if code:
            sys.exit((self._folder / "log").read_text())
        self._pipeline.load_lora_weights(run / "lora")
        try:
            drawn = score.draw_prompts(self._pipeline, [*NEW, *KNOWN])
        finally:
            self._pipeline.unload_lora_weights()
        return {**self._figures(drawn), "CPU": seconds}

    def _figures(self, drawn: Sequence[Image]) -> Figures:
        new, known = (
            summarise(read_pictures(drawn[part], scenes))
            for part, scenes in ((slice(len(NEW)), NEW), (slice(len(NEW), None), KNOWN))
        )
        pairs = zip(self._before[len(NEW) :], drawn[len(NEW) :], strict=True)
        moved = np.mean([np.linalg.norm(shape_colour(one) - shape_colour(other)) for one, other in pairs])
        return {
            "right": len(NEW) * new.accuracy,
            "new": new.distance,
            "known": known.distance,
            "moved": float(moved),
        }


def _ways(folder: Path, weight: float) -> dict[str, list[str]]:
    """The sources of each way; draws what they hold."""
    pictures, others, captions = folder / "pictures", folder / "others", folder / "known.jsonl"
    make = [sys.executable, str(EXAMPLE / "make_data.py"), "--output", str(pictures)]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    rng = random.Random(0)
    rows = []
    for picture in sorted(pictures.glob("*.png")):
        colour, caption = picture.name.partition("_")[0], picture.with_suffix(".txt").read_text().strip()
        text = caption.replace(colour, rng.choice(list(shapes.KNOWN_COLOURS)))
        rows.append(json.dumps({"file_name": picture.name, "text": text}) + "\n")
    captions.write_text("".join(rows))
    others.mkdir()
    for place in range(len(rows)):
        scene = shapes.random_known_scene(rng)
        shapes.draw_scene(scene, rng).save(others / f"{place:02}.png")
        (others / f"{place:02}.txt").write_text(scene.caption)

    def preserved(path: Path, *settings: str) -> list[str]:
        values = ", ".join((f"path: {path}", "preserve: true", f"weight: {weight}", *settings))
        return [f"{{path: {pictures}}}", f"{{{values}}}"]

    return {
        "nothing": [f"{{path: {pictures}}}"],
        "the same, without a caption": preserved(pictures, "captions: none"),
        "the same, `a shape`": preserved(pictures, "captions: none", "trigger: a shape"),
        "the same, known colours named": preserved(pictures, f"metadata: {captions}"),
        "pictures of known colours": preserved(others),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=150, help="of each run (default: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2), help="default: %(default)s")
    parser.add_argument("--weight", type=float, default=0.25, help="of what is preserved (default: 1/4)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), steps=options.steps, weight=options.weight)
        rows = [row("before training", [bench.base()])]
        for name, sources in bench.ways.items():
            rows.append(row(name, [bench.taught(sources, seed) for seed in options.seeds]))
            print(rows[-1], file=sys.stderr)
        print_table(f"{options.steps} steps of 8 pictures, seeds {list(options.seeds)}", rows)


def row(name: str, runs: Sequence[Figures]) -> dict[str, str]:
    """A row of the table: the spread of each figure."""
    return {"preserved": name} | {
        figure: _spread([run[figure] for run in runs]) if figure in runs[0] else ""
        for figure in ("right", "new", "known", "moved", "CPU")
    }


def _spread(values: Sequence[float]) -> str:
    middle, low, high = (f"{value:.1f}" for value in (statistics.median(values), min(values), max(values)))
    return middle if low == high else f"{middle} ({low} - {high})"


if __name__ == "__main__":
    main()
