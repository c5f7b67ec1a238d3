"""Taggers are recognised, prepare images as their authors do, and list tags as captions have them."""

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from diffsynth_lite.captioning.captioner import Answer, Question
from diffsynth_lite.captioning.model import open_captioner
from diffsynth_lite.errors import UserError
from diffsynth_lite.testing.captioners import save_tiny_tagger

_RED, _BLUE = "red_dress", "blue_sky"
_TAGS = {
    "general": (9, (1.0, 1.0, 1.0)),  # a rating
    _RED: (0, (-0.1, 0.0, 0.1)),  # mean blue, green and red
    _BLUE: (0, (0.1, 0.0, -0.05)),
    "o_o": (0, (0.01, 0.01, 0.01)),
    "some_one_(series)": (4, (0.0, 0.0, 0.01)),
}


def _tags_of(folder: Path, *images: Image.Image) -> str:
    question = Question(images=images, instruction="is not read")
    other = Question(images=[_plain((0, 255, 0))], instruction="")
    with open_captioner(str(folder), device="cpu", batch_size=2) as tagger:
        answer, _ = tagger.answer([question, other], max_tokens=1)
        assert [answer] == tagger.answer([question], max_tokens=1)
    assert answer == Answer(text=answer.text)
    return answer.text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_tagger(tmp_path_factory.mktemp("tagger"), _TAGS)


def _plain(color: tuple[int, int, int], size: tuple[int, int] = (10, 10)) -> Image.Image:
    return Image.new("RGB", size, color)


def test_tags_are_in_words_by_probability_without_ratings(folder: Path) -> None:
    # Of red: sigmoid(25) red, sigmoid(2.55) both the face and the character, 0.93, which is above 0.85.
    assert _tags_of(folder, _plain((255, 0, 0))) == "red dress, o_o, some one (series)"
    assert _tags_of(folder, _plain((0, 0, 255))) == "blue sky, o_o"


def test_general_tags_need_less_than_characters(folder: Path) -> None:
    # sigmoid(0.01 * 150) is 0.82.
    assert _tags_of(folder, _plain((150, 0, 150))) == "blue sky, o_o, red dress"
    assert _tags_of(folder, _plain((200, 0, 200))) == "blue sky, o_o, some one (series), red dress"


def test_an_image_is_in_the_middle_of_a_white_square(tmp_path: Path) -> None:
    tagger = save_tiny_tagger(tmp_path, {"white": (4, (0.0, 0.02, 0.0)), "image": (0, (0.0, 0.0, 0.0))})
    assert _tags_of(tagger, _plain((0, 0, 0), (8, 8))) == "image"
    # sigmoid(0.02 * 127) is 0.93.
    assert _tags_of(tagger, _plain((0, 0, 0), (4, 8))) == "white, image"
    assert _tags_of(tagger, _plain((0, 0, 0), (8, 4))) == "white, image"


def test_tags_of_a_clip_are_those_of_its_mean_frame(folder: Path) -> None:
    red, blue = _plain((255, 0, 0)), _plain((0, 0, 255))
    # Each of both is certain in one frame, and so has 0.5 in the mean; of the character there is too little.
    assert set(_tags_of(folder, red, blue).split(", ")) == {"red dress", "blue sky", "o_o"}


def test_without_onnxruntime_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UserError, match=r"pip install 'diffsynth_lite\[tagger\]'"):
        open_captioner(str(folder))


@pytest.mark.parametrize("settings", [{"quantize": "int8"}, {"dtype": "float32"}])
def test_settings_of_other_models_have_no_effect_on_a_tagger(folder: Path, settings: dict[str, str]) -> None:
    with pytest.raises(UserError, match="no effect"):
        open_captioner(str(folder), **settings)  # type: ignore[arg-type]


def test_damaged_files_of_a_tagger_are_named(tmp_path: Path) -> None:
    folder = save_tiny_tagger(tmp_path, _TAGS)
    table = (folder / "selected_tags.csv").read_text()
    (folder / "selected_tags.csv").write_text(table + "9,more,0,1\n")
    with pytest.raises(UserError, match="and not 6 tags"), open_captioner(str(folder), device="cpu"):
        pass
    (folder / "selected_tags.csv").write_text("id\n1\n")
    with pytest.raises(UserError, match=r"selected_tags.csv is not a table"), open_captioner(str(folder)):
        pass
    (folder / "selected_tags.csv").write_text(table)
    (folder / "model.onnx").write_bytes(np.zeros(99, dtype=np.uint8).tobytes())
    with pytest.raises(UserError, match=r"model.onnx cannot be read"), open_captioner(str(folder)):
        pass
