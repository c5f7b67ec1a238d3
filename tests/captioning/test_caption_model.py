"""Captioning models of several classes answer the same in a batch as singly, in what memory there is."""

import gc
import logging
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hub_server import REPOSITORY, Hub, serving
from PIL import Image

from diffsynth_lite.captioning.captioner import Question
from diffsynth_lite.captioning.model import CaptionModel, open_captioner
from diffsynth_lite.core.weights.frozen_linear import FrozenLinear
from diffsynth_lite.errors import UserError
from diffsynth_lite.files import parse_json, write_json
from diffsynth_lite.pipelines.base.text_encoders import TextEncoderMemory, transformer_layers
from diffsynth_lite.testing.captioners import (
    save_tiny_florence2,
    save_tiny_gemma3,
    save_tiny_joycaption,
    save_tiny_qwen3_vl,
    save_tiny_smolvlm,
    save_tiny_tagger,
)

_SAVERS = {
    "qwen3-vl": save_tiny_qwen3_vl,
    "gemma3": save_tiny_gemma3,
    "smolvlm": save_tiny_smolvlm,
    "joycaption": save_tiny_joycaption,
    "florence2": save_tiny_florence2,
}
_OF_ONE_IMAGE = ("joycaption", "florence2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save(tmp_path_factory.mktemp("captioners") / name) for name, save in _SAVERS.items()}


@pytest.fixture(scope="module")
def qwen(folders: dict[str, Path]) -> Path:
    return folders["qwen3-vl"]


def _open(folder: Path, **settings: Any) -> CaptionModel:
    captioner = open_captioner(str(folder), device="cpu", **{"batch_size": 3, **settings})
    assert isinstance(captioner, CaptionModel)
    return captioner


def _image(width: int, height: int, brightest: int) -> Image.Image:
    numbers = np.random.default_rng(width * height).random((height, width, 3))
    return Image.fromarray((numbers * brightest).astype("uint8"))


def _questions(num_images: int = 2) -> list[Question]:
    """Of different sizes, lengths and, at the end, numbers of images."""
    several = [_image(90, 90, 60), _image(50, 70, 200)]
    return [
        Question(images=[_image(128, 96, 255)], instruction="a cat"),
        Question(images=[_image(64, 200, 100)], instruction="describe this image, please: a dog, a red tree"),
        Question(images=several[:num_images], instruction="a red house"),
    ]


def _ask(captioner: CaptionModel, questions: Sequence[Question], max_tokens: int = 8) -> list[str]:
    answers = captioner.answer(questions, max_tokens=max_tokens)
    assert not any(one.problem for one in answers)
    return [one.text for one in answers]


@pytest.mark.parametrize("name", _SAVERS)
def test_answers_of_a_batch_are_those_of_single_questions_and_the_same_when_asked_again(
    folders: dict[str, Path], name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    questions = _questions(num_images=1 if name in _OF_ONE_IMAGE else 2)
    with _open(folders[name]) as captioner:
        caplog.clear()
        together = _ask(captioner, questions)
        assert [_ask(captioner, [one])[0] for one in questions] == together
        # Releases sample by default, with settings that have no effect here, and raise no warning.
        assert not caplog.records
    assert all(together)
    assert len(set(together)) == 3, "what is on the images does not matter"
    with _open(folders[name]) as again:
        assert _ask(again, questions) == together


@pytest.mark.parametrize("name", ["qwen3-vl", "gemma3", "florence2"])
def test_an_answer_ends_with_the_model_or_with_the_limit(folders: dict[str, Path], name: str) -> None:
    with _open(folders[name]) as captioner:
        (short,) = captioner.answer(_questions()[:1], max_tokens=3)
        assert (short.num_tokens, short.is_unfinished) == (3, True)
        model: Any = captioner._model
        # The next answer ends where its second token is.
        second = captioner._processor.tokenizer.encode(short.text, add_special_tokens=False)[1]
        model.generation_config.eos_token_id = [second, 0]
        (ended,) = captioner.answer(_questions()[:1], max_tokens=3)
    assert (ended.num_tokens, ended.is_unfinished) == (1, False)
    assert short.text.startswith(ended.text)


def test_a_model_of_tasks_is_asked_for_its_longest_caption_and_reads_no_instruction(
    folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    captioner = _open(folders["florence2"])
    assert captioner.name.endswith("florence2 <MORE_DETAILED_CAPTION>")
    (warning,) = [one.message for one in caplog.records if one.levelno == logging.WARNING]
    assert "reads no instruction" in warning
    image = _image(60, 60, 200)
    with captioner:
        texts = _ask(captioner, [Question(images=[image], instruction=one) for one in ("a", "a red dog")])
        problems = captioner.answer([Question(images=[image, image], instruction="a")], max_tokens=3)
    assert texts[0] == texts[1]
    assert "one image at a time" in problems[0].problem


def test_only_the_question_that_a_model_cannot_read_has_no_answer(qwen: Path) -> None:
    questions = _questions()
    with _open(qwen) as captioner:
        texts = _ask(captioner, questions)
        # Qwen's own processor refuses images that are 200 times as wide as high.
        questions[1] = Question(images=[_image(900, 4, 255)], instruction="a")
        answers = captioner.answer(questions, max_tokens=8)
    assert "aspect ratio" in answers[1].problem
    assert [one.text for one in answers] == [texts[0], "", texts[2]]


def test_nothing_of_the_model_stays_in_memory(qwen: Path) -> None:
    with _open(qwen, quantize="int8") as captioner:
        layer = weakref.ref(transformer_layers(captioner._model)[0][0])
        model = weakref.ref(captioner._model)
        _ask(captioner, _questions())
    gc.collect()
    assert model() is None
    assert layer() is None


@pytest.mark.parametrize("quantize", ["int8", "nf4"])
def test_linear_layers_are_quantised_of_texts_and_of_images(qwen: Path, quantize: Any) -> None:
    with _open(qwen, quantize=quantize) as captioner:
        kinds = {
            type(one)
            for stack in transformer_layers(captioner._model)
            for layer in stack
            for one in layer.modules()
            if isinstance(one, torch.nn.Linear | FrozenLinear)
        }
        answers = _ask(captioner, _questions())
        assert [_ask(captioner, [one])[0] for one in _questions()] == answers
    assert kinds == {FrozenLinear}


def test_layers_are_streamed_where_the_device_has_no_room_and_answer_the_same(
    folders: dict[str, Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _open(folders["smolvlm"]) as plain:
        expected = _ask(plain, _questions())
        needed = sum(weight.nbytes for weight in plain._model.parameters())
    caplog.set_level(logging.INFO, logger="diffsynth_lite.captioning.model")

    def asked_with(free_bytes: float) -> int:
        """How many layers were streamed."""
        caplog.clear()
        monkeypatch.setattr("diffsynth_lite.captioning.model._free_bytes", lambda _: free_bytes)
        with _open(folders["smolvlm"]) as model:
            assert _ask(model, _questions()) == expected
            layers = [layer for stack in transformer_layers(model._model) for layer in stack]
            return sum("forward" in vars(layer) for layer in layers)

    assert asked_with(1.3 * needed) == 0
    assert not caplog.records
    # Those of the text; that of the images is one, and would always be there.
    assert asked_with(needed) == 3
    (line,) = caplog.messages
    assert line.startswith("The model takes ")
    with pytest.raises(UserError, match=r"^--model: the weights take .* at least, and cpu has .* free; take"):
        asked_with(0.5 * needed)


def test_a_device_that_is_full_before_a_question_is_asked_is_named(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(TextEncoderMemory, "place", full)
    with pytest.raises(UserError, match=r"^--model: the weights do not fit cpu; take"), _open(qwen):
        pass
    monkeypatch.setattr("diffsynth_lite.captioning.model.available_host_bytes", lambda: 1000)
    with pytest.raises(UserError, match=r"and cpu has 1000 bytes free; take --quantize"), _open(qwen):
        pass


def test_a_full_device_gets_smaller_batches_and_the_item_that_never_fits_is_reported(
    qwen: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    questions = [*_questions(1), *_questions(2)[2:]]
    with _open(qwen, batch_size=4) as captioner:
        expected = _ask(captioner, questions)
        generate = captioner._model.generate

        def generate_or_fail(**inputs: Any) -> Any:
            asked.append(len(inputs["input_ids"]))
            if asked[-1] > 2 or len(inputs["image_grid_thw"]) > asked[-1]:
                raise torch.OutOfMemoryError("full")
            return generate(**inputs)

        monkeypatch.setattr(captioner._model, "generate", generate_or_fail)
        answers = captioner.answer(questions, max_tokens=8)
        assert captioner.batch_size == 1
    assert asked == [4, 2, 2, 1, 1]
    assert [one.text for one in answers] == [*expected[:3], ""]
    assert "memory is full" in answers[3].problem
    assert [line for line in caplog.messages if "--batch" in line] == [
        f"The device's memory is full: from now on --batch is {size}." for size in (2, 1)
    ]


def test_what_is_not_a_captioner_is_refused_in_one_line(folders: dict[str, Path], tmp_path: Path) -> None:
    def refusal(location: Path | str, **settings: Any) -> str:
        with pytest.raises(UserError) as error:
            open_captioner(str(location), **{"device": "cpu", **settings})
        assert "\n" not in str(error.value)
        return str(error.value)

    def folder_of(**config: Any) -> Path:
        write_json(tmp_path / "config.json", config)
        return tmp_path

    assert "there is no folder ./nothing" in refusal("./nothing")
    (tmp_path / "file").touch()
    assert "is a file; give the model's folder" in refusal(tmp_path / "file")
    assert "has no config.json" in refusal(tmp_path)
    assert "needs code from its repository" in refusal(folder_of(model_type="new", auto_map={}))
    assert "has the model_type new, which transformers" in refusal(folder_of(model_type="new"))
    assert "a qwen3, does not see images" in refusal(folder_of(model_type="qwen3"))
    assert "holds no safetensors weights" in refusal(folder_of(model_type="qwen3_vl"))
    assert "--device: nothing is not a device" in refusal(folders["gemma3"], device="nothing")
    assert "--device: torch has no xpu" in refusal(folders["gemma3"], device="xpu")
    assert "--device: torch has no cpu:1" in refusal(folders["gemma3"], device="cpu:1")


def test_weights_that_do_not_fit_are_refused_before_they_are_asked(qwen: Path, tmp_path: Path) -> None:
    for path in qwen.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = parse_json((qwen / "config.json").read_bytes())
    config["text_config"]["intermediate_size"] *= 2
    write_json(tmp_path / "config.json", config)
    for quantize in ("none", "int8"):
        with (
            pytest.raises(UserError, match=r"^--model: the weights in .* do not fit"),
            _open(tmp_path, quantize=quantize),
        ):
            pass


@pytest.mark.parametrize("is_tagger", [False, True])
def test_of_a_repository_what_is_needed_is_fetched_and_nothing_else(
    qwen: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, is_tagger: bool
) -> None:
    folder, others = qwen, {"pytorch_model.bin": b"pickle", "onnx/model.onnx": b"", "modeling.py": b"code"}
    if is_tagger:
        folder = save_tiny_tagger(tmp_path / "tagger", {"red": (0, (0.0, 0.0, 1.0))})
        others = {"config.json": b'{"architecture": "vit"}', "model.safetensors": b"for another program"}
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub = Hub(files | others)
    caplog.set_level(logging.INFO)
    with serving(hub, tmp_path / "cache"):
        captioner = open_captioner(REPOSITORY, device="cpu")
        assert not {"model.safetensors", "model.onnx"} & set(hub.fetched)
        with captioner:
            assert set(hub.fetched) == files.keys() | ({"config.json"} if is_tagger else set())
            (answer,) = captioner.answer(_questions()[:1], max_tokens=3)
    assert (answer.text == "red") if is_tagger else answer.text
    assert captioner.name == REPOSITORY
    assert any(line.startswith(f"Looking for {REPOSITORY} on the hub") for line in caplog.messages)
    assert is_tagger or any("to download in 1 files" in line for line in caplog.messages)


def test_a_repository_that_is_not_there_or_gated_is_named_with_what_to_do(qwen: Path, tmp_path: Path) -> None:
    hub = Hub({path.name: path.read_bytes() for path in qwen.iterdir()})
    hub.gate = "GatedRepo"
    with serving(hub, tmp_path / "cache"):
        with pytest.raises(
            UserError, match=r"^--model: the hub has no repository owner/gone .* no local folder"
        ):
            open_captioner("owner/gone", device="cpu")
        captioner = open_captioner(REPOSITORY, device="cpu")
        with pytest.raises(UserError, match=r"^--model: owner/name is gated: accept its terms"), captioner:
            pass
    assert "model.safetensors" not in hub.fetched
