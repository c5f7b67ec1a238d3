"""Qwen-Image against diffusers' own transformer and pipeline."""

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImageLayeredPipeline, QwenImagePipeline, QwenImageTransformer2DModel
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift
from family_sample import CPU, PROMPTS, assert_equal_under_all_flags

from diffsynth_lite.core.noise import shift_sigma
from diffsynth_lite.media import Prompt
from diffsynth_lite.pipelines import PipelineFolder, qwen_image_layered
from diffsynth_lite.pipelines.qwen_image import QwenImage, model_fn_qwen_image, tiny

BY_PIPELINE = {
    QwenImagePipeline: (QwenImage, tiny),
    QwenImageLayeredPipeline: (qwen_image_layered.QwenImageLayered, qwen_image_layered.tiny),
}


@pytest.fixture(scope="module")
def pipeline() -> QwenImagePipeline:
    return tiny()


@pytest.fixture(scope="module")
def family(pipeline: QwenImagePipeline, tmp_path_factory: pytest.TempPathFactory) -> QwenImage:
    folder = tmp_path_factory.mktemp("qwen_image")
    pipeline.save_pretrained(folder)
    return QwenImage(PipelineFolder(path=folder))


def test_model_fn_equals_the_transformers_own_forward(pipeline: QwenImagePipeline) -> None:
    transformer: QwenImageTransformer2DModel = pipeline.transformer
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(2, 16, 1, 8, 4, generator=generator)
    embeds = torch.randn(2, 7, 16, generator=generator)
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    sigma = torch.tensor([0.2, 0.7])

    tokens = QwenImagePipeline._pack_latents(latents[:, :, 0], 2, 16, 8, 4)
    reference = transformer(
        hidden_states=tokens,
        timestep=sigma,
        encoder_hidden_states=embeds,
        encoder_hidden_states_mask=mask,
        img_shapes=[[(1, 4, 2)]] * 2,
        return_dict=False,
    )[0]
    reference = QwenImagePipeline._unpack_latents(reference, 8 * 8, 4 * 8, vae_scale_factor=8)
    assert_equal_under_all_flags(
        transformer,
        reference,
        model_fn_qwen_image,
        latents,
        sigma,
        embeds,
        mask,
    )


def test_prompts_are_encoded_as_by_the_pipeline(pipeline: QwenImagePipeline, family: QwenImage) -> None:
    encoded = family.load_prompt_encoder(torch.float32, torch.device("cpu"))(
        [Prompt(text=text) for text in PROMPTS]
    )
    embeds, mask = pipeline.encode_prompt(list(PROMPTS), device="cpu")
    assert mask is not None
    for row, row_mask, conditioning in zip(embeds, mask.bool(), encoded, strict=True):
        assert torch.equal(conditioning["prompt_embeds"], row[row_mask])


def test_one_prompt_alone_has_no_mask_and_keeps_its_length(
    pipeline: QwenImagePipeline, family: QwenImage
) -> None:
    (alone,) = family.load_prompt_encoder(torch.float32, torch.device("cpu"))([Prompt(text=PROMPTS[0])])
    embeds, mask = pipeline.encode_prompt(PROMPTS[0], device="cpu")
    assert mask is None
    assert torch.equal(alone["prompt_embeds"], embeds[0])


def test_the_shift_is_the_one_of_the_pipelines_sampler(
    pipeline: QwenImagePipeline, family: QwenImage
) -> None:
    scheduler = pipeline.scheduler
    num_tokens = 4096
    mu = 0.5 + (0.9 - 0.5) * (num_tokens - 256) / (8192 - 256)
    sigmas = torch.linspace(0.05, 1.0, 20)
    ours = shift_sigma(sigmas, family.family_shift((16, 1, 128, 128)))
    torch.testing.assert_close(
        ours, torch.as_tensor(scheduler.time_shift(mu, 1.0, sigmas)), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("pipeline_class", [QwenImagePipeline, QwenImageLayeredPipeline])
def test_lengths_are_those_of_what_the_pipeline_keeps_with_the_end_of_the_chat(
    pipeline_class: Any, tmp_path: Path
) -> None:
    family_class, build = BY_PIPELINE[pipeline_class]
    pipeline = build()
    pipeline.save_pretrained(tmp_path)
    family = family_class(PipelineFolder(path=tmp_path))
    texts = ["", "a circle", *("1" * count for count in (507, 508, 512))]  # a token each
    lengths = family.prompt_lengths(texts)
    assert lengths[0] == 5
    assert [length - lengths[0] for length in lengths[2:]] == [507, 508, 512]
    assert [length > family.max_prompt_tokens for length in lengths] == [False, False, False, True, True]
    encoded = family.load_prompt_encoder(torch.float32, CPU)([Prompt(text=text) for text in texts])
    for text, row, length in zip(texts, encoded, lengths, strict=True):
        with torch.no_grad():
            whole, _ = pipeline.encode_prompt(text, device=CPU, max_sequence_length=1024)
            drawn, _ = pipeline.encode_prompt(text, device=CPU, max_sequence_length=512)
        assert len(whole[0]) == length
        # Of a text of 508 the last token of the chat's end is lost, as in the pipeline's own call.
        torch.testing.assert_close(row["prompt_embeds"], drawn[0], rtol=0, atol=1e-5)


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


@pytest.mark.parametrize(("width", "height"), [(1024, 1024), (1664, 928)])
def test_at_the_released_sizes_shapes_shift_and_velocity_are_the_pipelines(
    family: QwenImage, width: int, height: int
) -> None:
    latents_shape = family.latents_shape(width, height, 1)
    assert latents_shape == (16, 1, height // 8, width // 8)
    num_tokens = (height // 16) * (width // 16)
    assert family.num_tokens(latents_shape) == num_tokens
    config = family.load_scheduler().config
    mu = calculate_shift(
        num_tokens,
        config.base_image_seq_len,
        config.max_image_seq_len,
        config.base_shift,
        config.max_shift,
    )
    assert family.family_shift(latents_shape) == pytest.approx(math.exp(mu))

    transformer = family.load_transformer(torch.float32)
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(1, *latents_shape, generator=generator)
    embeds = torch.randn(1, 7, 16, generator=generator)
    with torch.no_grad():
        velocity = model_fn_qwen_image(transformer, latents, torch.tensor([0.5]), embeds)
        packed = QwenImagePipeline._pack_latents(latents[:, :, 0], 1, 16, height // 8, width // 8)
        reference = transformer(
            hidden_states=packed,
            timestep=torch.tensor([0.5]),
            encoder_hidden_states=embeds,
            img_shapes=[[(1, height // 16, width // 16)]],
            return_dict=False,
        )[0]
    unpacked = QwenImagePipeline._unpack_latents(reference, height, width, vae_scale_factor=8)
    assert torch.equal(velocity, unpacked)
