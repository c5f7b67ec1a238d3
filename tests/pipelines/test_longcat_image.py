"""LongCat-Image and its edits: what the tests of all families do not ask of them."""

import pytest
import torch
from diffusers.pipelines.longcat_image.pipeline_longcat_image import split_quotation
from family_sample import CPU, encode_texts, family_fixture

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


def test_the_text_encoder_that_rewrites_prompts_needs_no_processor_here(image: LongCatImage) -> None:
    assert "text_processor" in image.folder.pipeline_config()
    assert "text_processor" not in image.components_without_weights
    assert image.load_prompt_encoder(torch.float32, CPU)
