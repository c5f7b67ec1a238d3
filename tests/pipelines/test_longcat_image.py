"""LongCat-Image and its edits: what the tests of all families do not ask of them."""

import math

import pytest
import torch
from diffusers.pipelines.longcat_image.pipeline_longcat_image import calculate_shift, split_quotation
from family_sample import CPU, encode_texts, family_fixture, mandelbrot
from PIL.Image import Image

from diffsynth_lite.media import Prompt
from diffsynth_lite.pipelines import longcat_image_edit
from diffsynth_lite.pipelines.longcat_image import LongCatImage, SplitTokenizer, tiny
from diffsynth_lite.pipelines.longcat_image_edit import LongCatImageEdit

image = family_fixture("longcat_image")
edit = family_fixture("longcat_image_edit")


@pytest.mark.parametrize(
    "text",
    [
        "a sign, 'an image', and \"the image\" below",
        "it's \u2018an image\u2019, \u201cthe image\u201d, and it's red",
        "a sign, 'the image of it's' and an open ' image",
    ],
)
def test_quoted_words_are_read_by_the_character_as_by_the_pipeline(image: LongCatImage, text: str) -> None:
    pipeline = tiny()
    with torch.no_grad():
        (expected,) = pipeline.encode_prompt(text)[0]
    assert torch.equal(encode_texts(image, text)[0]["prompt_embeds"], expected)
    tokens = [
        token
        for part, is_quoted in split_quotation(text)
        for piece in (part if is_quoted else [part])
        for token in pipeline.tokenizer(piece)["input_ids"]
    ]
    assert image.prompt_lengths([text]) == [len(tokens)]
    assert len(tokens) > len(pipeline.tokenizer(text)["input_ids"])


def test_each_of_several_words_with_an_apostrophe_is_read_as_it_is(image: LongCatImage) -> None:
    tokenizer, text = tiny().tokenizer, "it's a ring that doesn't shine, she'd say"
    assert tokenizer.decode(SplitTokenizer(tokenizer).tokens(text)) == text
    # In diffusers 0.42.1 it is not; when it is, SplitTokenizer need not hide them.
    assert "".join(part for part, _ in split_quotation(text)) != text


def test_another_template_is_another_identity_of_the_prompt_encoder(image: LongCatImage) -> None:
    template = tiny().prompt_template_encode_prefix, tiny().prompt_template_encode_suffix
    assert repr(template) in image.prompt_encoder_id(torch.float32)


def test_images_are_trained_with_the_shift_that_they_are_sampled_with(image: LongCatImage) -> None:
    assert image.family_shift((16, 128, 96)) == pytest.approx(math.exp(calculate_shift(64 * 48)))


@torch.no_grad()
def encoded_edit(text: str, shown: Image, size: tuple[int, int]) -> torch.Tensor:
    """What the pipeline makes of a prompt, as its call does."""
    pipeline, (width, height) = longcat_image_edit.tiny(), size
    resize = pipeline.image_processor.resize
    embeds_bld: torch.Tensor = pipeline.encode_prompt(
        text, resize(resize(shown, height, width), height // 2, width // 2)
    )[0]
    return embeds_bld[0]


def test_each_prompt_of_a_batch_sees_its_own_image(edit: LongCatImageEdit) -> None:
    images = mandelbrot(100, 68, 20), mandelbrot(60, 130, 30)
    texts = "a 'ring' image", "it's an image"
    encode = edit.load_prompt_encoder(torch.float32, CPU)
    rows = encode([Prompt(text=text, images=(one,)) for text, one in zip(texts, images, strict=True)])
    for row, text, one in zip(rows, texts, images, strict=True):
        expected = encoded_edit(text, one, edit.input_size(*one.size))
        assert torch.equal(row["prompt_embeds"], expected)


def test_the_instruction_of_an_edit_is_cut_where_the_pipeline_fails(edit: LongCatImageEdit) -> None:
    shown, longest = mandelbrot(100, 68, 20), " image" * 512
    (row,) = edit.load_prompt_encoder(torch.float32, CPU)([Prompt(text=f"{longest} of", images=(shown,))])
    assert edit.prompt_lengths([f"{longest} of"]) == [513]
    assert torch.equal(row["prompt_embeds"], encoded_edit(longest, shown, edit.input_size(*shown.size)))
    with pytest.raises(TypeError, match="has no len"):  # when it cuts, the instruction need not be cut here
        encoded_edit(f"{longest} of", shown, edit.input_size(*shown.size))
