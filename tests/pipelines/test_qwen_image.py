"""Qwen-Image, 2.1, Layered and Edit against diffusers' own pipelines."""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImage21Pipeline, QwenImagePipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_layered as layered
from family_sample import (
    CPU,
    Sample,
    assert_equal_under_all_flags,
    layers_of,
    mandelbrot,
    sample_fixture,
    transformer_calls,
)
from PIL import Image

from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Media
from diffsynth_lite.pipelines import PipelineFolder, PreviewRequest, qwen_image_edit
from diffsynth_lite.pipelines.qwen_image import QwenImage
from diffsynth_lite.pipelines.qwen_image_21 import QwenImage21, model_fn_qwen_image_21
from diffsynth_lite.pipelines.qwen_image_edit import QwenImageEdit, TextAndImages
from diffsynth_lite.pipelines.qwen_image_layered import QwenImageLayered

FAMILY = "qwen_image"
of_21 = sample_fixture("qwen_image_21")
of_layers = sample_fixture("qwen_image_layered")
TWO_LEVELS = torch.tensor([0.2, 0.7])
MEDIA = Media(frames=(mandelbrot(64, 32, 10),), layers=layers_of(64, 32, 20))


def test_another_template_of_the_pipeline_makes_other_cache_entries(
    family: QwenImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = family.prompt_encoder_id(torch.float32)
    build = QwenImagePipeline.__init__

    @functools.wraps(build)
    def with_other_template(pipeline: QwenImagePipeline, **components: Any) -> None:
        build(pipeline, **components)
        pipeline.prompt_template_encode += "!"

    monkeypatch.setattr(QwenImagePipeline, "__init__", with_other_template)
    assert family.prompt_encoder_id(torch.float32) != before


def random_latents(count: int = 2) -> torch.Tensor:
    return torch.randn(count, 64, 1, 4, 6, generator=torch.Generator().manual_seed(0))


def own_forward(
    pipeline: Any,
    latents: torch.Tensor,
    embeds: torch.Tensor,
    mask: torch.Tensor | None,
    sigma: torch.Tensor = TWO_LEVELS,
) -> torch.Tensor:
    """As the pipeline calls it: four places of the image to one of the mask after the text."""
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


def test_a_model_function_of_2_1_takes_a_mask_as_the_transformer_does(of_21: Sample) -> None:
    pipeline, mask = of_21.fresh_pipeline(), torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
    latents, embeds = random_latents(), torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(1))
    reference = own_forward(pipeline, latents, embeds, mask)
    expected = assert_equal_under_all_flags(
        pipeline.transformer, reference, model_fn_qwen_image_21, latents, TWO_LEVELS, embeds, mask
    )
    assert None not in expected.values()


def test_images_are_opaque_for_2_1(of_21: Sample) -> None:
    family, pipeline = of_21.family, of_21.fresh_pipeline()
    image = mandelbrot(64, 32, 10)
    pixels = pipeline.image_processor.preprocess(image.convert("RGBA"))
    with torch.no_grad():
        expected = pipeline._encode_vae_image(pixels.unsqueeze(2), generator=None)
    (tensors,) = family.load_media_encoder(torch.float32, CPU)([Media(frames=(image,))])
    torch.testing.assert_close(tensors["latents"], expected[0], rtol=1e-5, atol=1e-6)


def test_levels_in_the_index_of_2_1_are_sampled_with(of_21: Sample, tmp_path: Path) -> None:
    levels = {"sample_sigmas": [1.0, 0.5]}
    QwenImage21Pipeline(**of_21.fresh_pipeline().components, **levels).save_pretrained(tmp_path)
    assert QwenImage21(PipelineFolder(path=tmp_path)).pipeline_settings == levels


def test_each_image_is_encoded_as_the_pipeline_encodes_its_own(of_layers: Sample) -> None:
    family, pipeline = of_layers.family, of_layers.fresh_pipeline()
    (encoded,) = family.load_media_encoder(torch.float32, CPU)([MEDIA])
    images = (MEDIA.frames[0].convert("RGBA"), *MEDIA.layers)
    with torch.no_grad():
        expected = [
            pipeline._encode_vae_image(
                pipeline.image_processor.preprocess(one, 32, 64).unsqueeze(2), generator=None
            )
            for one in images
        ]
    torch.testing.assert_close(encoded["latents"][None], torch.cat(expected, dim=2), rtol=1e-5, atol=1e-6)
    assert torch.equal(encoded["picture_latents"], encoded["latents"][:, :1])
    assert family.latents_shape(64, 32, 3) == encoded["latents"].shape
    assert family.num_condition_values(encoded["latents"].shape) == encoded["picture_latents"].numel()
    # Transparency is seen, and so is which layer is on top.
    below, above = MEDIA.layers
    for layers in ((below, above.convert("RGB").convert("RGBA")), (above, below)):
        (other,) = family.load_media_encoder(torch.float32, CPU)([Media(frames=MEDIA.frames, layers=layers)])
        assert not torch.equal(other["latents"], encoded["latents"])


def generated(
    family: QwenImageLayered, transformer: Any, num_layers: int, **changes: Any
) -> list[Image.Image]:
    conditioning = {"prompt_embeds": torch.ones(5, 16)}
    request = {"conditioning": conditioning, "negative": conditioning, "inputs": (mandelbrot(96, 96, 10),)}
    request |= {"width": 64, "height": 32, "num_inference_steps": 2, "guidance_scale": 1.0, "seed": 0}
    request |= {"num_layers": num_layers} | changes
    [layers] = family.sample(transformer, torch.float32, [PreviewRequest(**request)])
    return layers


def test_a_preview_has_a_transparent_image_for_each_layer_in_any_size(of_layers: Sample) -> None:
    family = of_layers.family
    transformer, own = family.load_transformer(torch.float32), layered.calculate_dimensions
    for num_layers, size in ((1, (64, 32)), (3, (48, 48))):
        layers = generated(family, transformer, num_layers, width=size[0], height=size[1])
        assert [(layer.mode, layer.size) for layer in layers] == [("RGBA", size)] * num_layers
        assert len({layer.getchannel("A").tobytes() for layer in layers}) == num_layers
    with pytest.raises(UserError, match=r"validation\.inputs: 0 images for a prompt"):
        generated(family, transformer, 1, inputs=())
    # The pipeline resizes images in its own way again.
    assert layered.calculate_dimensions is own


def test_the_shift_of_the_sampler_is_the_pipelines_and_that_of_training_is_qwen_images(
    of_layers: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = QwenImageLayered(of_layers.family.folder)
    given: list[float] = []
    retrieve = layered.retrieve_timesteps
    monkeypatch.setattr(
        layered,
        "retrieve_timesteps",
        lambda *others, mu, **settings: given.append(mu) or retrieve(*others, mu=mu, **settings),
    )
    transformer = family.load_transformer(torch.float32)
    (call, *_) = transformer_calls(transformer, lambda: generated(family, transformer, 3))
    shape = family.latents_shape(64, 32, 4)
    assert family.num_tokens(shape) == call["hidden_states"].shape[1]
    assert family.resolution_shift(shape) == pytest.approx(math.exp(given[0]))
    # By the area only, whatever the number of layers.
    sizes = {edge: [family.latents_shape(edge, edge, count) for count in (2, 5)] for edge in (640, 1024)}
    assert [round(family.resolution_shift(shape), 1) for shape in sizes[640]] == [12.2, 12.2]
    assert [round(family.resolution_shift(shape), 1) for shape in sizes[1024]] == [54.6, 54.6]
    assert [round(family.family_shift(shape), 2) for shape in sizes[640]] == [1.76, 1.76]
    family.scheduler_config["time_shift_type"] = "linear"
    assert family.resolution_shift(sizes[1024][0]) == 4


WIDE, TALL = mandelbrot(100, 52, 20), mandelbrot(40, 90, 30)


@pytest.fixture(scope="module", params=["qwen_image_edit", "qwen_image_edit plus"])
def edit(request: pytest.FixtureRequest, sample_of: Callable[[str], Sample]) -> QwenImageEdit:
    edit = sample_of(request.param).family
    edit.check_folder()
    return edit


def test_text_and_images_are_processed_as_by_the_processor_of_the_released_models() -> None:
    pytest.importorskip("torchvision", reason="Qwen2VLProcessor cannot be constructed without torchvision")
    from transformers import Qwen2VLProcessor, Qwen2VLVideoProcessor

    components = qwen_image_edit.tiny().components
    tokenizer, image_processor = components["tokenizer"], components["processor"]
    theirs = Qwen2VLProcessor(
        image_processor=image_processor, tokenizer=tokenizer, video_processor=Qwen2VLVideoProcessor()
    )
    text = ["<|vision_start|><|image_pad|><|vision_end|><|vision_start|><|image_pad|><|vision_end|>a ring"]
    call = {"text": text, "images": [WIDE, TALL], "padding": True, "return_tensors": "pt"}
    ours, expected = (
        TextAndImages(tokenizer=tokenizer, image_processor=image_processor)(**call),
        theirs(**call),
    )
    for name in ("input_ids", "attention_mask", "pixel_values", "image_grid_thw"):
        assert torch.equal(ours[name], expected[name]), name


def test_each_image_takes_as_many_tokens_as_its_patches_merge_into() -> None:
    components = qwen_image_edit.tiny().components
    tokenizer = components["tokenizer"]
    processed = TextAndImages(tokenizer=tokenizer, image_processor=components["processor"])(
        text=["<|image_pad|> a <|image_pad|>"], images=[WIDE, TALL], padding=True, return_tensors="pt"
    )
    image_token = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert (processed["input_ids"] == image_token).sum() * 4 == len(processed["pixel_values"])
