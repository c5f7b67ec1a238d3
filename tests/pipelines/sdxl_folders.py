"""Tiny folders of SDXL, and what the tests of its family file have in common."""

from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusionXLPipeline
from family_sample import CPU, PROMPTS

from diffsynth_lite.media import Prompt
from diffsynth_lite.pipelines import PipelineFolder, PreviewRequest
from diffsynth_lite.pipelines.sdxl import SDXL


def saved(pipeline: StableDiffusionXLPipeline, folder: Path, **changed: Any) -> SDXL:
    parts = {name: part for name, part in pipeline.components.items() if part is not None}
    config = {"force_zeros_for_empty_prompt": changed.pop("force_zeros_for_empty_prompt", True)}
    StableDiffusionXLPipeline(**(parts | changed), **config).save_pretrained(folder)
    return SDXL(PipelineFolder(path=folder))


def encoded_prompts(family: SDXL, *texts: str) -> list[dict[str, torch.Tensor]]:
    return family.load_prompt_encoder(torch.float32, CPU)([Prompt(text=text) for text in texts])


def gradients(model: torch.nn.Module, output: torch.Tensor) -> dict[str, torch.Tensor | None]:
    model.zero_grad()
    output.square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def request_of(family: SDXL, negative: str, **settings: Any) -> PreviewRequest:
    (conditioning,) = encoded_prompts(family, PROMPTS[0])
    encode = family.load_prompt_encoder(torch.float32, CPU)
    (against,) = encode([Prompt(text=negative, is_negative=True)])
    return PreviewRequest(
        conditioning=conditioning,
        negative=against,
        width=64,
        height=32,
        num_inference_steps=2,
        seed=3,
        **settings,
    )
