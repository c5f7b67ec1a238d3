"""Kandinsky 5.0 Image against diffusers' own pipeline, at every step and in both dtypes."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from family_sample import CPU, PROMPTS, Sample, transformer_calls

from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Prompt
from diffsynth_lite.pipelines import PipelineFolder
from diffsynth_lite.pipelines.kandinsky5 import Kandinsky5

FAMILY = "kandinsky5"
WIDTH, HEIGHT = 64, 32


def steps_of(
    pipeline: Any, prompt: str, negative: str, seed: int
) -> list[tuple[dict[str, Any], torch.Tensor]]:
    """What the pipeline gives its transformer, and what that returns, with and without the prompt."""
    outputs: list[torch.Tensor] = []
    pipeline.resolutions = [(WIDTH, HEIGHT)]
    call = {"prompt": prompt, "negative_prompt": negative, "width": WIDTH, "height": HEIGHT}
    call |= {"num_inference_steps": 3, "generator": torch.Generator().manual_seed(seed)}
    calls = transformer_calls(pipeline.transformer, lambda: pipeline(**call), outputs)
    return list(zip(calls, outputs, strict=True))


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-6), (torch.bfloat16, 0.02)])
def test_a_batch_of_different_prompts_is_predicted_as_by_the_pipeline_at_every_step(
    sample: Sample, dtype: torch.dtype, most: float
) -> None:
    family, pipeline = sample.family, sample.fresh_pipeline()
    pipeline.transformer = model = family.load_transformer(dtype)
    for part in ("text_encoder", "text_encoder_2", "vae"):
        getattr(pipeline, part).to(dtype)
    encode = family.load_prompt_encoder(dtype, CPU)
    conditioning = encode([Prompt(text=text) for text in PROMPTS])
    # All of other lengths: diffusers rounds queries and keys to bfloat16 in any dtype, which makes more of
    # the last digits in which a product of several rows differs.
    assert len({len(one["prompt_embeds"]) for one in conditioning}) == len(PROMPTS)
    rows = [steps_of(pipeline, text, PROMPTS[seed - 1], seed) for seed, text in enumerate(PROMPTS)]
    for place, together in enumerate(zip(*rows, strict=True)):
        given, expected = zip(*together, strict=True)
        latents = torch.cat([one["hidden_states"] for one in given])[:, 0].movedim(-1, 1).float()
        # Of the scheduler: the pipeline rounds what it gives to the model's dtype, as the family does.
        sigma = pipeline.scheduler.sigmas[place // 2].expand(len(given))
        prompts = [conditioning[-1], *conditioning[:-1]] if place % 2 else conditioning
        with torch.no_grad():
            ours = family.predict(model, latents, sigma, prompts)
        theirs = torch.cat(expected)[:, 0].movedim(-1, 1)
        assert ours.dtype == theirs.dtype == dtype
        assert (ours - theirs).abs().max() <= most * theirs.abs().max()


def test_models_that_are_given_an_image_too_are_refused(sample: Sample, tmp_path: Path) -> None:
    folder = tmp_path / "edits"
    shutil.copytree(sample.family.folder.path, folder)
    file = folder / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"visual_cond": True}))
    with pytest.raises(UserError, match="visual_cond must be false in folders of Kandinsky5T2IPipeline"):
        Kandinsky5(PipelineFolder(path=folder)).check_folder()


def test_images_have_at_most_as_many_rows_as_the_model_has_places_for(sample: Sample) -> None:
    sample.family.check_size(2048, 16, keys="data.width")
    assert len(sample.model.visual_rope_embeddings.args_2) * 16 == 2048
    for size in ((2064, 16), (16, 2064)):
        with pytest.raises(UserError, match="at most 2048 pixels on each side"):
            sample.family.check_size(*size, keys="data.width")


def test_the_code_of_a_card_names_a_size_that_the_pipeline_would_replace(sample: Sample) -> None:
    request = sample.request(num_inference_steps=1, guidance_scale=1.0, seed=0)
    _, line = sample.family.usage_setup(request)
    assert line == f"pipeline.resolutions = [({request.width}, {request.height})]"
    width, height = sample.fresh_pipeline().resolutions[1]
    assert sample.family.usage_setup(replace(request, width=width, height=height)) == []


def test_captions_are_counted_as_the_pipeline_cleans_them(sample: Sample) -> None:
    text = "  a ring &amp;amp;\n\n a   circle "
    (encoded,) = sample.family.load_prompt_encoder(torch.float32, CPU)([Prompt(text=text)])
    assert sample.family.prompt_lengths([text]) == [len(encoded["prompt_embeds"])]
