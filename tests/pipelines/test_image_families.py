"""What single families of images have of their own: ERNIE-Image, Ideogram 4, Krea 2, SD3 and Z-Image."""

import inspect
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from diffusers import (
    Ideogram4Pipeline,
    Krea2Pipeline,
    SD3Transformer2DModel,
)
from diffusers.models.transformers.transformer_ideogram4 import IMAGE_POSITION_OFFSET
from diffusers.pipelines.ideogram4.pipeline_ideogram4 import _resolution_aware_mu
from family_sample import (
    CPU,
    PROMPTS,
    Sample,
    adapted_transformer,
    encode_texts,
    family_fixture,
    mandelbrot,
    sample_fixture,
    velocity_and_gradients,
)
from transformers import DynamicCache, Qwen3ForCausalLM

from diffsynth_lite.errors import UserError
from diffsynth_lite.lora import find_target_layers
from diffsynth_lite.media import Media, Prompt
from diffsynth_lite.pipelines import (
    PipelineFolder,
    ernie_image,
    ideogram4,
    z_image,
)
from diffsynth_lite.pipelines.ernie_image import ErnieImage
from diffsynth_lite.pipelines.krea2 import Krea2
from diffsynth_lite.pipelines.sd3 import SD3
from diffsynth_lite.pipelines.z_image import ZImage

ernie = family_fixture("ernie_image")
ideogram = sample_fixture("ideogram4")
krea = sample_fixture("krea2")
sd3 = family_fixture("sd3")
zimage = family_fixture("z_image")


def test_latents_of_ernie_are_the_inverse_of_what_the_pipeline_decodes(ernie: ErnieImage) -> None:
    """It adds another number to the variance than that of the autoencoder's file, which FLUX.2 adds."""
    pipeline = ernie_image.tiny()
    image, vae = mandelbrot(64, 32, 10), ernie_image.tiny().vae
    assert vae.config.batch_norm_eps == 1e-4
    vae.bn.running_var.mul_(1e-4)  # so that the number counts
    pixels = pipeline.image_processor.preprocess(image)
    ours = ernie.encode_pixels(vae, pixels)
    std = torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + 1e-5)
    decoded = pipeline._unpatchify_latents(ours * std + vae.bn.running_mean.view(1, -1, 1, 1))
    with torch.no_grad():
        expected = vae.encode(pixels).latent_dist.mode()
    torch.testing.assert_close(decoded, expected)
    (encoded,) = ernie.load_media_encoder(torch.float32, CPU)([Media(frames=(image,))])
    assert encoded["latents"].shape == ernie.latents_shape(64, 32, 1) == (128, 2, 4)


def test_ernies_model_that_rewrites_prompts_is_not_needed(ernie: ErnieImage) -> None:
    assert "pe" in ernie.folder.pipeline_config()
    assert not (ernie.folder.path / "pe").exists()
    assert not {"pe", "pe_tokenizer"} & {*ernie.components, *ernie.components_without_weights}
    ernie.check_folder()


LENGTH = 64
"""Of the rows of Ideogram 4; by default 2048, which takes long."""


def test_the_tables_of_positions_are_those_of_fp32_under_autocast() -> None:
    """As ``README_ideogram4.md`` of diffusers warns of it; from 65536 on, bfloat16 has every 512th number."""
    positions = (IMAGE_POSITION_OFFSET + torch.arange(64))[None, :, None].expand(1, 64, 3)
    embed = ideogram4.tiny().transformer.rotary_emb
    with torch.autocast("cpu", torch.bfloat16):
        assert (torch.ones(1, 1) @ torch.ones(1, 1)).dtype == torch.bfloat16
        tables = embed(positions)
    for table, expected in zip(tables, embed(positions), strict=True):
        assert len(table[0].unique(dim=0)) == 64
        assert torch.equal(table, expected)


def test_a_prompt_that_the_pipeline_refuses_loses_its_end(
    ideogram: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, pipeline = ideogram.family, ideogram4.tiny()
    monkeypatch.setattr(type(family), "max_prompt_tokens", 24)
    text = "circle " * 5
    with pytest.raises(ValueError, match="exceeds"):
        pipeline.encode_prompt(text, 4, 2, 24, CPU)
    (length,) = family.prompt_lengths([text])
    assert 24 < length <= LENGTH
    (row,) = encode_texts(family, text)
    with torch.no_grad():
        whole = pipeline.encode_prompt([text], 4, 2, LENGTH, CPU)[0][0]
    start = LENGTH - length
    torch.testing.assert_close(row["prompt_embeds"], whole[start : start + 24], rtol=1e-4, atol=1e-5)


def test_the_shift_of_ideogram_is_the_middle_of_the_pipelines_noise_levels(ideogram: Sample) -> None:
    family = ideogram.family
    mu = inspect.signature(Ideogram4Pipeline.__call__).parameters["mu"].default
    for side in (512, 1024, 2048):
        shift = family.family_shift(family.latents_shape(side, side, 1))
        middle = _resolution_aware_mu(height=side, width=side, base_mu=mu)
        assert shift == pytest.approx(math.exp(middle))


def test_ideograms_second_transformer_is_read_for_guided_previews_only(
    ideogram: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, model, read = ideogram.family, ideogram.model, []
    load = family.load_component
    monkeypatch.setattr(
        family, "load_component", lambda name, *given: read.append(name) or load(name, *given)
    )
    for scale, expected in ((1.0, []), (2.0, ["unconditional_transformer"])):
        request = ideogram.request(num_inference_steps=1, guidance_scale=scale, seed=0)
        family.sample(model, torch.float32, [request])
        assert [name for name in read if name != "vae"] == expected


RECIPE = Path(__file__).parents[2] / "configs" / "krea2_lora.yaml"


AUTHORS = {
    *("img_in", "final_layer.linear", "to_q", "to_k", "to_v", "to_out.0", "to_gate", "ff.up", "ff.down"),
    *("text_fusion.projector", "txt_in.linear_1", "txt_in.linear_2"),
    *("time_embed.linear_1", "time_embed.linear_2", "time_mod_proj"),
}
"""Of diffusers, commit 58eb52c0803e, ``examples/dreambooth/train_dreambooth_lora_krea2.py``."""


def krea_with_settings(pipeline: Krea2Pipeline, folder: Path, **settings: object) -> Krea2:
    """The family on the same components with other settings in ``model_index.json``."""
    Krea2Pipeline(**pipeline.components, **settings).save_pretrained(folder)
    return Krea2(PipelineFolder(path=folder))


def test_other_layers_of_the_text_encoder_make_other_cache_entries(krea: Sample, tmp_path: Path) -> None:
    family, pipeline = krea.family, krea.fresh_pipeline()
    other = krea_with_settings(pipeline, tmp_path, text_encoder_select_layers=(2, 1))
    (prompt,) = prompts = [Prompt(text=PROMPTS[0])]
    (ours,), (theirs,) = (each.load_prompt_encoder(torch.float32, CPU)(prompts) for each in (family, other))
    assert not torch.allclose(ours["prompt_embeds"], theirs["prompt_embeds"])
    with torch.no_grad():
        expected, _ = Krea2Pipeline.from_pretrained(tmp_path).encode_prompt(prompt.text, device=CPU)
    assert torch.equal(theirs["prompt_embeds"][0], expected[0, 0])
    assert family.prompt_encoder_id(torch.float32) != other.prompt_encoder_id(torch.float32)


def test_the_recipe_of_krea_trains_the_layers_of_the_authors(krea: Sample) -> None:
    lora = yaml.safe_load(RECIPE.read_text())["lora"]
    assert (set(lora["target_modules"]), lora["rank"]) == (AUTHORS, 32)
    model, family = krea.family.empty_transformer(), krea.family
    layers, of_default = (
        set(find_target_layers(model, targets, unused_modules=[]))
        for targets in (lora["target_modules"], family.default_target_modules)
    )
    assert len(layers - of_default) == 8
    _, gradients = velocity_and_gradients(krea, adapted_transformer(family, targets=lora["target_modules"]))
    assert [name for name, gradient in gradients.items() if gradient is None or not gradient.any()] == []


def test_krea_turbo_has_one_shift_for_all_sizes_and_the_prompts_of_raw(krea: Sample, tmp_path: Path) -> None:
    family, pipeline = krea.family, krea.fresh_pipeline()
    turbo = krea_with_settings(
        pipeline, tmp_path, is_distilled=True, text_encoder_select_layers=pipeline.text_encoder_select_layers
    )
    for side in (512, 1024):
        shape = family.latents_shape(side, side, 1)
        assert turbo.family_shift(shape) == math.exp(1.15)
    assert turbo.prompt_encoder_id(torch.float32) == family.prompt_encoder_id(torch.float32)


def test_images_beyond_the_table_of_places_are_refused_with_its_size(sd3: SD3) -> None:
    sd3.check_size(384, 384, keys="data.width, data.height")
    with pytest.raises(
        UserError, match=r"data\.width, data\.height: 400x64; .* at most 384 pixels on each side"
    ):
        sd3.check_size(400, 64, keys="data.width, data.height")
    with pytest.raises(ValueError, match="greater than `pos_embed_max_size`: 24"):
        sd3.load_transformer(torch.float32).pos_embed(torch.zeros(1, 16, 50, 8))


def test_layouts_of_sd3_without_a_second_attention_get_a_lora_too(sd3: SD3) -> None:
    """3 medium and 3.5 large."""
    with torch.device("meta"):
        plain = SD3Transformer2DModel(num_layers=2)
    names = {name for name, _ in plain.named_modules()}
    assert not any(".attn2." in name for name in names)
    assert "transformer_blocks.1.attn.add_q_proj" in sd3.unused_modules(plain)
    assert "transformer_blocks.1.attn.to_add_out" not in names


# The transformer fills prompts up to multiples of 32: three lengths, two of which it makes one.
def test_a_text_encoder_saved_as_a_whole_language_model_encodes_the_same(
    zimage: ZImage, tmp_path: Path
) -> None:
    pipeline = z_image.tiny()
    pipeline.save_pretrained(tmp_path)
    whole = ZImage(PipelineFolder(path=tmp_path))
    encoder = pipeline.text_encoder
    language_model = Qwen3ForCausalLM(encoder.config)
    language_model.model.load_state_dict(encoder.state_dict())
    language_model.tie_weights()
    language_model.save_pretrained(tmp_path / "text_encoder")
    expected, found = (encode_texts(each, *PROMPTS) for each in (zimage, whole))
    for row, other in zip(found, expected, strict=True):
        assert torch.equal(row["prompt_embeds"], other["prompt_embeds"])


def test_no_keys_and_values_are_kept_of_a_prompt_and_none_are_missed(
    zimage: ZImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, make, load = [], DynamicCache.__init__, zimage.load_text_encoders

    def load_with_cache(*given: Any) -> dict[str, Any]:
        encoders = load(*given)
        encoders["text_encoder"].config.use_cache = True
        return encoders

    def encoded() -> torch.Tensor:
        (given,) = encode_texts(zimage, PROMPTS[0])
        return given["prompt_embeds"]

    monkeypatch.setattr(DynamicCache, "__init__", lambda *a, **k: made.append(1) or make(*a, **k))
    without = encoded()
    assert not made
    monkeypatch.setattr(zimage, "load_text_encoders", load_with_cache)
    assert torch.equal(encoded(), without)
    assert made
