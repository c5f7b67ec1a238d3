"""FLUX.2 dev and klein, from text and from images, against diffusers' own autoencoder and pipelines."""

import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from diffusers import AutoencoderKLFlux2, Flux2Pipeline
from family_sample import (
    CPU,
    PROMPTS,
    Sample,
    encode_texts,
    family_fixture,
    mandelbrot,
)
from PIL import Image

from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Media
from diffsynth_lite.pipelines import PipelineFolder, PreviewRequest
from diffsynth_lite.pipelines.flux2 import Flux2, tiny
from diffsynth_lite.testing import seeded

FAMILY = "flux2"
dev = family_fixture("flux2")
PROMPT = "a red circle"


WIDE, TALL = mandelbrot(110, 70, 20), mandelbrot(64, 100, 30)


@pytest.fixture(scope="module", params=["flux2", "flux2 klein"])
def family(request: pytest.FixtureRequest, sample_of: Callable[[str], Sample]) -> Flux2:
    return sample_of(request.param).family


def saved(pipeline: Any, folder: Path) -> Flux2:
    pipeline.save_pretrained(folder)
    return Flux2(PipelineFolder(path=folder))


@cache
def reference(family: Flux2) -> Any:
    """The family's pipeline, read once from its folder as the family reads it."""
    return family.pipeline.from_pretrained(family.folder.path)


@cache  # of 512 tokens and 30 layers, which takes most of a test's time
def encoded_prompts(family: Flux2, *texts: str) -> list[dict[str, torch.Tensor]]:
    return encode_texts(family, *texts)


def request_of(family: Flux2, **settings: Any) -> PreviewRequest:
    """A preview of ``PROMPT``, 64 x 32, of two steps."""
    conditioning, negative = encoded_prompts(family, PROMPT, "blurred")
    fixed = {"width": 64, "height": 32, "num_inference_steps": 2, "guidance_scale": 3.5, "seed": 3}
    return PreviewRequest(conditioning=conditioning, negative=negative, **fixed | settings)


def generate(pipeline: Any, **settings: Any) -> Any:
    """What the pipeline itself generates for ``request_of``."""
    generator = torch.Generator().manual_seed(3)
    fixed = {"width": 64, "height": 32, "num_inference_steps": 2, "guidance_scale": 3.5}
    return pipeline(prompt=PROMPT, generator=generator, **fixed | settings).images[0]


def test_the_tokenizer_reads_prompts_as_the_processor_of_the_released_models() -> None:
    pytest.importorskip("torchvision", reason="PixtralProcessor cannot be imported without torchvision")
    from diffusers.pipelines.flux2.pipeline_flux2 import format_input
    from transformers import PixtralImageProcessorPil, PixtralProcessor

    tokenizer = tiny().tokenizer
    processor = PixtralProcessor(
        image_processor=PixtralImageProcessorPil(), tokenizer=tokenizer, chat_template=tokenizer.chat_template
    )
    call = {"return_tensors": "pt", "padding": "max_length", "truncation": True, "max_length": 512}
    chats = format_input([*PROMPTS, "", "circle " * 200])
    ours, theirs = (
        reader.apply_chat_template(chats, tokenize=True, return_dict=True, **call)
        for reader in (tokenizer, processor)
    )
    for name in ("input_ids", "attention_mask"):
        assert torch.equal(ours[name], theirs[name]), name


def test_the_shift_by_resolution_is_the_one_that_the_pipeline_gives_its_sampler(
    family: Flux2, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = inspect.signature(family.pipeline.__call__).parameters["num_inference_steps"].default
    transformer = family.load_transformer(torch.float32)
    scheduler = family.load_scheduler()
    monkeypatch.setattr(family, "load_scheduler", lambda: scheduler)
    # The noise levels are set before the first of 50 steps.
    monkeypatch.setattr(scheduler, "step", Mock(side_effect=InterruptedError))
    request = request_of(family, num_inference_steps=default, guidance_scale=1.0)
    with pytest.raises(InterruptedError):
        family.sample(transformer, torch.float32, [request])
    shift = family.resolution_shift(family.latents_shape(64, 32, 1))
    sigmas = torch.linspace(1, 1 / default, default)
    torch.testing.assert_close(
        scheduler.sigmas[:-1], shift * sigmas / (1 + (shift - 1) * sigmas), rtol=1e-5, atol=0
    )


def encoded_inputs(family: Flux2, *inputs: Image.Image) -> dict[str, torch.Tensor]:
    media = Media(frames=(mandelbrot(64, 32, 10),), inputs=inputs)
    (encoded,) = family.load_media_encoder(torch.float32, CPU)([media])
    return {name: tensor for name, tensor in encoded.items() if name != "latents"}


def test_a_preview_is_what_the_pipeline_generates_from_the_text_and_the_images(family: Flux2) -> None:
    inputs, transformer = (WIDE, TALL), family.load_transformer(torch.float32)
    request = request_of(family, inputs=inputs, guidance_scale=1.0)
    ((generated,),) = family.sample(transformer, torch.float32, [request])
    expected = generate(reference(family), image=list(inputs), guidance_scale=1.0)
    assert generated.tobytes() == expected.tobytes()


def test_an_input_is_cut_to_whole_tokens_and_brought_to_a_megapixel(dev: Flux2) -> None:
    assert (dev.max_inputs, dev.needs_inputs) == (None, False)
    # Never enlarged.
    assert dev.input_size(*WIDE.size) == (96, 64)
    assert dev.input_size(1024, 1024) == (1024, 1024)
    assert dev.input_size(4000, 3000) == (1168, 880)


def test_an_input_above_a_megapixel_is_encoded_as_by_the_pipeline(tmp_path: Path) -> None:
    with seeded(0):  # without attention, which would take long at this size
        vae = AutoencoderKLFlux2(
            block_out_channels=(2, 2, 2, 2),
            norm_num_groups=1,
            layers_per_block=1,
            mid_block_add_attention=False,
        )
    family = saved(Flux2Pipeline(**tiny().components | {"vae": vae.eval()}), tmp_path)
    given = mandelbrot(1300, 900, 20)
    pipeline = reference(family)
    pixels: list[torch.Tensor] = []
    pipeline.prepare_image_latents = lambda images, **_settings: pixels.extend(images) or (None, None)
    generate(pipeline, image=given)
    with torch.no_grad():
        expected = pipeline._encode_vae_image(pixels[0], generator=None)[0]
    (latents,) = encoded_inputs(family, given).values()
    assert torch.equal(latents, expected)
    assert latents.shape == family.latents_shape(*family.edits.input_size(1300, 900), 1) == (128, 53, 76)


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
