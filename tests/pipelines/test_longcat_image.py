"""LongCat-Image and its edits: what the tests of all families do not ask of them."""

import math

import pytest
import torch
from diffusers.pipelines.longcat_image.pipeline_longcat_image import calculate_shift, split_quotation
from family_sample import encode_texts, family_fixture

from diffsynth_lite.pipelines.longcat_image import LongCatImage, SplitTokenizer, tiny

image = family_fixture("longcat_image")


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
