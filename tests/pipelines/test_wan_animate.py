"""Wan Animate: what its model learns of the character's image, and where a LoRA may be."""

import pytest
import torch
from family_sample import CPU, SIGMA, Sample, clip, mandelbrot, transformer_calls

from diffsynth_lite.errors import UserError
from diffsynth_lite.lora import find_target_layers
from diffsynth_lite.media import Media

FAMILY = "wan_animate"


@pytest.mark.parametrize("first_frame", [None, mandelbrot(64, 32, 90)])
def test_a_frame_before_those_of_a_clip_is_the_image_of_the_character(
    sample: Sample, first_frame: object
) -> None:
    guides = {"control": clip(64, 32, 9, 40), "face": clip(40, 48, 9, 60)}
    item = Media(frames=clip(64, 32, 9, 10), first_frame=first_frame, fps=30.0, **guides)
    encode = sample.family.load_media_encoder(torch.float32, CPU)
    (given,) = encode([item])
    character = first_frame or item.frames[0]
    (still,) = encode([Media(frames=(character,) * 9, fps=30.0, **guides)])
    assert given["latents"].shape == sample.family.latents_shape(64, 32, 9)
    assert "loss_mask" not in given
    # Sums of one frame and of nine are in another order.
    torch.testing.assert_close(given["latents"][:, 0], still["latents"][:, 1])
    assert torch.equal(given["latents"][:, 0], given["condition_latents"][4:, 0])
    assert given["condition_latents"][:4, 0].eq(1).all()
    assert given["condition_latents"][:4, 1:].eq(0).all()


def test_the_model_sees_the_pixels_of_a_face_from_minus_one_to_one(sample: Sample) -> None:
    model, batch = sample.model, (sample.latents, SIGMA, sample.conditioning)
    (call,) = transformer_calls(model, lambda: sample.family.predict(model, *batch))
    pixels = torch.stack([row["face_pixels"] for row in sample.conditioning])
    torch.testing.assert_close(call["face_pixel_values"], pixels / 127.5 - 1)


def test_what_is_cached_next_to_latents_is_counted_in_bytes(sample: Sample) -> None:
    kept = {name: value for name, value in sample.conditioning[0].items() if name != "prompt_embeds"}
    counted = 4 * sample.family.num_condition_values(sample.latents.shape[1:])
    assert counted == sum(value.nbytes for value in kept.values())


def test_a_lora_is_on_the_blocks_and_not_on_what_sees_poses_and_faces(sample: Sample) -> None:
    unused = sample.family.unused_modules(sample.model)
    layers = find_target_layers(sample.model, ["to_q", "to_k"], unused_modules=unused)
    assert {layer.partition(".")[0] for layer in layers} == {"blocks"}
    with pytest.raises(UserError):
        find_target_layers(sample.model, ["face_adapter.*.to_out"], unused_modules=unused)
