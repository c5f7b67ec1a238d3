"""Wan VACE against diffusers' own pipeline."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import WanVACEPipeline
from diffusers_pipelines import bytes_of, generated_by
from family_sample import (
    CPU,
    NEGATIVE,
    PROMPTS,
    Sample,
    clip,
    encode_texts,
    mandelbrot,
    transformer_calls,
)
from PIL import Image

from diffsynth_lite.lora import find_target_layers
from diffsynth_lite.media import Media
from diffsynth_lite.pipelines import Conditioning
from diffsynth_lite.pipelines.wan_vace import WanVACE

FAMILY = "wan_vace"


WIDTH, HEIGHT, NUM_FRAMES = 64, 32, 5


FRAMES, CONTROL = (clip(WIDTH, HEIGHT, NUM_FRAMES, quality) for quality in (10, 30))


LEVEL = torch.tensor([0.7])


def box(left: int, right: int) -> Image.Image:
    mask = Image.new("L", (WIDTH, HEIGHT), 0)
    mask.paste(255, (left, 8, right, 24))
    return mask


MASK = tuple(box(8 + 4 * place, 40 + 4 * place) for place in range(NUM_FRAMES))
"""It moves, and its edges are not those of latents."""


@pytest.fixture(scope="module")
def prompt(family: WanVACE) -> Conditioning:
    return encode_texts(family, PROMPTS[0])[0]


def composed(inside: tuple[Image.Image, ...] | None) -> list[Image.Image]:
    """Frames with what is painted again replaced, by numpy."""
    frames = []
    for place in range(NUM_FRAMES):
        frame, chosen = np.array(FRAMES[place]), np.array(MASK[place]) > 127
        frame[chosen] = np.array(inside[place])[chosen] if inside else 127
        frames.append(Image.fromarray(frame))
    return frames


GIVEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "control": ({"control": CONTROL}, {"video": list(CONTROL)}),
    "mask": ({"inpaint_mask": MASK}, {"video": composed(None), "mask": list(MASK)}),
    "both": (
        {"control": CONTROL, "inpaint_mask": MASK},
        {"video": composed(CONTROL), "mask": list(MASK)},
    ),
}
"""What an item has, and what a user of the pipeline would give for the same."""


@pytest.mark.parametrize("given", GIVEN)
def test_in_training_the_model_gets_what_the_pipeline_gives_it(
    sample: Sample, prompt: Conditioning, given: str
) -> None:
    of_item, of_pipeline = GIVEN[given]
    item = Media(frames=FRAMES, fps=16.0, **of_item)
    (encoded,) = sample.family.load_media_encoder(torch.float32, CPU)([item])
    latents = encoded.pop("latents")[None]
    assert ("control_mask" in encoded) == ("inpaint_mask" in of_item)
    bytes_kept = sum(tensor.nbytes for tensor in encoded.values())
    counted = 4 * sample.family.num_condition_values(latents.shape[1:])
    assert counted == bytes_kept if "inpaint_mask" in of_item else counted > bytes_kept
    model = sample.family.load_transformer(torch.float32)
    (ours,) = transformer_calls(
        model, lambda: sample.family.predict(model, latents, LEVEL, [prompt | encoded])
    )
    pipeline = WanVACEPipeline.from_pretrained(sample.family.folder.path)
    theirs = transformer_calls(
        pipeline.transformer,
        lambda: pipeline(
            PROMPTS[0],
            width=WIDTH,
            height=HEIGHT,
            num_frames=NUM_FRAMES,
            num_inference_steps=1,
            guidance_scale=1.0,
            output_type="latent",
            **of_pipeline,
        ),
    )[0]
    for name in ("control_hidden_states", "control_hidden_states_scale"):
        assert torch.equal(ours[name], theirs[name]), name
    assert ours["control_hidden_states"].shape[1] == 96
    torch.testing.assert_close(ours["encoder_hidden_states"], theirs["encoder_hidden_states"])


def test_items_with_and_without_masks_train_together(sample: Sample, prompt: Conditioning) -> None:
    items = [Media(frames=FRAMES, fps=16.0, **of_item) for of_item, _ in GIVEN.values()]
    encoded = sample.family.load_media_encoder(torch.float32, CPU)(items)
    latents = torch.stack([tensors.pop("latents") for tensors in encoded])
    conditioning = [prompt | tensors for tensors in encoded]
    model = sample.family.load_transformer(torch.float32)
    with torch.no_grad():
        together = sample.family.predict(model, latents, LEVEL.expand(4), conditioning)
        single = [
            sample.family.predict(model, latents[place, None], LEVEL, conditioning[place : place + 1])
            for place in range(4)
        ]
    torch.testing.assert_close(together, torch.cat(single), rtol=1e-4, atol=1e-5)
    differences = [(one - other).abs().max() for one in single for other in single if one is not other]
    assert min(differences) > 1e-4


STILL = mandelbrot(WIDTH, HEIGHT, 50)


GENERATED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "control and mask": (
        {"control": CONTROL, "inpaint_mask": MASK},
        {"video": list(CONTROL), "mask": list(MASK)},
    ),
    "still, control and mask": (
        {"inputs": (STILL,), "control": CONTROL, "inpaint_mask": MASK},
        {
            "video": [
                Image.composite(inside, STILL, mask) for inside, mask in zip(CONTROL, MASK, strict=True)
            ],
            "mask": list(MASK),
        },
    ),
}


@pytest.mark.parametrize("given", GENERATED)
def test_a_preview_is_what_the_pipeline_generates(sample: Sample, given: str) -> None:
    of_request, of_pipeline = GENERATED[given]
    request = replace(
        sample.request(num_inference_steps=2, guidance_scale=4.0, seed=3),
        **{"num_frames": NUM_FRAMES, "control": (), **of_request},
    )
    family = sample.family
    (ours,) = family.sample(family.load_transformer(torch.float32), torch.float32, [request])
    pipeline = WanVACEPipeline.from_pretrained(family.folder.path)
    given = {"prompt": PROMPTS[0], "negative_prompt": NEGATIVE, "num_frames": NUM_FRAMES, **of_pipeline}
    assert bytes_of(ours) == generated_by(pipeline, request, **given)


def test_the_further_blocks_can_be_trained_without_the_others(sample: Sample) -> None:
    model = sample.family.empty_transformer()
    targets = ["vace_blocks.*.attn1.to_q", "vace_blocks.*.ffn.net.2"]
    layers = find_target_layers(model, targets, unused_modules=sample.family.unused_modules(model))
    assert layers == [
        f"vace_blocks.{place}.{layer}" for place in (0, 1) for layer in ("attn1.to_q", "ffn.net.2")
    ]
    assert sample.family.needs_inputs is False
