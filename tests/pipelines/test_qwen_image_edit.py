"""Qwen-Image-Edit and Edit-Plus against diffusers' own transformer and pipelines."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImageEditPipeline, QwenImageEditPlusPipeline, QwenImageTransformer2DModel
from family_sample import CPU, assert_equal_under_all_flags, picture, small_edit_inputs
from PIL import Image

from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Media, Prompt
from diffsynth_lite.pipelines import PipelineFolder, PreviewRequest
from diffsynth_lite.pipelines.qwen_image_edit import (
    QwenImageEdit,
    TextAndPictures,
    model_fn_qwen_image_edit,
    tiny,
)

PROMPT = "a red circle"
WIDE, TALL = picture(100, 52, 20), picture(40, 90, 30)


@pytest.fixture(autouse=True, scope="module")
def _small_inputs() -> Iterator[None]:
    with small_edit_inputs():
        yield


@pytest.fixture(scope="module", params=[QwenImageEditPipeline, QwenImageEditPlusPipeline])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> QwenImageEdit:
    folder = tmp_path_factory.mktemp(request.param.__name__)
    request.param(**tiny().components).save_pretrained(folder)
    family = QwenImageEdit(PipelineFolder(path=folder))
    family.check_folder()
    return family


@pytest.fixture
def pictures(family: QwenImageEdit) -> tuple[Image.Image, ...]:
    """As many as the family's pipeline takes."""
    return (WIDE, TALL) if family.pipeline is QwenImageEditPlusPipeline else (WIDE,)


def reference_pipeline(family: QwenImageEdit, **parts: Any) -> Any:
    """The family's pipeline, callable as a whole: its own processor needs torchvision."""
    components = tiny().components
    processor = TextAndPictures(tokenizer=components["tokenizer"], pictures=components["processor"])
    pipeline = family.pipeline(**components | {"processor": processor} | parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def small_transformer(*, zero_cond_t: bool) -> QwenImageTransformer2DModel:
    torch.manual_seed(0)
    return QwenImageTransformer2DModel(
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
        zero_cond_t=zero_cond_t,
    )


@pytest.mark.parametrize("zero_cond_t", [False, True])
def test_model_fn_equals_the_transformers_own_forward(zero_cond_t: bool) -> None:
    transformer = small_transformer(zero_cond_t=zero_cond_t)
    generator = torch.Generator().manual_seed(0)
    sizes = [(8, 4), (6, 6), (4, 10)]
    noisy, *inputs = (torch.randn(2, 16, 1, *size, generator=generator) for size in sizes)
    embeds = torch.randn(2, 7, 16, generator=generator)
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    sigma = torch.tensor([0.2, 0.7])

    pack = QwenImageEditPlusPipeline._pack_latents
    reference = transformer(
        hidden_states=torch.cat(
            [pack(one, 2, 16, *size) for one, size in zip([noisy, *inputs], sizes, strict=True)], 1
        ),
        timestep=sigma,
        encoder_hidden_states=embeds,
        encoder_hidden_states_mask=mask,
        img_shapes=[[(1, height // 2, width // 2) for height, width in sizes]] * 2,
        return_dict=False,
    )[0][:, : 4 * 2]
    reference = QwenImageEditPlusPipeline._unpack_latents(reference, 8 * 8, 4 * 8, vae_scale_factor=8)
    assert_equal_under_all_flags(
        transformer,
        reference,
        model_fn_qwen_image_edit,
        noisy,
        sigma,
        embeds,
        mask,
        input_latents_bcfhw=inputs,
    )


def encoded_inputs(family: QwenImageEdit, pictures: tuple[Image.Image, ...]) -> dict[str, torch.Tensor]:
    media = Media(frames=(picture(64, 32, 10),), inputs=pictures)
    (encoded,) = family.load_media_encoder(torch.float32, CPU)([media])
    return {name: tensor for name, tensor in encoded.items() if name != "latents"}


def encoded_prompts(
    family: QwenImageEdit, pictures: tuple[Image.Image, ...], *texts: str
) -> list[dict[str, torch.Tensor]]:
    prompts = [Prompt(text=text, images=pictures) for text in texts]
    return family.load_prompt_encoder(torch.float32, CPU)(prompts)


def test_all_that_the_model_gets_is_what_the_pipeline_gives_it(
    family: QwenImageEdit, pictures: tuple[Image.Image, ...]
) -> None:
    transformer = family.load_transformer(torch.float32)
    calls: list[dict[str, Any]] = []
    transformer.register_forward_pre_hook(
        lambda _module, _args, kwargs: calls.append(kwargs), with_kwargs=True
    )
    pipeline = reference_pipeline(family, transformer=transformer)
    pipeline(**reference_call(pictures), true_cfg_scale=1.0)
    (conditioning,) = encoded_prompts(family, pictures, PROMPT)
    with torch.no_grad():
        family.predict(
            transformer,
            torch.zeros(1, 16, 1, 4, 8),
            torch.ones(1),
            [conditioning | encoded_inputs(family, pictures)],
        )
    theirs, ours, num_noisy = calls[0], calls[-1], 2 * 4
    assert ours["hidden_states"].shape == theirs["hidden_states"].shape
    assert torch.equal(ours["hidden_states"][:, num_noisy:], theirs["hidden_states"][:, num_noisy:])
    assert torch.equal(ours["encoder_hidden_states"], theirs["encoder_hidden_states"])
    assert ours["encoder_hidden_states_mask"] is theirs["encoder_hidden_states_mask"] is None
    assert ours["img_shapes"] == theirs["img_shapes"]
    assert len(ours["img_shapes"][0]) == 1 + len(pictures)


def reference_call(pictures: tuple[Image.Image, ...]) -> dict[str, Any]:
    return {
        "image": list(pictures) if len(pictures) > 1 else pictures[0],
        "prompt": PROMPT,
        "width": 64,
        "height": 32,
        "num_inference_steps": 2,
        "generator": torch.Generator().manual_seed(3),
    }


def test_a_preview_is_what_the_pipeline_draws_from_the_text_and_the_pictures(
    family: QwenImageEdit, pictures: tuple[Image.Image, ...]
) -> None:
    expected = reference_pipeline(family)(
        **reference_call(pictures), negative_prompt="blurred", true_cfg_scale=2.0
    ).images[0]
    conditioning, negative = encoded_prompts(family, pictures, PROMPT, "blurred")
    request = PreviewRequest(
        conditioning=conditioning,
        negative=negative,
        inputs=pictures,
        width=64,
        height=32,
        num_inference_steps=2,
        guidance_scale=2.0,
        seed=3,
    )
    ((drawn,),) = family.sample(family.load_transformer(torch.float32), torch.float32, [request])
    assert drawn.tobytes() == expected.tobytes()


def test_a_prompt_changes_with_the_pictures_it_sees(family: QwenImageEdit) -> None:
    (wide,) = encoded_prompts(family, (WIDE,), PROMPT)
    (other,) = encoded_prompts(family, (WIDE.rotate(180),), PROMPT)
    assert wide["prompt_embeds"].shape == other["prompt_embeds"].shape
    assert not torch.allclose(wide["prompt_embeds"], other["prompt_embeds"], atol=1e-3)


def test_the_pictures_own_noise_level_is_zero_in_models_that_want_it() -> None:
    velocity = [
        model_fn_qwen_image_edit(
            small_transformer(zero_cond_t=zero_cond_t),
            torch.ones(1, 16, 1, 4, 4),
            torch.tensor([0.7]),
            torch.ones(1, 3, 16),
            input_latents_bcfhw=[torch.ones(1, 16, 1, 4, 4)],
        )
        for zero_cond_t in (False, True)
    ]
    assert not torch.allclose(*velocity, atol=1e-4)


@pytest.mark.parametrize("one", [WIDE, TALL, picture(64, 64, 20), picture(200, 31, 20)])
def test_the_size_of_an_input_is_that_of_its_latents(family: QwenImageEdit, one: Image.Image) -> None:
    [latents] = encoded_inputs(family, (one,)).values()
    assert latents.shape == family.latents_shape(*family.input_size(*one.size), 1)


def test_an_input_of_which_no_row_would_be_left_is_refused(family: QwenImageEdit) -> None:
    with pytest.raises(UserError, match="8000x2 pixels are too narrow for an input picture"):
        family.input_size(8000, 2)


def test_each_release_takes_as_many_pictures_as_its_pipeline(family: QwenImageEdit) -> None:
    assert family.max_inputs == (None if family.pipeline is QwenImageEditPlusPipeline else 1)


def test_a_number_of_pictures_that_the_pipeline_cannot_take_is_refused(family: QwenImageEdit) -> None:
    with pytest.raises(UserError, match="0 input pictures"):
        encoded_prompts(family, (), PROMPT)
    if family.pipeline is QwenImageEditPipeline:
        with pytest.raises(UserError, match="2 input pictures; a QwenImageEditPipeline takes exactly one"):
            encoded_inputs(family, (WIDE, TALL))


def test_the_two_releases_have_encodings_of_their_own(tmp_path: Path) -> None:
    ids = []
    for pipeline_class in (QwenImageEditPipeline, QwenImageEditPlusPipeline):
        folder = tmp_path / pipeline_class.__name__
        pipeline_class(**tiny().components).save_pretrained(folder)
        family = QwenImageEdit(PipelineFolder(path=folder))
        ids.append((family.prompt_encoder_id(torch.float32), family.media_encoder_id(torch.float32)))
    assert ids[0][0] != ids[1][0]
    assert ids[0][1] != ids[1][1]


def test_text_and_pictures_are_processed_as_by_the_processor_of_the_released_models() -> None:
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


def test_each_picture_takes_as_many_tokens_as_its_patches_merge_into() -> None:
    components = tiny().components
    tokenizer = components["tokenizer"]
    processed = TextAndPictures(tokenizer=tokenizer, pictures=components["processor"])(
        text=["<|image_pad|> a <|image_pad|>"], images=[WIDE, TALL], padding=True, return_tensors="pt"
    )
    picture_token = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert (processed["input_ids"] == picture_token).sum() * 4 == len(processed["pixel_values"])
