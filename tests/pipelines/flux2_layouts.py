"""The releases of FLUX.2 in small: dev, the base models of klein, and distilled klein."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from diffusers import Flux2KleinPipeline, Flux2Pipeline, Flux2Transformer2DModel
from family_sample import CPU

from diffsynth_lite.media import Prompt
from diffsynth_lite.pipelines import PipelineFolder, PreviewRequest
from diffsynth_lite.pipelines.flux2 import Flux2, tiny
from diffsynth_lite.testing.text_encoders import tiny_qwen3_lm
from diffsynth_lite.testing.tokenizers import qwen2_tokenizer

PROMPT = "a red circle"


def small_transformer(*, is_guided: bool) -> Flux2Transformer2DModel:
    torch.manual_seed(0)
    return Flux2Transformer2DModel(
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=48,
        guidance_embeds=is_guided,
        axes_dims_rope=(4, 4, 4, 4),
    )


def klein(*, is_distilled: bool = False) -> Flux2KleinPipeline:
    tokenizer = qwen2_tokenizer()
    parts = tiny().components | {
        "tokenizer": tokenizer,
        "text_encoder": tiny_qwen3_lm(tokenizer),
        "transformer": small_transformer(is_guided=False),
    }
    return Flux2KleinPipeline(**parts, is_distilled=is_distilled)


LAYOUTS = {"dev": tiny, "klein": klein}


def saved(pipeline: Flux2Pipeline | Flux2KleinPipeline, folder: Path) -> Flux2:
    pipeline.save_pretrained(folder)
    return Flux2(PipelineFolder(path=folder))


@cache
def reference(family: Flux2) -> Any:
    """The family's pipeline, read once from its folder as the family reads it."""
    pipeline = family.pipeline.from_pretrained(family.folder.path)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@cache  # of 512 tokens and 30 layers, which takes most of a test's time
def encoded_prompts(family: Flux2, *texts: str) -> list[dict[str, torch.Tensor]]:
    return family.load_prompt_encoder(torch.float32, CPU)([Prompt(text=text) for text in texts])


def request_of(family: Flux2, **settings: Any) -> PreviewRequest:
    """A preview of ``PROMPT``, 64 x 32, of two steps."""
    conditioning, negative = encoded_prompts(family, PROMPT, "blurred")
    fixed = {"width": 64, "height": 32, "num_inference_steps": 2, "guidance_scale": 3.5, "seed": 3}
    return PreviewRequest(conditioning=conditioning, negative=negative, **fixed | settings)


def draw(pipeline: Any, **settings: Any) -> Any:
    """What the pipeline itself draws for ``request_of``."""
    generator = torch.Generator().manual_seed(3)
    fixed = {"width": 64, "height": 32, "num_inference_steps": 2, "guidance_scale": 3.5}
    return pipeline(prompt=PROMPT, generator=generator, **fixed | settings).images[0]
