import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from diffsynth_lite.captioning.captioner import Question
from diffsynth_lite.captioning.model import CaptionModel, open_captioner
from diffsynth_lite.testing.captioners import save_tiny_qwen3_vl

_SAVERS = {"qwen3-vl": save_tiny_qwen3_vl}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save(tmp_path_factory.mktemp("captioners") / name) for name, save in _SAVERS.items()}


def _image(width: int, height: int, brightest: int) -> Image.Image:
    numbers = np.random.default_rng(width * height).random((height, width, 3))
    return Image.fromarray((numbers * brightest).astype("uint8"))


def _questions() -> list[Question]:
    """Of different sizes, lengths and numbers of images."""
    return [
        Question(images=[_image(128, 96, 255)], instruction="a cat"),
        Question(images=[_image(64, 200, 100)], instruction="describe this image, please: a dog, a red tree"),
        Question(images=[_image(90, 90, 60), _image(50, 70, 200)], instruction="a red house"),
    ]


def _ask(captioner: Any, questions: Sequence[Question], max_tokens: int = 12) -> list[str]:
    answers = captioner.answer(questions, max_tokens=max_tokens)
    assert not any(one.problem for one in answers)
    return [one.text for one in answers]


@pytest.mark.parametrize("name", _SAVERS)
def test_answers_in_a_batch_are_those_of_single_questions_and_the_same_when_asked_again(
    folders: dict[str, Path], name: str
) -> None:
    questions = _questions()
    with open_captioner(str(folders[name]), device="cpu", batch_size=3) as captioner:
        together = _ask(captioner, questions)
        assert [_ask(captioner, [one])[0] for one in questions] == together
        assert _ask(captioner, questions) == together
    assert all(together)
    assert len(set(together)) == 3


def test_nothing_of_the_model_stays_in_memory(folders: dict[str, Path]) -> None:
    captioner = open_captioner(str(folders["qwen3-vl"]), device="cpu")
    assert isinstance(captioner, CaptionModel)
    with captioner:
        model = weakref.ref(captioner._model)
        assert model() is not None
    gc.collect()
    assert model() is None
