"""Builds a family's tiny pipeline on disk, and a batch that the family encoded itself."""

import importlib
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image

from diffsynth_lite.media import Media, Prompt
from diffsynth_lite.pipelines import Conditioning, ModelFamily, PipelineFolder, load_family

CPU = torch.device("cpu")
# Of different lengths, so that every family has to pad and to mask.
PROMPTS = ("a red circle", "a blue square on a white background", "a ring")


@dataclass(frozen=True)
class Sample:
    """A family's tiny pipeline, and a batch that it encoded itself."""

    name: str
    family: ModelFamily
    latents: torch.Tensor
    conditioning: list[Conditioning]


def build_sample(name: str, folder: Path) -> Sample:
    family_class = load_family(name)
    importlib.import_module(family_class.__module__).tiny().save_pretrained(folder)
    family = family_class(PipelineFolder(path=folder))
    width, height = 4 * family.size_divisor, 2 * family.size_divisor
    images = [
        Image.effect_mandelbrot((width, height), (-2, -1, 1, 1), 10 + place).convert("RGB")
        for place in range(3)
    ]
    encoded = family.load_media_encoder(torch.float32, CPU)([Media(frames=(image,)) for image in images])
    return Sample(
        name=name,
        family=family,
        latents=torch.stack([image["latents"] for image in encoded]),
        conditioning=family.load_prompt_encoder(torch.float32, CPU)([Prompt(text=text) for text in PROMPTS]),
    )
