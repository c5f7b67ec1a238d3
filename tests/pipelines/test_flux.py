"""FLUX.1, Fill, Kontext and Chroma against diffusers' own pipelines."""

import dataclasses
from typing import Any

import numpy as np
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from family_sample import (
    CPU,
    PROMPTS,
    encode_texts,
    family_fixture,
    gradients,
    hole,
    mandelbrot,
    transformer_calls,
)
from PIL import Image

from diffsynth_lite.media import Media
from diffsynth_lite.pipelines import PreviewRequest
from diffsynth_lite.pipelines.chroma import model_fn_chroma
from diffsynth_lite.pipelines.chroma import tiny as tiny_chroma
from diffsynth_lite.pipelines.flux import FLUX, Flux
from diffsynth_lite.pipelines.flux_fill import FLUX_FILL, FluxFill

FAMILY = "flux"
fill = family_fixture("flux_fill")


ITEM = Media(frames=(mandelbrot(64, 32, 10),), inpaint_mask=(hole(64, 32, 1),))


ROWS, COLUMNS = 2, 4  # tokens of an image of 64 x 32 pixels


TWO_LEVELS = torch.tensor([0.2, 0.7])


def test_dev_gets_no_guidance_in_training_or_that_of_its_target(family: Flux) -> None:
    guided = Flux(family.folder)
    transformer = guided.load_transformer(torch.float32)
    batch = torch.zeros(1, 16, 4, 8), torch.ones(1), encode_texts(guided, "a ring")
    for scale in (1.0, 3.5):
        guided.training_guidance = scale
        (call,) = transformer_calls(transformer, lambda: guided.predict(transformer, *batch))
        assert call["guidance"].tolist() == [scale]


def encoded_by_fill(family: FluxFill, *items: Media) -> list[dict[str, torch.Tensor]]:
    return family.load_media_encoder(torch.float32, CPU)(items)


def request_of_fill(family: FluxFill, **changes: Any) -> PreviewRequest:
    (prompt,) = encode_texts(family, "a red circle")
    request = PreviewRequest(
        conditioning=prompt,
        negative=prompt,
        inputs=ITEM.frames,
        inpaint_mask=ITEM.inpaint_mask,
        width=64,
        height=32,
        num_inference_steps=2,
        guidance_scale=30.0,
        seed=3,
    )
    return dataclasses.replace(request, **changes)


def patches(planes_bchw: torch.Tensor) -> torch.Tensor:
    """Tokens of 2 x 2 places in reading order, written out instead of through diffusers."""
    rows = planes_bchw.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5)
    return rows.reshape(len(planes_bchw), -1, 4 * planes_bchw.shape[1])


def test_a_token_holds_its_own_pixels_of_the_mask_and_the_image_without_them(fill: FluxFill) -> None:
    (sample,) = encoded_by_fill(fill, ITEM)
    mask = torch.from_numpy(np.array(ITEM.inpaint_mask[0])).long() // 255
    assert sample["mask_tokens"].dtype == torch.uint8
    for row in range(ROWS):
        for column in range(COLUMNS):
            square = mask[16 * row : 16 * row + 16, 16 * column : 16 * column + 16]
            # 64 places of a latent's 8 x 8 pixels, each of the token's 2 x 2 latents.
            expected = square.view(2, 8, 2, 8).permute(1, 3, 0, 2).flatten()
            assert torch.equal(sample["mask_tokens"][row * COLUMNS + column].long(), expected)
    pixels = torch.from_numpy(np.array(ITEM.frames[0])).permute(2, 0, 1)[None] / 127.5 - 1
    vae = fill.load_component("vae", torch.float32)
    with torch.no_grad():
        latents, masked = (
            (vae.encode(part).latent_dist.mode() - vae.config.shift_factor) * vae.config.scaling_factor
            for part in (pixels, pixels * (1 - mask))
        )
    torch.testing.assert_close(sample["latents"], latents[0])
    torch.testing.assert_close(sample["masked_tokens"], patches(masked)[0])


def test_the_model_knows_nothing_of_what_it_is_to_paint(fill: FluxFill) -> None:
    """An image that differs only in the masked part is another target with the same condition."""
    other = ITEM.frames[0].copy()
    other.paste((0, 200, 0), (8, 3, 39, 26))  # the hole
    first, second = encoded_by_fill(fill, ITEM, dataclasses.replace(ITEM, frames=(other,)))
    assert not torch.allclose(first["latents"], second["latents"])
    for name in ("masked_tokens", "mask_tokens"):
        assert torch.equal(first[name], second[name])
    other.putpixel((63, 31), (0, 200, 0))  # outside of it
    (third,) = encoded_by_fill(fill, dataclasses.replace(ITEM, frames=(other,)))
    assert not torch.equal(first["masked_tokens"], third["masked_tokens"])


def test_training_asks_for_no_guidance_and_a_preview_for_its_own(fill: FluxFill) -> None:
    transformer = fill.load_transformer(torch.float32)
    request = request_of_fill(fill)
    (sample,) = encoded_by_fill(fill, ITEM)
    batch = torch.zeros(1, 16, 4, 8), torch.ones(1), [request.conditioning | sample]
    (trained,) = transformer_calls(transformer, lambda: fill.predict(transformer, *batch))
    sampled = transformer_calls(transformer, lambda: fill.sample(transformer, torch.float32, [request]))
    assert [call["guidance"].tolist() for call in (trained, *sampled)] == [[1.0], [30.0], [30.0]]


def test_a_preview_keeps_the_middle_of_its_image_undistorted(fill: FluxFill) -> None:
    transformer, wide = fill.load_transformer(torch.float32), mandelbrot(100, 32, 20)
    middle = wide.resize((64, 32), Image.Resampling.LANCZOS, box=(18, 0, 82, 32))
    requests = [request_of_fill(fill, inputs=(given,)) for given in (wide, middle, wide.resize((64, 32)))]
    [fitted], [cut], [distorted] = fill.sample(transformer, torch.float32, requests)
    assert fitted.tobytes() == cut.tobytes() != distorted.tobytes()


def test_the_released_fill_has_the_size_of_its_file() -> None:
    """23,804,922,408 bytes, a header of some 100 KiB among them."""
    counts = {}
    for release in (FLUX[0], FLUX_FILL[0]):
        with torch.device("meta"):
            model = FluxTransformer2DModel(**release.components["transformer"].config)
        counts[release.name] = 2 * sum(weight.numel() for weight in model.parameters())
    assert counts["FLUX.1 dev"] == FLUX[0].components["transformer"].num_bytes
    assert counts["FLUX.1 Fill dev"] == counts["FLUX.1 dev"] + 2 * 320 * 3072 == 23_804_782_720
    assert 0 < 23_804_922_408 - counts["FLUX.1 Fill dev"] < 200_000


def own_forward_of_chroma(
    transformer: Any, latents: torch.Tensor, embeds: torch.Tensor, mask: Any
) -> torch.Tensor:
    """With 2 x 2 patches in reading order, written out instead of through diffusers' packing."""
    places = torch.tensor([[0.0, row, column] for row in range(4) for column in range(2)])
    velocity = transformer(
        hidden_states=patches(latents),
        timestep=TWO_LEVELS,
        encoder_hidden_states=embeds,
        txt_ids=torch.zeros(7, 3),
        img_ids=places,
        attention_mask=torch.cat([mask.bool(), torch.ones(2, 8).bool()], dim=1),
        return_dict=False,
    )[0]
    return FluxPipeline._unpack_latents(velocity, 8 * 8, 4 * 8, vae_scale_factor=8)


def differing(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    assert None not in (*first.values(), *second.values())
    return [name for name, gradient in first.items() if not torch.equal(gradient, second[name])]


def test_of_chroma_diffusers_own_checkpointing_forgets_the_mask_and_ours_does_not() -> None:
    transformer, generator = tiny_chroma().transformer, torch.Generator().manual_seed(0)
    latents, embeds = (torch.randn(2, *size, generator=generator) for size in ((16, 8, 4), (7, 32)))
    mask = torch.tensor([[1, 1, 1, 0, 0, 0, 0], [1] * 7])
    plain = own_forward_of_chroma(transformer, latents, embeds, mask)
    expected = gradients(transformer, plain)

    transformer.enable_gradient_checkpointing()
    # The day this fails, diffusers passes the mask on, and its hook can be used here as elsewhere.
    theirs = own_forward_of_chroma(transformer, latents, embeds, mask)
    assert not torch.allclose(theirs[0], plain[0], rtol=0, atol=1e-4)
    assert len(differing(gradients(transformer, theirs), expected)) > len(expected) / 2
    assert torch.equal(theirs[1], plain[1])  # whose mask hides nothing

    transformer.disable_gradient_checkpointing()
    ours = model_fn_chroma(transformer, latents, TWO_LEVELS, embeds, mask, use_gradient_checkpointing=True)
    assert torch.equal(ours, plain)
    assert differing(gradients(transformer, ours), expected) == []


def test_chromas_own_mask_of_numbers_hides_less_than_one_of_truth_values() -> None:
    pipeline = tiny_chroma()
    # The day this fails, diffusers issue 12116 is mended, and test_family_fidelity.py need not do it.
    embeds, _, mask, *_ = pipeline.encode_prompt(PROMPTS[0], device=CPU, do_classifier_free_guidance=False)
    assert mask.is_floating_point()
    generated = [
        pipeline(
            prompt_embeds=embeds,
            prompt_attention_mask=given,
            guidance_scale=1.0,
            width=64,
            height=32,
            num_inference_steps=2,
            generator=torch.Generator().manual_seed(3),
            output_type="pt",
        ).images
        for given in (mask, mask.bool())
    ]
    assert (generated[0] - generated[1]).abs().max() > 1 / 255
