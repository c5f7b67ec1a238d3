"""Qwen-Image-Edit and Edit-Plus against diffusers' own pipelines."""

from collections.abc import Callable

import pytest
import torch
from diffusers import QwenImageEditPipeline, QwenImageEditPlusPipeline
from family_sample import CPU, Sample, encode_texts, picture
from PIL import Image

from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Media
from diffsynth_lite.pipelines.qwen_image_edit import QwenImageEdit, TextAndPictures, tiny

FAMILY = "qwen_image_edit"
PROMPT = "a red circle"
WIDE, TALL = picture(100, 52, 20), picture(40, 90, 30)


@pytest.fixture(scope="module", params=["qwen_image_edit", "qwen_image_edit plus"])
def family(request: pytest.FixtureRequest, sample_of: Callable[[str], Sample]) -> QwenImageEdit:
    family = sample_of(request.param).family
    family.check_folder()
    return family


def encoded_inputs(family: QwenImageEdit, pictures: tuple[Image.Image, ...]) -> dict[str, torch.Tensor]:
    media = Media(frames=(picture(64, 32, 10),), inputs=pictures)
    (encoded,) = family.load_media_encoder(torch.float32, CPU)([media])
    return {name: tensor for name, tensor in encoded.items() if name != "latents"}


@pytest.mark.parametrize("one", [WIDE, TALL, picture(64, 64, 20), picture(200, 31, 20)])
def test_the_size_of_an_input_is_that_of_its_latents(family: QwenImageEdit, one: Image.Image) -> None:
    [latents] = encoded_inputs(family, (one,)).values()
    assert latents.shape == family.latents_shape(*family.input_size(*one.size), 1)


def test_an_input_of_which_no_row_would_be_left_is_refused(family: QwenImageEdit) -> None:
    with pytest.raises(UserError, match="8000x2 pixels are too narrow for an input picture"):
        family.input_size(8000, 2)


def test_each_release_takes_as_many_images_as_its_pipeline(family: QwenImageEdit) -> None:
    assert family.max_inputs == (None if family.pipeline is QwenImageEditPlusPipeline else 1)


def test_a_number_of_images_that_the_pipeline_cannot_take_is_refused(family: QwenImageEdit) -> None:
    with pytest.raises(UserError, match="0 input pictures"):
        encode_texts(family, PROMPT)
    if family.pipeline is QwenImageEditPipeline:
        with pytest.raises(UserError, match="2 input pictures; a QwenImageEditPipeline takes exactly one"):
            encoded_inputs(family, (WIDE, TALL))


def test_the_two_releases_have_encodings_of_their_own(sample_of: Callable[[str], Sample]) -> None:
    families = [sample_of(name).family for name in ("qwen_image_edit", "qwen_image_edit plus")]
    assert len({family.prompt_encoder_id(torch.float32) for family in families}) == 2
    assert len({family.media_encoder_id(torch.float32) for family in families}) == 2


def test_text_and_images_are_processed_as_by_the_processor_of_the_released_models() -> None:
    pytest.importorskip("torchvision", reason="Qwen2VLProcessor cannot be constructed without torchvision")
    from transformers import Qwen2VLProcessor, Qwen2VLVideoProcessor

    components = tiny().components
    tokenizer, pictures = components["tokenizer"], components["processor"]
    theirs = Qwen2VLProcessor(
        image_processor=pictures, tokenizer=tokenizer, video_processor=Qwen2VLVideoProcessor()
    )
    text = ["<|vision_start|><|image_pad|><|vision_end|><|vision_start|><|image_pad|><|vision_end|>a ring"]
    call = {"text": text, "images": [WIDE, TALL], "padding": True, "return_tensors": "pt"}
    ours, expected = TextAndPictures(tokenizer=tokenizer, pictures=pictures)(**call), theirs(**call)
    for name in ("input_ids", "attention_mask", "pixel_values", "image_grid_thw"):
        assert torch.equal(ours[name], expected[name]), name


def test_each_image_takes_as_many_tokens_as_its_patches_merge_into() -> None:
    components = tiny().components
    tokenizer = components["tokenizer"]
    processed = TextAndPictures(tokenizer=tokenizer, pictures=components["processor"])(
        text=["<|image_pad|> a <|image_pad|>"], images=[WIDE, TALL], padding=True, return_tensors="pt"
    )
    image_token = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert (processed["input_ids"] == image_token).sum() * 4 == len(processed["pixel_values"])
