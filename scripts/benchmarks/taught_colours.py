"""What a run of the quickstart teaches: its four new colours, and what becomes of those that were known.

Trains its mini Qwen-Image under any settings, draws 16 prompts of new colours, none of them a caption of the
training set, and 24 of colours that it knew before with plain diffusers, from the same noise each time, and
measures the colours.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
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

Figures = Mapping[str, float]
"""Of one run:

    right        prompts of new colours whose drawn colour is nearest to the one that is named, of 16
    new, known   how far a drawn colour is from the one that is named, in RGB: 0 is exact, 441 black for white
    moved        how far the colours drawn for the 24 are from those that the model drew before
    CPU s        seconds of the processor, one thread, the start of the run included
"""
COLUMNS = ("right", "new", "known", "moved", "CPU s")


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
        self._before = score.draw_prompts(self._pipeline, [*NEW, *KNOWN])

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
            drawn = score.draw_prompts(self._pipeline, [*NEW, *KNOWN])
        finally:
            transformer.unload_lora()
        return {**self._figures(drawn), "CPU s": seconds}

    def _figures(self, drawn: Sequence[Image]) -> Figures:
        new = summarise(read_pictures(drawn[: len(NEW)], NEW))
        known = summarise(read_pictures(drawn[len(NEW) :], KNOWN))
        pairs = zip(self._before[len(NEW) :], drawn[len(NEW) :], strict=True)
        moved = np.mean([np.linalg.norm(shape_colour(one) - shape_colour(other)) for one, other in pairs])
        return {
            "right": len(NEW) * new.accuracy,
            "new": new.distance,
            "known": known.distance,
            "moved": float(moved),
        }


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
