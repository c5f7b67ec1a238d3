"""Scores a LoRA of clips with plain diffusers: do shapes move as the new word says, and as the known ones do?

8 prompts with the new word, none of them a training caption, and 8 with known directions are generated before
and after the LoRA is loaded, from the same noise. Nothing of diffsynth_lite is used.
"""

from collections.abc import Sequence
from pathlib import Path

import comparison
import motions
import shapes
import torch
from comparison import Drawn, Measure
from diffusers import WanPipeline
from grid import Panel, draw_grid
from measure_motion import read_clips, summarise_motion
from PIL import Image

COLUMNS = 4
TITLES = {"new": f'"{motions.NEW_WORD}"', "known": "known directions"}


def main() -> None:
    """Draw, measure, print the table, write score.json and grid.png."""
    arguments = comparison.parse_arguments(__doc__.splitlines()[0])
    torch.set_num_threads(1)
    comparison.silence_loading_bars()
    groups = comparison.compare(
        load_pipeline(arguments.model),
        arguments.lora,
        {"new": motions.held_out_scenes(), "known": motions.known_scenes()},
        Measure(generate_prompts, read_clips, summarise_motion),
    )
    captions = comparison.training_captions(arguments.data)
    num_unseen = comparison.write_record(groups, captions, arguments.output)
    make_grid(groups).save(arguments.output / "grid.png")
    print(make_table(groups))
    num_new = len(groups["new"].scenes)
    print(f"{num_unseen} of the {num_new} prompts of the new word are not among the training captions.")
    print(f"Strips of frames: {arguments.output / 'grid.png'}, figures: {arguments.output / 'score.json'}")


def load_pipeline(folder: Path) -> WanPipeline:
    """The pipeline of a folder, in float32."""
    return comparison.load_quietly(WanPipeline, folder)


def generate_prompts(pipeline: WanPipeline, scenes: Sequence[motions.MovingScene]) -> list[list[Image.Image]]:
    """One clip of 9 frames of 64 x 64 a scene, in one batch; its noise depends on its place only."""
    return pipeline(
        prompt=[scene.caption for scene in scenes],
        negative_prompt=[""] * len(scenes),
        guidance_scale=comparison.GUIDANCE_SCALE,
        height=shapes.SIZE,
        width=shapes.SIZE,
        num_frames=motions.NUM_FRAMES,
        num_inference_steps=comparison.NUM_STEPS,
        generator=comparison.seeds_by_place(len(scenes)),
        output_type="pil",
    ).frames


def make_table(groups: dict[str, Drawn]) -> str:
    """Accuracy, cosine and pixels moved of both groups, a row before and a row after."""
    lines = [f"{'':8}" + "".join(f"{TITLES[name]:>18}{'cosine':>8}{'pixels':>8}" for name in groups)]
    for row in ("before", "after"):
        scores = [group.scores[row] for group in groups.values()]
        figures = (
            f"{f'{score.accuracy:.0%} right':>18}{score.cosine:>8.2f}{score.pixels:>8.1f}" for score in scores
        )
        lines.append(f"{row:8}" + "".join(figures))
    return "\n".join(lines)


def make_grid(groups: dict[str, Drawn]) -> Image.Image:
    """Panels of four columns of strips: before, after, and a drawing of what the prompt asks for."""
    panels = []
    for name, group in groups.items():
        right = {row: f"{score.accuracy:.0%}" for row, score in group.scores.items()}
        heading = f"{TITLES[name]}: {right['before']} right before, {right['after']} after"
        rows = group.generated | {"wanted": [motions.draw_frames(scene) for scene in group.scenes]}
        for start in range(0, len(group.scenes), COLUMNS):
            columns = slice(start, start + COLUMNS)
            captions = [
                f"{scene.colour} {scene.shape} moving {scene.direction}\non {scene.ground}"
                for scene in group.scenes[columns]
            ]
            strips = {
                label: [motions.make_strip(clip) for clip in clips[columns]] for label, clips in rows.items()
            }
            panels.append(Panel(heading, captions, strips, scale=1))
    return draw_grid(panels)


if __name__ == "__main__":
    main()
