"""Ideogram 4 against diffusers' own transformer and pipeline."""

import inspect
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui_names import IDEOGRAM4
from diffusers import Ideogram4Pipeline
from diffusers.models.transformers.transformer_ideogram4 import (
    IMAGE_POSITION_OFFSET,
    LLM_TOKEN_INDICATOR,
)
from diffusers.pipelines.ideogram4.pipeline_ideogram4 import (
    QWEN3_VL_ACTIVATION_LAYERS,
    _resolution_aware_mu,
)
from family_sample import (
    CPU,
    PROMPTS,
    Sample,
    adapted_transformer,
    assert_equal_under_all_flags,
    build_sample,
)

from diffsynth_lite.lora import adapter_settings, adapter_tensors
from diffsynth_lite.lora.conversion import FamilyNames, convert
from diffsynth_lite.lora.reading import read_contents
from diffsynth_lite.media import Prompt
from diffsynth_lite.pipelines import PreviewRequest
from diffsynth_lite.pipelines.ideogram4 import Ideogram4, model_fn_ideogram4, tiny

LENGTH = 64  # by default 2048, which takes long
TIME = torch.tensor([0.2, 0.7])
WIDTH = 16 * len(QWEN3_VL_ACTIVATION_LAYERS)


@pytest.fixture(scope="module")
def pipeline() -> Ideogram4Pipeline:
    return tiny()


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return build_sample("ideogram4", tmp_path_factory.mktemp("ideogram4"))


@pytest.fixture(scope="module")
def family(sample: Sample) -> Ideogram4:
    assert isinstance(sample.family, Ideogram4)
    return sample.family


def encoded_by_the_pipeline(pipeline: Ideogram4Pipeline, texts: list[str]) -> tuple[torch.Tensor, ...]:
    """Embeddings, positions, segments and roles for pictures of 4 x 2 tokens, in rows as its call has."""
    with torch.no_grad():
        encoded: tuple[torch.Tensor, ...] = pipeline.encode_prompt(texts, 4, 2, LENGTH, CPU)
    return encoded


def own_forward(
    pipeline: Ideogram4Pipeline,
    latents: torch.Tensor,
    encoded: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """The tokens of the pictures behind those of the prompts, in one row and back."""
    embeds, positions, segments, roles = encoded
    longest = embeds.shape[1]
    tokens = latents.flatten(2).transpose(1, 2)
    text = torch.zeros(len(tokens), longest - tokens.shape[1], tokens.shape[2])
    predicted = pipeline.transformer(
        hidden_states=torch.cat([text, tokens], dim=1),
        timestep=TIME,
        encoder_hidden_states=embeds,
        position_ids=positions,
        segment_ids=segments,
        indicator=roles,
        return_dict=False,
    )[0]
    return predicted[:, text.shape[1] :].transpose(1, 2).reshape(latents.shape)


@pytest.mark.parametrize("num_texts", [1, 2])
def test_model_fn_equals_the_transformers_own_forward(
    pipeline: Ideogram4Pipeline, family: Ideogram4, num_texts: int
) -> None:
    """With prompts of one length and of two, of which one is padded."""
    latents = torch.randn(2, 128, 4, 2, generator=torch.Generator().manual_seed(0))
    texts = [PROMPTS[0], (PROMPTS[1] + " and more")] if num_texts == 2 else [PROMPTS[0]] * 2
    lengths = family.prompt_lengths(texts)
    assert len({*lengths}) == num_texts
    whole = encoded_by_the_pipeline(pipeline, texts)
    rows = [embeds[LENGTH - length : LENGTH] for embeds, length in zip(whole[0], lengths, strict=True)]
    encoded = tuple(tensor[:, LENGTH - max(lengths) :] for tensor in whole)
    reference = own_forward(pipeline, latents, encoded)
    expected = assert_equal_under_all_flags(
        pipeline.transformer, reference, model_fn_ideogram4, latents, TIME, rows
    )
    no_gradient = {name for name, gradient in expected.items() if gradient is None}
    assert no_gradient == set()


def test_the_tables_of_positions_are_those_of_fp32_under_autocast(pipeline: Ideogram4Pipeline) -> None:
    """As ``README_ideogram4.md`` of diffusers warns of it; from 65536 on, bfloat16 has every 512th number."""
    positions = (IMAGE_POSITION_OFFSET + torch.arange(64))[None, :, None].expand(1, 64, 3)
    embed = pipeline.transformer.rotary_emb
    with torch.autocast("cpu", torch.bfloat16):
        assert (torch.ones(1, 1) @ torch.ones(1, 1)).dtype == torch.bfloat16
        tables = embed(positions)
    for table, expected in zip(tables, embed(positions), strict=True):
        assert len(table[0].unique(dim=0)) == 64
        assert torch.equal(table, expected)


def test_prompts_are_encoded_as_by_the_pipeline_without_its_padding(
    pipeline: Ideogram4Pipeline, family: Ideogram4
) -> None:
    texts = [*PROMPTS, '{"high_level_description": "a circle"}', ""]
    encoded = family.load_prompt_encoder(torch.float32, CPU)([Prompt(text=text) for text in texts])
    theirs, _, _, roles = encoded_by_the_pipeline(pipeline, texts)
    for row, length, embeds, role in zip(encoded, family.prompt_lengths(texts), theirs, roles, strict=True):
        assert row["prompt_embeds"].shape == (length, WIDTH)
        expected = embeds[role == LLM_TOKEN_INDICATOR]
        torch.testing.assert_close(row["prompt_embeds"], expected, rtol=1e-4, atol=1e-5)
        assert not embeds[role != LLM_TOKEN_INDICATOR].any()


def test_a_prompt_that_the_pipeline_refuses_loses_its_end(
    pipeline: Ideogram4Pipeline, family: Ideogram4, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(family), "max_prompt_tokens", 24)
    text = "circle " * 5
    with pytest.raises(ValueError, match="exceeds"):
        pipeline.encode_prompt(text, 4, 2, 24, CPU)
    (length,) = family.prompt_lengths([text])
    assert 24 < length <= LENGTH
    (row,) = family.load_prompt_encoder(torch.float32, CPU)([Prompt(text=text)])
    whole = encoded_by_the_pipeline(pipeline, [text])[0][0]
    start = LENGTH - length
    torch.testing.assert_close(row["prompt_embeds"], whole[start : start + 24], rtol=1e-4, atol=1e-5)


def test_the_shift_is_the_middle_of_the_pipelines_noise_levels(family: Ideogram4) -> None:
    mu = inspect.signature(Ideogram4Pipeline.__call__).parameters["mu"].default
    for side in (512, 1024, 2048):
        shift = family.family_shift(family.latents_shape(side, side, 1))
        middle = _resolution_aware_mu(height=side, width=side, base_mu=mu)
        assert shift == pytest.approx(math.exp(middle))


def test_the_second_transformer_is_read_for_guided_previews_alone(
    family: Ideogram4, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = family.load_transformer(torch.float32)
    (conditioning,) = family.load_prompt_encoder(torch.float32, CPU)([Prompt(text=PROMPTS[0])])
    read: list[str] = []
    load = family.load_component

    def watched(name: str, *settings: Any) -> Any:
        read.append(name)
        return load(name, *settings)

    monkeypatch.setattr(family, "load_component", watched)
    for scale, expected in ((1.0, []), (2.0, ["unconditional_transformer"])):
        request = PreviewRequest(
            conditioning=conditioning,
            negative={},
            width=64,
            height=32,
            num_inference_steps=1,
            guidance_scale=scale,
            seed=0,
        )
        family.sample(model, torch.float32, [request])
        assert [name for name in read if name != "vae"] == expected


def test_a_lora_is_converted_to_the_layers_that_comfyui_has(sample: Sample, tmp_path: Path) -> None:
    family = sample.family
    transformer = adapted_transformer(sample, targets=family.target_sets["all"])
    (file,) = family.save_lora(tmp_path, adapter_tensors(transformer), adapter_settings(transformer))
    names = FamilyNames(layers=family.lora_layers, comfyui=family.lora_spelling)
    conversion = convert(read_contents(file), names, "comfyui", tmp_path / "for_comfyui.safetensors")
    assert conversion.difference == 0
    pattern = re.compile("|".join(re.escape(name).replace(r"\*", r"\d+") for name in IDEOGRAM4))
    layers = {name.partition(".")[0] for name in conversion.tensors}
    assert [layer for layer in layers if not pattern.fullmatch(layer)] == []
    assert {"lora_unet_layers_0_attention_qkv", "lora_unet_layers_1_attention_o"} < layers
