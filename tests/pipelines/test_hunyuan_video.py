"""HunyuanVideo and HunyuanVideo 1.5 against diffusers' own pipelines."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import test_family_fidelity as fidelity
import test_family_interface as interface
import torch
from diffusers import HunyuanVideo15ImageToVideoPipeline, HunyuanVideoPipeline
from family_sample import CPU, PROMPTS, SIGMA, Sample, encode_texts, picture, transformer_calls
from transformers import PreTrainedTokenizerFast

from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Media
from diffsynth_lite.pipelines import PipelineFolder
from diffsynth_lite.pipelines.base.tokenizer import load_tokenizer
from diffsynth_lite.pipelines.hunyuan_video import TEMPLATE, HunyuanVideo
from diffsynth_lite.pipelines.hunyuan_video_15 import HunyuanVideo15
from diffsynth_lite.training.export.usage import usage_code

FAMILY = "hunyuan_video"
TEXTS = (*PROMPTS, "", "circle " * 300)


@pytest.fixture(scope="module")
def of_15(sample_of: Callable[[str], Sample]) -> Sample:
    return sample_of("hunyuan_video_15")


@pytest.fixture(scope="module")
def of_images(sample_of: Callable[[str], Sample]) -> HunyuanVideo15:
    family = sample_of("hunyuan_video_15 of images").family
    assert isinstance(family, HunyuanVideo15)
    return family


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_training_the_model_gets_the_scale_that_is_set_as_from_the_pipeline(
    sample: Sample, dtype: torch.dtype
) -> None:
    family = HunyuanVideo(sample.family.folder)
    model = family.load_transformer(dtype)
    batch = sample.latents[:1], SIGMA[:1], sample.conditioning[:1]
    (plain,) = transformer_calls(model, lambda: family.predict(model, *batch))
    assert plain["guidance"].tolist() == [1000.0]
    family.training_guidance = 6.3
    (trained,) = transformer_calls(model, lambda: family.predict(model, *batch))
    request = sample.request(num_inference_steps=1, guidance_scale=6.3, seed=0)
    sampled = transformer_calls(model, lambda: family.sample(model, torch.float32, [request]))[0]
    assert trained["guidance"].dtype == sampled["guidance"].dtype == dtype
    assert torch.equal(trained["guidance"], sampled["guidance"])


def test_a_model_that_knows_no_scale_is_steered_away_from_the_negative_prompt(
    sample_of: Callable[[str], Sample],
) -> None:
    unguided = sample_of("hunyuan_video unguided")
    fidelity.test_another_caption_and_another_negative_prompt_generate_something_else(unguided)


def test_a_folder_that_names_the_class_of_llama_2_is_read_as_its_file_has_it(
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
    settings_of_usage = {
        "dtype": "bfloat16",
        "lora": "lora",
        "prompt": "x",
        "negative_prompt": "",
        "fps": 24.0,
    }
    code = (usage_code(family, request, base=str(folder), **settings_of_usage) or "").splitlines()
    reading = f'PreTrainedTokenizerFast.from_pretrained({str(folder)!r}, subfolder="tokenizer")'
    assert {"from transformers import PreTrainedTokenizerFast", f"pipeline.tokenizer = {reading}"} <= {*code}
    mended = PreTrainedTokenizerFast.from_pretrained(str(folder), subfolder="tokenizer")
    assert mended(texts)["input_ids"] == expected
    plain = usage_code(sample.family, request, base="tiny", **settings_of_usage)
    assert "PreTrainedTokenizerFast" not in (plain or "PreTrainedTokenizerFast")
    (folder / "tokenizer" / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"the tokenizer in .* cannot be loaded"):
        load_tokenizer(folder / "tokenizer", "LlamaTokenizerFast")


def test_what_is_kept_of_images_has_a_key_of_all_that_makes_it(
    sample_of: Callable[[str], Sample], tmp_path: Path
) -> None:
    starting = sample_of("hunyuan_video_15 of images")
    copy = Path(shutil.copytree(starting.family.folder.path, tmp_path / "copy"))
    fidelity.test_a_cache_key_changes_with_the_dtype_and_with_every_file_that_the_encoder_needs(
        starting, copy, "media"
    )
    interface.test_an_example_of_the_conditioning_is_what_the_encoders_give_of_a_prompt_as_long_as_may_be(
        starting
    )


def test_words_in_quotes_are_read_once_each_as_by_the_pipeline(of_15: Sample) -> None:
    text = 'a sign that says "Stop" and “go”, "Stop"'
    plain, quoted = encode_texts(of_15.family, PROMPTS[0], text)
    with torch.no_grad():
        *_, glyphs, mask = of_15.fresh_pipeline().encode_prompt([text], device=CPU, batch_size=1)
    number = len('Text "Stop". Text "go". ') + 1  # and what ends it
    assert (len(plain["glyph_embeds"]), int(mask.sum())) == (0, number)
    assert torch.equal(quoted["glyph_embeds"], glyphs[0, :number])
    model, batch = of_15.family.load_transformer(torch.float32), (of_15.latents[:2], SIGMA[:2])
    with torch.no_grad():
        both = of_15.family.predict(model, *batch, [plain, quoted])
        without = of_15.family.predict(
            model, *batch, [plain, quoted | {"glyph_embeds": plain["glyph_embeds"]}]
        )
    assert torch.equal(both[0], without[0])
    assert (both[1] - without[1]).abs().max() > 1e-4


@pytest.mark.parametrize("is_named", [False, True])
def test_a_clip_starts_from_the_image_that_is_named_or_its_own_first_frame(
    of_images: HunyuanVideo15, is_named: bool
) -> None:
    clip = Media(
        frames=tuple(picture(64, 32, 10 + frame) for frame in range(5)),
        first_frame=picture(64, 32, 40) if is_named else None,
    )
    start = clip.first_frame or clip.frames[0]
    (encoded,) = of_images.load_media_encoder(torch.float32, CPU)([clip])
    assert sum(value.numel() for name, value in encoded.items() if name != "latents") == (
        of_images.num_condition_values(encoded["latents"].shape)
    )
    pipeline = HunyuanVideo15ImageToVideoPipeline.from_pretrained(of_images.folder.path)
    latents = encoded.pop("latents")[None]
    with torch.no_grad():
        given, seen = pipeline.prepare_cond_latents_and_mask(latents, start, 1, 32, 64, torch.float32, CPU)
        embeds = pipeline.encode_image(start, batch_size=1, device=CPU, dtype=torch.float32)
    (prompt,) = encode_texts(of_images, PROMPTS[0])
    model = of_images.load_transformer(torch.float32)
    (call,) = transformer_calls(
        model, lambda: of_images.predict(model, latents, SIGMA[:1], [prompt | encoded])
    )
    assert torch.equal(call["hidden_states"], torch.cat([latents, given, seen], dim=1))
    assert torch.equal(call["image_embeds"], embeds)
    assert given.any()


def test_a_clip_that_starts_from_an_image_has_other_frames(of_15: Sample, of_images: HunyuanVideo15) -> None:
    of_15.family.check_frames(1, key="data.frame_counts")
    with pytest.raises(UserError, match=r"1 frames; .* of which the first is given, such as 5 or 9"):
        of_images.check_frames(1, key="data.frame_counts")
    assert (of_images.record_kinds, of_images.needs_inputs) == (("video", "image_to_video"), True)
    assert (of_15.family.record_kinds, of_15.family.needs_inputs) == (("video", "image"), False)


def test_a_distilled_model_is_known_by_its_guider(of_15: Sample, tmp_path: Path) -> None:
    assert of_15.family.distilled is None
    folder = Path(shutil.copytree(of_15.family.folder.path, tmp_path / "copy"))
    file = folder / "guider" / "guider_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"guidance_scale": 1.0}))
    family = HunyuanVideo15(PipelineFolder(path=folder))
    family.check_folder()
    assert "its guider has a scale of 1" in (family.distilled or "")
