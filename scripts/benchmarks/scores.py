"""Whether scores find the best step: runs of the mini Qwen-Image whose steps have a measured truth.

    python scripts/benchmarks/scores.py FOLDER [--run NAME ...]

Runs are trained as the quickstart is, with other settings; what FOLDER has is not made again. At each scored
step images are generated for the truth, and others, of other prompts and noise, for the scores:

    Q        the truth: images with the named colour and shape, 0 to 1: the mean of 16 prompts of new colours
             (3 images each) and of 24 of known ones (2 each)
    N, K, Z  the scores, of 16 prompts of each kind, one image each

The stand-in for DINOv2 is a small network that learned shapes, grounds and the known colours from drawings,
for about 40 s; it has never seen a new colour. Prompt scores (SigLIP) decide nothing and are left out.
"""

import argparse
import random
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from itertools import pairwise, product, starmap
from pathlib import Path
from typing import get_args

import numpy as np
import torch
import torch.nn.functional as F
from meters import print_table
from PIL import Image
from torch import nn

from diffsynth_lite.cli.train import main as train
from diffsynth_lite.scores.measures import GeneratedFeatures, References
from diffsynth_lite.scores.recommendation import Mark, recommend, sum_of_means
from diffsynth_lite.scores.record import ScoredColumn, ScoreRecord

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "quickstart"
sys.path.insert(0, str(EXAMPLE))

import comparison  # noqa: E402
import make_data  # noqa: E402
import score  # noqa: E402
import shapes  # noqa: E402
from measure import find_foreground, read_image  # noqa: E402

MODEL = EXAMPLE / "mini_qwen_image"
BATCH, NUM_PROMPTS, NUM_DRAWS = 64, 16, 100
KNOWN, GROUNDS = list(shapes.KNOWN_COLOURS), list(shapes.GROUNDS)
_OF_FOUR = ("train.global_batch_size=4", "train.micro_batch_size=4")

Truth = tuple[np.ndarray, np.ndarray]
"""Share of right images by prompt of new colours, and of known ones."""


@dataclass(frozen=True)
class Run:
    """A run whose steps are judged; the settings are next to those of the quickstart."""

    data: str
    steps: Sequence[int]
    settings: tuple[str, ...] = ()


_RANK_4 = ("lora.rank=4", "train.seed=1")
_OVERTRAINED = (50, 100, 150, 200, 300, 400, 550, 700, 850, 1000)
_LAST = (20, 60, 120, 200, 300, 400, 500, 600, 800, 1000)
RUNS = {
    "normal": Run("all", range(30, 301, 30)),
    "overtrained": Run("four", _OVERTRAINED, ("train.learning_rate=6e-3", *_OF_FOUR)),
    "null": Run("all", (10, 20), ("train.learning_rate=1e-12",)),
    "later": Run("eight", range(60, 601, 60), (*_RANK_4, "train.learning_rate=3e-3", *_OF_FOUR)),
    "last": Run("eight", _LAST, ("train.seed=3", "train.learning_rate=6e-3", *_OF_FOUR)),
}


def training_set(name: str) -> dict[shapes.Scene, tuple[bytes, bytes]]:
    """The images (PNG) and captions of a training set, by what they show."""
    files = make_data.training_files()
    scenes = {}
    for stem in (file.removesuffix(".png") for file in files if file.endswith(".png")):
        colour, shape, _, ground = stem.split("_")
        scenes[shapes.Scene(colour, shape, ground)] = files[f"{stem}.png"], files[f"{stem}.txt"]
    places = {"all": range(8), "four": (0,), "eight": (2, 3)}[name]
    of_colours = ([scene for scene in scenes if scene.colour == colour] for colour in shapes.NEW_COLOURS)
    return {of_one[place]: scenes[of_one[place]] for of_one in of_colours for place in places}


def new_scenes() -> list[shapes.Scene]:
    """24 scenes of new colours, of no training set and not of the truth."""
    taken = {*shapes.held_out_scenes(), *training_set("all")}
    all_scenes = starmap(shapes.Scene, product(shapes.NEW_COLOURS, shapes.SHAPES, GROUNDS))
    scenes = sorted(all_scenes, key=lambda s: (shapes.SHAPES.index(s.shape), GROUNDS.index(s.ground)))
    return random.Random(6).sample([scene for scene in scenes if scene not in taken], 24)


def plain_scenes() -> list[shapes.Scene]:
    """24 scenes of known colours that are not of the truth."""
    scenes, rng = list(shapes.known_scenes(24)), random.Random(11)
    while len(scenes) < 48:
        scene = shapes.random_known_scene(rng)
        if scene not in scenes:
            scenes.append(scene)
    return scenes[24:]


@dataclass(frozen=True)
class Prompts:
    """Scenes that images are generated of, ``seeds`` each; the noise of no two groups is the same."""

    scenes: list[shapes.Scene]
    seeds: int
    first_seed: int


GROUPS = {
    "truth new": Prompts(shapes.held_out_scenes(), 3, 1_000_000),
    "truth known": Prompts(shapes.known_scenes(24), 2, 2_000_000),
    "new": Prompts(new_scenes(), 2, 3_000_000),
    "plain": Prompts(plain_scenes(), 2, 4_000_000),
}


def groups_of(data: str) -> dict[str, Prompts]:
    """The groups of a run with this training set, of which up to 16 captions are scored."""
    scenes = list(training_set(data))
    return GROUPS | {"taught": Prompts(random.Random(5).sample(scenes, min(16, len(scenes))), 2, 5_000_000)}


class Bench:
    """Trains and generates, into a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        comparison.silence_loading_bars()
        self._pipeline = score.load_pipeline(MODEL)

    def folder_of(self, name: str) -> Path:
        """The folder of a run, which is trained where it is not there yet."""
        run, folder = RUNS[name], self._folder / f"run {name}"
        if (folder / "checkpoints" / f"lora-{run.steps[-1]:08d}").exists():
            return folder
        images = self._folder / f"images {run.data}"
        images.mkdir(parents=True, exist_ok=True)
        for place, (png, caption) in enumerate(training_set(run.data).values()):
            (images / f"{place}.png").write_bytes(png)
            (images / f"{place}.txt").write_bytes(caption)
        places = (
            *(f"model.path={MODEL}", f"data.path={images}", f"data.cache_dir={self._folder / 'cache'}"),
            *(f"output.dir={folder}", f"output.checkpoint_every_steps={np.gcd.reduce(run.steps)}"),
            *("validation.prompts=[]", "validation.loss_items=0", "validation.item_losses=0"),
            *(f"train.steps={run.steps[-1]}", "train.use_gradient_checkpointing=false"),
        )
        with (self._folder / f"{name}.log").open("w") as log, redirect_stdout(log), redirect_stderr(log):
            code = train(["--config", "quickstart.yaml", *places, *run.settings])
        if code:
            sys.exit((self._folder / f"{name}.log").read_text())
        return folder

    def generated(self, name: str, step: int) -> dict[str, np.ndarray]:
        """The images of a step of a run, by group, (P, S, 64, 64, 3); step 0 is the base."""
        data = RUNS[name].data
        file = self._folder / "generated" / (f"{name} {step}.npz" if step else f"base {data}.npz")
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            if step:
                lora = self.folder_of(name) / "checkpoints" / f"lora-{step:08d}"
                self._pipeline.load_lora_weights(lora, weight_name=comparison.LORA_FILE)
            np.savez(file, **{group: self.generate(prompts) for group, prompts in groups_of(data).items()})
            self._pipeline.unload_lora_weights()
        with np.load(file) as stored:
            return {group: stored[group] for group in stored.files}

    def generate(self, prompts: Prompts) -> np.ndarray:
        """Images (P, S, 64, 64, 3) of the model as it is."""
        images: list[Image.Image] = []
        jobs = [
            (scene, prompts.first_seed + 1000 * place + seed)
            for place, scene in enumerate(prompts.scenes)
            for seed in range(prompts.seeds)
        ]
        for start in range(0, len(jobs), BATCH):
            part = jobs[start : start + BATCH]
            images += self._pipeline(
                prompt=[scene.caption for scene, _ in part],
                negative_prompt=[" "] * len(part),
                true_cfg_scale=comparison.GUIDANCE_SCALE,
                height=shapes.SIZE,
                width=shapes.SIZE,
                num_inference_steps=comparison.NUM_STEPS,
                generator=[torch.Generator().manual_seed(seed) for _, seed in part],
            ).images
        pixels = np.stack([np.asarray(image.convert("RGB")) for image in images])
        return pixels.reshape(len(prompts.scenes), prompts.seeds, *pixels.shape[1:])


class StandIn(nn.Module):
    """A network that learned shapes, grounds and known colours from 3,000 drawings."""

    def __init__(self) -> None:
        super().__init__()
        sides = ((3, 16), (16, 32), (32, 64), (64, 64))
        layers = (layer for a, b in sides for layer in (nn.Conv2d(a, b, 3, 2, 1), nn.ReLU()))
        self.body = nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 64), nn.ReLU())
        self.heads = nn.ModuleList([nn.Linear(64, len(names)) for names in (KNOWN, shapes.SHAPES, GROUNDS)])

    @classmethod
    def trained(cls, num_steps: int = 1500) -> "StandIn":
        """The network after its lesson, the same at each call."""
        torch.manual_seed(0)
        network, rng = cls(), random.Random(1)
        scenes = [shapes.random_known_scene(rng) for _ in range(3000)]
        drawings = [
            shapes.draw(
                scene.shape,
                tuple(
                    min(255, max(0, round(value + rng.gauss(0, 8)))) for value in shapes.COLOURS[scene.colour]
                ),
                shapes.GROUNDS[scene.ground],
                centre=(rng.uniform(0.42, 0.58), rng.uniform(0.42, 0.58)),
                radius=rng.uniform(0.23, 0.35),
            )
            for scene in scenes
        ]
        pixels = _tensor(np.stack([np.asarray(drawing) for drawing in drawings]))
        names = [
            (KNOWN.index(s.colour), shapes.SHAPES.index(s.shape), GROUNDS.index(s.ground)) for s in scenes
        ]
        wanted = torch.tensor(names)
        optimizer = torch.optim.Adam(network.parameters(), 1e-3)
        for _ in range(num_steps):
            chosen = torch.randint(len(pixels), (64,))
            noise = 0.1 * torch.rand(64, 1, 1, 1) * torch.randn(64, 3, 64, 64)
            seen = network.body(pixels[chosen] + noise)
            pairs = zip(network.heads, wanted[chosen].T, strict=True)
            losses = [F.cross_entropy(head(seen), label) for head, label in pairs]
            optimizer.zero_grad()
            sum(losses).backward()
            optimizer.step()
        return network.eval()

    @torch.no_grad()
    def features(self, pixels: np.ndarray) -> np.ndarray:
        """Unit vectors (..., D) of images (..., 64, 64, 3)."""
        seen = F.normalize(self.body(_tensor(pixels.reshape(-1, *pixels.shape[-3:]))), dim=1)
        return seen.numpy().astype(float).reshape(*pixels.shape[:-3], -1)


def _tensor(pixels: np.ndarray) -> torch.Tensor:
    return torch.tensor(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1


@cache
def templates() -> dict[str, np.ndarray]:
    """The outline of each shape."""
    drawn = {shape: shapes.draw(shape, (220, 40, 40), (10, 10, 10)) for shape in shapes.SHAPES}
    return {shape: outline(np.asarray(image)) for shape, image in drawn.items()}


def truth(images: Mapping[str, np.ndarray]) -> Truth:
    """What of the images of a step is right."""
    found = []
    for group in ("truth new", "truth known"):
        pairs = zip(images[group], GROUPS[group].scenes, strict=True)
        found.append(np.array([np.mean([is_right(image, scene) for image in row]) for row, scene in pairs]))
    return found[0], found[1]


def quality(found: Truth) -> float:
    """The mean over both groups, Q."""
    return float(np.mean([part.mean() for part in found]))


def is_right(image: np.ndarray, scene: shapes.Scene) -> bool:
    """Whether an image shows the colour and the shape of its caption."""
    seen = outline(image)
    if seen is None or not read_image(Image.fromarray(image), scene.colour).right:
        return False
    overlap = {shape: (seen & one).sum() / (seen | one).sum() for shape, one in templates().items()}
    return max(overlap, key=overlap.get) == scene.shape


def outline(pixels: np.ndarray) -> np.ndarray | None:
    """The shape in an image, cut out and scaled to 24 x 24; None where there is none."""
    rows, columns = np.nonzero(mask := find_foreground(pixels.astype(float)))
    if len(rows) < 12:
        return None
    cut = mask[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
    return np.asarray(Image.fromarray((cut * 255).astype("uint8")).resize((24, 24))) > 127


class Judge:
    """Scores the steps of a run by images by step, each time with other prompts and one of two seeds."""

    def __init__(self, network: StandIn, data: str, images: Mapping[int, Mapping[str, np.ndarray]]) -> None:
        drawn, trained_on = random.Random(77), training_set(data)
        held_out = [np.asarray(shapes.draw_scene(scene, drawn)) for scene in GROUPS["new"].scenes]
        taught = groups_of(data)["taught"].scenes
        training = [np.asarray(Image.open(BytesIO(trained_on[scene][0]))) for scene in taught]
        self.steps, self._taught = list(images), tuple(scene.caption for scene in taught)
        self._held_out, self._training = (network.features(np.stack(one)) for one in (held_out, training))
        self._features = {
            (step, group): network.features(images[step][group])
            for step in images
            for group in ("new", "plain", "taught")
        }

    def record(self, rng: np.random.Generator, count: int = NUM_PROMPTS) -> ScoreRecord:
        """The record that a run would have kept, of prompts and seeds that are chosen at random."""
        new, plain = (rng.permutation(24)[:count] for _ in range(2))
        seed = int(rng.integers(2))
        references = References(
            held_out=self._held_out[new][:, None],
            training=self._training[:, None],
            base_plain=self._features[0, "plain"][plain][:, seed],
            base_again=self._features[0, "plain"][plain][:, 1 - seed],
        )
        chosen = {"new": new, "plain": plain, "taught": np.arange(len(self._taught))}
        columns = []
        for step in self.steps:
            by_group = {group: self._features[step, group][rows][:, seed] for group, rows in chosen.items()}
            images = GeneratedFeatures(prompt=np.zeros(count), **by_group)
            columns.append(references.scores(ScoredColumn.name(step), step, images))
        return ScoreRecord(
            measure="of this benchmark",
            models=("stand-in", "stand-in"),
            held_out_contrast=references.held_out_contrast,
            other_seed=references.other_seed,
            new_prompts=tuple(GROUPS["new"].scenes[place].caption for place in new),
            plain_prompts=tuple(GROUPS["plain"].scenes[place].caption for place in plain),
            taught_prompts=self._taught,
            columns=tuple(columns),
        )


def run_row(name: str, judge: Judge, truths: Mapping[int, Truth]) -> dict[str, str]:
    """What came of several draws of prompts: choices against the truth, and how many steps got each mark."""
    rng, steps = np.random.default_rng(1), judge.steps[1:]
    draws = [recommend(judge.record(rng)) for _ in range(NUM_DRAWS)]
    q = {step: quality(truths[step]) for step in steps}
    best = max(steps, key=q.__getitem__)
    highest = [max(found.columns, key=lambda one: one.total.value).step or 0 for found in draws]
    losses = {step: [(a - b) / 2 for a, b in zip(truths[step], truths[best], strict=True)] for step in steps}
    near = [not sum_of_means(losses[step], comparisons=len(steps)).is_below_zero for step in highest]
    chosen = [found for found in draws if found.best is not None]
    same = [best in [found.best.step, *(one.step for one in found.same)] for found in chosen]
    marks = {mark: [mark in one.marks for found in draws for one in found.columns] for mark in get_args(Mark)}
    return {
        "run": name,
        "Q: base; best step; all; last": f"{quality(truths[0]):.2f}; {q[best]:.2f} ({best}); "
        f"{np.mean(list(q.values())):.2f}; {q[steps[-1]]:.2f}",
        "Q of the highest Z": f"{np.mean([q[step] for step in highest]):.2f}",
        "within noise of the best": f"{np.mean(near):.0%}",
        "recommended": f"{len(chosen) / NUM_DRAWS:.0%}",
        "and the best step among the same": f"{np.mean(same):.0%}" if same else "",
        **{mark: f"{np.mean(found):.0%}" for mark, found in marks.items()},
    }


def coverage_rows(judge: Judge) -> list[dict[str, str]]:
    """How often intervals of the difference between two steps, of drawn prompts, cover that of all 24."""
    columns = judge.record(np.random.default_rng(0), 24).columns[1:]
    rng, rows = np.random.default_rng(2), []
    for count in (4, 8, 16):
        hits = []
        for one, other in pairwise(columns):
            parts = [np.subtract(other.contrast, one.contrast), np.subtract(other.kept, one.kept)]
            wanted = sum(part.mean() for part in parts)
            for _ in range(200):
                found = sum_of_means([part[rng.integers(0, 24, count)] for part in parts])
                hits.append(found.low <= wanted <= found.high)
        rows.append({"prompts of each kind": str(count), "intervals that cover": f"{np.mean(hits):.1%}"})
    return rows


def cost_row(bench: Bench, network: StandIn, judge: Judge) -> dict[str, str]:
    """The processor's time of what is done with the 48 images of a step, in shares of their generation."""
    started_at = time.process_time()
    images = bench.generate(Prompts(GROUPS["new"].scenes[:NUM_PROMPTS], 3, 0))
    generated_at = time.process_time()
    network.features(images)
    read_at = time.process_time()
    recommend(judge.record(np.random.default_rng(0)))
    scoring = (time.process_time() - read_at) / len(judge.steps)
    shares = {"features": read_at - generated_at, "scores and recommendation": scoring}
    return {name: f"{seconds / (generated_at - started_at):.2%}" for name, seconds in shares.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and generate what the folder lacks, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("folder", type=Path, help="for runs and images")
    parser.add_argument("--run", action="append", choices=RUNS, help="these only")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    bench, network, rows = Bench(options.folder.resolve()), StandIn.trained(), []
    for name in options.run or RUNS:
        images = {step: bench.generated(name, step) for step in (0, *RUNS[name].steps)}
        truths = {step: truth(of_step) for step, of_step in images.items()}
        judge = Judge(network, RUNS[name].data, images)
        rows.append(run_row(name, judge, truths))
        if name == "normal":
            print_table("Coverage of 95 % intervals", coverage_rows(judge))
            print_table(
                "Cost of a step, the generation of its images is 100 %", [cost_row(bench, network, judge)]
            )
    print_table(f"{NUM_DRAWS} draws of {NUM_PROMPTS} prompts of each kind", rows)


if __name__ == "__main__":
    main()
