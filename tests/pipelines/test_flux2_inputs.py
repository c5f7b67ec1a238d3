"""FLUX.2 with pictures to start from against diffusers' pipelines; the forward is in ``test_flux2.py``."""

from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLFlux2, Flux2Pipeline
from family_sample import CPU, picture, transformer_calls
from flux2_layouts import LAYOUTS, PROMPT, draw, encoded_prompts, reference, request_of, saved
from PIL import Image

from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Media
from diffsynth_lite.pipelines.flux2 import Flux2, tiny
from diffsynth_lite.testing import seeded

WIDE, TALL = picture(110, 70, 20), picture(64, 100, 30)


@pytest.fixture(scope="module", params=LAYOUTS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Flux2:
    return saved(LAYOUTS[request.param](), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Flux2:
    return saved(tiny(), tmp_path_factory.mktemp("dev"))


def encoded_inputs(family: Flux2, *inputs: Image.Image) -> dict[str, torch.Tensor]:
    media = Media(frames=(picture(64, 32, 10),), inputs=inputs)
    (encoded,) = family.load_media_encoder(torch.float32, CPU)([media])
    return {name: tensor for name, tensor in encoded.items() if name != "latents"}


def encoded(family: Flux2, *inputs: Image.Image) -> dict[str, torch.Tensor]:
    """What the transformer gets of an item with the prompt, beside its latents."""
    return encoded_prompts(family, PROMPT)[0] | encoded_inputs(family, *inputs)


@pytest.mark.parametrize("inputs", [(WIDE,), (WIDE, TALL), (TALL, WIDE, WIDE)])
def test_all_that_the_model_gets_is_what_the_pipeline_gives_it(
    family: Flux2, inputs: tuple[Image.Image, ...]
) -> None:
    pipeline = reference(family)
    (theirs, *_) = transformer_calls(pipeline.transformer, lambda: draw(pipeline, image=list(inputs)))
    transformer = family.load_transformer(torch.float32)
    batch = torch.zeros(2, 128, 2, 4), torch.ones(2), [encoded(family, *inputs)] * 2
    (ours,) = transformer_calls(transformer, lambda: family.predict(transformer, *batch))
    num_noisy = 2 * 4
    num_tokens = num_noisy + sum(6 * 4 for _ in inputs)
    assert ours["hidden_states"].shape == (2, num_tokens, 128)
    for row in ours["hidden_states"]:
        assert torch.equal(row[num_noisy:], theirs["hidden_states"][0, num_noisy:])
    for name in ("txt_ids", "img_ids"):
        assert torch.equal(ours[name], theirs[name]), name
    assert ours["img_ids"][..., 0].unique().tolist() == [10 * place for place in range(1 + len(inputs))]
    assert torch.equal(ours["encoder_hidden_states"][:1], theirs["encoder_hidden_states"])


def test_the_velocity_is_that_of_the_noisy_picture_and_follows_the_others(family: Flux2) -> None:
    transformer = family.load_transformer(torch.float32)
    batch = torch.zeros(1, 128, 2, 4), torch.ones(1)
    with torch.no_grad():
        velocities = [
            family.predict(transformer, *batch, [encoded(family, *inputs)])
            for inputs in ((), (WIDE,), (WIDE.rotate(180),), (WIDE, TALL), (TALL, WIDE))
        ]
    for place, velocity in enumerate(velocities):
        assert velocity.shape == (1, 128, 2, 4)
        assert not any(torch.allclose(velocity, other, atol=1e-5) for other in velocities[:place])


@pytest.mark.parametrize("inputs", [(WIDE,), (WIDE, TALL)])
def test_a_preview_is_what_the_pipeline_draws_from_the_text_and_the_pictures(
    family: Flux2, inputs: tuple[Image.Image, ...]
) -> None:
    transformer = family.load_transformer(torch.float32)
    request = request_of(family, inputs=inputs, guidance_scale=1.0)
    ((drawn,),) = family.sample(transformer, torch.float32, [request])
    expected = draw(reference(family), image=list(inputs), guidance_scale=1.0)
    assert drawn.tobytes() == expected.tobytes()


def test_a_bf16_autoencoder_reads_the_pictures_of_a_preview_of_a_fp32_model(dev: Flux2) -> None:
    request = request_of(dev, inputs=(WIDE,))
    ((drawn,),) = dev.sample(dev.load_transformer(torch.float32), torch.bfloat16, [request])
    assert drawn.size == (64, 32)


def test_the_size_of_an_input_is_known_before_it_is_encoded(family: Flux2) -> None:
    assert family.max_inputs is None
    assert not family.needs_inputs
    for given in (WIDE, TALL, picture(64, 64, 20), picture(512, 64, 20)):
        width, height = family.input_size(*given.size)
        assert encoded_inputs(family, given)["input_latents_0"].shape == family.latents_shape(
            width, height, 1
        )
    # Cut to whole tokens, never enlarged; brought to a megapixel where they are above one.
    assert family.input_size(*WIDE.size) == (96, 64)
    assert family.input_size(1024, 1024) == (1024, 1024)
    assert family.input_size(4000, 3000) == (1168, 880)


def test_an_input_above_a_megapixel_is_encoded_as_by_the_pipeline(tmp_path: Path) -> None:
    with seeded(0):  # without attention, which would take long at this size
        vae = AutoencoderKLFlux2(
            block_out_channels=(2, 2, 2, 2),
            norm_num_groups=1,
            layers_per_block=1,
            mid_block_add_attention=False,
        )
    family = saved(Flux2Pipeline(**tiny().components | {"vae": vae.eval()}), tmp_path)
    given = picture(1300, 900, 20)
    pipeline = reference(family)
    pixels: list[torch.Tensor] = []
    pipeline.prepare_image_latents = lambda images, **_settings: pixels.extend(images) or (None, None)
    draw(pipeline, image=given)
    with torch.no_grad():
        expected = pipeline._encode_vae_image(pixels[0], generator=None)[0]
    (latents,) = encoded_inputs(family, given).values()
    assert torch.equal(latents, expected)
    assert latents.shape == family.latents_shape(*family.input_size(1300, 900), 1) == (128, 53, 76)


@pytest.mark.parametrize("size", [(63, 200), (200, 63), (700, 70), (513, 64), (64, 513)])
def test_an_input_that_the_pipeline_refuses_is_refused(dev: Flux2, size: tuple[int, int]) -> None:
    processor = reference(dev).image_processor
    with pytest.raises(ValueError, match=r"too small|too extreme"):
        processor.check_image_input(Image.new("RGB", size))
    message = f"{size[0]}x{size[1]} pixels: .* at least 64 on each side, and at most 8 times"
    with pytest.raises(UserError, match=message):
        dev.input_size(*size)


@pytest.mark.parametrize("size", [(64, 512), (512, 64), (64, 64), (71, 568)])
def test_an_input_that_the_pipeline_takes_is_taken(dev: Flux2, size: tuple[int, int]) -> None:
    reference(dev).image_processor.check_image_input(Image.new("RGB", size))
    assert min(dev.input_size(*size)) >= 64
