"""Qwen-Image 2.1 against diffusers' own transformer, autoencoder and pipeline."""

import math
from pathlib import Path

import pytest
import torch
from diffusers import QwenImage21Pipeline
from diffusers.pipelines.qwenimage21.pipeline_qwenimage21 import calculate_shift
from family_sample import CPU, PROMPTS, assert_equal_under_all_flags, picture, transformer_calls

from diffsynth_lite.media import Media, Prompt
from diffsynth_lite.pipelines import PipelineFolder
from diffsynth_lite.pipelines.qwen_image_21 import QwenImage21, model_fn_qwen_image_21, tiny

SIGMA = torch.tensor([0.2, 0.7])


@pytest.fixture(scope="module")
def pipeline() -> QwenImage21Pipeline:
    return tiny()


@pytest.fixture(scope="module")
def family(pipeline: QwenImage21Pipeline, tmp_path_factory: pytest.TempPathFactory) -> QwenImage21:
    folder = tmp_path_factory.mktemp("qwen_image_21")
    pipeline.save_pretrained(folder)
    return QwenImage21(PipelineFolder(path=folder))


def encoded_prompts(family: QwenImage21, *texts: str) -> list[dict[str, torch.Tensor]]:
    return family.load_prompt_encoder(torch.float32, CPU)([Prompt(text=text) for text in texts])


def drawn_latents(count: int = 2) -> torch.Tensor:
    return torch.randn(count, 64, 1, 4, 6, generator=torch.Generator().manual_seed(0))


def own_forward(
    pipeline: QwenImage21Pipeline,
    latents: torch.Tensor,
    embeds: torch.Tensor,
    mask: torch.Tensor | None,
    sigma: torch.Tensor = SIGMA,
) -> torch.Tensor:
    """As the pipeline calls it: four places of the picture to one of the mask behind the text."""
    slots = [False] * embeds.shape[1] + [True] * 6
    output = pipeline.transformer(
        hidden_states=latents.flatten(2).transpose(1, 2),
        encoder_hidden_states=embeds,
        timestep=sigma,
        img_shapes=[[(1, 4, 6)]] * len(latents),
        img_mask=torch.tensor([slots] * len(latents)),
        encoder_hidden_states_mask=mask,
        return_dict=False,
    )[0]
    assert output.shape[1] == embeds.shape[1] + 24
    return pipeline._unpack_latents(output[:, -24:], 4 * 16, 6 * 16, pipeline.vae_scale_factor)


@pytest.mark.parametrize("mask", [None, torch.tensor([[True] * 7, [True] * 4 + [False] * 3])])
def test_model_fn_equals_the_transformers_own_forward(
    pipeline: QwenImage21Pipeline, mask: torch.Tensor | None
) -> None:
    latents, embeds = drawn_latents(), torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(1))
    reference = own_forward(pipeline, latents, embeds, mask)
    expected = assert_equal_under_all_flags(
        pipeline.transformer, reference, model_fn_qwen_image_21, latents, SIGMA, embeds, mask
    )
    assert None not in expected.values()


def test_prompts_are_encoded_as_by_the_pipeline(pipeline: QwenImage21Pipeline, family: QwenImage21) -> None:
    texts = [*PROMPTS, ""]
    lengths = family.prompt_lengths(texts)
    for text, row, length in zip(texts, encoded_prompts(family, *texts), lengths, strict=True):
        with torch.no_grad():
            embeds, mask, _ = pipeline.encode_prompt(text, device=CPU)
        assert mask is None
        assert torch.equal(row["prompt_embeds"], embeds[0])
        assert len(embeds[0]) == length
    (long,) = encoded_prompts(family, "circle " * 1100)
    assert len(long["prompt_embeds"]) == 1024


def test_samples_of_several_lengths_are_what_the_pipeline_makes_of_each(
    pipeline: QwenImage21Pipeline, family: QwenImage21
) -> None:
    texts, latents = (PROMPTS[0], PROMPTS[1], PROMPTS[0]), drawn_latents(3)
    sigma = torch.tensor([0.2, 0.7, 0.9])
    batch = latents, sigma, encoded_prompts(family, *texts)
    passes = transformer_calls(pipeline.transformer, lambda: family.predict(pipeline.transformer, *batch))
    assert [len(one["hidden_states"]) for one in passes] == [2, 1]
    assert family.splits_batches
    with torch.no_grad():
        found = family.predict(pipeline.transformer, *batch)
        alone = [
            own_forward(
                pipeline,
                latents[place, None],
                pipeline.encode_prompt(text, device=CPU)[0],
                None,
                sigma[place, None],
            )
            for place, text in enumerate(texts)
        ]
        embeds, mask, _ = pipeline.encode_prompt(list(texts[:2]), device=CPU)
        together = own_forward(pipeline, latents[:2], embeds, mask, sigma[:2])
    torch.testing.assert_close(found, torch.cat(alone), rtol=0, atol=1e-5)
    # Why they go through the model apart: behind padding the picture of a shorter prompt stands elsewhere.
    assert not torch.allclose(together[0], found[0], atol=1e-4)


def test_pictures_are_opaque(pipeline: QwenImage21Pipeline, family: QwenImage21) -> None:
    image = picture(64, 32, 10)
    pixels = pipeline.image_processor.preprocess(image.convert("RGBA"))
    with torch.no_grad():
        expected = pipeline._encode_vae_image(pixels.unsqueeze(2), generator=None)
    (tensors,) = family.load_media_encoder(torch.float32, CPU)([Media(frames=(image,))])
    torch.testing.assert_close(tensors["latents"], expected[0], rtol=1e-5, atol=1e-6)


def test_the_shift_is_the_pipelines_and_levels_in_its_index_are_those_of_a_distilled_model(
    pipeline: QwenImage21Pipeline, family: QwenImage21, tmp_path: Path
) -> None:
    for side in (512, 2048):
        shape = family.latents_shape(side, side, 1)
        assert shape == (64, 1, side // 16, side // 16)
        mu = calculate_shift((side // 16) ** 2, 256, 8192, 0.5, 0.9)
        assert family.family_shift(shape) == pytest.approx(math.exp(mu))
    assert family.distilled is None
    QwenImage21Pipeline(**pipeline.components, sample_sigmas=[1.0, 0.5]).save_pretrained(tmp_path)
    distilled = QwenImage21(PipelineFolder(path=tmp_path))
    assert distilled.distilled is not None
    assert distilled._sampling_levels == {"sample_sigmas": [1.0, 0.5]}
