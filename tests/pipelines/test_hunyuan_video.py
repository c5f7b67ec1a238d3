"""HunyuanVideo against diffusers' own transformer and pipeline."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import test_family_fidelity as fidelity
import torch
from comfyui_names import HUNYUAN_VIDEO
from diffusers import HunyuanVideoPipeline
from family_sample import (
    CPU,
    PROMPTS,
    Sample,
    adapted_transformer,
    assert_equal_under_all_flags,
    build_sample,
    transformer_calls,
)
from transformers import PreTrainedTokenizerFast

from diffsynth_lite.errors import UserError
from diffsynth_lite.lora import adapter_settings, adapter_tensors
from diffsynth_lite.lora.conversion import FamilyNames, convert
from diffsynth_lite.lora.reading import known_pairs, read_contents
from diffsynth_lite.lora.updates import pairs_of
from diffsynth_lite.media import Prompt
from diffsynth_lite.pipelines import PipelineFolder
from diffsynth_lite.pipelines.base.tokenizer import load_tokenizer
from diffsynth_lite.pipelines.hunyuan_video import (
    TEMPLATE,
    HunyuanVideo,
    model_fn_hunyuan_video,
    tiny,
    tiny_hunyuan_video_transformer,
)
from diffsynth_lite.training.export.usage import usage_code

SIGMA = torch.tensor([0.1, 0.5, 0.9])
TEXTS = (*PROMPTS, "", "circle " * 300)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return build_sample("hunyuan_video", tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("is_guided", [True, False])
def test_model_fn_equals_the_transformers_own_forward(is_guided: bool) -> None:
    transformer = tiny_hunyuan_video_transformer(
        in_channels=4, out_channels=4, text_embed_dim=16, pooled_projection_dim=32, guidance_embeds=is_guided
    )
    generator = torch.Generator().manual_seed(0)
    latents, embeds, pooled = (
        torch.randn(shape, generator=generator) for shape in ((2, 4, 3, 4, 8), (2, 7, 16), (2, 32))
    )
    mask = (torch.arange(7) < torch.tensor([[7], [4]])).long()
    timestep, guidance = torch.tensor([200.0, 700.0]), torch.tensor([6000.0, 1000.0]) if is_guided else None
    reference = transformer(
        hidden_states=latents,
        timestep=timestep,
        encoder_hidden_states=embeds,
        encoder_attention_mask=mask,
        pooled_projections=pooled,
        guidance=guidance,
        return_dict=False,
    )[0]
    inputs = latents, timestep, embeds, mask, pooled, guidance
    assert_equal_under_all_flags(transformer, reference, model_fn_hunyuan_video, *inputs)


def test_prompts_are_encoded_as_by_the_pipeline(sample: Sample) -> None:
    family, pipeline = sample.family, sample.fresh_pipeline()
    encoded = family.load_prompt_encoder(torch.float32, CPU)([Prompt(text=text) for text in TEXTS])
    with torch.no_grad():
        embeds, pooled, mask = pipeline.encode_prompt(list(TEXTS), device=CPU)
    lengths = mask.sum(1).tolist()
    for tensors, row, length, of_clip in zip(encoded, embeds, lengths, pooled, strict=True):
        assert torch.equal(tensors["prompt_embeds"], row[:length])
        assert torch.equal(tensors["pooled_prompt_embeds"], of_clip)
    assert lengths[-1] == family.max_prompt_tokens == 256 < family.prompt_lengths(TEXTS)[-1]
    assert family.prompt_lengths(TEXTS)[:-1] == lengths[:-1]
    assert lengths[3] == 1  # what ends a message; nothing of the template before it


def test_a_prompt_without_its_padding_counts_as_in_the_pipeline(sample: Sample) -> None:
    pipeline, texts = sample.fresh_pipeline(), list(PROMPTS[:2])
    encoded = sample.family.load_prompt_encoder(torch.float32, CPU)([Prompt(text=text) for text in texts])
    with torch.no_grad():
        embeds, pooled, mask = pipeline.encode_prompt(texts, device=CPU)
        timestep, guidance = 1000 * SIGMA[:2], torch.full((2,), 1000.0)
        padded = model_fn_hunyuan_video(
            pipeline.transformer, sample.latents[:2], timestep, embeds, mask, pooled, guidance
        )
        ours = sample.family.predict(pipeline.transformer, sample.latents[:2], SIGMA[:2], encoded)
        unmasked = model_fn_hunyuan_video(
            pipeline.transformer, sample.latents[:2], timestep, embeds, None, pooled, guidance
        )
    # Sums over matrices of another shape; the masked part adds exact zeros.
    torch.testing.assert_close(ours, padded, rtol=1e-4, atol=1e-5)
    assert (unmasked - padded).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_tells_the_scale_that_it_is_set_to_as_the_pipeline_does(
    sample: Sample, dtype: torch.dtype
) -> None:
    family = HunyuanVideo(sample.family.folder)
    model = family.load_transformer(dtype)
    batch = sample.latents[:1], SIGMA[:1], sample.conditioning[:1]
    (plain,) = transformer_calls(model, lambda: family.predict(model, *batch))
    assert plain["guidance"].tolist() == [1000.0]
    family.training_guidance = 6.3
    (told,) = transformer_calls(model, lambda: family.predict(model, *batch))
    request = sample.request(num_inference_steps=1, guidance_scale=6.3, seed=0)
    drawn = transformer_calls(model, lambda: family.sample(model, torch.float32, [request]))[0]
    assert told["guidance"].dtype == drawn["guidance"].dtype == dtype
    assert torch.equal(told["guidance"], drawn["guidance"])


def without_guidance() -> Any:
    """The tiny pipeline of a model that is told no guidance scale."""
    parts = tiny().components
    layout = parts["transformer"].config
    widths = ("in_channels", "out_channels", "text_embed_dim", "pooled_projection_dim")
    parts["transformer"] = tiny_hunyuan_video_transformer(
        guidance_embeds=False, **{name: layout[name] for name in widths}
    )
    return HunyuanVideoPipeline(**parts)


def test_a_model_that_knows_no_scale_is_steered_away_from_the_negative_prompt(tmp_path: Path) -> None:
    unguided = build_sample("hunyuan_video", tmp_path, without_guidance)
    pipeline = fidelity.read_pipeline(unguided)
    fidelity.test_a_preview_is_what_the_pipeline_draws_from_the_text(unguided, pipeline, fidelity.GUIDANCE)
    fidelity.test_another_caption_and_another_negative_prompt_draw_something_else(unguided)
    family, model = unguided.family, unguided.family.load_transformer(torch.float32)
    batch = unguided.latents[:1], SIGMA[:1], unguided.conditioning[:1]
    (told,) = transformer_calls(model, lambda: family.predict(model, *batch))
    assert told["guidance"] is None


def test_a_folder_that_names_the_class_of_llama_2_is_read_as_its_file_says(
    sample: Sample, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(sample.family.folder.path, tmp_path / "named"))
    index, settings = folder / "model_index.json", folder / "tokenizer" / "tokenizer_config.json"
    for file, change in (
        (index, {"tokenizer": ["transformers", "LlamaTokenizerFast"]}),
        (settings, {"tokenizer_class": "LlamaTokenizerFast"}),
    ):
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    texts = [TEMPLATE.format(text) for text in (*TEXTS, "naïve\n\n42  it's")]
    expected = sample.family.load_tokenizer()(texts)["input_ids"]
    family = HunyuanVideo(PipelineFolder(path=folder))
    named = family.load_tokenizer()
    assert (named.padding_side, named(texts)["input_ids"]) == ("right", expected)
    pipeline = HunyuanVideoPipeline.from_pretrained(folder)
    # When transformers reads it rightly, ``is_misread`` can go.
    assert pipeline.tokenizer(texts)["input_ids"] != expected
    request = sample.request(num_inference_steps=2, guidance_scale=6.0, seed=5)
    told = {"dtype": "bfloat16", "lora": "lora", "prompt": "x", "negative_prompt": "", "fps": 24.0}
    code = (usage_code(family, request, base=str(folder), **told) or "").splitlines()
    reading = f'PreTrainedTokenizerFast.from_pretrained({str(folder)!r}, subfolder="tokenizer")'
    assert {"from transformers import PreTrainedTokenizerFast", f"pipeline.tokenizer = {reading}"} <= {*code}
    mended = PreTrainedTokenizerFast.from_pretrained(str(folder), subfolder="tokenizer")
    assert mended(texts)["input_ids"] == expected
    plain = usage_code(sample.family, request, base="tiny", **told)
    assert "PreTrainedTokenizerFast" not in (plain or "PreTrainedTokenizerFast")
    (folder / "tokenizer" / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"the tokenizer in .* cannot be loaded"):
        load_tokenizer(folder / "tokenizer", "LlamaTokenizerFast")


def test_a_lora_is_converted_to_the_layers_that_comfyui_has(sample: Sample, tmp_path: Path) -> None:
    family = sample.family
    transformer = adapted_transformer(sample, targets=family.target_sets["all"])
    trained = pairs_of(adapter_tensors(transformer), adapter_settings(transformer), "transformer.")
    (file,) = family.save_lora(tmp_path, adapter_tensors(transformer), adapter_settings(transformer))
    names = FamilyNames(layers=family.lora_layers, comfyui=family.lora_spelling)
    conversion = convert(read_contents(file), names, "comfyui", tmp_path / "for_comfyui.safetensors")
    # Folded alpha is a power of two from the rank: nothing was rounded.
    assert conversion.difference == 0
    pattern = re.compile("|".join(re.escape(name).replace(r"\*", r"\d+") for name in HUNYUAN_VIDEO))
    layers = {name.partition(".")[0] for name in conversion.tensors}
    assert [layer for layer in layers if not pattern.fullmatch(layer)] == []
    single = "transformer.single_transformer_blocks.0"
    parts = (*(f"{single}.attn.{name}" for name in ("to_q", "to_k", "to_v")), f"{single}.proj_mlp")
    update = torch.cat([2 * pair.up @ pair.down for pair in (trained[name] for name in parts)])
    key = "lora_unet_single_blocks_0_linear1"
    down, up = (conversion.tensors[f"{key}.lora_{part}.weight"] for part in ("down", "up"))
    strength = conversion.tensors[f"{key}.alpha"] / len(down)
    torch.testing.assert_close(strength * up @ down, update)
    back = known_pairs(conversion.contents, family.lora_layers)
    assert back.keys() == trained.keys()
