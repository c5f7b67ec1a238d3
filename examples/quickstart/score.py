"""Scores a LoRA with plain diffusers: does it draw the colours it was taught, and keep those it knew?

16 prompts of new colours, none of them a training caption, and 8 prompts of known colours are drawn before
and after the LoRA is loaded, from the same noise. Nothing of diffsynth_lite is used.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import diffusers
import shapes
import torch
import transformers
from diffusers import QwenImagePipeline
from grid import Panel, draw_grid
from measure import Reading, Score, read_pictures, summarise
from PIL import Image

NUM_STEPS = 20
GUIDANCE_SCALE = 3.0
NUM_KNOWN_PROMPTS = 8
LORA_FILE = "pytorch_lora_weights.safetensors"


@dataclass(frozen=True)
class Drawn:
    """The pictures of one group of prompts, before and after, and what they show."""

    scenes: list[shapes.Scene]
    images: dict[str, list[Image.Image]]
    readings: dict[str, list[Reading]]

    @property
    def scores(self) -> dict[str, Score]:
        """The summary before and after."""
        return {row: summarise(readings) for row, readings in self.readings.items()}


def main() -> None:
    """Draw, measure, print the table, write score.json and grid.png."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    silence_loading_bars()
    new, known = shapes.held_out_scenes(), shapes.known_scenes(NUM_KNOWN_PROMPTS)
    pipeline = load_pipeline(arguments.model)
    images = {"before": draw_prompts(pipeline, new + known)}
    pipeline.load_lora_weights(arguments.lora)
    images["after"] = draw_prompts(pipeline, new + known)
    groups = {
        "new": measure({row: drawn[: len(new)] for row, drawn in images.items()}, new),
        "known": measure({row: drawn[len(new) :] for row, drawn in images.items()}, known),
    }
    captions = training_captions(arguments.data)
    num_unseen = sum(scene.caption not in captions for scene in new)
    arguments.output.mkdir(parents=True, exist_ok=True)
    record = make_record(groups) | {"num_unseen_new_prompts": num_unseen}
    (arguments.output / "score.json").write_text(json.dumps(record, indent=2) + "\n")
    make_grid(groups).save(arguments.output / "grid.png")
    print(make_table(groups))
    print(f"{num_unseen} of the {len(new)} prompts of new colours are not among the training captions.")
    print(f"Pictures: {arguments.output / 'grid.png'}, figures: {arguments.output / 'score.json'}")


def parse_arguments() -> argparse.Namespace:
    """Read the command line and see that the inputs are there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of the pipeline")
    parser.add_argument("--lora", type=Path, required=True, help=f"folder with {LORA_FILE}")
    parser.add_argument("--data", type=Path, required=True, help="training folder, for its captions")
    parser.add_argument("--output", type=Path, required=True, help="folder for score.json and grid.png")
    arguments = parser.parse_args()
    if not (arguments.model / "model_index.json").is_file():
        parser.error(f"--model {arguments.model} holds no model_index.json; name a diffusers pipeline folder")
    if not (arguments.lora / LORA_FILE).is_file():
        parser.error(f"--lora {arguments.lora} holds no {LORA_FILE}; name the lora folder of a run")
    if not training_captions(arguments.data):
        parser.error(f"--data {arguments.data} holds no .txt captions; name the folder of the training set")
    return arguments


def training_captions(folder: Path) -> set[str]:
    """The captions of a folder of pictures with .txt files."""
    return {path.read_text().strip() for path in folder.glob("*.txt")}


def silence_loading_bars() -> None:
    """Switch the progress bars of the libraries off."""
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()


def load_pipeline(folder: Path) -> QwenImagePipeline:
    """The pipeline of a folder, in float32."""
    pipeline = QwenImagePipeline.from_pretrained(folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw_prompts(pipeline: QwenImagePipeline, scenes: Sequence[shapes.Scene]) -> list[Image.Image]:
    """One 64 x 64 picture a scene, in one batch; its noise depends on its place in the list only."""
    return pipeline(
        prompt=[scene.caption for scene in scenes],
        negative_prompt=[" "] * len(scenes),
        true_cfg_scale=GUIDANCE_SCALE,
        height=shapes.SIZE,
        width=shapes.SIZE,
        num_inference_steps=NUM_STEPS,
        generator=[torch.Generator().manual_seed(place) for place in range(len(scenes))],
    ).images


def measure(images: dict[str, list[Image.Image]], scenes: list[shapes.Scene]) -> Drawn:
    """Read every picture of a group."""
    return Drawn(scenes, images, {row: read_pictures(drawn, scenes) for row, drawn in images.items()})


def make_record(groups: dict[str, Drawn]) -> dict[str, object]:
    """The figures as plain values: a summary and one entry a prompt."""
    record: dict[str, object] = {"num_steps": NUM_STEPS, "guidance_scale": GUIDANCE_SCALE}
    for name, group in groups.items():
        summary = {row: asdict(score) for row, score in group.scores.items()}
        prompts = [
            {"prompt": scene.caption} | {row: asdict(read[place]) for row, read in group.readings.items()}
            for place, scene in enumerate(group.scenes)
        ]
        record[name] = summary | {"prompts": prompts}
    return record


def make_table(groups: dict[str, Drawn]) -> str:
    """Accuracy and distance of both groups, a row before and a row after."""
    lines = [f"{'':8}" + "".join(f"{f'{name} colours':>16}{'distance':>10}" for name in groups)]
    for row in ("before", "after"):
        scores = [group.scores[row] for group in groups.values()]
        figures = (f"{f'{score.accuracy:.0%} right':>16}{score.distance:>10.1f}" for score in scores)
        lines.append(f"{row:8}" + "".join(figures))
    return "\n".join(lines)


def make_grid(groups: dict[str, Drawn]) -> Image.Image:
    """Panels of 8 columns: before, after, and a drawing of what the prompt asks for."""
    panels = []
    for name, group in groups.items():
        right = {row: f"{score.accuracy:.0%}" for row, score in group.scores.items()}
        heading = f"{name} colours: {right['before']} right before, {right['after']} after"
        wanted = [
            shapes.draw(scene.shape, shapes.COLOURS[scene.colour], shapes.GROUNDS[scene.ground])
            for scene in group.scenes
        ]
        rows = group.images | {"wanted": wanted}
        for start in range(0, len(group.scenes), 8):
            columns = slice(start, start + 8)
            captions = [f"{scene.colour} {scene.shape}\non {scene.ground}" for scene in group.scenes[columns]]
            part = {label: images[columns] for label, images in rows.items()}
            panels.append(Panel(heading, captions, part))
    return draw_grid(panels)


if __name__ == "__main__":
    main()
