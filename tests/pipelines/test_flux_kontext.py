"""FLUX.1 Kontext against diffusers' own pipeline; its forward is compared in ``test_flux.py``."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diffusers import FluxKontextPipeline
from family_sample import CPU, picture, small_edit_inputs
from PIL import Image

from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Media, Prompt
from diffsynth_lite.pipelines import PipelineFolder
from diffsynth_lite.pipelines.flux import Flux
from diffsynth_lite.pipelines.flux_kontext import FluxKontext, tiny

PROMPT = "a red circle"
WIDE, TALL = picture(100, 52, 20), picture(40, 90, 30)


@pytest.fixture(autouse=True, scope="module")
def _small_inputs() -> Iterator[None]:
    with small_edit_inputs():
        yield


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> FluxKontext:
    folder = tmp_path_factory.mktemp("kontext")
    tiny().save_pretrained(folder)
    family = FluxKontext(PipelineFolder(path=folder))
    family.check_folder()
    return family


def encoded(family: FluxKontext, *inputs: Image.Image) -> dict[str, torch.Tensor]:
    """What the transformer gets of an item with the prompt, beside its latents."""
    (prompt,) = family.load_prompt_encoder(torch.float32, CPU)([Prompt(text=PROMPT)])
    (media,) = family.load_media_encoder(torch.float32, CPU)(
        [Media(frames=(picture(64, 32, 10),), inputs=inputs)]
    )
    media.pop("latents")
    return prompt | media


def draw(pipeline: FluxKontextPipeline, given: Image.Image) -> Image.Image:
    pipeline.set_progress_bar_config(disable=True)
    drawn: Image.Image = pipeline(
        image=given,
        prompt=PROMPT,
        width=64,
        height=32,
        max_area=64 * 32,
        guidance_scale=2.5,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(3),
    ).images[0]
    return drawn


@pytest.mark.parametrize(("given", "num_input_tokens"), [(WIDE, 5 * 3), (TALL, 2 * 6)])
def test_all_that_the_model_gets_is_what_the_pipeline_gives_it(
    family: FluxKontext, given: Image.Image, num_input_tokens: int
) -> None:
    transformer = family.load_transformer(torch.float32)
    calls: list[dict[str, Any]] = []
    transformer.register_forward_pre_hook(
        lambda _module, _args, kwargs: calls.append(kwargs), with_kwargs=True
    )
    draw(FluxKontextPipeline(**tiny().components | {"transformer": transformer}), given)
    with torch.no_grad():
        velocity = family.predict(
            transformer, torch.zeros(1, 16, 4, 8), torch.ones(1), [encoded(family, given)]
        )
    theirs, ours, num_noisy = calls[0], calls[-1], 2 * 4
    assert ours["hidden_states"].shape == theirs["hidden_states"].shape
    assert ours["hidden_states"].shape[1] == num_noisy + num_input_tokens
    assert torch.equal(ours["hidden_states"][:, num_noisy:], theirs["hidden_states"][:, num_noisy:])
    for name in ("encoder_hidden_states", "pooled_projections", "txt_ids", "img_ids", "timestep"):
        assert torch.equal(ours[name], theirs[name]), name
    assert velocity.shape == (1, 16, 4, 8)


def test_the_picture_to_edit_changes_the_velocity(family: FluxKontext) -> None:
    transformer = family.load_transformer(torch.float32)
    with torch.no_grad():
        first, second = (
            family.predict(transformer, torch.zeros(1, 16, 4, 8), torch.ones(1), [encoded(family, given)])
            for given in (WIDE, WIDE.rotate(180))
        )
    assert not torch.allclose(first, second, atol=1e-4)


def test_the_size_of_an_input_is_known_before_it_is_encoded(family: FluxKontext) -> None:
    assert family.max_inputs == 1
    for given in (WIDE, TALL):
        width, height = family.input_size(*given.size)
        assert encoded(family, given)["input_latents_0"].shape[-2:] == (height // 8, width // 8)
    assert family.input_size(*WIDE.size) != family.input_size(*TALL.size)
    with pytest.raises(UserError, match="8x900 pixels are too narrow"):
        family.input_size(8, 900)


@pytest.mark.parametrize("inputs", [(), (WIDE, TALL)])
def test_a_number_of_pictures_that_the_pipeline_cannot_take_is_refused(
    family: FluxKontext, inputs: tuple[Image.Image, ...]
) -> None:
    with pytest.raises(UserError, match=f"{len(inputs)} input pictures; .* takes exactly one"):
        encoded(family, *inputs)


def test_the_encodings_are_not_taken_for_those_of_text_to_image(family: FluxKontext) -> None:
    assert family.media_encoder_id(torch.float32) != _as_flux(family).media_encoder_id(torch.float32)
    # The prompts are: the same encoders, the same text.
    assert family.prompt_encoder_id(torch.float32) == _as_flux(family).prompt_encoder_id(torch.float32)


def _as_flux(family: FluxKontext) -> Flux:
    folder = family.folder.path.parent / "as_flux"
    Flux.pipelines[0](**tiny().components).save_pretrained(folder)
    return Flux(PipelineFolder(path=folder))
