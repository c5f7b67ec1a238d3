"""HunyuanVideo 1.5 against diffusers' own transformer, autoencoder and pipelines."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import test_family_fidelity as fidelity
import test_family_interface as interface
import torch
from comfyui_names import HUNYUAN_VIDEO_15
from diffusers import HunyuanVideo15ImageToVideoPipeline
from family_sample import (
    CPU,
    PROMPTS,
    Sample,
    adapted_transformer,
    assert_equal_under_all_flags,
    build_sample,
    picture,
    transformer_calls,
)
from hunyuan_pipelines import from_pictures

from diffsynth_lite.errors import UserError
from diffsynth_lite.lora import adapter_settings, adapter_tensors
from diffsynth_lite.lora.conversion import FamilyNames, convert
from diffsynth_lite.lora.reading import known_pairs, read_contents
from diffsynth_lite.lora.updates import pairs_of
from diffsynth_lite.media import Media, Prompt
from diffsynth_lite.pipelines import PipelineFolder
from diffsynth_lite.pipelines.hunyuan_video_15 import HunyuanVideo15, model_fn_hunyuan_video_15, tiny

SIGMA = torch.tensor([0.1, 0.5, 0.9])
TEXTS = (*PROMPTS, 'a sign that says "Stop" and “go”, "Stop"', "", "circle " * 1100)


@pytest.fixture(scope="module")
def pipeline() -> Any:
    return tiny()


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return build_sample("hunyuan_video_15", tmp_path_factory.mktemp("from_text"))


@pytest.fixture(scope="module")
def starting(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    """That of the pipeline which starts from pictures."""
    return build_sample("hunyuan_video_15", tmp_path_factory.mktemp("from_pictures"), from_pictures)


@pytest.fixture
def of_pictures(starting: Sample) -> HunyuanVideo15:
    family = starting.family
    assert isinstance(family, HunyuanVideo15)
    return family


def test_previews_from_pictures_are_what_the_pipeline_draws(starting: Sample) -> None:
    pipeline = fidelity.read_pipeline(starting)
    fidelity.test_a_preview_is_what_the_pipeline_draws_from_the_text(starting, pipeline, fidelity.GUIDANCE)


def test_clips_from_pictures_are_trained_as_the_pipeline_samples_them(
    starting: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    fidelity.test_all_that_the_model_is_told_in_training_is_what_the_pipeline_tells_it(starting)
    fidelity.test_what_the_model_says_of_a_place_comes_back_at_that_place(starting)
    interface.test_the_velocity_is_what_the_pipeline_hands_to_its_sampler(starting, monkeypatch)


def test_what_is_kept_of_pictures_has_a_key_of_all_that_makes_it(starting: Sample, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(starting.family.folder.path, tmp_path / "copy"))
    fidelity.test_a_cache_key_changes_with_the_dtype_and_with_every_file_that_the_encoder_needs(
        starting, copy, "media"
    )
    interface.test_an_example_of_the_conditioning_is_what_the_encoders_give_of_a_prompt_as_long_as_may_be(
        starting
    )


@pytest.mark.parametrize("starts_from_a_picture", [False, True])
def test_model_fn_equals_the_transformers_own_forward(starts_from_a_picture: bool) -> None:
    transformer = tiny().transformer
    generator = torch.Generator().manual_seed(0)
    latents, first = (torch.randn(2, 4, frames, 2, 4, generator=generator) for frames in (3, 1))
    embeds, glyphs, picture_embeds = (
        torch.randn(2, tokens, width, generator=generator) for tokens, width in ((7, 16), (5, 32), (4, 16))
    )
    mask, glyph_mask = (
        (torch.arange(tokens) < torch.tensor([[most], [least]])).long()
        for tokens, most, least in ((7, 7, 4), (5, 2, 5))
    )
    given, seen = torch.zeros(2, 4, 3, 2, 4), torch.zeros(2, 1, 3, 2, 4)
    start = {}
    if starts_from_a_picture:
        given[:, :, 0], seen[:, :, 0] = first[:, :, 0], 1
        start = {"image_embeds_bld": picture_embeds, "first_frame_bcfhw": first}
    else:
        picture_embeds = torch.zeros(2, 0, 16)
    timestep = torch.tensor([200.0, 700.0])
    reference = transformer(
        hidden_states=torch.cat([latents, given, seen], dim=1),
        timestep=timestep,
        encoder_hidden_states=embeds,
        encoder_attention_mask=mask,
        encoder_hidden_states_2=glyphs,
        encoder_attention_mask_2=glyph_mask,
        image_embeds=picture_embeds,
        return_dict=False,
    )[0]
    inputs = latents, timestep, embeds, mask, glyphs, glyph_mask
    assert_equal_under_all_flags(transformer, reference, model_fn_hunyuan_video_15, *inputs, **start)


def test_prompts_are_encoded_as_by_the_pipeline(pipeline: Any, sample: Sample) -> None:
    family = sample.family
    encoded = family.load_prompt_encoder(torch.float32, CPU)([Prompt(text=text) for text in TEXTS])
    with torch.no_grad():
        rows = pipeline.encode_prompt(list(TEXTS), device=CPU, batch_size=len(TEXTS))
    lengths, glyph_lengths = rows[1].sum(1).int().tolist(), rows[3].sum(1).int().tolist()
    for tensors, *theirs in zip(encoded, rows[0], lengths, rows[2], glyph_lengths, strict=True):
        row, length, glyphs, num_glyphs = theirs
        assert torch.equal(tensors["prompt_embeds"], row[:length])
        assert torch.equal(tensors["glyph_embeds"], glyphs[:num_glyphs])
    # Text "Stop". Text "go". and what ends it: words that come twice are read once.
    assert glyph_lengths == [0, 0, 0, len('Text "Stop". Text "go". ') + 1, 0, 0]
    assert lengths[-1] == family.max_prompt_tokens == 1000 < family.prompt_lengths(TEXTS)[-1]
    assert family.prompt_lengths(TEXTS)[:-1] == lengths[:-1]


def test_a_prompt_without_its_padding_counts_as_in_the_pipeline(pipeline: Any, sample: Sample) -> None:
    texts = [TEXTS[0], TEXTS[3]]
    encoded = sample.family.load_prompt_encoder(torch.float32, CPU)([Prompt(text=text) for text in texts])
    with torch.no_grad():
        embeds, mask, glyphs, glyph_mask = pipeline.encode_prompt(texts, device=CPU, batch_size=2)
        padded = model_fn_hunyuan_video_15(
            pipeline.transformer,
            sample.latents[:2],
            1000 * SIGMA[:2],
            *(embeds, mask, glyphs, glyph_mask),
            torch.zeros(2, pipeline.vision_num_semantic_tokens, 16),
        )
        ours = sample.family.predict(pipeline.transformer, sample.latents[:2], SIGMA[:2], encoded)
        plain = sample.family.predict(
            pipeline.transformer,
            sample.latents[:2],
            SIGMA[:2],
            [tensors | {"glyph_embeds": encoded[0]["glyph_embeds"]} for tensors in encoded],
        )
    # Sums over matrices of another shape; the masked part adds exact zeros.
    torch.testing.assert_close(ours, padded, rtol=1e-4, atol=1e-5)
    assert torch.equal(ours[0], plain[0])
    assert (ours[1] - plain[1]).abs().max() > 1e-4


@pytest.mark.parametrize("is_named", [False, True])
def test_a_clip_starts_from_the_picture_that_is_named_or_its_own_first_frame(
    of_pictures: HunyuanVideo15, is_named: bool
) -> None:
    clip = Media(
        frames=tuple(picture(64, 32, 10 + frame) for frame in range(5)),
        first_frame=picture(64, 32, 40) if is_named else None,
    )
    start = clip.first_frame or clip.frames[0]
    (encoded,) = of_pictures.load_media_encoder(torch.float32, CPU)([clip])
    assert sum(value.numel() for name, value in encoded.items() if name != "latents") == (
        of_pictures.num_condition_values(encoded["latents"].shape)
    )
    pipeline = HunyuanVideo15ImageToVideoPipeline.from_pretrained(of_pictures.folder.path)
    latents = encoded.pop("latents")[None]
    with torch.no_grad():
        given, seen = pipeline.prepare_cond_latents_and_mask(latents, start, 1, 32, 64, torch.float32, CPU)
        embeds = pipeline.encode_image(start, batch_size=1, device=CPU, dtype=torch.float32)
    (prompt,) = of_pictures.load_prompt_encoder(torch.float32, CPU)([Prompt(text=PROMPTS[0])])
    model = of_pictures.load_transformer(torch.float32)
    (told,) = transformer_calls(
        model, lambda: of_pictures.predict(model, latents, SIGMA[:1], [prompt | encoded])
    )
    assert torch.equal(told["hidden_states"], torch.cat([latents, given, seen], dim=1))
    assert torch.equal(told["image_embeds"], embeds)
    assert given.any()


def test_a_clip_that_starts_from_a_picture_has_other_frames(
    sample: Sample, of_pictures: HunyuanVideo15
) -> None:
    sample.family.check_frames(1, key="data.frame_counts")
    with pytest.raises(UserError, match=r"1 frames; .* of which the first is given, such as 5 or 9"):
        of_pictures.check_frames(1, key="data.frame_counts")
    assert (of_pictures.record_kinds, of_pictures.needs_inputs) == (("video", "image_to_video"), True)
    assert (sample.family.record_kinds, sample.family.needs_inputs) == (("video", "image"), False)


@pytest.mark.parametrize(("shift", "trained"), [(9.0, 3.0), (2.0, 2.0)])
def test_the_shift_is_that_of_the_models_own_trainer(
    sample: Sample, folder: Path, shift: float, trained: float
) -> None:
    change(folder / "scheduler" / "scheduler_config.json", {"shift": shift})
    assert HunyuanVideo15(PipelineFolder(path=folder)).family_shift(sample.latents.shape[1:]) == trained


@pytest.fixture
def folder(sample: Sample, tmp_path: Path) -> Path:
    """A folder with the settings of the tiny pipeline, and no weights."""
    for file in sample.family.folder.path.rglob("*"):
        if file.is_file() and file.suffix != ".safetensors":
            copy = tmp_path / file.relative_to(sample.family.folder.path)
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(file.read_bytes())
    return tmp_path


def change(file: Path, settings: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def test_what_was_distilled_is_told_by_its_guider_and_refused_where_it_knows_two_noise_levels(
    sample: Sample, folder: Path
) -> None:
    assert sample.family.distilled is None
    change(folder / "guider" / "guider_config.json", {"guidance_scale": 1.0})
    family = HunyuanVideo15(PipelineFolder(path=folder))
    family.check_folder(with_weights=False)
    assert "its guider has a scale of 1" in (family.distilled or "")
    change(folder / "transformer" / "config.json", {"use_meanflow": True})
    with pytest.raises(UserError, match=r"transformer has use_meanflow: a step-distilled model"):
        HunyuanVideo15(PipelineFolder(path=folder)).check_folder(with_weights=False)


def test_a_lora_is_converted_to_the_layers_that_comfyui_has(sample: Sample, tmp_path: Path) -> None:
    family = sample.family
    transformer = adapted_transformer(sample, targets=family.target_sets["all"])
    trained = pairs_of(adapter_tensors(transformer), adapter_settings(transformer), "transformer.")
    (file,) = family.save_lora(tmp_path, adapter_tensors(transformer), adapter_settings(transformer))
    names = FamilyNames(layers=family.lora_layers, comfyui=family.lora_spelling)
    conversion = convert(read_contents(file), names, "comfyui", tmp_path / "for_comfyui.safetensors")
    # Folded alpha is a power of two from the rank: nothing was rounded.
    assert conversion.difference == 0
    pattern = re.compile("|".join(re.escape(name).replace(r"\*", r"\d+") for name in HUNYUAN_VIDEO_15))
    layers = {name.partition(".")[0] for name in conversion.tensors}
    assert [layer for layer in layers if not pattern.fullmatch(layer)] == []
    queries = (
        "transformer_blocks.0.attn.to_q",
        "transformer_blocks.0.attn.to_k",
        "transformer_blocks.0.attn.to_v",
    )
    update = torch.cat(
        [2 * pair.up @ pair.down for pair in (trained[f"transformer.{name}"] for name in queries)]
    )
    key = "lora_unet_double_blocks_0_img_attn_qkv"
    down, up = (conversion.tensors[f"{key}.lora_{part}.weight"] for part in ("down", "up"))
    strength = conversion.tensors[f"{key}.alpha"] / len(down)
    torch.testing.assert_close(strength * up @ down, update)
    back = known_pairs(conversion.contents, family.lora_layers)
    assert back.keys() == trained.keys()
