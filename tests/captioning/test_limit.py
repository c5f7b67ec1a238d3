"""Tests for captions that are cut to what a text encoder reads."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffsynth_lite.captioning.limit import Fits, fitted, limit_of_config, limit_of_family
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines import PipelineFolder, qwen_image
from diffsynth_lite.pipelines.base import diffusers_components
from diffsynth_lite.pipelines.qwen_image import QwenImage


def words(limit: int) -> Fits:
    """As many words, each a token, and one at the end."""
    return lambda text: len(text.split()) < limit


def characters(limit: int) -> Fits:
    return lambda text: len(text) <= limit


@pytest.mark.parametrize(
    ("caption", "limit", "kept", "cut"),
    [
        ("A cat sleeps. A dog runs.", 7, "A cat sleeps. A dog runs.", ""),
        ("A cat sleeps. A dog runs.", 6, "A cat sleeps.", "A dog runs."),
        ('A sign reads "Stop." A dog runs.', 7, 'A sign reads "Stop."', "A dog runs."),
        (
            "A cat sleeps on a sofa, near a window, at night",
            9,
            "A cat sleeps on a sofa",
            "near a window, at night",
        ),
        (
            "Yes. A cat sleeps on a very old sofa near it.",
            9,
            "Yes. A cat sleeps on a very old",
            "sofa near it.",
        ),
        ("1girl, solo, long hair, smile", 5, "1girl, solo, long hair", "smile"),
        ("A cat", 1, "", "A cat"),
        ("", 1, "", ""),
    ],
)
def test_a_caption_is_cut_at_the_end_of_a_sentence_tag_or_word(caption, limit, kept, cut):
    assert fitted(caption, words(limit)) == (kept, cut)


@pytest.mark.parametrize(
    ("caption", "kept"), [("一只猫在睡觉。狗在跑步。", "一只猫在睡觉。"), ("ผู้หญิงยิ้มอยู่", "ผู้หญิงย")]
)
def test_scripts_without_spaces_are_cut_too(caption, kept):
    assert fitted(caption, characters(8))[0] == kept


@given(st.text(st.sampled_from('ab.,! \n"猫。'), max_size=80), st.integers(1, 20))
def test_what_is_kept_fits_and_is_the_beginning(caption, limit):
    kept, cut = fitted(caption, words(limit))
    assert caption.startswith(kept)
    assert words(limit)(kept) or not kept
    assert cut in caption
    assert set(caption[len(kept) :].removesuffix(cut)) <= set(" ,;、\uff0c") or cut


def test_json_loses_its_last_elements_and_stays_json():
    elements = [{"type": "obj", "desc": f"the cat of number {number}"} for number in range(9)]
    caption = {"compositional_deconstruction": {"background": "a room", "elements": elements}}
    text = json.dumps(caption)
    kept, cut = fitted(text, characters(300))
    left = json.loads(kept)["compositional_deconstruction"]["elements"]
    assert left
    assert left + json.loads(cut) == elements
    assert len(kept) <= 300 < len(kept) + len(json.dumps(elements[0]))
    assert fitted(text, characters(3)) == ("", text)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "Qwen" / "Qwen-Image"
    qwen_image.tiny().save_pretrained(folder)
    return folder


@pytest.fixture
def config(model: Path, tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model: {{family: qwen_image, path: {model}}}\n"
        f"data: {{sources: [{{path: {tmp_path}}}]}}\n"
        f"output: {{dir: {tmp_path}/run}}\n"
    )
    return file


def test_the_limit_of_a_config_is_that_of_its_family_with_the_trigger_whose_tokenizer_is_loaded_once(
    config, model, monkeypatch
):
    loaded = []
    load = diffusers_components.load_tokenizer
    monkeypatch.setattr(
        diffusers_components, "load_tokenizer", lambda *given: loaded.append(given) or load(*given)
    )
    kept, cut = fitted("word " * 3_000, limit_of_config(config))
    assert len(loaded) == 1
    assert f"{kept} {cut}" == ("word " * 3_000).strip()
    family = QwenImage(PipelineFolder(path=model))
    fitting, longer = family.prompt_lengths([kept, f"{kept} word"])
    assert fitting <= family.max_prompt_tokens < longer
    with_trigger = limit_of_config(config, trigger="ohwx woman")
    assert not with_trigger(kept)
    assert with_trigger(fitted("ohwx woman, " + "word " * 3_000, limit_of_config(config))[0])


def test_the_limit_of_a_family_is_that_of_a_release_of_it(config, model, monkeypatch):
    kept, cut = fitted("word " * 3_000, limit_of_config(config))
    monkeypatch.chdir(model.parent.parent)
    assert fitted("word " * 3_000, limit_of_family("qwen_image")) == (kept, cut)


@pytest.mark.parametrize("name", ["sdxl", "wan"])
def test_a_family_whose_tokenizer_is_not_here_is_an_error_in_one_line(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"--family {name}: .*--config FILE") as caught:
        limit_of_family(name)
    assert "\n" not in str(caught.value)


def test_a_config_whose_model_is_not_there_is_an_error(config, model):
    config.write_text(config.read_text().replace(str(model), "/no/such/folder"))
    with pytest.raises(UserError, match="no folder /no/such/folder"):
        limit_of_config(config)
