"""ERNIE-Image against diffusers' own transformer, autoencoder and pipeline."""

import pytest
import torch
from diffusers import ErnieImagePipeline
from family_sample import CPU, PROMPTS, assert_equal_under_all_flags, picture

from diffsynth_lite.media import Media, Prompt
from diffsynth_lite.pipelines import PipelineFolder
from diffsynth_lite.pipelines.base.model_function import pad_tokens
from diffsynth_lite.pipelines.ernie_image import ErnieImage, model_fn_ernie_image, tiny


@pytest.fixture(scope="module")
def pipeline() -> ErnieImagePipeline:
    return tiny()


@pytest.fixture(scope="module")
def family(pipeline: ErnieImagePipeline, tmp_path_factory: pytest.TempPathFactory) -> ErnieImage:
    folder = tmp_path_factory.mktemp("ernie_image")
    pipeline.save_pretrained(folder)
    return ErnieImage(PipelineFolder(path=folder))


@pytest.mark.parametrize("lengths", [(5, 9, 7), (6, 6, 6)], ids=["padded", "of one length"])
def test_model_fn_equals_the_transformers_own_forward(lengths: tuple[int, ...]) -> None:
    """It has no other inputs; the pipeline's own function makes those of the prompts."""
    transformer = tiny().transformer
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(3, 128, 4, 2, generator=generator)
    timestep = torch.tensor([200.0, 700.0, 512.5])
    rows = [torch.randn(length, 16, generator=generator) for length in lengths]
    text_bth, text_lens = ErnieImagePipeline._pad_text(rows, CPU, torch.float32, 16)
    reference = transformer(latents, timestep, text_bth, text_lens, return_dict=False)[0]
    expected = assert_equal_under_all_flags(
        transformer, reference, model_fn_ernie_image, latents, timestep, *pad_tokens(rows)
    )
    # No layer of the last block is unused.
    assert all(gradient is not None for gradient in expected.values())


def test_prompts_are_encoded_as_by_the_pipeline_and_cut_where_it_would_not(
    pipeline: ErnieImagePipeline, family: ErnieImage
) -> None:
    texts = [*PROMPTS, "", "circle " * 100]
    encode = family.load_prompt_encoder(torch.float32, CPU)
    rows = [row["prompt_embeds"] for row in encode([Prompt(text=text) for text in texts])]
    expected = pipeline.encode_prompt(texts, CPU)
    for row, other in zip(rows[:4], expected[:4], strict=True):
        assert torch.equal(row, other)
    # Of an empty text the pipeline makes one token, which begins all others of the released tokenizer.
    assert [len(row) for row in rows[:3]] == family.prompt_lengths(PROMPTS)
    assert len(rows[3]) == 1
    # What stands behind the cut is not seen by what stands before it.
    assert (len(rows[4]), len(expected[4])) == (512, 700)
    torch.testing.assert_close(rows[4], expected[4][:512], rtol=1e-4, atol=1e-5)
    assert family.prompt_lengths(texts[4:]) == [700]


def test_latents_are_the_inverse_of_what_the_pipeline_decodes(
    pipeline: ErnieImagePipeline, family: ErnieImage
) -> None:
    """It adds another number to the variance than the autoencoder's file says, which FLUX.2 adds."""
    image, vae = picture(64, 32, 10), tiny().vae
    assert vae.config.batch_norm_eps == 1e-4
    vae.bn.running_var.mul_(1e-4)  # so that the number counts
    pixels = pipeline.image_processor.preprocess(image)
    ours = family.encode_pixels(vae, pixels)
    std = torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + 1e-5)
    decoded = pipeline._unpatchify_latents(ours * std + vae.bn.running_mean.view(1, -1, 1, 1))
    with torch.no_grad():
        expected = vae.encode(pixels).latent_dist.mode()
    torch.testing.assert_close(decoded, expected)
    (encoded,) = family.load_media_encoder(torch.float32, CPU)([Media(frames=(image,))])
    assert encoded["latents"].shape == family.latents_shape(64, 32, 1) == (128, 2, 4)


def test_the_model_that_rewrites_prompts_is_not_needed(family: ErnieImage) -> None:
    assert "pe" in family.folder.pipeline_config()
    assert not (family.folder.path / "pe").exists()
    assert not {"pe", "pe_tokenizer"} & {*family.components, *family.components_without_weights}
    family.check_folder()
