"""Stable Diffusion 3 against diffusers' own transformer and pipeline."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from family_sample import CPU, PROMPTS, assert_equal_under_all_flags

from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Prompt
from diffsynth_lite.pipelines import PipelineFolder
from diffsynth_lite.pipelines.sd3 import SD3, model_fn_sd3, tiny

LONG = "circle " * 90
"""90 words: more tokens than CLIP reads, and than T5 does."""


@pytest.fixture(scope="module")
def pipeline() -> StableDiffusion3Pipeline:
    return tiny()


@pytest.fixture(scope="module")
def family(pipeline: StableDiffusion3Pipeline, tmp_path_factory: pytest.TempPathFactory) -> SD3:
    folder = tmp_path_factory.mktemp("sd3")
    pipeline.save_pretrained(folder)
    return SD3(PipelineFolder(path=folder))


def test_model_fn_equals_the_transformers_own_forward() -> None:
    """Its other inputs are those of a ControlNet, of an IP-Adapter and of guidance by skipped layers."""
    transformer = tiny().transformer
    generator = torch.Generator().manual_seed(0)
    batch = (
        torch.randn(2, 16, 8, 6, generator=generator),
        torch.tensor([200.0, 712.5]),
        torch.randn(2, 9, 80, generator=generator),
        torch.randn(2, 64, generator=generator),
    )
    latents, timestep, embeds, pooled = batch
    reference = transformer(
        hidden_states=latents,
        encoder_hidden_states=embeds,
        pooled_projections=pooled,
        timestep=timestep,
        return_dict=False,
    )[0]
    expected = assert_equal_under_all_flags(transformer, reference, model_fn_sd3, *batch)
    # The prompt's own queries in the last block: nobody looks at what they find.
    last = "transformer_blocks.1.attn."
    found = {name for name, gradient in expected.items() if gradient is None or not gradient.any()}
    unused = {f"{last}{name}" for name in ("add_q_proj.weight", "add_q_proj.bias", "norm_added_q.weight")}
    # A bias of keys moves all scores alike.
    assert unused <= found


def test_prompts_are_encoded_as_by_the_pipeline(pipeline: StableDiffusion3Pipeline, family: SD3) -> None:
    texts = [*PROMPTS, "", LONG]
    rows = family.load_prompt_encoder(torch.float32, CPU)([Prompt(text=text) for text in texts])
    # As its call does: other texts for the other encoders only where they are given.
    with torch.no_grad():
        embeds, _, pooled, _ = pipeline.encode_prompt(
            texts, None, None, CPU, do_classifier_free_guidance=False
        )
    for row, expected, vector in zip(rows, embeds, pooled, strict=True):
        assert torch.equal(row["prompt_embeds"], expected)
        assert torch.equal(row["pooled_prompt_embeds"], vector)
    of_clip, of_t5 = rows[0]["prompt_embeds"].split([77, 256])
    assert not of_clip[:, 64:].any()
    assert of_clip[:, :64].all()
    assert of_t5.all()
    assert family.prompt_lengths(texts)[-1] > family.max_prompt_tokens


def test_pictures_beyond_the_table_of_places_are_refused_with_its_size(family: SD3) -> None:
    family.check_size(384, 384, keys="data.width, data.height")
    with pytest.raises(
        UserError, match=r"data\.width, data\.height: 400x64; .* at most 384 pixels on each side"
    ):
        family.check_size(400, 64, keys="data.width, data.height")
    with pytest.raises(ValueError, match="greater than `pos_embed_max_size`: 24"):
        family.load_transformer(torch.float32).pos_embed(torch.zeros(1, 16, 50, 8))


def test_a_folder_without_t5_is_refused(family: SD3, tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    index = tmp_path / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"text_encoder_3": [None, None]}))
    for file in (tmp_path / "text_encoder_3").iterdir():
        file.unlink()
    with pytest.raises(UserError, match="text_encoder_3"):
        SD3(PipelineFolder(path=tmp_path)).check_folder()


def test_layouts_without_a_second_attention_get_a_lora_too(family: SD3) -> None:
    """3 medium and 3.5 large."""
    with torch.device("meta"):
        plain = SD3Transformer2DModel(num_layers=2)
    names = {name for name, _ in plain.named_modules()}
    assert not any(".attn2." in name for name in names)
    assert "transformer_blocks.1.attn.add_q_proj" in family.unused_modules(plain)
    assert "transformer_blocks.1.attn.to_add_out" not in names
