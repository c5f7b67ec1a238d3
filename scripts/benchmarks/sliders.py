"""A colour slider on the quickstart's mini Qwen-Image, learned from prompts only, from three seeds.

    python scripts/benchmarks/sliders.py [--seeds 0 1 2] [--steps 200] [--slider "{target: difference}"]

It moves purple to red at strength 1 and to blue at -1, from six triples of prompts with two anchors. Then it
is used at nine strengths on prompts that it was not trained on: 14 images of purple shapes (another shape and
ground, the words in other orders, other scenes), 4 of the anchored prompts and 6 of other colours, each from
the same noise at all strengths, by plain diffusers. Of each seed:

    rho          rank correlation of strength and measured colour, mean over the 14 images: 1 never turns back
    colour       place on the line from blue (-1) to red (1), mean of the 14, at strengths -2, -1, 0, 1, 2
    at           strengths at which that mean crosses -0.8 and 0.6; what follows is the mean of both
    IoU          overlap of a shape's outline with that at strength 0; in the first row, of the base's own
                 images of blue and red shapes with that of its purple ones: more is not to be had
    anchors      change of the anchored images against strength 0, RMS of 0 to 255; others: of other colours
"""

import argparse
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import yaml
from meters import print_table
from PIL.Image import Image

from diffsynth_lite.cli.train import main as train

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "quickstart"
sys.path.insert(0, str(EXAMPLE))

import comparison  # noqa: E402
import score  # noqa: E402
import shapes  # noqa: E402
from measure import find_foreground, shape_colour  # noqa: E402

MODEL = EXAMPLE / "mini_qwen_image"
SEEDS = (0, 1, 2)
STRENGTHS = (-2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0)
COLUMNS = ("seed", "rho", "colour", "at", "IoU", "anchors", "others", "CPU s")
GOALS = (-0.8, 0.6)
"""Colours at which the side effects are compared: those of runs whose strengths differ."""
BLUE, RED = (np.array(shapes.COLOURS[name], float) for name in ("blue", "red"))
Curve = npt.NDArray[np.float64]
"""A value at each strength, (9,)."""


def _scene(colour: str, shape: str, ground: str) -> str:
    return shapes.Scene(colour, shape, ground).caption


SUBJECTS = [
    *(("circle", "black"), ("ring", "white"), ("triangle", "gray")),
    *(("circle", "white"), ("ring", "gray"), ("triangle", "black")),
]
ANCHORS = (_scene("green", "square", "white"), _scene("yellow", "star", "black"))
OWN = (
    *[_scene("purple", "circle", "gray")] * 4,
    *["a circle purple on a gray background", "one purple circle on a gray background"] * 2,
    *[_scene("purple", *scene) for scene in (("star", "black"), ("square", "white"), ("cross", "gray"))] * 2,
)
OTHERS = (
    *[_scene("cyan", "ring", "gray")] * 2,
    _scene("orange", "cross", "black"),
    *[_scene("pink", "circle", "gray")] * 2,
    _scene("green", "circle", "gray"),
)
PROMPTS = (*OWN, *ANCHORS, *ANCHORS, *OTHERS)
NOISE = [
    zlib.crc32(prompt.encode()) % 10**6 + PROMPTS[:place].count(prompt)
    for place, prompt in enumerate(PROMPTS)
]
"""Seed of each image: no two of a prompt have the same noise."""
GROUPS = {
    "own": slice(0, len(OWN)),
    "anchors": slice(len(OWN), len(OWN) + 4),
    "others": slice(len(OWN) + 4, None),
}


@dataclass(frozen=True)
class Judged:
    """The images of all prompts at all strengths, measured: arrays of strengths and images, (9, 24).

    Attributes:
        colour: place on the line from blue (-1) to red (1).
        overlap: of the outline with that at strength 0.
        change: RMS against strength 0.
    """

    colour: npt.NDArray[np.float64]
    overlap: npt.NDArray[np.float64]
    change: npt.NDArray[np.float64]

    @classmethod
    def of(cls, images: Sequence[Sequence[Image]]) -> "Judged":
        """Measure images, by strength and prompt."""
        pixels = np.array([[np.asarray(image.convert("RGB"), float) for image in row] for row in images])
        masks = np.array([[find_foreground(one) for one in row] for row in pixels])
        middle, axis = (RED + BLUE) / 2, (RED - BLUE) / 2
        shown = np.array([[shape_colour(image) for image in row] for row in images])
        zero = STRENGTHS.index(0.0)
        both, either = masks & masks[zero], masks | masks[zero]
        return cls(
            colour=(shown - middle) @ axis / (axis @ axis),
            overlap=both.sum((2, 3)) / either.sum((2, 3)).clip(1),
            change=np.sqrt(((pixels - pixels[zero]) ** 2).mean((2, 3, 4))),
        )

    def row(self) -> dict[str, str]:
        """The figures, see the top of this file."""
        colours = self.colour[:, GROUPS["own"]]
        curve = colours.mean(1)
        places = [crossing(curve, goal) for goal in GOALS]

        def at_goals(values: npt.NDArray[np.float64], group: str, digits: int) -> str:
            if None in places:
                return "-"
            mean = values[:, GROUPS[group]].mean(1)
            return f"{np.mean([np.interp(place, STRENGTHS, mean) for place in places if place]):.{digits}f}"

        return {
            "rho": f"{np.mean([rank_correlation(column) for column in colours.T]):.3f}",
            "colour": " ".join(f"{value:.2f}" for value in curve[::2]),
            "at": ", ".join("-" if place is None else f"{place:.2f}" for place in places),
            "IoU": at_goals(self.overlap, "own", 3),
            "anchors": at_goals(self.change, "anchors", 1),
            "others": at_goals(self.change, "others", 1),
        }


def crossing(curve: Curve, goal: float) -> float | None:
    """The strength nearest to 0 at which a curve crosses a value, on the side of its sign; None if none."""
    zero, step = STRENGTHS.index(0.0), 1 if goal > curve[STRENGTHS.index(0.0)] else -1
    for place in range(zero, zero + 4 * step, step):
        low, high = curve[place], curve[place + step]
        if min(low, high) <= goal <= max(low, high):
            part = (goal - low) / (high - low)
            return float(STRENGTHS[place] + part * (STRENGTHS[place + step] - STRENGTHS[place]))
    return None


def rank_correlation(values: Curve) -> float:
    """Spearman's, of values with their strengths; values that are equal to a thousandth share a rank."""
    rounded = np.round(values, 3)
    ranks = [(rounded < value).sum() + ((rounded == value).sum() - 1) / 2 for value in rounded]
    return float(np.corrcoef(ranks, np.arange(len(STRENGTHS)))[0, 1])


def config(folder: Path) -> dict[str, Any]:
    """The settings of a run next to those of the quickstart, by section."""
    triples = [
        dict(zip(("neutral", "positive", "negative"), prompts, strict=True))
        for scene in SUBJECTS
        for prompts in [[_scene(colour, *scene) for colour in ("purple", "red", "blue")]]
    ]
    return {
        "extends": str(EXAMPLE.parents[1] / "configs" / "quickstart.yaml"),
        "model": {"path": str(MODEL)},
        "lora": {"rank": 4, "target_modules": ["attention"]},
        "data": {"path": None, "cache_dir": str(folder / "cache")},
        "objective": {"slider": {"triples": triples, "anchors": list(ANCHORS)}},
        "train": {"global_batch_size": 4, "micro_batch_size": 4, "use_gradient_checkpointing": False},
        "validation": {"prompts": [], "num_inference_steps": 12},
        "output": {"dir": str(folder / "run"), "keep_checkpoints": 1},
    }


class Bench:
    """Trains and judges sliders, with what all runs share in a folder."""

    def __init__(self, folder: Path, *, steps: int) -> None:
        self._folder, self._steps = folder, steps
        comparison.silence_loading_bars()
        self._pipeline = score.load_pipeline(MODEL)

    def figures(self, seed: int, changes: Mapping[str, Any]) -> dict[str, str]:
        """The figures of a run.

        Args:
            changes: settings of ``objective.slider``.
        """
        folder = self._folder / f"seed {seed}"
        folder.mkdir()
        settings = config(folder)
        settings["data"]["cache_dir"] = str(self._folder / "cache")
        settings["objective"]["slider"] |= changes
        file = folder / "slider.yaml"
        file.write_text(yaml.safe_dump(settings))
        arguments = [f"train.steps={self._steps}", f"train.seed={seed}"]
        log, started_at = folder / "log", time.process_time()
        with log.open("w") as text, redirect_stdout(text), redirect_stderr(text):
            code = train(["--config", str(file), *arguments])
        seconds = time.process_time() - started_at
        if code:
            sys.exit(log.read_text())
        return {"seed": str(seed), **self._judge(folder / "run" / "lora").row(), "CPU s": f"{seconds:.0f}"}

    def _judge(self, lora: Path) -> Judged:
        transformer = self._pipeline.transformer
        transformer.load_lora_adapter(
            lora, weight_name=comparison.LORA_FILE, prefix="transformer", adapter_name="slider"
        )
        try:
            images = []
            for strength in STRENGTHS:
                transformer.set_adapters("slider", weights=strength)
                images.append(self._generate(PROMPTS))
        finally:
            transformer.unload_lora()
        return Judged.of(images)

    def base(self) -> dict[str, str]:
        """How far the base's own images of red and blue shapes have the outlines of its purple ones."""
        images = [
            self._generate([prompt.replace("purple", colour) for prompt in OWN])
            for colour in ("blue", "purple", "red")
        ]
        blue, purple, red = ([find_foreground(np.asarray(one, float)) for one in row] for row in images)
        overlaps = [
            (one & own).sum() / (one | own).sum()
            for row in (blue, red)
            for one, own in zip(row, purple, strict=True)
        ]
        return {"seed": "base", "IoU": f"{np.mean(overlaps):.3f}"}

    def _generate(self, prompts: Sequence[str]) -> list[Image]:
        images: list[Image] = self._pipeline(
            prompt=list(prompts),
            negative_prompt=[" "] * len(prompts),
            true_cfg_scale=comparison.GUIDANCE_SCALE,
            height=shapes.SIZE,
            width=shapes.SIZE,
            num_inference_steps=12,
            generator=[torch.Generator().manual_seed(seed) for seed in NOISE[: len(prompts)]],
        ).images
        return images


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=200, help="of each run (default: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="default: %(default)s")
    parser.add_argument("--slider", default="{}", help="settings of objective.slider, as {name: value}")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), steps=options.steps)
        rows = [bench.base()]
        for seed in options.seeds:
            rows.append(bench.figures(seed, yaml.safe_load(options.slider)))
            print(rows[-1], file=sys.stderr)
        shown = [{column: row.get(column, "") for column in COLUMNS} for row in rows]
        print_table(f"{options.steps} steps of 4 samples and 2 anchors, {options.slider}", shown)


if __name__ == "__main__":
    main()
