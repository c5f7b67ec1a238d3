"""FLUX.1 Fill against diffusers' own transformer and pipeline."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxFillPipeline, FluxTransformer2DModel
from family_sample import CPU, assert_equal_under_all_flags, hole, picture, transformer_calls
from PIL import Image

from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Media, Prompt
from diffsynth_lite.pipelines import PipelineFolder, PreviewRequest, flux, require_family
from diffsynth_lite.pipelines.flux import Flux
from diffsynth_lite.pipelines.flux_fill import FluxFill, model_fn_flux_fill, tiny
from diffsynth_lite.releases.flux import FLUX, FLUX_FILL

ITEM = Media(frames=(picture(64, 32, 10),), inpaint_mask=(hole(64, 32, 1),))
ROWS, COLUMNS = 2, 4  # tokens of a picture of 64 x 32 pixels


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> FluxFill:
    folder = tmp_path_factory.mktemp("fill")
    tiny().save_pretrained(folder)
    family = FluxFill(PipelineFolder(path=folder))
    family.check_folder()
    return family


def encoded(family: FluxFill, *items: Media) -> list[dict[str, torch.Tensor]]:
    return family.load_media_encoder(torch.float32, CPU)(items)


def request_of(family: FluxFill, **changes: Any) -> PreviewRequest:
    (prompt,) = family.load_prompt_encoder(torch.float32, CPU)([Prompt(text="a red circle")])
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


def test_model_fn_equals_the_transformers_own_forward() -> None:
    transformer = tiny().transformer
    generator = torch.Generator().manual_seed(0)
    noisy, masked = torch.randn(2, 2, 16, 8, 4, generator=generator)
    mask = torch.randint(2, (2, 64, 8, 4), generator=generator).float()
    embeds, pooled = torch.randn(2, 7, 32, generator=generator), torch.randn(2, 32, generator=generator)
    sigma, guidance = torch.tensor([0.2, 0.7]), torch.tensor([1.0, 30.0])
    reference = transformer(
        hidden_states=torch.cat([patches(noisy), patches(masked), patches(mask)], dim=2),
        timestep=sigma,
        guidance=guidance,
        pooled_projections=pooled,
        encoder_hidden_states=embeds,
        txt_ids=torch.zeros(7, 3),
        img_ids=torch.tensor([[0.0, row, column] for row in range(4) for column in range(2)]),
        return_dict=False,
    )[0]
    reference = FluxFillPipeline._unpack_latents(reference, 8 * 8, 4 * 8, vae_scale_factor=8)
    given = assert_equal_under_all_flags(
        transformer,
        reference,
        model_fn_flux_fill,
        noisy,
        sigma,
        embeds,
        pooled,
        guidance,
        condition_bld=torch.cat([patches(masked), patches(mask)], dim=2),
    )
    assert given["x_embedder.weight"] is not None
    assert given["x_embedder.weight"].shape == (32, 384)


def test_a_token_is_told_its_own_pixels_of_the_mask_and_the_picture_without_them(family: FluxFill) -> None:
    (sample,) = encoded(family, ITEM)
    mask = torch.from_numpy(np.array(ITEM.inpaint_mask[0])).long() // 255
    assert sample["mask_tokens"].dtype == torch.uint8
    for row in range(ROWS):
        for column in range(COLUMNS):
            square = mask[16 * row : 16 * row + 16, 16 * column : 16 * column + 16]
            # 64 places of a latent's 8 x 8 pixels, each of the token's 2 x 2 latents.
            expected = square.view(2, 8, 2, 8).permute(1, 3, 0, 2).flatten()
            assert torch.equal(sample["mask_tokens"][row * COLUMNS + column].long(), expected)
    pixels = torch.from_numpy(np.array(ITEM.frames[0])).permute(2, 0, 1)[None] / 127.5 - 1
    vae = family.load_component("vae", torch.float32)
    with torch.no_grad():
        latents, masked = (
            (vae.encode(part).latent_dist.mode() - vae.config.shift_factor) * vae.config.scaling_factor
            for part in (pixels, pixels * (1 - mask))
        )
    torch.testing.assert_close(sample["latents"], latents[0])
    torch.testing.assert_close(sample["masked_tokens"], patches(masked)[0])


def test_the_model_is_told_nothing_of_what_it_is_to_paint(family: FluxFill) -> None:
    """A picture that differs in the masked part alone is another target, told by the same numbers."""
    other = ITEM.frames[0].copy()
    other.paste((0, 200, 0), (8, 3, 39, 26))  # the hole
    first, second = encoded(family, ITEM, dataclasses.replace(ITEM, frames=(other,)))
    assert not torch.allclose(first["latents"], second["latents"])
    for name in ("masked_tokens", "mask_tokens"):
        assert torch.equal(first[name], second[name])
    other.putpixel((63, 31), (0, 200, 0))  # outside of it
    (third,) = encoded(family, dataclasses.replace(ITEM, frames=(other,)))
    assert not torch.equal(first["masked_tokens"], third["masked_tokens"])


def test_another_mask_changes_the_velocity(family: FluxFill) -> None:
    transformer = family.load_transformer(torch.float32)
    prompt = request_of(family).conditioning
    items = [ITEM, dataclasses.replace(ITEM, inpaint_mask=(hole(64, 32, 0),))]
    with torch.no_grad():
        first, second = (
            family.predict(transformer, torch.zeros(1, 16, 4, 8), torch.ones(1), [prompt | sample])
            for sample in encoded(family, *items)
        )
    assert first.shape == (1, 16, 4, 8)
    assert not torch.allclose(first, second, atol=1e-4)


def test_training_asks_for_no_guidance_and_a_preview_for_its_own(family: FluxFill) -> None:
    transformer = family.load_transformer(torch.float32)
    request = request_of(family)
    (sample,) = encoded(family, ITEM)
    batch = torch.zeros(1, 16, 4, 8), torch.ones(1), [request.conditioning | sample]
    (trained,) = transformer_calls(transformer, lambda: family.predict(transformer, *batch))
    drawn = transformer_calls(transformer, lambda: family.sample(transformer, torch.float32, [request]))
    assert [call["guidance"].tolist() for call in (trained, *drawn)] == [[1.0], [30.0], [30.0]]


def test_a_preview_keeps_the_middle_of_its_picture_undistorted(family: FluxFill) -> None:
    transformer, wide = family.load_transformer(torch.float32), picture(100, 32, 20)
    middle = wide.resize((64, 32), Image.Resampling.LANCZOS, box=(18, 0, 82, 32))
    requests = [request_of(family, inputs=(given,)) for given in (wide, middle, wide.resize((64, 32)))]
    [fitted], [cut], [distorted] = family.sample(transformer, torch.float32, requests)
    assert fitted.tobytes() == cut.tobytes() != distorted.tobytes()


def test_the_released_model_has_the_size_of_its_file() -> None:
    """23,804,922,408 bytes, a header of some 100 KiB among them."""
    counts = {}
    for release in (FLUX[0], FLUX_FILL[0]):
        with torch.device("meta"):
            model = FluxTransformer2DModel(**release.components["transformer"].config)
        counts[release.name] = 2 * sum(weight.numel() for weight in model.parameters())
    assert counts["FLUX.1 dev"] == FLUX[0].components["transformer"].num_bytes
    assert counts["FLUX.1 Fill dev"] == counts["FLUX.1 dev"] + 2 * 320 * 3072 == 23_804_782_720
    assert 0 < 23_804_922_408 - counts["FLUX.1 Fill dev"] < 200_000


def test_its_folder_and_its_encodings_are_not_taken_for_those_of_text_to_image(
    family: FluxFill, tmp_path: Path
) -> None:
    flux.tiny().save_pretrained(tmp_path)
    as_flux = Flux(PipelineFolder(path=tmp_path))
    with pytest.raises(UserError, match=r"holds a FluxFillPipeline, .*; set model\.family: flux_fill"):
        require_family(Flux, family.folder)
    assert family.media_encoder_id(torch.float32) != as_flux.media_encoder_id(torch.float32)
    assert family.prompt_encoder_id(torch.float32) == as_flux.prompt_encoder_id(torch.float32)
