"""Scores a LoRA with plain diffusers: does it generate the colours it was taught, and keep those it knew?

16 prompts of new colours, none of them a training caption, and 8 prompts of known colours are generated
before and after the LoRA is loaded, from the same noise. Nothing of diffsynth_lite is used.
"""

from collections.abc import Sequence
from pathlib import Path

import comparison
import shapes
import torch
from comparison import Drawn, Measure
from diffusers import QwenImagePipeline
from grid import Panel, draw_grid
from measure import read_images, summarise
from PIL import Image

NUM_KNOWN_PROMPTS = 8


def main() -> None:
    """Draw, measure, print the table, write score.json and grid.png."""
    arguments = comparison.parse_arguments(__doc__.splitlines()[0])
    torch.set_num_threads(1)
    comparison.silence_loading_bars()
    groups = comparison.compare(
        load_pipeline(arguments.model),
        arguments.lora,
        {"new": shapes.held_out_scenes(), "known": shapes.known_scenes(NUM_KNOWN_PROMPTS)},
        Measure(generate_prompts, read_images, summarise),
    )
    captions = comparison.training_captions(arguments.data)
    num_unseen = comparison.write_record(groups, captions, arguments.output)
    make_grid(groups).save(arguments.output / "grid.png")
    print(make_table(groups))
    num_new = len(groups["new"].scenes)
    print(f"{num_unseen} of the {num_new} prompts of new colours are not among the training captions.")
    print(f"Images: {arguments.output / 'grid.png'}, figures: {arguments.output / 'score.json'}")


def load_pipeline(folder: Path) -> QwenImagePipeline:
    """The pipeline of a folder, in float32."""
    return comparison.load_quietly(QwenImagePipeline, folder)


def generate_prompts(pipeline: QwenImagePipeline, scenes: Sequence[shapes.Scene]) -> list[Image.Image]:
    """One 64 x 64 image a scene, in one batch; its noise depends on its place in the list only."""
    return pipeline(
        prompt=[scene.caption for scene in scenes],
        negative_prompt=[" "] * len(scenes),
        true_cfg_scale=comparison.GUIDANCE_SCALE,
        height=shapes.SIZE,
        width=shapes.SIZE,
        num_inference_steps=comparison.NUM_STEPS,
        generator=comparison.seeds_by_place(len(scenes)),
    ).images


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
        rows = group.generated | {"wanted": wanted}
        for start in range(0, len(group.scenes), 8):
            columns = slice(start, start + 8)
            captions = [f"{scene.colour} {scene.shape}\non {scene.ground}" for scene in group.scenes[columns]]
            part = {label: images[columns] for label, images in rows.items()}
            panels.append(Panel(heading, captions, part))
    return draw_grid(panels)


if __name__ == "__main__":
    main()
