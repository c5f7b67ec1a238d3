"""What both scores share: the command line, the prompts before and after a LoRA, the record of the figures.

A score generates two groups of prompts, "new" and "known", of which the LoRA was taught the first.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline

NUM_STEPS = 20
GUIDANCE_SCALE = 3.0
LORA_FILE = "pytorch_lora_weights.safetensors"


@dataclass(frozen=True)
class Drawn:
    """One group of prompts: its scenes, and by "before" and "after" what was generated and what that shows.

    What is generated is an image or a clip; readings and scores are dataclasses of the measure.
    """

    scenes: list[Any]
    generated: dict[str, list[Any]]
    readings: dict[str, list[Any]]
    scores: dict[str, Any]


@dataclass(frozen=True)
class Measure:
    """How a score generates scenes with a pipeline, reads what was generated, and sums the readings up."""

    generate: Callable[[Any, Sequence[Any]], list[Any]]
    read: Callable[[Sequence[Any], Sequence[Any]], list[Any]]
    summarise: Callable[[Sequence[Any]], Any]


def parse_arguments(description: str) -> argparse.Namespace:
    """Read the command line and see that the inputs are there."""
    parser = argparse.ArgumentParser(description=description)
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
    """The captions of a folder of images or clips with .txt files."""
    return {path.read_text().strip() for path in folder.glob("*.txt")}


def silence_loading_bars() -> None:
    """Switch the progress bars of the libraries off."""
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()


def load_quietly(pipeline_class: type[DiffusionPipeline], folder: Path) -> DiffusionPipeline:
    """The pipeline of a folder, in float32, without a bar for each call."""
    pipeline = pipeline_class.from_pretrained(folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def compare(
    pipeline: DiffusionPipeline, lora: Path, groups: dict[str, list[Any]], measure: Measure
) -> dict[str, Drawn]:
    """Generate the scenes of all groups in one batch, load the LoRA, generate them again, and read all."""
    scenes = [scene for group in groups.values() for scene in group]
    generated = {"before": measure.generate(pipeline, scenes)}
    pipeline.load_lora_weights(lora)
    generated["after"] = measure.generate(pipeline, scenes)
    compared, start = {}, 0
    for name, group in groups.items():
        part = {row: results[start : start + len(group)] for row, results in generated.items()}
        readings = {row: measure.read(results, group) for row, results in part.items()}
        scores = {row: measure.summarise(values) for row, values in readings.items()}
        compared[name] = Drawn(group, part, readings, scores)
        start += len(group)
    return compared


def seeds_by_place(count: int) -> list[torch.Generator]:
    """Generators, so that the noise of a prompt depends on its place in the list only."""
    return [torch.Generator().manual_seed(place) for place in range(count)]


def write_record(groups: dict[str, Drawn], captions: set[str], folder: Path) -> int:
    """Write score.json: a summary a group and one entry a prompt.

    Args:
        groups: from `compare`.
        captions: those of the training set.
        folder: made if it is missing.

    Returns:
        How many prompts of the group "new" are not among the captions.
    """
    num_unseen = sum(scene.caption not in captions for scene in groups["new"].scenes)
    record = make_record(groups) | {"num_unseen_new_prompts": num_unseen}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "score.json").write_text(json.dumps(record, indent=2) + "\n")
    return num_unseen


def make_record(groups: dict[str, Drawn]) -> dict[str, object]:
    """The figures as plain values."""
    record: dict[str, object] = {"num_steps": NUM_STEPS, "guidance_scale": GUIDANCE_SCALE}
    for name, group in groups.items():
        summary = {row: asdict(score) for row, score in group.scores.items()}
        prompts = [
            {"prompt": scene.caption} | {row: asdict(read[place]) for row, read in group.readings.items()}
            for place, scene in enumerate(group.scenes)
        ]
        record[name] = summary | {"prompts": prompts}
    return record
