import dataclasses

import pytest
import torch
from PIL import ExifTags, Image

from diffsynth_lite.data.buckets import Bucket
from diffsynth_lite.data.cache import TensorCache
from diffsynth_lite.data.items import PromptItem, TrainingItem, latents_mask
from diffsynth_lite.data.records import Record
from diffsynth_lite.media import Crop, Media


def key(prompt, encoder="encoder"):
    return prompt.key(TensorCache(None), encoder)


def test_each_input_of_a_prompt_key_changes_it(tmp_path):
    prompt = PromptItem(text="a", images=(tmp_path / "a.png",), content=("c",))
    changes = (
        {"text": "b"},
        {"is_negative": True},
        {"content": ("d",)},
        {"background": "black"},
        {"images": (), "content": ()},
        {"images": (), "content": (), "is_negative": True},
    )
    keys = {key(prompt), key(prompt, "other")}
    keys |= {key(dataclasses.replace(prompt, **change)) for change in changes}
    assert len(keys) == 8
    assert key(dataclasses.replace(prompt, images=(tmp_path / "moved.png",))) == key(prompt)


def test_a_prompt_is_loaded_with_its_image(write_image):
    path = write_image("a.png", size=(32, 16))
    prompt = PromptItem(text="a", images=(path,), content=("c",)).load()
    assert (prompt.text, [image.size for image in prompt.images]) == ("a", [(32, 16)])
    assert not prompt.is_negative


def test_a_negative_prompt_is_loaded_as_one():
    assert PromptItem(text="blurred", is_negative=True).load().is_negative


def test_an_image_is_loaded_with_its_size_upright_and_its_crop(tmp_path):
    path, sideways = tmp_path / "a.png", Image.Exif()
    sideways[ExifTags.Base.Orientation] = 6
    Image.new("RGB", (40, 100)).save(path, exif=sideways)
    item = TrainingItem(
        name="a",
        record=Record(name="a", source=0, target=path, captions=("a",)),
        content=("c",),
        bucket=Bucket(width=32, height=32),
        crop_x=0.25,
        crop_y=0.5,
        clip_start_s=None,
        fps=None,
        background="white",
    )
    media = item.load()
    assert media.frames[0].size == (32, 32)
    assert media.crop == Crop(original_width=100, original_height=40, left=12)
    keys = {each.key(TensorCache(None), "e") for each in (item, dataclasses.replace(item, crop_x=0.75))}
    assert len(keys) == 2


@pytest.mark.parametrize(("shape", "expected"), [((16, 1, 2), (1, 1, 2)), ((16, 5, 1, 2), (1, 1, 1, 2))])
def test_the_mask_of_latents_is_the_covered_part_of_their_area(shape, expected):
    mask = Image.new("L", (8, 4), 0)
    mask.paste(255, (0, 0, 3, 4))
    averaged = latents_mask(mask, shape)
    assert tuple(averaged.shape) == expected
    assert averaged.flatten().tolist() == [0.75, 0.0]


def test_where_the_encoder_has_a_mask_too_only_what_both_count_is_counted():
    frames = torch.tensor([0.0, 1.0, 1.0]).view(1, 3, 1, 1).expand(1, 3, 1, 2)
    mask = Image.new("L", (8, 4), 0)
    mask.paste(255, (0, 0, 4, 4))
    image = Image.new("RGB", (8, 4))
    media = Media(frames=(image,) * 3, mask=mask)
    item = TrainingItem(**dict.fromkeys(field.name for field in dataclasses.fields(TrainingItem)))
    latents = torch.zeros(16, 3, 1, 2)
    alone, both = (
        item.complete({"latents": latents, **masks}, media)["loss_mask"]
        for masks in ({}, {"loss_mask": frames})
    )
    assert alone.tolist() == [[[[1.0, 0.0]]]]
    assert both.tolist() == [[[[0.0, 0.0]], [[1.0, 0.0]], [[1.0, 0.0]]]]
